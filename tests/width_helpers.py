"""A small run of systems that scale the model by width, and a layer of it."""

from typing import Any

import numpy as np
from helpers import TRIO, fleet_json

# A narrow convnet, of which clients train all, a half and a quarter.
SMALL: dict[str, Any] = TRIO | {
    "strategy": "heterofl",
    "model": "convnet",
    "heterofl__width_ratios": "1,0.5,0.25",
    "training__local_iterations": 2,
    "num_rounds": 2,
    "fleet": fleet_json(rich=1.2, some=0.6, poor=0.3),
}


def conv_of(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """A convolution between two others: all its channels are cut."""
    (name,) = [name for name, array in arrays.items() if name.startswith("atoms.1.") and array.ndim == 4]
    return arrays[name]
