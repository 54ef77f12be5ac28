"""Central evaluation of the global model, or of its first atoms, on the data set's test split: clean and attacked."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from piecework.device_profiles.profile import usable_cpus
from piecework.federated_data.datasets import ArrayDataset
from piecework.federation.autoattack import AutoAttackResult, OnPixels, run_autoattack
from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece
from piecework.training.attacks import Attack, by_backward, pgd
from piecework.training.examples import as_inputs
from piecework.training.loop import PieceModel, classification_loss, load_for_device
from piecework.training.memory_cap import keep_heap_loose, return_free_memory
from piecework.training.randomness import generator, integer
from piecework.training.scoring import predictions
from piecework.training.settings import Settings
from piecework.training.setup import scale_pixels


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy on the test split. `adversarial_accuracy` is on `attacked` of its images.

    The attacked images include those that are misclassified without an attack.
    """

    loss: float
    accuracy: float
    adversarial_accuracy: float | None = None
    attacked: int = 0


class Evaluator:
    """Evaluates on the test split, holding one model at a time. With `attack`, `attacked` test images are also attacked.

    The attacked images and the starts of attacks depend on `seed` alone, so they are the same in every round. `prepare` is
    called with the model each time weights have been copied into it.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        data: ArrayDataset,
        batch_size: int,
        attack: Attack | None = None,
        attacked: int = 0,
        seed: int = 0,
    ) -> None:
        self.blueprint, self.data, self.batch_size = blueprint, data, batch_size
        self.attack, self.attacked, self.seed = attack, attacked, seed
        self.piece_class = PieceModel
        self.prepare: Callable[[PieceModel], None] = lambda _: None
        self._model: PieceModel | None = None

    def show(self, blueprint: Blueprint) -> None:
        """Evaluate another model from now on."""
        if blueprint is not self.blueprint:
            self.blueprint, self._model = blueprint, None

    def __call__(self, arrays: ArrayRecord, atoms: Piece | None = None, head: str = "head") -> Evaluation:
        """Evaluate the whole model, or `atoms` with a head unit (`head`, `aux.<i>`), in batches of a fixed size and order."""
        found = self.clean(arrays, atoms, head)
        if self.attack is None or not self.attacked:
            return found
        assert self._model is not None
        with at_full_speed():
            withstood, attacked = self._withstood(self._model, self.attack)
        return replace(found, adversarial_accuracy=withstood / attacked, attacked=attacked)

    def clean(self, arrays: ArrayRecord, atoms: Piece | None = None, head: str = "head") -> Evaluation:
        """Evaluate as `__call__`, but without an attack."""
        model = self._fill(arrays, atoms, head)
        loss, correct, seen = 0.0, 0, 0
        with at_full_speed(), torch.no_grad():
            for z, y in self._batches(np.arange(len(self.data.test_labels))):
                logits = model.logits(z)
                loss += float(classification_loss(logits, y, "sum"))
                correct += int((predictions(logits) == y).sum())
                seen += len(y)
        return Evaluation(loss / seen, correct / seen)

    def run_autoattack(
        self, arrays: ArrayRecord, images: int, epsilon: float, atoms: Piece | None = None, head: str = "head"
    ) -> AutoAttackResult:
        """Run AutoAttack on that many test images; `epsilon` is in pixels of [0, 1]. Raises SettingsError, ValueError."""
        model, rows = self._fill(arrays, atoms, head), self._choose_rows(images)
        pixels = as_inputs(self.data.test_inputs[rows], scale_pixels(self.data, "unit")).clamp_(0, 1)
        pixels = pixels.contiguous()  # FAB takes views of images that do not exist of those with channels last
        on_pixels = OnPixels(model.logits, model.units().values(), self.data.mean, self.data.std)
        labels, seed = torch.tensor(self.data.test_labels[rows]), integer(self.seed, "autoattack")
        model.set_attacked(True)
        try:
            with at_full_speed():
                return run_autoattack(on_pixels, pixels, labels, epsilon, seed, self.batch_size)
        finally:
            model.set_attacked(False)

    def _withstood(self, model: PieceModel, attack: Attack) -> tuple[int, int]:
        """Return the numbers of images that are classified correctly under the attack, and of images attacked."""
        start = torch.Generator().manual_seed(integer(self.seed, "evaluation-attack"))
        gradient = by_backward(lambda z, y: classification_loss(model.logits(z), y))
        withstood, seen = 0, 0
        model.set_attacked(True)
        try:
            for z, y in self._batches(self._choose_rows(self.attacked)):
                adversarial = pgd(gradient, z, y, attack, start)
                with torch.no_grad():
                    withstood += int((predictions(model.logits(adversarial)) == y).sum())
                seen += len(y)
        finally:
            model.set_attacked(False)
        return withstood, seen

    def _choose_rows(self, count: int) -> np.ndarray:
        """Draw the rows of `count` test images, or all if there are fewer. A smaller choice is part of a larger one."""
        order = generator(self.seed, "attacked").permutation(len(self.data.test_labels))
        return np.sort(order[:count])

    def _batches(self, rows: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        # A single image at the end joins the batch before it, because batch statistics of one image are meaningless.
        starts = range(self.batch_size, len(rows) - 1, self.batch_size)
        for chosen in np.split(rows, starts) if len(rows) else ():
            yield as_inputs(self.data.test_inputs[chosen], self.data), torch.tensor(self.data.test_labels[chosen])

    def _fill(self, arrays: Mapping[str, Array], atoms: Piece | None, head: str) -> PieceModel:
        """Return the model of these atoms and this head, filled with these weights."""
        atoms = tuple(range(len(self.blueprint.atoms))) if atoms is None else tuple(atoms)
        if self._model is None or (self._model.atoms, self._model.head_unit) != (atoms, head):
            self._model = None  # frees the old model before the new one is built
            self._model = self.piece_class(self.blueprint, atoms, head, load_for_device(self.blueprint, _still))
        for unit, module in self._model.units().items():
            fill_unit(arrays, unit, module)
        self.prepare(self._model)
        return self._model


def final_evaluation(
    evaluate: Evaluator, arrays: ArrayRecord, atoms: Piece, head: str, settings: Settings
) -> dict[str, Any]:
    """Evaluate the trained model clean, under PGD if `evaluate` has an attack, and under AutoAttack if enabled.

    Returns JSON values.
    """
    found = asdict(evaluate(arrays, atoms, head)) | {"attack_steps": settings.evaluation.attack_steps}
    if settings.evaluation.autoattack_examples:
        result = evaluate.run_autoattack(
            arrays, settings.evaluation.autoattack_examples, settings.attack.epsilon, atoms, head
        )
        found["autoattack"] = asdict(result)
    return found


@torch.no_grad()
def fill_unit(arrays: Mapping[str, Array], unit: str, module: nn.Module) -> None:
    """Copy a unit's arrays into its module."""
    for name, target in module.state_dict().items():
        target.copy_(torch.from_numpy(arrays[f"{unit}.{name}"].numpy()))


def _still(unit: str, module: nn.Module) -> None:
    module.eval().requires_grad_(False)


@contextmanager
def at_full_speed(threads: int = 0) -> Iterator[None]:
    """In the body, use `threads` cores (0 = all that this process may use) and keep freed memory for reuse.

    Clients that run in this process may have left one thread and a tight heap. Where the user set OMP_NUM_THREADS, that many
    are all, because threads that share a core with other work wait for each other.
    """
    before = torch.get_num_threads()
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list is for nested regions
    torch.set_num_threads(threads or (int(wanted) if wanted.isdigit() else 0) or max(before, usable_cpus()))
    keep_heap_loose()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        return_free_memory()
