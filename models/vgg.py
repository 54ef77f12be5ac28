"""VGG-11, -13 and -16: Simonyan and Zisserman, ICLR 2015, convolutions as in torchvision's vgg*_bn.

An atom is a convolution with its BN, its ReLU and the max-pooling that follows, as FedProphet cuts it. Its authors count the
average pooling and the classifier to the last convolution's atom; here they are the head. VGG-16 has 15,253,578 parameters for
3 channels and 10 classes with the classifier `fedprophet`.

A max-pooling that would leave less than one pixel is omitted: from 28x28 the maps are 14, 7, 3, 1 and again 1. `classifier`
selects the classifier of a paper:

  fedprophet  512-512-512-classes, dropout 0.5
  profl       512-4096-4096-classes, dropout 0.4
  prism       512-classes

`norm` = `none` omits the batch norms (torchvision's vgg*, and PriSM's VGG-11). `pooling` = `profl` pools after every 2
convolutions of VGG-11 and every 4 of VGG-16, as ProFL (KDD 2025) describes; its VGG-16 ends with a 4x4 map for 32x32 images, to
which the average pooling before the classifier applies.
"""

from functools import partial
from itertools import accumulate, pairwise

from torch import nn

from piecework.models.cascade import Atom, Blueprint, Shape, norm_layer
from piecework.models.layers import map_size, require_one_of, require_size, scale_channels, stack_layers

CHANNELS = (64, 128, 256, 512, 512)
CONVS = {"vgg11": (1, 1, 2, 2, 2), "vgg13": (2, 2, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3)}  # by number of channels
PROFL_POOLS = {"vgg11": (2, 4, 6, 8), "vgg16": (4, 8, 13)}  # the convolutions before a pooling
CLASSIFIERS = {"fedprophet": ((512, 512), 0.5), "profl": ((4096, 4096), 0.4), "prism": ((), 0.0)}


def _vgg(
    name: str,
    num_classes: int,
    input_shape: Shape,
    width: float = 1.0,
    batch_norm: str = "running",
    *,
    classifier: str = "fedprophet",
    norm: str = "bn",
    pooling: str = "torchvision",
) -> Blueprint:
    """Build the atoms `conv1` .. `conv8` (VGG-11), `conv10` (VGG-13) or `conv13` (VGG-16)."""
    require_size(name, input_shape, 16)
    require_one_of("classifier", classifier, tuple(CLASSIFIERS))
    require_one_of("norm", norm, ("bn", "none"))
    pools = _pools(name, pooling)
    channels, size = input_shape[0], (input_shape[1], input_shape[2])
    atoms: list[Atom] = []
    for stage, convs in enumerate(CONVS[name]):
        outputs = scale_channels(CHANNELS[stage], width)
        for _ in range(convs):
            number = len(atoms) + 1
            pool = number in pools and min(size) >= 2
            size = map_size(size, 2, 2) if pool else size
            build = partial(_conv, channels, outputs, pool, batch_norm if norm == "bn" else "none")
            atoms.append(Atom(f"conv{number}", build, (outputs, *size)))
            channels = outputs
    hidden, dropout = CLASSIFIERS[classifier]
    head = partial(_head, (channels, *(scale_channels(h, width) for h in hidden)), num_classes, dropout)
    return Blueprint(name, input_shape, num_classes, tuple(atoms), head, batch_norm)


vgg11 = partial(_vgg, "vgg11")
vgg13 = partial(_vgg, "vgg13")
vgg16 = partial(_vgg, "vgg16")


def _pools(name: str, pooling: str) -> tuple[int, ...]:
    """Return the numbers of the convolutions before a max-pooling."""
    require_one_of("pooling", pooling, ("torchvision", "profl"))
    if pooling == "torchvision":
        return tuple(accumulate(CONVS[name]))
    if name not in PROFL_POOLS:
        raise ValueError(f"pooling = 'profl' is not defined for {name}: ProFL has {' and '.join(PROFL_POOLS)}")
    return PROFL_POOLS[name]


def _conv(inputs: int, outputs: int, pool: bool, norm: str) -> nn.Module:
    layers: dict[str, nn.Module] = {"conv": nn.Conv2d(inputs, outputs, 3, padding=1)}
    if norm != "none":
        layers["bn"] = norm_layer(outputs, norm)
    layers["relu"] = nn.ReLU(inplace=True)
    if pool:
        layers["pool"] = nn.MaxPool2d(2)
    return stack_layers(**layers)


def _head(features: tuple[int, ...], num_classes: int, dropout: float) -> nn.Module:
    layers: dict[str, nn.Module] = {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    for number, (inputs, outputs) in enumerate(pairwise(features), start=1):
        layers[f"fc{number}"] = nn.Linear(inputs, outputs)
        layers[f"relu{number}"] = nn.ReLU(inplace=True)
        layers[f"dropout{number}"] = nn.Dropout(dropout)
    layers[f"fc{len(features)}"] = nn.Linear(features[-1], num_classes)
    return stack_layers(**layers)
