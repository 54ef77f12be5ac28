"""The evaluation of FedRBN's model: which of the two sets of batch-norm statistics is used for an image.

A detector decides from an image's clean logits whether it was attacked. It is fitted on public examples and on attacks on them.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piecework.models.dual_norm import use
from piecework.strategies.whole.fedrbn.client import BRANCHES
from piecework.training.attacks import by_backward, pgd
from piecework.training.examples import Examples
from piecework.training.loop import PieceModel, classification_loss
from piecework.training.randomness import integer
from piecework.training.scoring import predictions
from piecework.training.settings import Settings, SettingsError
from piecework.training.setup import dataset_of, image_attack

LEARNT_FROM = 500  # maximum number of public examples, each used clean and attacked

Verdict = Callable[[np.ndarray], np.ndarray]  # logits [B, classes] -> whether attacked, bool [B]


class DetectingPiece(PieceModel):
    """A piece whose detector chooses the statistics for each image; without a detector, all use the adversarial ones."""

    detector: Verdict | None = None

    def logits_by(self, z: Tensor, *, adversarial: bool) -> Tensor:
        """Return logits[B, classes] with the chosen set of statistics."""
        use(self.units().values(), adversarial=adversarial)
        return super().logits(z)

    def logits(self, z: Tensor) -> Tensor:
        """Return logits[B, classes] of z[B, ...]; gradients pass through the set that the detector chose for each image."""
        robust = self.logits_by(z, adversarial=True)
        if self.detector is None:
            return robust
        clean = self.logits_by(z, adversarial=False)
        attacked = torch.from_numpy(self.detector(clean.detach().numpy()))
        return torch.where(attacked.unsqueeze(1), robust, clean)


def branch_of(name: str) -> type[PieceModel]:
    """Return the piece class that `fedrbn.evaluation-branch = name` evaluates with.

    Raises SettingsError if the detector needs scikit-learn and it is not installed.
    """
    if name == "detector":
        _sklearn("svm")  # fails before training starts if it is not installed
        return DetectingPiece
    return BRANCHES[name]


def fit_detector(piece: PieceModel, public: Examples, settings: Settings) -> None:
    """Fit the detector of a DetectingPiece on public examples. Raises SettingsError if scikit-learn is not installed."""
    assert isinstance(piece, DetectingPiece)
    piece.detector = None
    rows = np.linspace(0, len(public) - 1, min(LEARNT_FROM, len(public))).astype(int)
    attack = image_attack(settings, dataset_of(settings), settings.attack.steps)
    start = torch.Generator().manual_seed(integer(settings.seed, "detector"))
    gradient = by_backward(lambda z, y: classification_loss(piece.logits(z), y))
    met = []
    for positions in np.array_split(rows, max(1, len(rows) // settings.evaluation.batch_size)):
        z = public.read(positions)
        with torch.no_grad():
            y = predictions(
                piece.logits_by(z, adversarial=False)
            )  # predictions, because labels of public data may not be those of the run
        attacked = pgd(gradient, z, y, attack, start)
        with torch.no_grad():
            met.append([piece.logits_by(x, adversarial=False).numpy() for x in (z, attacked)])
    clean, attacked_logits = (np.concatenate(part) for part in zip(*met, strict=True))
    pipeline, preprocessing, svm = (_sklearn(module) for module in ("pipeline", "preprocessing", "svm"))
    machine = pipeline.make_pipeline(preprocessing.StandardScaler(), svm.SVC(kernel="rbf"))
    machine.fit(np.concatenate([clean, attacked_logits]), np.repeat([False, True], [len(clean), len(attacked_logits)]))
    piece.detector = machine.predict


def _sklearn(module: str) -> Any:
    try:
        return import_module(f"sklearn.{module}")
    except ImportError as error:
        raise SettingsError(
            f"fedrbn.evaluation-branch = 'detector' needs scikit-learn ({error}): pip install 'piecework[data]', or use oracle"
        ) from error
