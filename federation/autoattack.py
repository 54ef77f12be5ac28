"""AutoAttack, the standard evaluation of robustness (Croce and Hein, "Reliable evaluation of adversarial robustness with an
ensemble of diverse parameter-free attacks", ICML 2020), with its warnings. The attacks are those of torchattacks, which the
extra `attacks` installs.
"""

import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from piecework.federated_data.datasets import ArrayDataset
from piecework.models.cascade import isolate_rng
from piecework.training.memory_cap import return_free_memory
from piecework.training.settings import Settings, SettingsError
from piecework.training.setup import image_attack

MIN_CLASSES = 4  # the targeted loss (DLR) divides by differences of the four largest logits
OUTSIDE = 1e-6  # allowed excess over the radius of the ball, for rounding


@dataclass(frozen=True)
class AutoAttackResult:
    """Fractions of the images classified correctly: clean, under the ensemble, and `after` each of its attacks in turn.

    `warnings` are sentences that say why `accuracy` may be too high.
    """

    images: int
    clean_accuracy: float
    accuracy: float
    after: dict[str, float]
    seconds: float
    warnings: list[str]


class OnPixels(nn.Module):
    """Wrap a model of normalised images as one of pixels in [0, 1]. `modules` are the modules that `logits` uses."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        modules: Iterable[nn.Module],
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.logits, self.parts = logits, nn.ModuleList(modules)
        self.register_buffer("mean", torch.tensor(tuple(mean)).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(tuple(std)).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits[B, classes] for pixels x[B, C, H, W]."""
        return self.logits((x - self.mean) / self.std)


def require_autoattack(settings: Settings, data: ArrayDataset) -> None:
    """Reject a run whose final AutoAttack could not be computed.

    Raises SettingsError for too few classes or a missing torchattacks, and DatasetError for data other than 8-bit images.
    """
    if not settings.evaluation.autoattack_examples:
        return
    key = f"evaluation.autoattack-examples = {settings.evaluation.autoattack_examples}"
    if data.num_classes < MIN_CLASSES:
        raise SettingsError(
            f"{key}: data set {data.name} has {data.num_classes} classes and AutoAttack's targeted attack needs "
            f"{MIN_CLASSES}; set evaluation.autoattack-examples = 0"
        )
    image_attack(settings, data, 1)
    try:
        _torchattacks()
    except SettingsError as error:
        raise SettingsError(f"{key}: {error}, or set evaluation.autoattack-examples = 0") from error


def run_autoattack(
    model: nn.Module, images: Tensor, labels: Tensor, epsilon: float, seed: int, batch_size: int = 250
) -> AutoAttackResult:
    """Attack images[N, C, H, W], pixels in [0, 1], with labels[N], in the L-infinity ball of radius `epsilon`.

    Each attack gets the images that the attacks before it left correctly classified. The model maps pixels to logits and is
    attacked in evaluation mode. Raises SettingsError if torchattacks is missing, ValueError for fewer than four classes.
    """
    started = time.perf_counter()
    library = _torchattacks()
    with freeze(model), isolate_rng(seed), fix_statistics(model, images, batch_size) as fixed:
        logits = torch.cat([_logits(model, batch) for batch in torch.split(images, batch_size)])
        classes = logits.shape[1]
        if classes < MIN_CLASSES:
            raise ValueError(f"AutoAttack needs a model of {MIN_CLASSES} classes or more, this one has {classes}")
        warnings = suspicions(model, images[:batch_size], labels[:batch_size])
        if fixed:
            warnings.append(
                "Batch norms that use batch statistics were fixed to the statistics of the clean images, because an attack "
                "needs a model whose prediction for an image does not depend on the rest of the batch."
            )
        right, after = logits.argmax(1) == labels, {}
        clean = int(right.sum())
        for name, attack in standard_attacks(library, model, epsilon, seed, classes).items():
            for rows in torch.split(right.nonzero().flatten(), batch_size):
                if len(rows):
                    right[rows] = ~is_fooled(
                        model, attack(images[rows], labels[rows]), images[rows], labels[rows], epsilon
                    )
                return_free_memory()  # batches shrink as attacks succeed, and each size leaves holes in the heap
            after[name] = int(right.sum())
    count = len(labels)
    if by_square := after["fab-t"] - after["square"]:
        warnings.append(
            f"Square, which sees no gradients, broke {by_square} of {count} images that the gradient attacks had not: "
            "gradients may be masked, and the robustness overestimated."
        )
    fractions = {name: left / count for name, left in after.items()}
    return AutoAttackResult(
        count, clean / count, fractions["square"], fractions, time.perf_counter() - started, warnings
    )


def standard_attacks(
    library: ModuleType, model: nn.Module, epsilon: float, seed: int, classes: int
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return the four attacks of version "standard", by name and in order, with the authors' parameters.

    torchattacks' own AutoAttack differs: it takes 10 steps instead of 100, stretches Square's schedule, and targets every
    class instead of nine.
    """
    common: dict[str, Any] = {"norm": "Linf", "eps": epsilon, "seed": seed, "n_restarts": 1}
    # The targets are all of these classes but the true one.
    aimed: dict[str, Any] = {"steps": 100, "n_classes": min(classes, 10)}
    return {
        "apgd-ce": library.APGD(model, loss="ce", steps=100, **common),
        "apgd-t": library.APGDT(model, **aimed, **common),
        "fab-t": library.FAB(model, multi_targeted=True, **aimed, **common),
        "square": library.Square(model, n_queries=5000, resc_schedule=False, **common),
    }


def suspicions(model: nn.Module, images: Tensor, labels: Tensor) -> list[str]:
    """Run AutoAttack's checks on a batch of images: random outputs, probabilities instead of logits, zero gradients.

    Returns a warning for each check that finds something.
    """
    found, count = [], len(labels)
    first, second = _logits(model, images), _logits(model, images)
    # The authors' check compares outputs that are scaled to length 1.
    apart = (F.normalize(first) - F.normalize(second)).norm(dim=1) > 1e-4
    if changed := int((apart | (first.argmax(1) != second.argmax(1))).sum()):
        found.append(
            f"Outputs are random: two passes over the same images differ for {changed} of {count}; the attacks, which expect "
            "one answer, may fail for that reason alone."
        )
    if first.min() > -1e-5 and first.max() < 1 + 1e-5 and bool(((first.sum(1) - 1).abs() < 1e-5).all()):
        found.append(
            "Outputs are probabilities (soft-max), not logits: their gradients vanish by rounding, and the robustness may be "
            "overestimated."
        )
    x = images.detach().requires_grad_()
    gradient = torch.autograd.grad(F.cross_entropy(model(x), labels, reduction="sum"), x)[0]
    if zero := int((gradient.flatten(1) == 0).all(1).sum()):
        found.append(
            f"The loss has a zero gradient at {zero} of {count} images ({zero / count:.1%}): gradient attacks make no progress "
            "there, and the robustness may be overestimated."
        )
    return found


@contextmanager
def freeze(model: nn.Module) -> Iterator[None]:
    """In the body, the model is in evaluation mode and its parameters take no gradients (FAB leaves some behind)."""
    modes = [(module, module.training) for module in model.modules()]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval().requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter in learning:
            parameter.requires_grad_(True)


@contextmanager
def fix_statistics(model: nn.Module, images: Tensor, batch_size: int) -> Iterator[bool]:
    """In the body, batch norms without running statistics use those of these images. Yields whether there are such norms."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is None]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.track_running_stats, norm.momentum = True, None  # without momentum torch takes the mean over all batches
        norm.running_mean, norm.running_var = torch.zeros(norm.num_features), torch.ones(norm.num_features)
        norm.num_batches_tracked = torch.tensor(0)
        norm.train()
    try:
        for batch in torch.split(images, batch_size) if norms else ():
            if len(batch) > 1 or len(images) == 1:  # batch norm has no statistics of one example
                _logits(model, batch)
        for norm in norms:
            norm.eval()
        yield bool(norms)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.track_running_stats, norm.momentum = False, momentum
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None


@torch.no_grad()
def is_fooled(model: nn.Module, adversarial: Tensor, x: Tensor, y: Tensor, epsilon: float) -> Tensor:
    """Return bool [B]: the adversarial example is misclassified, in [0, 1], and within `epsilon` of its image in x."""
    allowed = (adversarial - x).abs().flatten(1).amax(1) <= epsilon + OUTSIDE
    allowed &= (adversarial.flatten(1) >= 0).all(1) & (adversarial.flatten(1) <= 1).all(1)
    return allowed & (_logits(model, adversarial).argmax(1) != y)


@torch.no_grad()
def _logits(model: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = model(x)
    return logits


def _torchattacks() -> ModuleType:
    try:
        return importlib.import_module("torchattacks")
    except ImportError as error:
        raise SettingsError(f"AutoAttack needs torchattacks ({error}): pip install 'piecework[attacks]'") from error
