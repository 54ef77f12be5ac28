"""A model of frozen random weights for which masks are learned (FedPM).

Every weight and bias is +c or -c, c = e / sqrt(fan_in); its sign is drawn from a seed and never changes. A learned score s
keeps it with probability theta = sigmoid(s). The arrays of such a model are its scores, under the usual names of the weights.
In training every forward pass draws new masks; in evaluation they are fixed by the seed. Norms have neither scale nor shift.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Atom, Blueprint, isolate_rng
from piecework.models.change import Change, Origin


class DrawnMask(torch.autograd.Function):
    """A mask drawn with probabilities sigmoid(s), whose gradient passes the draw as if it were the identity.

    With `by_authors` the gradient is multiplied by theta.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, generator: torch.Generator | None, by_authors: bool) -> Tensor:
        """Return zeros and ones in the shape of the scores."""
        theta = scores.sigmoid()
        ctx.save_for_backward(theta)
        ctx.by_authors = by_authors
        return torch.bernoulli(theta, generator=generator)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the scores."""
        (gradient,), (theta,) = grads, ctx.saved_tensors
        slope = theta * (1 - theta)
        return gradient * (slope * theta if ctx.by_authors else slope), None, None


class Scored(nn.Module):
    """A layer whose parameters are scores; `seed` draws its masks in evaluation."""

    seed: int
    by_authors: bool

    def begin(self, seed: int, by_authors: bool) -> None:
        """Freeze random weights drawn from the seed, and draw initial scores from N(0, 1)."""
        scale = math.e / math.sqrt(self.get_parameter("weight")[0].numel())
        with isolate_rng(seed):
            for name, parameter in list(self.named_parameters(recurse=False)):
                signs = torch.empty_like(parameter, requires_grad=False).bernoulli_(0.5).mul_(2).sub_(1)
                self.register_buffer(f"frozen_{name}", signs.mul_(scale), persistent=False)
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter)
        self.seed, self.by_authors = seed, by_authors

    def draw(self) -> dict[str, Tensor]:
        """Return the masked weights and bias."""
        generator = None
        if not self.training:
            generator = torch.Generator(self.get_parameter("weight").device).manual_seed(self.seed)
        return {
            name: self.get_buffer(f"frozen_{name}") * DrawnMask.apply(scores, generator, self.by_authors)
            for name, scores in self.named_parameters(recurse=False)
        }


class ScoredConv2d(nn.Conv2d, Scored):
    """A convolution with masked weights."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the output for z[B, C, H, W]."""
        drawn = self.draw()
        out: Tensor = self._conv_forward(z, drawn["weight"], drawn.get("bias"))
        return out


class ScoredLinear(nn.Linear, Scored):
    """A linear layer with masked weights."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the output for z[..., F]."""
        drawn = self.draw()
        return nn.functional.linear(z, drawn["weight"], drawn.get("bias"))


@dataclass(frozen=True)
class Supermask(Change):
    """Frozen random weights that are masked by trained scores (FedPM)."""

    scores: Literal["paper", "authors"]  # have this gradient
    seed: int = 0  # from which the weights are drawn

    def apply(self, model: Blueprint, origin: Origin) -> Blueprint:
        """Return the model with scores."""
        return supermask(model, self.seed, by_authors=self.scores == "authors")


def supermask(blueprint: Blueprint, seed: int, *, by_authors: bool = False) -> Blueprint:
    """Return the model with scores. Raises ValueError for layers other than convolutions, linear layers and batch norms."""
    atoms = tuple(
        Atom(atom.name, partial(build_scored, atom.build, seed, number, by_authors), atom.shape, atom.before)
        for number, atom in enumerate(blueprint.atoms)
    )
    head = partial(build_scored, blueprint.build_head, seed, len(atoms), by_authors)
    model = replace(blueprint, atoms=atoms, build_head=head, width=1.0, initialisation="default")  # of scores
    for unit in model.units():
        with without_data():
            layers = [layer for layer in model.build_unit(unit).modules() if not isinstance(layer, Scored)]
        if strange := [type(layer).__name__ for layer in layers if [*layer.parameters(recurse=False)]]:
            raise ValueError(f"{blueprint.name} has a {strange[0]}: masks are for convolutions and linear layers")
    return model


def build_scored(build: Callable[[], nn.Module], seed: int, number: int, by_authors: bool) -> nn.Module:
    """Build a module with scores. Its frozen weights are a function of the seed and the unit's number."""
    module = build()
    for place, layer in enumerate(list(module.modules())):
        if type(layer) is nn.Conv2d:
            layer.__class__ = ScoredConv2d
        elif type(layer) is nn.Linear:
            layer.__class__ = ScoredLinear
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.register_parameter("weight", None)
            layer.register_parameter("bias", None)
        if isinstance(layer, Scored):
            layer.begin(int(np.random.SeedSequence([seed, number, place]).generate_state(1)[0]), by_authors)
    return module


@torch.no_grad()
def fix_masks(module: nn.Module) -> None:
    """Put the weights that evaluation draws in the place of the scores, in layers of torch's own classes."""
    module.eval()
    for layer in list(module.modules()):
        if isinstance(layer, Scored):
            for name, value in layer.draw().items():
                layer.get_parameter(name).copy_(value)
                delattr(layer, f"frozen_{name}")
            own: type[nn.Module] = nn.Conv2d if isinstance(layer, ScoredConv2d) else nn.Linear
            layer.__class__ = own  # type: ignore[assignment]
