"""Federated training of one model across devices none of which can hold it."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.cascade import Cascade

__version__ = "0.1.0"


def load(run_dir: str | Path) -> "Cascade":
    """The trained model of a finished run, in evaluation mode: of one that ended in the middle of a cascade, the atoms that
    were trained with the head behind them. Raises CheckpointError where there is none.
    """
    from piecework.runs import load_model

    return load_model(Path(run_dir))
