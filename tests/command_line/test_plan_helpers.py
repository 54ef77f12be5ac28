"""The processes that plan systems for `plan --suggest`: no system is lost, and no process stays."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import fleet_json

from piecework.plans.beside import Helpers, row_in
from piecework.plans.question import ask
from piecework.plans.suggest import plan_system
from piecework.training.settings import Settings


@pytest.mark.slow
def test_a_system_whose_helper_ends_is_planned_here_and_no_helper_stays() -> None:
    settings = Settings(clients=20)
    broken = replace(ask(settings), examples="many")  # which ends the helper with a TypeError
    with Helpers(["allsmall"], settings, broken, 0, 2) as beside:
        for thread in beside.threads:
            thread.join()
        found = beside.rows(lambda name: {"reason": f"{name} was planned here"})
    assert found == {"allsmall": {"reason": "allsmall was planned here"}}
    assert [child.poll() is None for child in beside.children] == [False, False]


SIBLING = """
from torch import nn
def body():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
"""
NET = """
import sys
from torch import nn
print("a line that is no answer")
sys.stdin.read(1)
def make(num_classes, input_shape):
    from a_sibling import body
    return nn.Sequential(body(), nn.Linear(4 * 36, num_classes))
"""


@pytest.mark.slow
def test_helpers_import_what_this_process_can_and_what_a_module_prints_and_reads_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_sibling.py").write_text(SIBLING)
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    settings = Settings(clients=2, model=f"{tmp_path / 'net.py'}:make", fleet=fleet_json(board=30_000))
    with Helpers(["heterofl"], settings, (question := ask(settings, input_shape="1x8x8", classes=3)), 0, 1) as beside:
        for thread in beside.threads:
            thread.join()
        found = beside.rows(lambda name: {"reason": f"{name} was planned here"})
    own = plan_system(settings.with_values({"strategy": "heterofl"}), question, 0)
    assert not own["reason"]
    assert found == {"heterofl": own}


@pytest.mark.parametrize("answer", ["", "half a l", '{"reason": "', "7\n"])
def test_what_is_no_row_is_no_answer(answer: str) -> None:
    assert row_in(answer) is None


def test_what_was_planned_here_is_not_planned_again() -> None:
    settings, here = Settings(clients=20), list[str]()

    def refuse(name: str) -> dict[str, str]:
        here.append(name)
        return {"reason": "no device can"}

    with Helpers(["allsmall", "fedepth"], settings, ask(settings), 0, 0) as beside:
        assert beside.rows(refuse).keys() == {"allsmall", "fedepth"}
    assert here == ["allsmall", "fedepth"]
