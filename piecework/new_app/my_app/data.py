"""The data set."""

from pathlib import Path

import numpy as np
from piecework.federated_data.sources import Source

CLASSES, EDGE = 4, 8


def read(folder: Path, download: bool) -> Source:
    """Return images uint8 (N, H, W, C) and labels int64 (N,). This set is drawn; one on disk would be read from `folder`."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 100, (CLASSES, EDGE, EDGE, 1))
    labels = rng.integers(0, CLASSES, 1000)
    images = (patterns[labels] + rng.integers(0, 156, (1000, EDGE, EDGE, 1))).astype(np.uint8)
    return Source(images[:800], labels[:800], images[800:], labels[800:], CLASSES)
