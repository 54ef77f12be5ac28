"""Federated training of one model across devices none of which can hold it."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.trained_model import TrainedModel

__version__ = "0.1.0"


def load(path: str | Path, *, normalise: bool = True) -> "TrainedModel":
    """The trained model of a finished run, in evaluation mode: `path` is the run's folder or a copy of its model.safetensors.

    It takes images [B, C, H, W], uint8 or floats in [0, 1], and scales them itself; with `normalise=False` they must be
    standardised already. `model(images)` gives logits, `model.predict(images)` classes and probabilities. Of a run that ended
    in the middle of a cascade it is the atoms that were trained with the head behind them; with exits, it predicts by the mean
    of theirs; of FedRBN, it has the statistics of its `evaluation-branch`, or the clean ones where that chooses by image.
    Neither the data set nor Flower is needed. Raises models.trained_model.ModelFileError where there is no such file, or it
    cannot be read.
    """
    from models.trained_model import load_model

    return load_model(Path(path), normalise=normalise)
