"""DepthFL's classifiers behind the blocks of a model ("DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR
2023, with the classifiers of its authors' code).

Behind a map: attention (a separable convolution of stride 2, batch norm, ReLU, enlarged again, sigmoid; multiplied with the
map), then separable convolutions of stride 2, each to twice the channels, up to those of the last block; global average
pooling, linear. Behind other features, which the paper does not have: their mean over tokens, linear.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from piecework.models.cascade import Atom, Blueprint, Cascade, Shape, norm_layer, num_features, num_logits, pooled
from piecework.models.partition import Piece

EXIT = "exit"  # what exits are called, with the number of the atom that they stand behind, from 0


def separable(channels: int, out: int, batch_norm: str) -> nn.Sequential:
    """Two depthwise-separable convolutions, the first of stride 2, the second to `out` channels, each with norm and ReLU."""
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
    """The classifier behind a map of `channels`, which the model brings to `last` channels in the end."""

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
        """Logits[B, classes] of z[B, C, H, W]."""
        attention = F.interpolate(self.attention(z), size=z.shape[2:], mode="bilinear", align_corners=False).sigmoid_()
        found: Tensor = self.fc(pooled(self.steps(z * attention)))
        return found


class FeatureExit(nn.Module):
    """The classifier behind features without a map."""

    def __init__(self, shape: Shape, logits: int) -> None:
        super().__init__()
        self.fc = nn.Linear(num_features(shape), logits)

    def forward(self, z: Tensor) -> Tensor:
        """Logits[B, classes] of z[B, tokens, F] or z[B, F]."""
        found: Tensor = self.fc(pooled(z))
        return found


def with_exits(blueprint: Blueprint, blocks: Sequence[Piece]) -> Blueprint:
    """The model, and behind its atoms, as spare ones, an exit for every block but the last, whose exit is the head."""
    exits, logits = [], num_logits(blueprint)
    for block in blocks[:-1]:
        shape = blueprint.atoms[block[-1]].shape
        if len(shape) == 3:
            last = num_features(blueprint.feature_shape)
            build: Callable[[], nn.Module] = partial(MapExit, shape[0], last, logits, blueprint.batch_norm)
        else:
            build = partial(FeatureExit, shape, logits)
        exits.append(Atom(f"{EXIT}{block[-1]}", build, (logits,), shape))
    return replace(blueprint, atoms=(*blueprint.atoms, *exits), spare=len(exits))


def exits_of(blueprint: Blueprint) -> dict[int, int]:
    """The exits of a model, by the atom they stand behind."""
    spare = range(len(blueprint.atoms) - blueprint.spare, len(blueprint.atoms))
    return {int(blueprint.atoms[atom].name.removeprefix(EXIT)): atom for atom in spare}


class ExitCascade(Cascade):
    """A whole model with exits, which predicts by the mean of their logits."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        self._exits = exits_of(blueprint)

    def forward(self, x: Tensor) -> Tensor:
        """Logits[B, classes] of x[B, *input_shape]."""
        found = []
        for number, atom in enumerate(self.atoms[: len(self.atoms) - len(self._exits)]):
            x = atom(x)
            if (place := self._exits.get(number)) is not None:
                found.append(self.atoms[place](x))
        return mean_logits([*found, self.head(x)])


def mean_logits(logits: Sequence[Tensor]) -> Tensor:
    """Of several exits, [B, classes] each."""
    total = logits[0]
    for each in logits[1:]:
        total = total + each
    return total / len(logits)
