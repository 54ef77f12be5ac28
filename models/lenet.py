"""LeNet-5: LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998, in two layouts.

  caffe  5x5 convolutions of 20 and 50 channels, linear 500, no padding, no biases: SpaFL's for Fashion-MNIST (NeurIPS
         2024), 430,500 weights for 1x28x28 and 10 classes
  lecun  5x5 convolutions of 6 and 16 channels, linear 120 and 84: the original's sizes, 61,706 parameters

Both use ReLU and max-pooling, as is usual today. They have no norm layers: `batch_norm` only affects the exit heads of pieces.
"""

from functools import partial
from itertools import pairwise

from torch import nn

from piecework.models.cascade import Atom, Blueprint, Shape
from piecework.models.layers import map_size, require_one_of, require_size, scale_channels, stack_layers

CHANNELS = {"caffe": (20, 50), "lecun": (6, 16)}
HIDDEN = {"caffe": (500,), "lecun": (120, 84)}
MIN_EDGE = {"caffe": 16, "lecun": 12}  # pixels


def lenet5(
    num_classes: int, input_shape: Shape, width: float = 1.0, batch_norm: str = "running", layout: str = "caffe"
) -> Blueprint:
    """Build the atoms `conv1`, `conv2`. `lecun` pads images below 32 pixels by 2, so that 28x28 and 32x32 both end in 5x5."""
    require_one_of("layout", layout, tuple(CHANNELS))
    require_size(f"lenet5 in the {layout} layout", input_shape, MIN_EDGE[layout])
    bias = layout == "lecun"
    padding = 2 if layout == "lecun" and min(input_shape[1:]) < 32 else 0
    first, second = (scale_channels(channels, width) for channels in CHANNELS[layout])
    size1 = map_size(map_size(input_shape[1:], 5, 1, padding), 2, 2)
    size2 = map_size(map_size(size1, 5), 2, 2)
    atoms = (
        Atom("conv1", partial(_conv, input_shape[0], first, padding, bias), (first, *size1)),
        Atom("conv2", partial(_conv, first, second, 0, bias), (second, *size2)),
    )
    features = (second * size2[0] * size2[1], *(scale_channels(hidden, width) for hidden in HIDDEN[layout]))
    head = partial(_head, features, num_classes, bias)
    return Blueprint("lenet5", input_shape, num_classes, atoms, head, batch_norm)


def _conv(inputs: int, outputs: int, padding: int, bias: bool) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, 5, padding=padding, bias=bias)
    return stack_layers(conv=conv, relu=nn.ReLU(inplace=True), pool=nn.MaxPool2d(2))


def _head(features: tuple[int, ...], num_classes: int, bias: bool) -> nn.Module:
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for number, (inputs, outputs) in enumerate(pairwise(features), start=1):
        layers[f"fc{number}"] = nn.Linear(inputs, outputs, bias=bias)
        layers[f"relu{number}"] = nn.ReLU(inplace=True)
    layers[f"fc{len(features)}"] = nn.Linear(features[-1], num_classes, bias=bias)
    return stack_layers(**layers)
