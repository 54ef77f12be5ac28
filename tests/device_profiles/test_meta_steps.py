"""Steps on tensors without data cost what they cost on fake tensors of a CPU, and those that may differ there run on these."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import a_training_config
from torch import nn

from piecework.device_profiles import meta_steps
from piecework.device_profiles.dispatch import without_data
from piecework.device_profiles.memory import PeakMemory, trace
from piecework.device_profiles.meta_steps import OnMeta, UnsuitedError
from piecework.models.low_rank import low_rank
from piecework.models.zoo import build_blueprint
from piecework.planning.page_cost import paged_cost
from piecework.planning.step_cost import fake_load, has_own_layers, piece_cost
from piecework.training.attacks import Attack
from piecework.training.loop import PieceModel, single_loss
from piecework.training.paged import PagedCascade
from piecework.training.pages import PageFiles

IMAGE = Attack("linf", epsilon=8 / 255, step=2 / 255, steps=2, low=0.0, high=1.0)
CIFAR: dict[str, Any] = {"num_classes": 10, "input_shape": (3, 32, 32)}
BLUEPRINTS = {
    "one-channel": build_blueprint("cnn3", num_classes=3, input_shape=(1, 8, 8), width=0.02),
    "group norms": build_blueprint("resnet10", batch_norm="group", **CIFAR),
    "norms of batches": build_blueprint("preresnet20", batch_norm="batch", **CIFAR),
    "low rank": low_rank(build_blueprint("vgg11", norm="none", classifier="prism", **CIFAR), 0.2),
    "features": build_blueprint("mlp", **CIFAR),
}


@contextmanager
def on_fake_tensors() -> Iterator[None]:
    """No step is suited."""

    def refuse(*_: object) -> None:
        raise UnsuitedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnMeta, "__torch_dispatch__", refuse)
        yield


@contextmanager
def counting(asked: list[Any]) -> Iterator[None]:
    """Note the operators of which fake tensors are asked."""
    ask = meta_steps._ask

    def note(func: Any, *rest: Any) -> Any:
        asked.append(func)
        return ask(func, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meta_steps, "_ask", note)
        yield


@pytest.mark.parametrize("attack", [None, IMAGE], ids=["clean", "attacked"])
@pytest.mark.parametrize("name", BLUEPRINTS)
def test_the_cost_is_that_on_fake_tensors(name: str, attack: Attack | None) -> None:
    blueprint = BLUEPRINTS[name]
    config, atoms = replace(a_training_config(4), attack=attack), range(len(blueprint.atoms))
    meta_steps._RESULTS.clear()
    first, again = (piece_cost(blueprint, atoms, "head", config) for _ in range(2))
    with on_fake_tensors():
        assert first == again == piece_cost(blueprint, atoms, "head", config)


PAGED: dict[str, dict[str, Any]] = {
    "plain": {},
    "cheap": {"cheap": True},
    "spilled": {"spilled": True, "micro_batch": 3},
    "ahead": {"ahead": True, "optimiser": "adam"},
    "attacked": {"attack": IMAGE, "micro_batch": 3},
}


@pytest.mark.parametrize("changes", PAGED.values(), ids=PAGED)
@pytest.mark.parametrize(
    ("name", "size", "first"), [("group norms", 4, 3), ("norms of batches", 1, 3), ("one-channel", 4, 1)]
)
def test_the_cost_of_a_paged_step_is_that_on_fake_tensors(
    name: str, size: int, first: int, changes: dict[str, Any]
) -> None:
    blueprint = BLUEPRINTS[name]
    atoms = range(len(blueprint.atoms))
    config = replace(a_training_config(size), pages=((0, first), (first, len(atoms))), **changes)
    meta_steps._RESULTS.clear()
    cost = paged_cost(blueprint, atoms, "head", config)
    assert meta_steps._RESULTS
    assert cost.bytes_read > cost.state_read > 0
    with on_fake_tensors():
        assert cost == paged_cost(blueprint, atoms, "head", config)


@pytest.mark.parametrize(("size", "micro_batch"), [(1, 0), (4, 1)])
def test_a_paged_step_on_one_example_takes_what_both_say(size: int, micro_batch: int, tmp_path: Path) -> None:
    """A user's model is traced on fake tensors. Between segments, views of one example have other strides than a batch's."""
    blueprint = BLUEPRINTS["norms of batches"]
    atoms = range(len(blueprint.atoms))
    pages = ((0, 3), (3, 4), (4, 8), (8, len(atoms)), (len(atoms), len(atoms)))
    config = a_training_config(size, pages=pages, micro_batch=micro_batch)
    with PeakMemory() as memory:
        cascade = PagedCascade(blueprint, atoms, "head", fake_load(blueprint), config, PageFiles(tmp_path / "pages"))
        cascade.young = False
        for _ in range(2):
            cascade.step(torch.zeros(size, 3, 32, 32), torch.zeros(size, dtype=torch.int64))
    for name in (blueprint.zoo_name, "mine.py:net"):
        assert paged_cost(replace(blueprint, zoo_name=name), atoms, "head", config).peak_bytes == memory.peak


def test_an_operator_is_asked_once() -> None:
    blueprint, asked = BLUEPRINTS["norms of batches"], list[Any]()
    meta_steps._RESULTS.clear()
    with counting(asked):
        piece_cost(blueprint, (0, 1), "head", a_training_config(4))
        once = len(asked)
        piece_cost(blueprint, (0, 1), "head", a_training_config(4))
    assert asked.count(torch.ops.aten.convolution.default) < 10
    assert len(asked) == once > 20


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.LSTM(4, 4, batch_first=True), (2, 5, 4)),
        (lambda: nn.GRU(4, 4, batch_first=True), (2, 5, 4)),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (2, 5, 4)),
    ],
    ids=["LSTM", "GRU", "attention"],
)
def test_what_may_have_its_own_operator_on_a_cpu_is_refused(
    layer: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    with OnMeta(), pytest.raises(UnsuitedError, match="may be another operator on a CPU"):
        layer()(torch.zeros(shape, requires_grad=True))


def test_what_the_step_makes_without_data_takes_nothing() -> None:
    """And what it makes on the device of another tensor does, also where torch itself makes it."""

    def nothing() -> None:
        with without_data():
            kept = torch.zeros(1000)
        copy = kept + kept
        assert copy.shape == kept.shape

    def something() -> None:
        with without_data():
            kept = torch.zeros(1000)
        held = torch.zeros(1000)
        held.copy_(kept)
        assert torch.empty_like(kept, device="cpu").shape == (held * 2).shape

    def on_its_device() -> None:
        x = torch.zeros(10)
        kept = torch.zeros(1000, device=x.device), torch.empty_like(x), torch.arange(5, device=x.device)
        assert len(kept) == 3

    assert trace(nothing, own_layers=True).peak_bytes == 0
    assert trace(something, own_layers=True).peak_bytes == 4 * 1000 * 3
    assert trace(on_its_device, own_layers=True).peak_bytes == 4 * 10 + 4 * 1000 + 4 * 10 + 8 * 5


def test_a_step_that_is_unsuited_begins_anew() -> None:
    """What was counted before is forgotten, and what is freed later does not count either."""
    kept = list[torch.Tensor]()

    def work() -> None:
        kept.append(torch.zeros(1000))
        x = torch.zeros(10).sigmoid()
        kept.clear()
        assert x.shape == (10,)

    memory = PeakMemory()
    assert trace(work, memory, own_layers=True).peak_bytes == 4000 + 2 * 40
    assert memory.live == 0


def test_a_step_that_catches_the_refusal_runs_on_fake_tensors() -> None:
    def work() -> None:
        x = torch.zeros(1000)
        try:
            y = torch.sigmoid(x) * x
        except Exception:
            y = x
        assert y.shape == x.shape

    assert trace(work, own_layers=True).peak_bytes == 4 * 1000 * 3


@pytest.mark.parametrize(
    "changes", [{"precision": "bfloat16"}, {"recompute": ((0, 1),)}], ids=["bfloat16", "recompute"]
)
def test_other_steps_run_on_fake_tensors(changes: dict[str, Any]) -> None:
    blueprint = BLUEPRINTS["one-channel"]
    assert has_own_layers(blueprint, a_training_config(4), PieceModel, single_loss)
    assert not has_own_layers(blueprint, replace(a_training_config(4), **changes))


def test_layers_and_losses_of_a_user_run_on_fake_tensors() -> None:
    """They may call what is another operator on a CPU: an RNN, or autocast."""
    blueprint, config = BLUEPRINTS["one-channel"], a_training_config(4)
    own = replace(blueprint.atoms[0], build=lambda: nn.RNN(3, 3, nonlinearity="relu"))
    assert not has_own_layers(replace(blueprint, atoms=(own, *blueprint.atoms[1:])), config)
    assert not has_own_layers(replace(blueprint, zoo_name="mine.py:net"), config)
    assert not has_own_layers(blueprint, config, PieceModel, lambda pieces: None)


def test_kinds_of_calls_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_steps, "MOST", 3)
    meta_steps._RESULTS.clear()
    trace(lambda: [torch.zeros(size) for size in range(1, 11)], own_layers=True)
    assert len(meta_steps._RESULTS) <= 3
