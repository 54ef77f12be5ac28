"""Small convolutional networks of the papers: each is a table of convolutions, followed by linear layers.

  cnn3         FedProphet's small model for 32x32 images (its authors' code)
  cnn4         the same for 224x224 images
  conv4        SpaFL's network for CIFAR-10 (NeurIPS 2024): 804,800 weights and 1,280 of batch norm for 3x32x32, 10 classes
  cnn-femnist  PriSM's for FEMNIST (its authors' code): 246,590 parameters for 1x28x28 and 62 classes

FedProphet states neither the padding of its convolutions (here half the kernel) nor whether they have biases (here they do). An
atom is a convolution with its BN, ReLU and pooling. Hidden linear layers belong to the head.
"""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from piecework.models.cascade import Atom, Blueprint, Shape, norm_layer
from piecework.models.layers import map_size, norm_layer_1d, require_size, scale_channels, stack_layers


class Conv(NamedTuple):
    """A row of a table: a square convolution, then max-pooling of `pool` x `pool`, or adaptive pooling to `grid` x `grid`."""

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    pool: int = 1
    grid: int = 0


class Table(NamedTuple):
    """A network: whether convolutions and hidden layers have a bias and batch norms, and its `minimum` input edge in pixels."""

    convs: tuple[Conv, ...]
    hidden: tuple[int, ...]
    bias: bool
    conv_norm: bool
    hidden_norm: bool
    minimum: int


TABLES = {
    "cnn3": Table((Conv(64, 3, 1, 1), Conv(128, 3, 2, 1, grid=2)), (), True, True, False, minimum=3),
    "cnn4": Table((Conv(64, 7, 2, 3, pool=2), Conv(128, 7, 2, 3, grid=7)), (512,), True, True, False, minimum=51),
    "conv4": Table(
        (Conv(64, 5), Conv(64, 5, pool=2), Conv(128, 5), Conv(128, 5, pool=2)),
        (128, 128),
        False,
        True,
        True,
        minimum=28,
    ),
    "cnn-femnist": Table((Conv(32, 5, 1, 2, pool=2), Conv(64, 5, 1, 2, pool=2)), (), True, False, False, minimum=4),
}


def _cnn(name: str, num_classes: int, input_shape: Shape, width: float = 1.0, batch_norm: str = "running") -> Blueprint:
    """Build the atoms `conv1`, `conv2` and so on, one per row of the table."""
    table = TABLES[name]
    require_size(name, input_shape, table.minimum)
    channels, size = input_shape[0], (input_shape[1], input_shape[2])
    atoms: list[Atom] = []
    for number, row in enumerate(table.convs, start=1):
        conv = row._replace(channels=scale_channels(row.channels, width))
        size = map_size(map_size(size, conv.kernel, conv.stride, conv.padding), conv.pool, conv.pool)
        size = (conv.grid, conv.grid) if conv.grid else size
        build = partial(_conv, channels, conv, table.bias, batch_norm if table.conv_norm else "none")
        atoms.append(Atom(f"conv{number}", build, (conv.channels, *size)))
        channels = conv.channels
    features = (channels * size[0] * size[1], *(scale_channels(hidden, width) for hidden in table.hidden))
    # SpaFL's last layer has no bias either.
    head = partial(_head, features, num_classes, table.bias, batch_norm if table.hidden_norm else "none")
    return Blueprint(name, input_shape, num_classes, tuple(atoms), head, batch_norm)


cnn3 = partial(_cnn, "cnn3")
cnn4 = partial(_cnn, "cnn4")
conv4 = partial(_cnn, "conv4")
cnn_femnist = partial(_cnn, "cnn-femnist")


def _conv(inputs: int, conv: Conv, bias: bool, norm: str) -> nn.Module:
    layers: dict[str, nn.Module] = {
        "conv": nn.Conv2d(inputs, conv.channels, conv.kernel, conv.stride, conv.padding, bias=bias)
    }
    if norm != "none":
        layers["bn"] = norm_layer(conv.channels, norm)
    layers["relu"] = nn.ReLU(inplace=True)
    if conv.pool > 1:
        layers["pool"] = nn.MaxPool2d(conv.pool)
    if conv.grid:
        layers["pool"] = nn.AdaptiveMaxPool2d(conv.grid)
    return stack_layers(**layers)


def _head(features: tuple[int, ...], num_classes: int, bias: bool, norm: str) -> nn.Module:
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for number, (inputs, outputs) in enumerate(pairwise(features), start=1):
        layers[f"fc{number}"] = nn.Linear(inputs, outputs, bias=bias)
        if norm != "none":
            layers[f"bn{number}"] = norm_layer_1d(outputs, norm)
        layers[f"relu{number}"] = nn.ReLU(inplace=True)
    layers[f"fc{len(features)}"] = nn.Linear(features[-1], num_classes, bias=bias)
    return stack_layers(**layers)
