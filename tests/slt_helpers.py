"""The network of a step of SLT, and one with given arrays."""

import numpy as np
import torch

from piecework.models.cascade import Blueprint, Cascade
from piecework.models.variant import Variant, vary
from piecework.models.wide_prefix import WidePrefix


def network(full: Blueprint, atoms: int, ratio: float) -> Blueprint:
    return vary(full, Variant(width=ratio, changes=(WidePrefix(atoms),)))


def filled(blueprint: Blueprint, arrays: dict[str, np.ndarray]) -> Cascade:
    model = Cascade(blueprint)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return model.eval()
