"""Distillation on the server (FedDF, FedET): collect the logits of clients' models on public examples and train models on
them.

N is the number of public examples, C of classes; s_k are the logits [N, C] of client k's model.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from statistics import median_low
from tempfile import TemporaryFile

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor
from torch.nn import functional as F

from piecework.federation.evaluation import at_full_speed, fill_unit
from piecework.models.cascade import Blueprint
from piecework.training.adam import Adam
from piecework.training.attacks import Loss
from piecework.training.examples import Examples
from piecework.training.loop import LocalTrainer, MakeLoss, PieceModel, load_for_device
from piecework.training.memory_cap import MemoryCap
from piecework.training.sgd import TrainingConfig

MIN_VARIANCE = 1e-12  # equal logits of all classes get a tiny weight, so that a sum of weights is never 0


class AdamPiece(PieceModel):
    """A piece that is trained by Adam."""

    optimiser = Adam


class Ensemble:
    """The logits of clients' models, in a temporary file; only one client's are in memory at a time."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 (stays open as long as the ensemble exists)
        self._shape = (0, 0)
        self.sizes: list[float] = []  # root mean square of each client's logits
        self.maximum = math.inf

    def add(self, logits: Tensor) -> None:
        """Append one client's logits [N, C]."""
        self._shape = (logits.shape[0], logits.shape[1])
        self._file.write(logits.float().contiguous().numpy().data)
        self.sizes.append(float(logits.double().square().mean().sqrt()))

    def distrust(self, factor: float) -> list[int]:
        """Exclude clients whose logits exceed `factor` times the clients' median size; 0 excludes none.

        Returns the indices of the excluded clients in the order in which they were added.
        """
        self.maximum = factor * median_low(self.sizes) if factor and self.sizes else math.inf
        return [member for member, size in enumerate(self.sizes) if size > self.maximum]

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the logits [N, C] of each client that is not excluded, in the order in which they were added."""
        for member, size in enumerate(self.sizes):
            if size > self.maximum:
                continue
            self._file.seek(4 * member * self._shape[0] * self._shape[1])
            read = self._file.read(4 * self._shape[0] * self._shape[1])
            yield torch.from_numpy(np.frombuffer(read, dtype=np.float32).reshape(self._shape).copy())
        self._file.seek(0, 2)


def average_logits(ensemble: Iterable[Tensor]) -> Tensor:
    """Return FedDF's target: the mean of the clients' logits, [N, C]."""
    total, members = torch.zeros(()), 0
    for logits in ensemble:
        total, members = total + logits.double(), members + 1
    return (total / members).float()


def teachers_accuracy(targets: Tensor, labels: np.ndarray) -> float:
    """Return the share of examples whose largest target [N, C] is that of their label [N]; nobody learns from the labels."""
    return float((targets.argmax(1).numpy() == labels).mean())


def consensus(ensemble: Iterable[Tensor]) -> Tensor:
    """Return FedET's target, [N, 2 C]: the consensus logits followed by the diversity logits.

    v_k(x) is the variance of s_k(x) over the classes. The consensus is sum_k v_k s_k / sum_k v_k; its largest class is the
    pseudo-label. The diversity logits are this mean over those k alone whose own largest class is another one, and 0 if all
    clients agree. `ensemble` is iterated twice.
    """
    agreed = _weigh(ensemble)
    label = agreed.argmax(1)
    return torch.cat([agreed, _weigh(ensemble, unlike=label)], dim=1).float()


def _weigh(ensemble: Iterable[Tensor], unlike: Tensor | None = None) -> Tensor:
    """Return sum_k v_k s_k / sum_k v_k, [N, C], over all k, or those whose largest class differs from `unlike` [N]."""
    total, weights = torch.zeros(()), torch.zeros(())
    for logits in map(Tensor.double, ensemble):
        weight = logits.var(dim=1, correction=0, keepdim=True) + MIN_VARIANCE
        if unlike is not None:
            weight = weight * (logits.argmax(1) != unlike).unsqueeze(1)
        total, weights = total + weight * logits, weights + weight
    return torch.where(weights > 0, total / weights, 0.0)


def likeness_loss(pieces: list[PieceModel]) -> Loss:
    """Return FedDF's loss: KL(softmax(target) || softmax(student)), the mean over the batch; targets are [B, C]."""
    (piece,) = pieces
    return lambda z, targets: divergence(piece.logits(z), targets).mean()


def consensus_loss(diversity: float) -> MakeLoss:
    """Return FedET's loss: cross-entropy with the pseudo-label, plus `diversity` x KL to the diversity logits.

    Targets are [B, 2 C], as `consensus` returns them. For an example on which all clients agree this is the KL to the uniform
    distribution, as its diversity logits are 0.
    """

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces

        def loss(z: Tensor, targets: Tensor) -> Tensor:
            logits, (agreed, diverse) = piece.logits(z), targets.chunk(2, dim=1)
            return F.cross_entropy(logits, agreed.argmax(1)) + diversity * divergence(logits, diverse).mean()

        return loss

    return make


def divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """Return KL(softmax(targets) || softmax(logits)) of each example, [B], for logits and targets [B, C]."""
    return F.kl_div(F.log_softmax(logits, 1), F.log_softmax(targets, 1), reduction="none", log_target=True).sum(1)


@torch.no_grad()
def logits_of(
    blueprint: Blueprint,
    arrays: Mapping[str, Array],
    examples: Examples,
    batch_size: int,
    cap: MemoryCap,
    threads: int = 1,
) -> Tensor:
    """Return a model's logits of all examples, [N, C], in evaluation mode; batches have `batch_size` examples or slightly more.

    `threads` is the number of torch's threads, which slightly changes the numbers.
    """
    found = []
    with at_full_speed(threads):
        model: PieceModel | None = None
        for positions in np.array_split(np.arange(len(examples)), max(1, len(examples) // batch_size)):
            with cap.first("logits", blueprint.name, len(positions)):
                if model is None:
                    (model,) = _whole(blueprint, arrays, PieceModel)
                    model.train(False)
                found.append(model.logits(examples.read(positions)))
    return torch.cat(found)


def distil(
    blueprint: Blueprint,
    arrays: ArrayRecord,
    examples: Examples,
    targets: Tensor,
    make_loss: MakeLoss,
    training_config: TrainingConfig,
    rng: np.random.Generator,
    cap: MemoryCap,
    piece_class: type[PieceModel] = PieceModel,
    threads: int = 1,
) -> tuple[ArrayRecord, float]:
    """Return the arrays of a model trained on `targets` [N, ...] as `training_config` says, and its mean loss.

    `threads` is the number of torch's threads, which slightly changes the numbers.
    """
    taught = Examples(examples.read, targets.numpy())
    trainer = LocalTrainer(partial(_whole, blueprint, arrays, piece_class), training_config, make_loss)
    with at_full_speed(threads):
        for _ in trainer.epochs():
            (own,) = rng.spawn(1)  # dropout would draw the same masks in every epoch
            trainer.epoch(taught, own, cap, f"distil {blueprint.name}")
        (model,) = trainer.finish()
    found = {f"{unit}.{name}": value for unit, m in model.units().items() for name, value in m.state_dict().items()}
    new = ArrayRecord({name: Array(found[name].detach().numpy()) for name in arrays})
    return new, trainer.total_loss / trainer.seen


def _whole(blueprint: Blueprint, arrays: Mapping[str, Array], piece_class: type[PieceModel]) -> list[PieceModel]:
    fill: Callable[..., None] = partial(fill_unit, arrays)
    return [piece_class(blueprint, range(len(blueprint.atoms)), "head", load_for_device(blueprint, fill))]
