"""Wherever a piece begins, a client's step takes its traced cost, to the byte.

It may begin behind atoms that are streamed, whose features are stored, or that are excluded; here with every atom of the zoo
that differs from those before it, in the systems that cut models by atoms.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import a_client, clients_of, fleet_json, run_local, tiny_settings
from settings_helpers import key_of

from piecework.client_app.client import Client, Update
from piecework.client_app.trainers import find_trainer
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import DeviceState
from piecework.federated_data.datasets import ArrayDataset
from piecework.models.cascade import Blueprint, initial_state
from piecework.models.layer_statistics import unit_signature
from piecework.models.partition import AtomTooLargeError, format_ranges
from piecework.models.variant import Variant, vary
from piecework.models.work_item import WorkItem
from piecework.models.zoo import MODELS, build_blueprint, usual_input
from piecework.planning.costs import cost_model_for
from piecework.strategies import find_method
from piecework.strategies.cascade.depthfl.client import DepthFLTaskConfig
from piecework.strategies.cascade.fedprophet.client import FedProphetTaskConfig, head_behind
from piecework.strategies.cascade.profl.client import OUTPUT_LAYER, ProFLTaskConfig
from piecework.training.examples import training_examples
from piecework.training.memory_cap import MemoryCap
from piecework.training.messages import Task, TaskConfig
from piecework.training.setup import blueprint_of_shape

BATCH = 4
SMALL = {"cnn4": (3, 64, 64), "lstm-imdb": (20,), "preresnet20": (3, 8, 8), "vit": (3, 32, 32)}
FIXED_FIRST = ("deit-tiny", "lstm-imdb", "mlp", "vit")  # without their first atom the input does not fit the others
SOME = ("cnn-femnist", "cnn3", "conv4", "lstm-imdb", "vgg11")


def distinct(blueprint: Blueprint) -> list[int]:
    """The first of the atoms that are built alike, and the last one, which always is trained."""
    atoms = range(len(blueprint.atoms))
    first = {unit_signature(blueprint, f"atoms.{atom}"): atom for atom in reversed(atoms)}
    return sorted({*first.values(), atoms[-1]})


def state(budget: int) -> DeviceState:
    return DeviceState("board", budget, 1e9, 1e6, 1e6)


class Phases(MemoryCap):
    """An accounting that keeps the peak of each phase."""

    def __init__(self, allowed: int) -> None:
        super().__init__(allowed, enforced=True)
        self.peaks: dict[str, int] = {}

    @contextmanager
    def first(self, phase: str, *key: object) -> Iterator[None]:
        before, self._meter.peak = self._meter.peak, self._meter.live
        with super().first(phase, *key):
            yield
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._meter.peak)
        self._meter.peak = max(before, self._meter.peak)


@cache
def blueprint_of(name: str) -> Blueprint:
    shape, classes = usual_input(name)
    return build_blueprint(
        name, num_classes=min(classes, 10), input_shape=SMALL.get(name, shape), width=0.25, batch_norm="running"
    )


@cache
def cut_of(strategy: str, name: str) -> Any:
    settings = tiny_settings(
        strategy=strategy, model=name, training__batch_size=BATCH, architecture__batch_norm="running", attack__steps=1
    )
    cost_model = cost_model_for(settings, blueprint_of(name), 1 if strategy == "fedprophet" else 0)
    return find_method(strategy).make_cut(blueprint_of(name), cost_model, settings)


@cache
def data_for(blueprint: Blueprint) -> ArrayDataset:
    rng, labels = np.random.default_rng(0), np.arange(12) % blueprint.num_classes
    if blueprint.vocabulary:
        tokens = rng.integers(0, blueprint.vocabulary, (12, *blueprint.input_shape)).astype(np.uint16)
        return ArrayDataset("mine", tokens, labels, 2, (), (), tokens, labels, vocabulary=blueprint.vocabulary)
    channels, *space = blueprint.input_shape
    images = rng.integers(0, 256, (12, *space, channels)).astype(np.uint8)
    mean, std = (0.5,) * channels, (0.25,) * channels
    return ArrayDataset("mine", images, labels, blueprint.num_classes, mean, std, images, labels)


def client_of(folder: Path, cut: Any, allowed: int, units: Sequence[str] = (), **changes: object) -> Client:
    """A client with eight examples, of which it makes two batches; with `units` of the system's own model in its store."""
    data, model = data_for(cut.blueprint), cut.model
    client = a_client(
        folder,
        cut.settings.with_values({key_of(name): value for name, value in changes.items()}),
        allowed,
        blueprint=cut.blueprint,
        full=cut.blueprint,
        data=data,
        local_data=lambda fill: training_examples(data, np.arange(8)),
        validation=training_examples(data, np.arange(8, 12)),
        cap=Phases(allowed),
    )
    client.store.write_units({name: value.numpy() for name, value in initial_state(model, 0, units=units)})
    return client


PLAIN = Variant()


def train(
    client: Client,
    strategy: str,
    costs: dict[WorkItem, int],
    own: TaskConfig | None = None,
    variant: Variant = PLAIN,
) -> Update:
    """A round of a system's trainer."""
    task = Task(
        "e",
        1,
        0,
        strategy,
        client.allowed,
        1,
        0.05,
        "",
        costs=costs,
        adversarial=strategy == "fedprophet",
        variant=variant,
        config=own.to_values() if own else {},
    )
    client.blueprint = vary(client.full, variant)
    return find_trainer(strategy)(task, client)


def train_one_by_one(folder: Path, strategy: str, name: str, atoms: list[int], **changes: object) -> None:
    """FeDepth of these atoms, each alone, without the others; each step takes its cost, all else no more than the largest."""
    cut = cut_of(strategy, name)
    costs = {item: cut.bytes(item) for item in (cut.item((atom,)) for atom in atoms)}
    client = client_of(folder, cut, max(costs.values()), **changes)
    update = train(client, strategy, costs)
    assert update.done == [*costs]
    assert {item: client.cap.peaks[f"train piece {format_ranges(item.atoms)}"] for item in costs} == costs
    assert client.cap.peak_bytes == client.allowed == update.metrics["predicted-peak"]


@pytest.mark.parametrize(
    ("strategy", "name"), [*(("fedepth", name) for name in sorted(MODELS)), *(("m-fedepth", name) for name in SOME)]
)
def test_behind_atoms_that_were_trained_and_streamed(tmp_path: Path, strategy: str, name: str) -> None:
    train_one_by_one(tmp_path, strategy, name, distinct(blueprint_of(name)))


def test_after_atoms_that_are_streamed_again_in_every_epoch(tmp_path: Path) -> None:
    for name, atoms in (("convnet", [0, 2, 4]), ("vgg11", [1, 2, 7]), ("lstm-imdb", [0, 1, 2])):
        train_one_by_one(tmp_path / name, "fedepth", name, atoms, memory__feature_cache=False, training__local_epochs=2)


@pytest.mark.parametrize("name", [name for name in sorted(MODELS) if name not in FIXED_FIRST])
def test_training_without_the_first_atoms(tmp_path: Path, name: str) -> None:
    for first in distinct(blueprint_of(name))[1:]:
        last = len(blueprint_of(name).atoms) - 1
        train_one_by_one(tmp_path / str(first), "fedepth", name, sorted({first, last}))


@pytest.mark.parametrize("name", FIXED_FIRST)
def test_first_atoms_that_must_be_trained(tmp_path: Path, name: str) -> None:
    """The client refuses with the cost of the atom; the plan gives the device nothing to train; `minimum` is what it takes."""
    cut = cut_of("fedepth", name)
    last = len(cut.blueprint.atoms) - 1
    costs = {WorkItem((0,)): 10**6, WorkItem((1,)): 10**6 - 2, WorkItem((last,)): 10}
    for allowed in (10**6 - 1, 10):
        client = client_of(tmp_path / str(allowed), cut, allowed)
        with pytest.raises(MemoryBudgetExceededError, match=f"atom '{cut.blueprint.atoms[0].name}' needs") as caught:
            train(client, "fedepth", costs)
        assert (caught.value.needed, caught.value.allowed) == (10**6, allowed)
    needed = cut.min_budget()
    assert needed == max(cut.needed_bytes(cut.item((0,))), cut.needed_bytes(cut.item((last,))))
    assert cut.method(cut).parts(0, state(needed), 1.0)
    with pytest.raises(AtomTooLargeError):
        cut.method(cut).parts(0, state(needed - 1), 1.0)


def test_the_smallest_budget_of_a_model_narrower_than_its_images() -> None:
    """The last atom could be given images, but the second, which also fits that budget, has fewer channels than they."""
    settings = tiny_settings(
        strategy="fedepth", training__batch_size=BATCH, architecture__width=0.1, architecture__batch_norm="running"
    )
    blueprint = blueprint_of_shape(settings, (3, 8, 8), 3)
    cut = find_method("fedepth").make_cut(blueprint, cost_model_for(settings, blueprint), settings)
    costs = [cut.needed_bytes(cut.item((atom,))) for atom in range(len(blueprint.atoms))]
    assert costs[0] > costs[4] > max(costs[1:4])
    assert cut.min_budget() == costs[0]
    assert cut.items(costs[0], cut.needed_bytes)[0].atoms == (0,)
    with pytest.raises(AtomTooLargeError, match="atom 'conv1' needs"):
        cut.items(costs[0] - 1, cut.needed_bytes)


@pytest.mark.slow
def test_behind_stored_features_under_attack(tmp_path: Path) -> None:
    """FedProphet, every atom a module; those before are streamed once, one at a time, and their features stay in the store."""
    seen = set()
    for name in sorted({*MODELS} - {"lstm-imdb"}):  # tokens cannot be attacked
        cut, blueprint = cut_of("fedprophet", name), blueprint_of(name)
        atoms = range(len(blueprint.atoms))
        new = [atom for atom in distinct(blueprint) if cut.part(cut.item((atom,))).signature() not in seen]
        seen |= {cut.part(cut.item((atom,))).signature() for atom in new}
        units = [*blueprint.units()[:-1], *(head_behind(blueprint, atom) for atom in atoms)]
        client = client_of(tmp_path / name, cut, 10**9, units)
        for atom in new:
            client.cap = Phases(10**9)
            task_config = FedProphetTaskConfig([[each] for each in atoms], atom, atom, epsilon=0.1)
            item = cut.item((atom,))
            update = train(client, "fedprophet", {item: cut.bytes(item)}, task_config, cut.variant)
            found = client.cap.peaks[f"train {atom}"]
            assert (
                (name, atom, found) == (name, atom, cut.bytes(item)) == (name, atom, update.metrics["predicted-peak"])
            )


@pytest.mark.parametrize("name", SOME)
def test_behind_frozen_blocks(tmp_path: Path, name: str) -> None:
    """ProFL: each step with its output module; and the output layer alone, for which the step's own atoms are streamed too."""
    cut = cut_of("profl", name)
    for t in range(1, len(cut.blocks) + 1):
        step, needed = cut.step(t), cut.needed_in_step(t)
        for piece, allowed in ((atoms, needed[cut.item(atoms)]) for atoms in (step, OUTPUT_LAYER)):
            item = cut.item(step)
            client = client_of(tmp_path / f"{t}-{len(piece)}", cut, allowed, cut.model.units())
            costs = needed | {item: max(needed[item], allowed + (piece != step))}
            train(client, "profl", costs, ProFLTaskConfig(t, "growing"), cut.variant)
            assert client.cap.peaks[f"train {format_ranges(piece) or 'the output layer'}"] == cut.bytes(cut.item(piece))
            assert client.cap.peak_bytes <= allowed  # of streamed atoms the writing of features is not traced


@pytest.mark.parametrize("name", SOME)
def test_the_first_blocks_with_their_exits(tmp_path: Path, name: str) -> None:
    cut = cut_of("depthfl", name)
    for depth in range(1, len(cut.blocks) + 1):
        piece = cut.depth(depth)
        client = client_of(tmp_path / str(depth), cut, cut.bytes(piece), cut.model.units())
        train(client, "depthfl", {piece: cut.bytes(piece)}, DepthFLTaskConfig(depth, 0.5), cut.variant)
        assert client.cap.peak_bytes == cut.bytes(piece)


@pytest.mark.slow
def test_a_run_whose_devices_leave_out_the_first_atoms(tmp_path: Path) -> None:
    """The poor devices' budget is the cost of their first piece: there is room for nothing beside its step."""
    model = {
        "model": "vgg11",
        "architecture__width": 0.1,
        "training__batch_size": 64,
        "architecture__batch_norm": "batch",
    }
    blueprint = build_blueprint("vgg11", num_classes=10, input_shape=(1, 32, 32), width=0.1, batch_norm="batch")
    settings = tiny_settings(**model)
    cut = find_method("fedepth").make_cut(blueprint, cost_model_for(settings, blueprint), settings)
    rich, poor = cut.needed_bytes(cut.item((0,))), cut.needed_bytes(cut.item((2,)))
    assert [part.atoms for part in find_method("fedepth")(cut).parts(0, state(poor), 1.0)] == [
        (2,),
        (4,),
        (5, 6),
        (7,),
    ]
    fleet = fleet_json(rich=rich, poor=poor)
    run = run_local(tmp_path, fleet=fleet, dataset="digits32", clients=8, clients_per_round=4, **model)
    clients = clients_of(run)
    assert {client["device"] for client in clients} == {"rich", "poor"}
    for client in clients:
        assert (client["status"], client["reason"]) == ("ok", "")
        assert client["measured_peak"] == client["predicted_peak"] == client["budget"]
