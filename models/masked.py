"""SpaFL's model: every filter has a threshold, below which it is masked (section 3).

tau_i: the threshold of filter (convolution) or neuron (linear) i; it is masked where mean|w_i| <= tau_i over its fan-in.
The gradient passes the step function as if it were the identity (Eq. 9). Linear layers with a bias stay as they are: the
authors mask all layers of LeNet-5 and Conv4, none of which has a bias, and not the classifier of ResNet-18, which has one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from models.cascade import Atom, Blueprint


def masked(blueprint: Blueprint) -> Blueprint:
    """The same model with thresholds, which start at 0; they are called `...parametrizations.weight.0.tau`."""
    atoms = tuple(Atom(atom.name, partial(_masked, atom.build), atom.shape) for atom in blueprint.atoms)
    return replace(blueprint, atoms=atoms, build_head=partial(_masked, blueprint.build_head), width=1.0)


class FilterMask(nn.Module):
    """Masks filters of a weight[N, ...] by thresholds tau[N]."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.zeros(filters))

    def forward(self, weight: Tensor) -> Tensor:
        """weight where mean|w_i| > tau_i, else 0."""
        above = weight.abs().flatten(1).mean(1) - self.tau
        step = (above > 0).to(weight.dtype) + above - above.detach()
        return weight * step.view(-1, *(1,) * (weight.dim() - 1))


def _masked(build: Callable[[], nn.Module]) -> nn.Module:
    module = build()
    for layer in list(module.modules()):
        if isinstance(layer, nn.Conv2d) or (isinstance(layer, nn.Linear) and layer.bias is None):
            parametrize.register_parametrization(layer, "weight", FilterMask(layer.weight.shape[0]))
    return module


def is_threshold(name: str) -> bool:
    """Whether a parameter of a masked model is a threshold."""
    return name.endswith(".tau")
