"""DepthFL's classifiers after the blocks of a model ("DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR
2023, with the classifiers of its authors' code).

After a feature map, a classifier has attention (a separable convolution of stride 2, batch norm, ReLU, upsampling, sigmoid,
multiplied with the map), then separable convolutions of stride 2, each doubling the channels up to those of the last block,
then global average pooling and a linear layer. After other features, which the paper does not cover, it takes the mean over
tokens and a linear layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.models.cascade import (
    Atom,
    Blueprint,
    Cascade,
    Shape,
    norm_layer,
    num_features,
    num_logits,
    pool_features,
)
from piecework.models.change import Change, Origin
from piecework.models.partition import Piece

EXIT = "exit"  # prefix of an exit's name, followed by the number of its atom, from 0


def separable(channels: int, out: int, batch_norm: str) -> nn.Sequential:
    """Return two depthwise-separable convolutions with norm and ReLU: the first of stride 2, the second to `out` channels."""
    layers: list[nn.Module] = []
    for stride, made in ((2, channels), (1, out)):
        layers += [
            nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False),
            nn.Conv2d(channels, made, 1, bias=False),
            norm_layer(made, batch_norm),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class MapExit(nn.Module):
    """The classifier after a map of `channels`, in a model whose last block has `last` channels."""

    def __init__(self, channels: int, last: int, logits: int, batch_norm: str) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            separable(channels, channels, batch_norm), norm_layer(channels, batch_norm), nn.ReLU(inplace=True)
        )
        steps = []
        while channels < last:
            steps.append(separable(channels, min(2 * channels, last), batch_norm))
            channels = min(2 * channels, last)
        self.steps = nn.Sequential(*steps)
        self.fc = nn.Linear(channels, logits)

    def forward(self, z: Tensor) -> Tensor:
        """Return logits[B, classes] for z[B, C, H, W]."""
        attention = F.interpolate(self.attention(z), size=z.shape[2:], mode="bilinear", align_corners=False).sigmoid_()
        found: Tensor = self.fc(pool_features(self.steps(z * attention)))
        return found


class FeatureExit(nn.Module):
    """The classifier after features that are not maps."""

    def __init__(self, shape: Shape, logits: int) -> None:
        super().__init__()
        self.fc = nn.Linear(num_features(shape), logits)

    def forward(self, z: Tensor) -> Tensor:
        """Return logits[B, classes] for z[B, tokens, F] or z[B, F]."""
        found: Tensor = self.fc(pool_features(z))
        return found


@dataclass(frozen=True)
class Exits(Change):
    """A classifier after each block but the last (DepthFL)."""

    exits: Annotated[tuple[Piece, ...], Field(min_length=1)]  # the blocks, as atoms

    def apply(self, model: Blueprint, origin: Origin) -> Blueprint:
        """Return the model with its exits."""
        return with_exits(model, self.exits)


def with_exits(blueprint: Blueprint, blocks: Sequence[Piece]) -> Blueprint:
    """Return the model with an exit as a replacement atom for every block but the last, whose exit is the head."""
    exits, logits = [], num_logits(blueprint)
    for block in blocks[:-1]:
        shape = blueprint.atoms[block[-1]].shape
        if len(shape) == 3:
            last = num_features(blueprint.feature_shape)
            build: Callable[[], nn.Module] = partial(MapExit, shape[0], last, logits, blueprint.batch_norm)
        else:
            build = partial(FeatureExit, shape, logits)
        exits.append(Atom(f"{EXIT}{block[-1]}", build, (logits,), shape))
    return replace(blueprint, atoms=(*blueprint.atoms, *exits), num_replacement_atoms=len(exits))


def exits_of(blueprint: Blueprint) -> dict[int, int]:
    """Return the exits of a model by the atom they follow."""
    added = range(len(blueprint.atoms) - blueprint.num_replacement_atoms, len(blueprint.atoms))
    return {int(blueprint.atoms[atom].name.removeprefix(EXIT)): atom for atom in added}


class ExitCascade(Cascade):
    """A whole model with exits, which predicts by the mean of all logits."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        self._exits = exits_of(blueprint)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits[B, classes] for x[B, *input_shape]."""
        found = []
        for number, atom in enumerate(self.atoms[: len(self.atoms) - len(self._exits)]):
            x = atom(x)
            if (place := self._exits.get(number)) is not None:
                found.append(self.atoms[place](x))
        return mean_logits([*found, self.head(x)])


def mean_logits(logits: Sequence[Tensor]) -> Tensor:
    """Return the mean logits of several exits, [B, classes] each."""
    total = logits[0]
    for each in logits[1:]:
        total = total + each
    return total / len(logits)
