"""A multi-layer perceptron, for feature vectors and small images."""

from functools import partial
from itertools import pairwise
from math import prod

from torch import nn

from piecework.models.cascade import Atom, Blueprint, Shape
from piecework.models.layers import scale_channels, stack_layers


def mlp(
    num_classes: int,
    input_shape: Shape,
    width: float = 1.0,
    batch_norm: str = "running",
    hidden: int = 128,
    layers: int = 3,
) -> Blueprint:
    """Build `layers` atoms fc1, fc2, ... of `hidden` x `width` neurons each, without norm layers."""
    if hidden < 1 or layers < 1:
        raise ValueError(f"mlp needs at least one neuron and one layer, got hidden = {hidden} and layers = {layers}")
    sizes = [prod(input_shape), *[scale_channels(hidden, width)] * layers]
    atoms = [
        Atom(f"fc{number}", partial(_layer, inputs, outputs), (outputs,))
        for number, (inputs, outputs) in enumerate(pairwise(sizes), start=1)
    ]
    return Blueprint(
        "mlp", input_shape, num_classes, tuple(atoms), partial(nn.Linear, sizes[-1], num_classes), batch_norm
    )


def _layer(inputs: int, outputs: int) -> nn.Module:
    return stack_layers(flatten=nn.Flatten(), fc=nn.Linear(inputs, outputs), relu=nn.ReLU(inplace=True))
