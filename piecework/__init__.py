"""Federated training of one model across devices none of which can hold it."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piecework.models.trained_model import TrainedModel

__version__ = "0.1.0"

# The packages are imported as piecework.NAME, so that a user's own `models.py` hides none of ours. A wheel has them in this
# folder, and a checkout links to them. The bundle that Flower makes of a checkout has no links, and neither has a checkout on a
# system without them: there the packages are found beside this folder.
if not (Path(__file__).parent / "models").is_dir():
    __path__.append(str(Path(__file__).resolve().parent.parent))


def load(path: str | Path, *, normalise: bool = True) -> "TrainedModel":
    """Load the trained model of a finished run, in evaluation mode, from the run's folder or a copy of its model.safetensors.

    The model takes images [B, C, H, W], uint8 or floats in [0, 1], and scales them itself; with `normalise=False` they must be
    standardised already. `model(images)` returns logits, `model.predict(images)` classes and probabilities. If the run ended in
    the middle of a cascade, the model has the trained atoms and the head after them. A model with exits predicts by the mean of
    their logits. A model with separate statistics for attacked images (FedRBN) has those of its setting `evaluation-branch`, or
    the clean ones if that setting chooses per image.

    Neither the data set nor Flower is needed. Raises ModelFileError (in piecework.models.trained_model) if the file does not
    exist or cannot be read.
    """
    from piecework.models.trained_model import load_model

    return load_model(Path(path), normalise=normalise)
