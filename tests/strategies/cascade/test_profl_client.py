"""ProFL's client: statistics, maps, features of frozen blocks, evaluation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    a_blueprint,
    a_client,
    tiny_settings,
)
from torch.nn import functional as F

from piecework.client_app.features import _mix_batches, prefix_features, teacher_logits
from piecework.client_app.validation import evaluate_whole
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.models.basic_layers import BasicLayers, blocks_of, cascade_at, step_atoms, with_basic_layers
from piecework.models.cascade import unit_of
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.strategies.cascade.profl.client import ProFLTaskConfig, distillation, evaluate, train
from piecework.training.evaluation_step import EvaluationStep
from piecework.training.loop import PieceModel, load_for_device
from piecework.training.messages import Task


def a_profl_client(folder: Path, allowed: int = 10**9) -> tuple[Any, Any]:
    client = a_client(folder, tiny_settings(architecture__batch_norm="running"), allowed=allowed)
    model = with_basic_layers(client.blueprint, blocks_of(client.blueprint))
    torch.manual_seed(0)
    for atom in range(len(client.blueprint.atoms), len(model.atoms)):
        client.store.save(f"atoms.{atom}", model.build_unit(f"atoms.{atom}"))
    client.blueprint = model
    return client, model


def a_task(t: int, doing: str = "growing") -> Task:
    variant = Variant(changes=(BasicLayers(tuple(blocks_of(a_blueprint()))),))
    return Task(
        *("experiment", 1, 0, "profl", 10**9, 10**6, 0.05, ""),
        variant=variant,
        config=ProFLTaskConfig(t, doing).to_values(),
        evaluation=[EvaluationStep(0)],
    )


def costing(task: Task, costs: dict[tuple[int, ...], int]) -> Task:
    """The task with these costs of atoms; of its statistics, costs of measuring them."""
    measured = ProFLTaskConfig.of(task).doing == "statistics"
    items = {WorkItem(atoms, variant=task.variant, measured=measured): cost for atoms, cost in costs.items()}
    return replace(task, costs=items)


def held(client: Any, model: Any, atoms: tuple[int, ...]) -> PieceModel:
    piece = PieceModel(model, atoms, "head", load_for_device(model, client.store.load))
    piece.train(False)
    return piece


def test_a_teachers_logits_are_those_of_the_model_row_by_row(tmp_path: Path) -> None:
    client, model = a_profl_client(tmp_path)
    client.blueprint = model
    examples = client.local_data(0)
    z = prefix_features(client, [(0,), (1,)])
    logits = teacher_logits(client, [(a,) for a in step_atoms(model, blocks_of(model_without(model)), 2)], z)
    with torch.no_grad():
        whole = held(client, model, cascade_at(model, blocks_of(model_without(model)), 2))
        expected = whole.logits(examples.read(np.arange(40)))
    torch.testing.assert_close(torch.tensor(np.array(logits)), expected, rtol=1e-4, atol=1e-5)


def model_without(model: Any) -> Any:
    """Without basic layers."""
    return replace(model, atoms=model.atoms[: len(model.atoms) - model.num_replacement_atoms], num_replacement_atoms=0)


@pytest.mark.parametrize(("t", "learns"), [(3, {"atoms.6", "head"}), (2, {"atoms.5"})])
def test_a_map_brings_the_student_nearer_to_its_teacher(tmp_path: Path, t: int, learns: set[str]) -> None:
    client, model = a_profl_client(tmp_path)
    blocks = blocks_of(client.blueprint)
    x = client.local_data(0).read(np.arange(40))
    with torch.no_grad():
        teacher = held(client, model, cascade_at(model, blocks, t)).logits(x)
        before = float(F.mse_loss(held(client, model, cascade_at(model, blocks, t - 1)).logits(x), teacher))
    student = tuple(range(3 + t, 7))
    task = costing(a_task(t, "map"), {student: 10**6})
    client.training_config = replace(client.training_config, lr=0.05, epochs=20)
    update = train(task, client)
    assert set(update.units) == learns
    with torch.no_grad():
        after = float(F.mse_loss(held(client, model, cascade_at(model, blocks, t - 1)).logits(x), teacher))
    assert after < 0.5 * before


def test_distillation_by_hand(tmp_path: Path) -> None:
    """Logits 0 against a teacher's 1, 2: the mean of the squares is 2.5; what does not learn has no gradient."""
    client, model = a_profl_client(tmp_path)
    piece = PieceModel(model, (5, 6), "head", load_for_device(model, client.store.load))
    loss = distillation(("atoms.5",))([piece])
    assert [p.requires_grad for p in piece.parameters()] == [True, False, False, False]
    with torch.no_grad():
        for parameter in piece.parameters():
            parameter.zero_()
    teacher = torch.tensor([[1.0, 2.0] * 5] * 3)
    assert loss(torch.rand(3, *model.shape_before(5)), teacher).item() == 2.5


def test_too_little_for_the_output_layer(tmp_path: Path) -> None:
    client, _ = a_profl_client(tmp_path, allowed=1000)
    task = costing(a_task(1), {(0, 1, 5, 6): 5000, (): 1001})
    with pytest.raises(MemoryBudgetExceededError) as caught:
        train(task, client)
    assert (caught.value.needed, caught.value.allowed) == (1001, 1000)


def test_evaluation_is_of_the_steps_model(tmp_path: Path) -> None:
    for t, doing, stands in ((2, "growing", 2), (3, "map", 2)):
        client, model = a_profl_client(tmp_path / doing)
        atoms = cascade_at(model, blocks_of(client.blueprint), stands)
        x, y = client.validation.read(np.arange(20)), client.validation.targets(np.arange(20))
        with torch.no_grad():
            logits = held(client, model, atoms).logits(x)
        found = evaluate(a_task(t, doing), client)
        assert found["val-examples"] == 20
        assert found["val-loss"] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-4)


def test_a_model_of_one_atom_is_evaluated_too(tmp_path: Path) -> None:
    whole = a_blueprint(batch_norm="running")
    one = replace(whole, atoms=whole.atoms[:1], build_head=lambda: whole.build_unit("aux.0"))
    client = a_client(tmp_path, tiny_settings(architecture__batch_norm="running"), blueprint=one)
    assert evaluate_whole(a_task(1), client)["val-examples"] == 20


def test_frozen_blocks_in_training_mode_take_the_statistics_of_batches(tmp_path: Path) -> None:
    """As a model whose batch norms never have others; the running ones stay as they are."""
    found = {}
    for mode, norm in (("training", "running"), ("evaluation", "batch"), ("evaluation", "running")):
        client = a_client(tmp_path / mode / norm, tiny_settings(architecture__batch_norm=norm))
        before = dict(client.store.read(["atoms.0", "atoms.1"]))
        examples = prefix_features(client, [(0,), (1,)], training=mode == "training")
        found[mode, norm] = examples.read(np.arange(len(examples)))
        assert all(np.array_equal(array, before[name]) for name, array in client.store.read(["atoms.0", "atoms.1"]))
    torch.testing.assert_close(found["training", "running"], found["evaluation", "batch"])
    assert not torch.allclose(found["training", "running"], found["evaluation", "running"], atol=1e-3)


def test_statistics_by_hand(tmp_path: Path) -> None:
    """Of the first norm: means of batches' means and variances of what its convolution makes of the client's images."""
    client, _ = a_profl_client(tmp_path)
    examples, size = client.local_data(0), client.training_config.batch_size
    unit = client.blueprint.build_unit("atoms.0")
    client.store.load("atoms.0", unit)
    order = [positions for positions, _ in _mix_batches(client, len(examples), size)]
    assert sum(map(len, order)) == len(examples)
    assert len(order[0]) == size
    layers = [layer for layer in unit.modules() if isinstance(layer, torch.nn.Conv2d | torch.nn.BatchNorm2d)]
    with torch.no_grad():
        z = [layers[0](examples.read(positions)) for positions in order]
    before = dict(client.store.read(["atoms.0", "atoms.1", "atoms.2"]))
    task = costing(a_task(2, "statistics"), {(0, 1): 10**6})
    update = train(task, client)
    assert update.units == ["atoms.0", "atoms.1"]
    after = dict(client.store.read(["atoms.0", "atoms.1", "atoms.2"]))
    mean = torch.stack([batch.mean(dim=(0, 2, 3)) for batch in z]).mean(dim=0)
    variance = torch.stack([batch.var(dim=(0, 2, 3)) for batch in z]).mean(dim=0)
    (name,) = [name for name in after if name.startswith("atoms.0") and name.endswith("running_mean")]
    np.testing.assert_allclose(after[name], mean.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(after[name.replace("mean", "var")], variance.numpy(), rtol=1e-4, atol=1e-6)
    assert {name for name in after if not np.array_equal(after[name], before[name])} == {
        f"atoms.{atom}.{kind}"
        for atom in (0, 1)
        for kind in (name.removeprefix("atoms.0."), name.removeprefix("atoms.0.").replace("mean", "var"))
    } | {name for name in after if name.endswith("num_batches_tracked") and unit_of(name) != "atoms.2"}
    with pytest.raises(MemoryBudgetExceededError, match="measuring the statistics of random blocks"):
        train(costing(task, {(0, 1): 10**10}), client)
