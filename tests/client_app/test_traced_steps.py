"""A traced step is the real one also under attack, in bfloat16, behind a frozen prefix, and for the systems' own models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import a_training_config, random_examples
from zoo_helpers import ONE_A_FAMILY, SMALL, blueprint_of

from piecework.device_profiles.memory import PeakMemory, trace
from piecework.models.cascade import Blueprint
from piecework.models.low_rank import low_rank
from piecework.models.masked import mask_model
from piecework.models.zoo import MODELS, is_token_model
from piecework.planning.step_cost import fake_load, piece_cost
from piecework.training.attacks import Attack
from piecework.training.loop import LocalTrainer, PieceModel, adversary, classification_loss, start
from piecework.training.memory_cap import MemoryCap
from piecework.training.sgd import TrainingConfig

IMAGE = Attack("linf", epsilon=8 / 255, step=2 / 255, steps=3, low=0.0, high=1.0)
FEATURES = Attack("l2", epsilon=1.0, step=0.5, steps=2, low=0.0)


def measured(blueprint: Blueprint, atoms: tuple[int, ...], head: str, training_config: TrainingConfig) -> int:
    cap = MemoryCap(10**12, enforced=False)
    trainer = LocalTrainer(lambda: [PieceModel(blueprint, atoms, head, fake_load(blueprint))], training_config)
    examples = random_examples(
        training_config.batch_size, blueprint.shape_before(atoms[0]), classes=blueprint.num_classes
    )
    trainer.epoch(examples, np.random.default_rng(0), cap, "train")
    return cap.peak_bytes


@pytest.mark.parametrize("name", sorted(name for name in ONE_A_FAMILY if not is_token_model(name)))
def test_a_whole_model_under_attack(name) -> None:
    blueprint = blueprint_of(name, **SMALL.get(name, {}))
    atoms, training_config = tuple(range(len(blueprint.atoms))), replace(a_training_config(2), attack=IMAGE)
    assert (
        measured(blueprint, atoms, "head", training_config)
        == piece_cost(blueprint, atoms, "head", training_config).peak_bytes
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_module_behind_others_under_attack(name) -> None:
    blueprint = blueprint_of(name, **SMALL.get(name, {}))
    last = len(blueprint.atoms) - 1
    atoms, head = ((last,), "head") if last == 1 else ((last - 1,), f"aux.{last - 1}")
    training_config = replace(a_training_config(2), attack=FEATURES)
    assert (
        measured(blueprint, atoms, head, training_config)
        == piece_cost(blueprint, atoms, head, training_config).peak_bytes
    )


@pytest.mark.parametrize(("attack", "momentum"), [(None, 0.9), (IMAGE, 0.0)], ids=["clean-momentum", "attacked"])
@pytest.mark.parametrize("name", ["cnn3", "preresnet20", "resnet18", "vgg11", "deit-tiny"])
def test_a_step_in_bfloat16(name, attack, momentum) -> None:
    blueprint = blueprint_of(name)
    atoms = tuple(range(len(blueprint.atoms)))
    training_config = replace(a_training_config(4), attack=attack, precision="bfloat16", momentum=momentum)
    found, cost = (
        measured(blueprint, atoms, "head", training_config),
        piece_cost(blueprint, atoms, "head", training_config).peak_bytes,
    )
    assert found == cost
    assert cost < piece_cost(blueprint, atoms, "head", replace(training_config, precision="float32")).peak_bytes


@pytest.mark.parametrize(
    "blueprint",
    [
        low_rank(blueprint_of("resnet18"), 0.4),
        low_rank(blueprint_of("vgg11", norm="none", classifier="prism"), 0.2),
        mask_model(blueprint_of("conv4")),
        mask_model(blueprint_of("resnet18-preact", width=0.5)),
    ],
    ids=lambda blueprint: f"{blueprint.name}-{len(blueprint.atoms)}",
)
def test_models_of_the_systems(blueprint) -> None:
    atoms, training_config = tuple(range(len(blueprint.atoms)))[2:], a_training_config(4)
    assert (
        measured(blueprint, atoms, "head", training_config)
        == piece_cost(blueprint, atoms, "head", training_config).peak_bytes
    )


@pytest.mark.parametrize("name", ["convnet", "preresnet20", "resnet18", "vgg11"])
@pytest.mark.parametrize("attack", [None, IMAGE], ids=["clean", "attacked"])
def test_a_prefix_that_is_held_and_frozen(name, attack) -> None:
    """Nothing here trains like this; other people's methods keep the frozen layers in memory."""
    blueprint, training_config = blueprint_of(name, batch_norm="running"), a_training_config(4)
    count = len(blueprint.atoms)

    def step() -> None:
        frozen = PieceModel(blueprint, range(count // 2), None, fake_load(blueprint))
        frozen.train(False)
        for parameter in frozen.parameters():
            parameter.requires_grad_(False)
        piece = PieceModel(blueprint, range(count // 2, count), "head", fake_load(blueprint))
        _, optimiser = start([piece], training_config, lambda pieces: lambda z, y: z.sum())

        def loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return classification_loss(piece.logits(frozen.features(z)), y)

        x, y = torch.zeros(4, *blueprint.input_shape), torch.zeros(4, dtype=torch.int64)
        if attack is not None:
            x = adversary([piece], loss, attack, 0)(x, y)
        loss(x, y).backward()
        optimiser.step()

    memory = PeakMemory()
    with memory:
        step()
    assert trace(step).peak_bytes == memory.peak


def test_attack_steps_have_the_memory_cost_of_one_step() -> None:
    blueprint = blueprint_of("convnet")
    costs = {
        steps: piece_cost(blueprint, (0, 1), "aux.1", replace(a_training_config(8), attack=replace(IMAGE, steps=steps)))
        for steps in (1, 2, 10)
    }
    clean = piece_cost(blueprint, (0, 1), "aux.1", a_training_config(8)).flops
    step = costs[1].flops - clean
    # forward, and backward to the image: conv1, conv2, the head's linear layer; 2 a multiply-accumulate, 8 images
    assert step == 2 * 2 * 8 * (64 * 16 * 9 + 64 * 16 * 16 * 9 + 16 * 10)
    assert costs[2].flops == clean + 2 * step
    assert costs[10].flops == clean + 10 * step
    assert costs[1].peak_bytes == costs[10].peak_bytes
