"""Traces that are kept from one process to the next: what makes a key, what is traced again, and files that are damaged."""

import json
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from piecework.cli import app
from piecework.device_profiles import trace_cache
from piecework.device_profiles.call_key import NoKeyError, call_key
from piecework.device_profiles.memory import StepCost
from piecework.device_profiles.trace_cache import TRACED, circumstances, digest_of, recall
from piecework.device_profiles.user_cache import NO_CACHE, trace_anew, traces_file
from piecework.models.cascade import Blueprint
from piecework.models.zoo import build_blueprint
from piecework.planning import step_cost
from piecework.planning.costs import on_images
from piecework.planning.now import NOW
from piecework.planning.step_cost import piece_cost, stream_cost
from piecework.strategies.cascade.fedepth.client import network_piece
from piecework.strategies.cascade.fedepth.mutual import mutual_loss
from piecework.strategies.sparse.spafl.forms import SparseModel
from piecework.strategies.whole.fedrbn.client import learner
from piecework.training.loop import PieceModel, single_loss
from piecework.training.sgd import TrainingConfig

ROOT = Path(__file__).parents[2]
CONFIG = TrainingConfig(0.1, 0.9, 0.0, 8, 1)


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIECEWORK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(NO_CACHE, raising=False)
    return traces_file()


@pytest.fixture
def traced() -> Iterator[list[str]]:
    """What the code says whenever it traces a part."""
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    NOW.addHandler(listener)
    yield said
    NOW.removeHandler(listener)


def blueprint(**changes: Any) -> Blueprint:
    return build_blueprint("convnet", **{"num_classes": 10, "input_shape": (1, 8, 8)} | changes)


def key(*args: Any, function: Callable[..., Any] = piece_cost, **kwargs: Any) -> str:
    return call_key(trace_cache._is_covered, function, *args, **kwargs)


def count() -> int:
    with sqlite3.connect(traces_file()) as file:
        return int(file.execute("SELECT count(*) FROM traces").fetchone()[0])


# ---- keys

# Each differs from the first in one thing that a step's bytes or FLOPs may depend on.
CALLS: dict[str, Callable[[], str]] = {
    "first": lambda: key(blueprint(), (0, 1), "head", CONFIG),
    "function": lambda: key(blueprint(), (0, 1), "head", CONFIG, function=stream_cost),
    "atoms": lambda: key(blueprint(), (0,), "head", CONFIG),
    "head": lambda: key(blueprint(), (0, 1), "exits.1", CONFIG),
    "copies": lambda: key(blueprint(), (0, 1), "head", CONFIG, 2),
    "targets": lambda: key(blueprint(), (0, 1), "head", CONFIG, targets=True),
    "classes": lambda: key(blueprint(num_classes=11), (0, 1), "head", CONFIG),
    "input": lambda: key(blueprint(input_shape=(1, 16, 16)), (0, 1), "head", CONFIG),
    "channels": lambda: key(blueprint(input_shape=(3, 8, 8)), (0, 1), "head", CONFIG),
    "width": lambda: key(blueprint(width=0.5), (0, 1), "head", CONFIG),
    "norm": lambda: key(blueprint(batch_norm="batch"), (0, 1), "head", CONFIG),
    "group norm": lambda: key(blueprint(batch_norm="group"), (0, 1), "head", CONFIG),
    "pooling": lambda: key(replace(blueprint(), auxiliary_pool="none"), (0, 1), "head", CONFIG),
    "batch": lambda: key(blueprint(), (0, 1), "head", replace(CONFIG, batch_size=9)),
    "micro-batch": lambda: key(blueprint(), (0, 1), "head", replace(CONFIG, micro_batch=4)),
    "recompute": lambda: key(blueprint(), (0, 1), "head", replace(CONFIG, recompute=((0, 1),))),
    "optimiser": lambda: key(blueprint(), (0, 1), "head", replace(CONFIG, momentum=0.0)),
    "its state": lambda: key(blueprint(), (0, 1), "head", replace(CONFIG, optimiser_state="bfloat16")),
    "decay": lambda: key(blueprint(), (0, 1), "head", replace(CONFIG, weight_decay=0.1)),
    "clipping": lambda: key(blueprint(), (0, 1), "head", replace(CONFIG, clip_norm=1.0)),
    "precision": lambda: key(blueprint(), (0, 1), "head", replace(CONFIG, precision="bfloat16")),
    "attack": lambda: key(blueprint(), (0, 1), "head", replace(CONFIG, attack=on_images(blueprint(), 1))),
    "its steps": lambda: key(blueprint(), (0, 1), "head", replace(CONFIG, attack=on_images(blueprint(), 2))),
    "class": lambda: key(blueprint(), (0, 1), "head", CONFIG, piece_class=SparseModel),
    "class with a weight": lambda: key(blueprint(), (0, 1), "head", CONFIG, piece_class=learner(0.25)),
    "its weight": lambda: key(blueprint(), (0, 1), "head", CONFIG, piece_class=learner(0.5)),
    "learning atoms": lambda: key(blueprint(), (0, 1), "head", CONFIG, piece_class=network_piece((1,))),
    "other atoms": lambda: key(blueprint(), (0, 1), "head", CONFIG, piece_class=network_piece((2,))),
    "loss": lambda: key(blueprint(), (0, 1), "head", CONFIG, 1, mutual_loss("paper")),
    "its kind": lambda: key(blueprint(), (0, 1), "head", CONFIG, 1, mutual_loss("authors")),
}


def test_each_thing_that_may_change_a_cost_changes_the_key() -> None:
    keys = {name: made() for name, made in CALLS.items()}
    assert len(set(keys.values())) == len(keys)
    assert keys == {name: made() for name, made in CALLS.items()}


@pytest.mark.slow
def test_keys_are_equal_in_another_process_and_of_classes_made_anew() -> None:
    """Functions and classes that are made within functions enter with what they hold, whatever their address is."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        elsewhere = pool.submit(keys_of, [name for name in CALLS if name not in ("first",)]).result()
    network_piece.cache_clear()
    learner.cache_clear()
    assert elsewhere == keys_of(list(elsewhere))


def keys_of(names: list[str]) -> dict[str, str]:
    return {name: CALLS[name]() for name in names}


class Alone(PieceModel):
    """A piece of a test, whose code no digest covers."""


@dataclass(frozen=True)
class Own:
    value: int


@pytest.mark.parametrize(
    "value",
    [Alone, Own(1), lambda z: z, partial(Alone, 1), object(), nn.Linear(1, 1), torch.zeros(1), {"a": [object()]}],
    ids=lambda value: type(value).__name__,
)
def test_what_the_digest_does_not_cover_has_no_key(value: object) -> None:
    with pytest.raises(NoKeyError):
        key(value)


def test_values_enter_with_their_types() -> None:
    values = [1, 1.0, True, "1", b"1", None, (1,), [1], ((1,),), {1: 1}, {1}, np.int64(1), np.float32(1), np.ones(1)]
    values += [np.ones((1, 1)), torch.float32, partial(nn.Linear, 1), partial(nn.Linear, 1, bias=False)]
    assert len({key(value) for value in values}) == len(values)


def test_two_functions_in_one_line_differ() -> None:
    first, second, third = (exec_in_models(f"made = lambda: ({text})") for text in ("1", "2", "len"))
    assert len({key(first), key(second), key(third)}) == 3


def exec_in_models(text: str) -> FunctionType:
    names: dict[str, Any] = {"__name__": "piecework.models.of_this_test"}
    exec(text, names)
    made = names["made"]
    assert isinstance(made, FunctionType)
    return made


def test_the_code_of_every_traced_package_is_in_the_digest(tmp_path: Path) -> None:
    for package in TRACED:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    now = time.time() + 1
    whole = digest_of(tmp_path, now)
    assert whole == digest_of(ROOT, now)
    for package in TRACED:
        path = next((tmp_path / package).rglob("[a-z]*.py"))
        text = path.read_text(encoding="utf-8")
        path.write_text(text + "\n")
        assert digest_of(tmp_path, now) not in (whole, None)
        path.write_text(text)
        assert digest_of(tmp_path, now) == whole
    os.utime(path, (now, now))
    assert digest_of(tmp_path, now - 60) is None, "this process may have loaded what the file was before"
    assert digest_of(tmp_path / "none", now) is None


def test_the_build_of_torch_and_its_state_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = piece_cost, blueprint(), (0, 1), "head", CONFIG
    before = trace_cache._key(*arguments)
    assert torch.__version__ in circumstances()
    monkeypatch.setattr(torch, "__version__", "3.0")
    after = trace_cache._key(*arguments)
    monkeypatch.undo()
    with torch.no_grad():
        without = trace_cache._key(*arguments)
    assert len({before, after, without}) == 3
    assert trace_cache._key(*arguments) == before


# ---- what is kept


def test_a_cost_is_traced_once_and_without_the_cache_anew(traced: list[str]) -> None:
    arguments = blueprint(), (0, 1), "head", CONFIG
    cost = piece_cost(*arguments)
    assert len(traced) == 1
    assert [recall(piece_cost, *arguments) for _ in range(3)] == [cost] * 3
    assert len(traced) == 2
    with trace_anew(wanted=True):
        assert recall(piece_cost, *arguments) == cost
        assert os.environ[NO_CACHE] == "1", "processes started meanwhile read it"
    assert len(traced) == 3
    assert NO_CACHE not in os.environ
    assert count() == 1


def test_a_loss_of_ones_own_is_traced_each_time(traced: list[str], own_file: Path) -> None:
    def own_loss(pieces: list[PieceModel]) -> Any:
        return single_loss(pieces)

    arguments = blueprint(), (0, 1), "head", CONFIG, 1, own_loss
    assert recall(piece_cost, *arguments) == recall(piece_cost, *arguments)
    assert len(traced) == 2
    assert not own_file.exists()


@pytest.mark.parametrize("damage", ["the file", "a result", "its kind", "a digit"])
def test_what_is_damaged_is_traced_and_written_again_with_one_warning(
    damage: str, own_file: Path, traced: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = blueprint(), (0, 1), "head", CONFIG
    cost = recall(piece_cost, *arguments)
    if damage == "the file":
        own_file.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    elif damage == "a digit":
        with sqlite3.connect(own_file) as file:
            file.execute("UPDATE traces SET result = replace(result, ?, ?)", (str(cost.flops), str(cost.flops + 1)))
    else:
        result = {"a result": '{"peak_bytes":', "its kind": json.dumps({"peak_bytes": "many", "flops": 1})}[damage]
        with sqlite3.connect(own_file) as file:
            file.execute("UPDATE traces SET result = ?", (result,))
    assert [recall(piece_cost, *arguments) for _ in range(3)] == [cost] * 3
    assert len(traced) == 2
    assert count() == 1
    assert [record.message for record in caplog.records if "damaged" in record.message] == [
        f"the kept traces in {own_file} are damaged: what cannot be read is traced and written again"
    ]


def test_a_folder_that_cannot_be_used_does_not_matter(
    own_file: Path, traced: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    own_file.parent.parent.write_text("a file where the folder would be")
    arguments = blueprint(), (0, 1), "head", CONFIG
    with caplog.at_level(logging.INFO, "piecework"):
        assert recall(piece_cost, *arguments) == recall(piece_cost, *arguments)
    assert len(traced) == 2
    assert len([record for record in caplog.records if "PIECEWORK_CACHE can name another" in record.message]) == 1


def test_the_oldest_are_removed(monkeypatch: pytest.MonkeyPatch, traced: list[str]) -> None:
    monkeypatch.setattr(trace_cache, "MOST", 3)
    for size in (2, 3, 4, 5):
        recall(piece_cost, blueprint(), (0,), "head", replace(CONFIG, batch_size=size))
    assert count() == 3
    recall(piece_cost, blueprint(), (0,), "head", replace(CONFIG, batch_size=5))
    assert len(traced) == 4
    recall(piece_cost, blueprint(), (0,), "head", replace(CONFIG, batch_size=2))
    assert (len(traced), count()) == (5, 3)


def traced_by_a_worker(number: int) -> list[int]:
    sizes = [2 + (number + step) % 6 for step in range(6)]
    return [recall(piece_cost, blueprint(), (0,), "head", replace(CONFIG, batch_size=s)).peak_bytes for s in sizes]


@pytest.mark.slow
def test_several_processes_write_at_once() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(traced_by_a_worker, range(3)))
    assert count() == 6
    assert found == [traced_by_a_worker(number) for number in range(3)]


def test_clean_removes_them_with_the_cache(own_file: Path, tmp_path: Path) -> None:
    recall(piece_cost, blueprint(), (0,), "head", CONFIG)
    app(["clean", "--output-dir", str(tmp_path)], standalone_mode=False)
    assert own_file.exists()
    app(["clean", "--output-dir", str(tmp_path), "--cache"], standalone_mode=False)
    assert not own_file.parent.exists()


# ---- plans

PLAN = """
import json, sys
from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.training.settings import Settings

def plan(own: dict[str, str]) -> dict[str, object]:
    settings = Settings.from_run_config({"clients": 4, "training.batch-size": 8, **own})
    return make_plan(settings, ask(settings))

if __name__ == "__main__":
    print(json.dumps([[plan(own) for own in json.loads(sys.argv[1])], "sympy" in sys.modules]))
"""
PLANNED = [{}, {"strategy": "fedprophet"}, {"memory.fit": "micro-batch,recompute"}]


@pytest.mark.slow
def test_a_second_plan_traces_nothing(monkeypatch: pytest.MonkeyPatch, own_file: Path) -> None:
    """Nothing imports torch's compiler, without which no tensor is fake."""

    def in_a_process() -> tuple[list[dict[str, Any]], bool]:
        command = [sys.executable, "-c", PLAN, json.dumps(PLANNED)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        plans, traced = json.loads(done.stdout)
        return plans, traced

    first, second = in_a_process(), in_a_process()
    assert (first[1], second[1]) == (True, False)
    assert first[0] == second[0]
    kept = count()
    monkeypatch.setenv(NO_CACHE, "1")
    here: dict[str, Any] = {"__name__": "here"}
    exec(PLAN, here)
    anew = [here["plan"](own) for own in PLANNED]
    assert json.loads(json.dumps(anew)) == first[0]
    assert count() == kept


def test_a_result_is_read_as_it_was_written() -> None:
    cost = recall(piece_cost, blueprint(), (0, 1), "head", CONFIG)
    assert isinstance(recall(piece_cost, blueprint(), (0, 1), "head", CONFIG), StepCost)
    assert cost == step_cost.piece_cost(blueprint(), (0, 1), "head", CONFIG)
