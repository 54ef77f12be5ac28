"""Reading ahead on a second thread: nothing is used too early, errors come to the task, and nothing outlives a step."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import a_training_config
from torch import nn
from zoo_helpers import blueprint_of

from piecework.models.cascade import Blueprint, isolate_rng
from piecework.training.ahead import Ahead
from piecework.training.attacks import Attack
from piecework.training.paged import PagedCascade
from piecework.training.pages import READER, PageFiles, Reading, Wanted
from piecework.training.sgd import TrainingConfig

CONFIG = a_training_config(2, pages=((0, 1), (1, 2), (2, 3)), ahead=True, attack=Attack("linf", 0.1, 0.05, 2))


class LatePages(PageFiles):
    """Pages of a disk that is as slow as can be: all is read when it is waited for, and nothing before."""

    def _begin(self, wanted: Wanted) -> Reading:
        return Late(self, wanted)


class Late:
    def __init__(self, pages: PageFiles, wanted: Wanted) -> None:
        self.pages, self.wanted = pages, wanted
        with torch.no_grad():
            for _, tensors in wanted:
                for tensor in tensors:
                    tensor.fill_(77)

    def wait(self) -> None:
        for each in self.wanted:
            self.pages._fetch(*each)
        self.wanted.clear()

    def join(self) -> None:
        raise AssertionError("nothing is read that is not needed")


def a_cascade(config: TrainingConfig, pages: PageFiles) -> PagedCascade:
    def load(unit: str) -> nn.Module:
        with isolate_rng(3):
            return blueprint.build_unit(unit)

    blueprint: Blueprint = blueprint_of("mlp", num_classes=2, input_shape=(2,), hidden=3, layers=3)
    return PagedCascade(blueprint, (0, 1, 2), "head", load, config, pages)


def two_steps(cascade: PagedCascade) -> dict[str, torch.Tensor]:
    x, y = torch.tensor([[0.5, -1.0], [2.0, 1.0]]), torch.tensor([0, 1])
    for seed in range(2):
        cascade.step(cascade.attack(x, y, seed), y)
    units = {unit: cascade.load_unit(unit) for unit in cascade.blueprint.units()}
    return {f"{unit}.{name}": value for unit, m in units.items() for name, value in m.state_dict().items()}


@contextmanager
def no_thread_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == READER]


@pytest.mark.parametrize("kind", [PageFiles, LatePages])
def test_weights_do_not_depend_on_when_pages_are_read(kind: type[PageFiles], tmp_path: Path) -> None:
    expected = two_steps(a_cascade(replace(CONFIG, ahead=False), PageFiles(tmp_path / "plain")))
    pages = kind(tmp_path / "ahead")
    with no_thread_left():
        found = two_steps(a_cascade(CONFIG, pages))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_error_of_the_second_thread_is_one_of_the_step(tmp_path: Path) -> None:
    cascade = a_cascade(CONFIG, PageFiles(tmp_path))
    two_steps(cascade)
    (tmp_path / "atoms.1.page").write_bytes(b"")
    x, y = torch.ones(2, 2), torch.zeros(2, dtype=torch.int64)
    with no_thread_left():
        for run in (lambda: cascade.step(x, y), lambda: cascade.attack(x, y, 0), lambda: cascade.streamed.logits(x)):
            with pytest.raises(OSError, match=r"page atoms\.1 is 36 bytes too short"):
                run()


def test_an_error_of_a_step_waits_for_the_second_thread_and_forgets_what_it_read(tmp_path: Path) -> None:
    """Labels of a class that the model lacks: the last segment fails while the one before it is read. A later step is sound."""
    cascade = a_cascade(CONFIG, PageFiles(tmp_path))
    two_steps(cascade)
    x, missing = torch.ones(2, 2), torch.full((2,), 5)
    with no_thread_left():
        for run in (lambda: cascade.step(x, missing), lambda: cascade.attack(x, missing, 0)):
            with pytest.raises(IndexError, match="Target 5 is out of bounds"):
                run()
        cascade.step(x, torch.zeros(2, dtype=torch.int64))


def test_what_is_read_ahead_is_what_is_taken(tmp_path: Path) -> None:
    pages = PageFiles(tmp_path)
    pages.write("1", [torch.ones(3)])

    def read(number: int) -> torch.Tensor:
        found = torch.zeros(3)
        pages.read(str(number), [found])
        return found

    ahead = Ahead(pages, read)
    with ahead:
        ahead.begin(1)
        assert pages.moved == (12, 12, 2)  # counted when it begins
        assert torch.equal(ahead.take(1), torch.ones(3))
        ahead.begin(1)
        with pytest.raises(RuntimeError, match="1 is read ahead, and 2 is taken"):
            ahead.take(2)
