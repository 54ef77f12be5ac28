"""Models of one's own: every system plans them or says which layer is in its way, and a run says the same."""

from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TRIO, fleet_json, model_of, run_local, tiny_settings
from model_helpers import mlp
from torch import nn

from piecework.models.basic_layers import without_bare_blocks
from piecework.models.cascade import Atom, Blueprint, unit_of
from piecework.models.zoo import MODELS
from piecework.planning.less_memory import FIT
from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.training.methods import METHODS


class Pooled(nn.Module):
    """A head behind maps of c channels."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(channels, classes)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.last(z.mean((2, 3)))


class Shortcut(nn.Module):
    """A block with a projection, but where it has as many channels before and behind it."""

    def __init__(self, before: int, behind: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(before, behind, 3, padding=1)
        self.skip = nn.Identity() if before == behind else nn.Conv2d(before, behind, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.skip(x)).relu()


def maps(blocks: Any) -> Any:
    """A convolutional model of atoms that `profl.blocks` makes of (channels of the image, c, batch_norm)."""

    def build(num_classes: int, input_shape: Any, width: float = 1.0, batch_norm: str = "running") -> Blueprint:
        colours, *edges = input_shape
        made = blocks(colours, max(1, int(16 * width)), batch_norm)
        atoms = tuple(Atom(name, module, (channels, *edges)) for name, module, channels in made)
        return Blueprint("mine", input_shape, num_classes, atoms, partial(Pooled, made[-1][2], num_classes), batch_norm)

    return build


def convs(colours: int, c: int, batch_norm: str) -> list[Any]:
    """Plain chains whose layers have numbers for names."""
    norm = partial(nn.BatchNorm2d, c, track_running_stats=batch_norm != "batch")

    def chain(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, c, 3, padding=1), norm(), nn.ReLU())

    return [("stem", partial(chain, colours), c), ("body", partial(chain, c), c)]


def deaf(colours: int, c: int, batch_norm: str) -> list[Any]:
    """Norms that keep statistics whatever the settings say."""
    return convs(colours, c, "running")


def projected(colours: int, c: int, batch_norm: str) -> list[Any]:
    """With one channel before and behind it, the block has no projection."""
    wide = max(1, int(1.5 * c))
    return [("stem", partial(nn.Conv2d, colours, c, 3, padding=1), c), ("block", partial(Shortcut, c, wide), wide)]


def grouped(colours: int, c: int, batch_norm: str) -> list[Any]:
    stem = partial(nn.Conv2d, colours, c, 3, padding=1)
    return [("stem", stem, c), ("four", partial(nn.Conv2d, c, c, 3, padding=1, groups=4 if c % 4 == 0 else 1), c)]


def flattened(num_classes: int, input_shape: Any, width: float = 1.0, batch_norm: str = "running") -> Blueprint:
    """Maps, then an atom that flattens them: the head reads features of one dimension."""
    colours, *edges = input_shape
    maps, hidden = 4 * edges[0] * edges[1], max(1, int(16 * width))
    last = partial(lambda: nn.Sequential(nn.Flatten(), nn.Linear(maps, hidden)))
    atoms = (Atom("stem", partial(nn.Conv2d, colours, 4, 3, padding=1), (4, *edges)), Atom("flat", last, (hidden,)))
    return Blueprint("mine", input_shape, num_classes, atoms, partial(nn.Linear, hidden, num_classes), batch_norm)


def bare(num_classes: int, input_shape: Any, width: float = 1.0, batch_norm: str = "running") -> Blueprint:
    """Atoms without arrays at the beginning, in the middle and at the end."""
    pixels, hidden = prod(input_shape), max(1, int(64 * width))
    atoms = (
        Atom("flatten", nn.Flatten, (pixels,)),
        Atom("fc1", partial(nn.Linear, pixels, hidden), (hidden,)),
        Atom("relu", nn.ReLU, (hidden,)),
        Atom("fc2", partial(nn.Linear, hidden, hidden), (hidden,)),
        Atom("tanh", nn.Tanh, (hidden,)),
    )
    return Blueprint("bare", input_shape, num_classes, atoms, partial(nn.Linear, hidden, num_classes), batch_norm)


def unheeding(num_classes: int, input_shape: Any, width: float = 1.0, batch_norm: str = "running") -> Blueprint:
    """As wide at every width."""
    return maps(convs)(num_classes, input_shape, 1.0, batch_norm)


OWN = {
    "unheeding": unheeding,
    "bare": bare,
    "own-mlp": mlp,
    "convs": maps(convs),
    "deaf": maps(deaf),
    "projected": maps(projected),
    "grouped": maps(grouped),
    "flattened": flattened,
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The models of this file by name, while a test lasts."""
    MODELS.update(OWN)
    yield
    for name in OWN:
        del MODELS[name]


def refusal(model: str, strategy: str) -> str:
    """Why a system does not plan a model; empty where it does."""
    settings = tiny_settings(model=model, strategy=strategy, clients=2, feddf__family="cnn3")
    try:
        assert make_plan(settings, ask(settings))["modules"]
    except ValueError as error:
        return str(error)
    return ""


CHAIN = "cannot be cut by rank: it is a chain of"
REFUSED = {
    ("own-mlp", "prism"): f"atom 'fc2' of own-mlp {CHAIN} 0 (Linear), 1 (ReLU). A chain can be cut if it has one plain conv",
    ("own-mlp", "orthdrop"): f"atom 'fc2' of own-mlp {CHAIN} 0 (Linear)",
    ("own-mlp", "spafl"): "own-mlp has neither convolutions nor linear layers without bias to mask",
    ("convs", "prism"): f"atom 'body' of mine {CHAIN} 0 (Conv2d), 1 (BatchNorm2d), 2 (ReLU)",
    ("convs", "orthdrop"): f"atom 'body' of mine {CHAIN} 0 (Conv2d)",
    ("deaf", "fjord"): "atoms.0 of mine keeps statistics although architecture.batch-norm = 'measured', and fjord's nets have",
    ("deaf", "fedpm"): "atoms.0 of mine keeps statistics although architecture.batch-norm = 'measured', and fedpm sends masks",
    ("flattened", "fedepth"): "mine cannot be trained block by block: atom 'stem' makes features of shape (4, 8, 8), which",
    ("projected", "fjord"): "mine cannot be cut by width: with 0.0625 of its channels it misses 'bias' of 'atoms.1.skip'",
    ("projected", "heterofl"): "mine cannot be cut by width: with 0.0625 of its channels it misses 'bias' of 'atoms.1.skip'",
    **{("unheeding", name): "mine is not narrower with" for name in ("heterofl", "fjord", "splitmix", "allsmall")},
    ("grouped", "feddrop"): "mine cannot be cut by width: in atom 'four', channels cannot be followed through a convolution",
}  # fmt: skip


@pytest.mark.parametrize("model", ["own-mlp", "convs"])
@pytest.mark.parametrize("strategy", METHODS)
def test_every_system_takes_a_model_of_ones_own_or_says_why_not(model: str, strategy: str) -> None:
    """A ValueError, and no other; of the systems that take every model, none."""
    said = refusal(model, strategy)
    if strategy in (
        "fedavg",
        "fedprox",
        "exclusivefl",
        "allsmall",
        "fedepth",
        "m-fedepth",
        "heterofl",
        "fjord",
        "depthfl",
    ):
        assert said == ""


@pytest.mark.parametrize(("model", "strategy"), REFUSED)
def test_the_layer_and_the_reason_are_named(model: str, strategy: str) -> None:
    assert refusal(model, strategy).startswith(REFUSED[model, strategy])


@pytest.mark.parametrize(
    ("model", "strategy"), [("own-mlp", "prism"), ("deaf", "fjord"), ("projected", "heterofl"), ("own-mlp", "spafl")]
)
def test_a_run_says_what_the_plan_says(model: str, strategy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        run_local(tmp_path, **TRIO | {"model": model, "strategy": strategy})
    assert str(caught.value) == refusal(model, strategy)


@pytest.mark.parametrize("strategy", ["prism", "orthdrop"])
def test_a_recorded_module_has_no_low_rank_form(strategy: str) -> None:
    """The atoms after the first are named with their layers, and so is what to do instead."""
    file = Path(__file__).with_name("own_modules.py")
    said = refusal(f"{file}:net", strategy)
    assert said.startswith(
        "own_modules.py:net cannot be cut by rank: the atoms after its first, 'body_0_0' (Conv2d, ReLU), "
        "'body_1' (Conv2d, BatchNorm2d, Conv2d), stay whole"
    )
    assert "the recorded calls of another module have no such form" in said
    assert "(feddrop, fedrolex, fjord, heterofl)" in said
    assert said.endswith(f"(strategy = fedavg, memory.fit = {FIT})")
    assert refusal(f"{file}:net", "heterofl") == ""


STEPS = {"profl__stage_rounds": 1, "profl__distil_rounds": 1, "num_rounds": 9, "profl__blocks": "budget"}


@pytest.mark.parametrize(
    ("strategy", "changes", "trained"),
    [
        ("fedavg", {}, 1),
        ("heterofl", {"architecture__batch_norm": "local"}, 1),
        ("fjord", {"faults__update_norm_limit": 0.0}, 1),
        ("m-fedepth", {"fleet": fleet_json(tight=0.9)}, 1),
        ("depthfl", {}, 1),
        ("fedpm", {}, 1),
        ("profl", STEPS | {"fleet": fleet_json(tight=0.7)}, 4),  # a step back, a map, two steps: the last behind a frozen block
    ],
)  # fmt: skip
def test_atoms_without_arrays_are_neither_sent_nor_stored(
    strategy: str, changes: dict[str, Any], trained: int, tmp_path: Path
) -> None:
    asked = TRIO | {"model": "bare", "fleet": "unlimited", "training__local_iterations": 1} | changes
    run = run_local(tmp_path, strategy=strategy, **asked)
    rounds = run.rounds()
    assert [client["status"] for record in rounds for client in record["clients"]] == ["ok"] * 3 * trained
    sent = {unit_of(name) for name in model_of(run)}
    assert not sent & {"atoms.0", "atoms.2", "atoms.4"}


def test_a_models_function_is_called_once_for_each_choice_of_arguments(tmp_path: Path) -> None:
    """It may be slow, and a plan, a server and each task of a client ask for the same models."""
    calls: list[Any] = []

    def slow(num_classes: int, input_shape: Any, width: float = 1.0, batch_norm: str = "running") -> Blueprint:
        calls.append((width, batch_norm))
        return mlp(num_classes, input_shape, width, batch_norm)

    MODELS["own-mlp"] = slow
    assert refusal("own-mlp", "heterofl") == ""
    run_local(tmp_path, **TRIO | {"model": "own-mlp", "strategy": "fedavg", "fleet": "unlimited"})
    assert len(calls) == len(set(calls)) > 1


def test_profl_joins_blocks_without_arrays_with_their_neighbours() -> None:
    blueprint = bare(10, (1, 8, 8))
    assert without_bare_blocks(blueprint, [(0,), (1,), (2,), (3,), (4,)]) == [(0, 1, 2), (3, 4)]
    assert without_bare_blocks(blueprint, [(0, 1), (2, 3, 4)]) == [(0, 1), (2, 3, 4)]
    with pytest.raises(ValueError, match="no atom has parameters, so there are no blocks to train"):
        without_bare_blocks(blueprint, [(0,), (2,)])
