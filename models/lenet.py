"""LeNet-5: LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998.

With ReLU and max-pooling, as used today; 61,706 parameters for 1x28x28 and 10 classes. It has no norm layers:
`batch_norm` only reaches the own heads of its pieces.
"""

from functools import partial

from torch import nn

from models.cascade import Atom, Blueprint, Shape
from models.layers import map_size, named, require_size, scaled


def lenet5(num_classes: int, input_shape: Shape, width: float = 1.0, batch_norm: str = "running") -> Blueprint:
    """Atoms `conv1`, `conv2`. Images below 32 pixels are padded by 2, so that 28x28 and 32x32 both end in 5x5."""
    require_size("lenet5", input_shape, 12)
    padding = 2 if min(input_shape[1:]) < 32 else 0
    first, second, hidden1, hidden2 = (scaled(c, width) for c in (6, 16, 120, 84))
    size1 = map_size(map_size(input_shape[1:], 5, 1, padding), 2, 2)
    size2 = map_size(map_size(size1, 5), 2, 2)
    atoms = (
        Atom("conv1", partial(_conv, input_shape[0], first, padding), (first, *size1)),
        Atom("conv2", partial(_conv, first, second, 0), (second, *size2)),
    )
    head = partial(_head, second * size2[0] * size2[1], hidden1, hidden2, num_classes)
    return Blueprint("lenet5", input_shape, num_classes, atoms, head, batch_norm)


def _conv(inputs: int, outputs: int, padding: int) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, 5, padding=padding)
    return named(conv=conv, relu=nn.ReLU(inplace=True), pool=nn.MaxPool2d(2))


def _head(features: int, hidden1: int, hidden2: int, num_classes: int) -> nn.Module:
    return named(
        flatten=nn.Flatten(),
        fc1=nn.Linear(features, hidden1),
        relu1=nn.ReLU(inplace=True),
        fc2=nn.Linear(hidden1, hidden2),
        relu2=nn.ReLU(inplace=True),
        fc3=nn.Linear(hidden2, num_classes),
    )
