"""FedDF's and FedET's rules by hand: averaged logits, weights, losses, and a model that learns its teachers' answers."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from helpers import feature_examples, numpy_of, random_examples, same
from torch import Tensor, nn

from piecework.device_profiles.memory import PeakMemory
from piecework.models.cascade import initial_state
from piecework.models.zoo import build_blueprint
from piecework.strategies.distillation.feddf.server_training import (
    AdamPiece,
    Ensemble,
    average_logits,
    consensus,
    consensus_loss,
    distil,
    divergence,
    likeness_loss,
    logits_of,
    teachers_accuracy,
)
from piecework.training.loop import PieceModel
from piecework.training.memory_cap import MemoryCap
from piecework.training.sgd import TrainingConfig


def ensemble(*members: list[list[float]]) -> Ensemble:
    found = Ensemble()
    for logits in members:
        found.add(torch.tensor(logits))
    return found


# Three clients, three examples, two classes.
ONE = [[2.0, 0.0], [3.0, 1.0], [0.0, 6.0]]
TWO = [[0.0, 4.0], [5.0, 1.0], [4.0, 0.0]]
THREE = [[1.0, 0.0], [0.0, -6.0], [1.0, 3.0]]


def test_averaged_logits() -> None:
    expected = torch.tensor([[1.0, 4 / 3], [8 / 3, -4 / 3], [5 / 3, 3.0]])
    torch.testing.assert_close(average_logits(ensemble(ONE, TWO, THREE)), expected)


def test_variance_weights_and_diversity_logits() -> None:
    """Variances (a - b)^2 / 4: of the first example 1, 4 and 1/4, of the second 1, 4 and 9, of the third 9, 4 and 1."""
    found = consensus(ensemble(ONE, TWO, THREE))
    agreed = [
        [(1 * 2 + 4 * 0 + 0.25 * 1) / 5.25, (1 * 0 + 4 * 4 + 0.25 * 0) / 5.25],
        [(1 * 3 + 4 * 5 + 9 * 0) / 14, (1 * 1 + 4 * 1 - 9 * 6) / 14],
        [(9 * 0 + 4 * 4 + 1 * 1) / 14, (9 * 6 + 4 * 0 + 1 * 3) / 14],
    ]
    torch.testing.assert_close(found[:, :2], torch.tensor(agreed))
    assert agreed[0][1] > agreed[0][0] and agreed[1][0] > agreed[1][1] and agreed[2][1] > agreed[2][0]
    # The first example's label is 1: clients 1 and 3 disagree. The second's 0: no client. The third's 1: client 2.
    torch.testing.assert_close(found[0, 2:], torch.tensor([(1 * 2 + 0.25 * 1) / 1.25, 0.0]))
    torch.testing.assert_close(found[1, 2:], torch.zeros(2))
    torch.testing.assert_close(found[2, 2:], torch.tensor([4.0, 0.0]))


def test_accuracy_of_the_ensemble() -> None:
    """The largest mean logits are of the classes 1, 0 and 1."""
    found = average_logits(ensemble(ONE, TWO, THREE))
    assert teachers_accuracy(found, np.array([1, 1, 1])) == pytest.approx(2 / 3)


def test_clients_without_an_opinion_weigh_nothing() -> None:
    found = consensus(ensemble([[0.0, 2.0]], [[7.0, 7.0]]))
    torch.testing.assert_close(found[0, :2], torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(consensus(ensemble([[7.0, 7.0]]))[0, :2], torch.tensor([7.0, 7.0]))


def test_the_divergence_of_two_answers() -> None:
    """KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 log(3/2) + 1/4 log(1/2)."""
    found = divergence(torch.tensor([[5.0, 5.0]]), torch.tensor([[math.log(3), 0.0]]))
    assert found.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-6)


class Said(PieceModel):
    """A piece without atoms or head: its logits are its input."""

    def __init__(self) -> None:
        super().__init__(a_model()[0], (), None, lambda unit: nn.Identity())

    def logits(self, z: Tensor) -> Tensor:
        return z


def test_the_losses_by_hand() -> None:
    said = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    targets = torch.tensor([[math.log(3), 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    likeness = likeness_loss([Said()])(said, targets[:, :2])
    second = float(divergence(said[1:], targets[1:, :2]))
    assert likeness.item() == pytest.approx((0.75 * math.log(1.5) + 0.25 * math.log(0.5) + second) / 2, abs=1e-6)
    # Labels 0 and 0: -log(1/2), -log(3/4). Clients agree on the second example: KL((1/2, 1/2) || (3/4, 1/4)).
    apart = float(divergence(said[:1], targets[:1, 2:]))
    agreed = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    expected = (math.log(2) - math.log(0.75)) / 2 + 0.05 * (apart + agreed) / 2
    assert consensus_loss(0.05)([Said()])(said, targets).item() == pytest.approx(expected, abs=1e-6)


def test_logits_wait_on_disk_client_by_client() -> None:
    """What is held while targets are made does not depend on how many clients there are."""
    peaks = []
    for clients in (10, 100):
        held = Ensemble()
        for client in range(clients):
            held.add(torch.full((50, 10), float(client)))
        with PeakMemory(None) as meter:
            average_logits(held)
            consensus(held)
        peaks.append(meter.peak)
        assert float(average_logits(held)[0, 0]) == pytest.approx((clients - 1) / 2)
    assert peaks[0] == peaks[1] < 50 * 10 * 8 * 10


def test_logits_far_above_the_others_are_excluded() -> None:
    held = ensemble(ONE, TWO, [[1000 * value for value in row] for row in THREE])
    assert held.distrust(10.0) == [2]
    torch.testing.assert_close(average_logits(held), average_logits(ensemble(ONE, TWO)))
    assert held.distrust(0.0) == []
    assert average_logits(held).abs().max() > 300


def a_model(batch_norm: str = "running") -> tuple[Any, ArrayRecord]:
    blueprint = build_blueprint("cnn3", num_classes=4, input_shape=(1, 8, 8), width=0.125, batch_norm=batch_norm)
    return blueprint, ArrayRecord({n: Array(v.numpy()) for n, v in initial_state(blueprint, 1)})


@pytest.mark.parametrize("piece_class", [None, AdamPiece])
def test_a_model_learns_its_teachers_answers(piece_class: Any) -> None:
    blueprint, arrays = a_model()
    examples, targets = random_examples(20, (1, 8, 8), 4), 3 * torch.eye(4)[torch.arange(20) % 4]
    training_config = TrainingConfig(0.05, 0.9, 0.0, 8, 1, iterations=30)
    cap, losses = MemoryCap(0, enforced=False), []
    further = {} if piece_class is None else {"piece_class": piece_class}
    new = arrays
    for _ in range(3):
        rng = np.random.default_rng(0)
        new, loss = distil(blueprint, new, examples, targets, likeness_loss, training_config, rng, cap, **further)
        losses.append(loss)
    assert losses[2] < losses[0] / 2
    assert list(new) == list(arrays)
    assert [(a.shape, a.dtype) for a in new.values()] == [(a.shape, a.dtype) for a in arrays.values()]
    assert int(new["atoms.0.bn.num_batches_tracked"].numpy()) == 90
    one, other = (
        distil(
            blueprint,
            arrays,
            examples,
            targets,
            likeness_loss,
            training_config,
            np.random.default_rng(0),
            cap,
            **further,
        )
        for _ in range(2)
    )
    assert same(numpy_of(one[0]), numpy_of(other[0]))


def test_dropout_draws_other_masks_in_every_epoch() -> None:
    """All examples are alike and the rate is 0, so that the logits of two epochs differ by their masks alone."""
    plain, arrays = a_model()
    blueprint = replace(plain, build_head=lambda: nn.Sequential(nn.Dropout(0.5), plain.build_head()))
    arrays = ArrayRecord({name.replace("head.", "head.1."): array for name, array in arrays.items()})
    examples = feature_examples(np.ones((4, 8, 8, 1), np.float32), np.zeros(4, np.int64))
    seen: list[Tensor] = []

    def note(pieces: list[PieceModel]) -> Any:
        def loss(z: Tensor, targets: Tensor) -> Tensor:
            seen.append(logits := pieces[0].logits(z))
            return logits.sum()

        return loss

    config, cap = TrainingConfig(0.0, 0.0, 0.0, 4, 2), MemoryCap(0, enforced=False)
    distil(blueprint, arrays, examples, torch.eye(4), note, config, np.random.default_rng(0), cap)
    first, second = seen
    assert not torch.equal(first, second)


def test_logits_are_of_all_examples_in_order() -> None:
    blueprint, arrays = a_model()
    examples, cap = random_examples(7, (1, 8, 8), 4), MemoryCap(0, enforced=False)
    found = logits_of(blueprint, arrays, examples, 3, cap)
    one = logits_of(blueprint, arrays, examples, 100, cap)
    assert found.shape == (7, 4)
    torch.testing.assert_close(found, one)
    assert cap.peak_bytes > 0
    # Batch statistics need two examples or more in a batch, whatever is left over.
    blueprint, arrays = a_model("batch")
    assert logits_of(blueprint, arrays, examples, 2, cap).isfinite().all()
