"""PreResNet-20: He et al., "Identity Mappings in Deep Residual Networks", ECCV 2016, as in FeDepth's code.

It consists of a stem (3x3, 16), 3 blocks of 16 channels, 3 of 32, 3 of 64, BN, ReLU, pooling and a linear layer; 272,314
parameters for 3 channels and 10 classes. The stem has a batch norm and no ReLU ("first_norm" there), because the first block
begins with BN and ReLU.
"""

from functools import partial

from torch import Tensor, nn

from piecework.models.cascade import Atom, Blueprint, Shape, norm_layer
from piecework.models.layers import map_size, require_one_of, require_size, scale_channels, stack_layers

CHANNELS = (16, 32, 64)
BLOCKS = 3


class PreActivationBlock(nn.Module):
    """BN-ReLU-conv-BN-ReLU-conv plus a shortcut: the identity, or a 1x1 convolution where the shape changes.

    `shortcut_from` = `x` takes the shortcut from the input, as in the paper's equation. `relu` takes it from relu(bn1(x)), also
    in identity blocks, as FeDepth's authors do (by a hasattr test that is always true). `mixed` takes identities from the input
    and 1x1 convolutions from relu(bn1(x)), as SpaFL's authors do.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, batch_norm: str, shortcut_from: str) -> None:
        super().__init__()
        self.bn1 = norm_layer(inputs, batch_norm)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = norm_layer(outputs, batch_norm)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and inputs == outputs
        self.shortcut_is_activated = shortcut_from == "relu" or (shortcut_from == "mixed" and not same)
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return out[B, outputs, H/stride, W/stride] for x[B, inputs, H, W]."""
        z = self.relu(self.bn1(x))
        shortcut = self.shortcut(z if self.shortcut_is_activated else x)
        out: Tensor = self.conv2(self.relu(self.bn2(self.conv1(z))))
        out += shortcut
        return out


def preresnet20(
    num_classes: int,
    input_shape: Shape,
    width: float = 1.0,
    batch_norm: str = "running",
    shortcut_from: str = "x",
) -> Blueprint:
    """Build the atoms `stem`, `block1` .. `block9`. A map of 32x32 becomes 16x16 at block4 and 8x8 at block7."""
    require_size("preresnet20", input_shape, 8)
    require_one_of("shortcut-from", shortcut_from, ("x", "relu"))
    channels, size = scale_channels(CHANNELS[0], width), input_shape[1:]
    atoms = [Atom("stem", partial(_stem, input_shape[0], channels, batch_norm), (channels, *size))]
    for number in range(BLOCKS * len(CHANNELS)):
        stage, place = divmod(number, BLOCKS)
        stride = 2 if stage and not place else 1
        outputs, size = scale_channels(CHANNELS[stage], width), map_size(size, 3, stride, 1)
        build = partial(PreActivationBlock, channels, outputs, stride, batch_norm, shortcut_from)
        atoms.append(Atom(f"block{number + 1}", build, (outputs, *size)))
        channels = outputs
    head = partial(_head, channels, num_classes, batch_norm)
    return Blueprint("preresnet20", input_shape, num_classes, tuple(atoms), head, batch_norm)


def _stem(inputs: int, outputs: int, batch_norm: str) -> nn.Module:
    return stack_layers(conv=nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), bn=norm_layer(outputs, batch_norm))


def _head(channels: int, num_classes: int, batch_norm: str) -> nn.Module:
    return stack_layers(
        bn=norm_layer(channels, batch_norm),
        relu=nn.ReLU(inplace=True),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(channels, num_classes),
    )
