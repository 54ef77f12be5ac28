"""ResNet-18 and -34: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, layer by layer as in torchvision.

ResNet-10, with one block per stage, is FedProphet's small model; its ResNet-34 has 21,416,000 parameters for 256 classes.
`stem` = `imagenet` is the 7x7 convolution of stride 2 with max-pooling. `cifar` is the 3x3 convolution that PriSM and ProFL use
on small images (ResNet-18 then has 11,173,962 parameters for 3 channels and 10 classes). `auto` selects `imagenet` from 64
pixels on.
"""

from functools import partial

from torch import Tensor, nn

from piecework.models.cascade import Atom, Blueprint, Shape, norm_layer
from piecework.models.layers import map_size, pooled_linear, require_one_of, require_size, scale_channels, stack_layers

CHANNELS = (64, 128, 256, 512)
BLOCKS = {"resnet10": (1, 1, 1, 1), "resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}  # blocks per stage


class BasicBlock(nn.Module):
    """conv-BN-ReLU-conv-BN plus a shortcut, then ReLU. The shortcut is a 1x1 convolution and BN where shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int, batch_norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm_layer(outputs, batch_norm)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm_layer(outputs, batch_norm)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, norm_layer(outputs, batch_norm))

    def forward(self, x: Tensor) -> Tensor:
        """Return out[B, outputs, H/stride, W/stride] for x[B, inputs, H, W]."""
        out: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        out = self.relu(out)
        return out


def _resnet(
    name: str,
    num_classes: int,
    input_shape: Shape,
    width: float = 1.0,
    batch_norm: str = "running",
    stem: str = "auto",
) -> Blueprint:
    """Build the atoms `stem`, `block1` and so on. The feature map halves at the first block of every stage but the first."""
    require_one_of("stem", stem, ("auto", "cifar", "imagenet"))
    if stem == "auto":
        stem = "imagenet" if min(input_shape[1:]) >= 64 else "cifar"
    require_size(f"{name} with the {stem} stem", input_shape, 32 if stem == "imagenet" else 8)
    channels, size = scale_channels(CHANNELS[0], width), (input_shape[1], input_shape[2])
    build_stem = cifar_stem
    if stem == "imagenet":
        build_stem, size = _imagenet_stem, map_size(map_size(size, 7, 2, 3), 3, 2, 1)
    atoms = [Atom("stem", partial(build_stem, input_shape[0], channels, batch_norm), (channels, *size))]
    for stage, blocks in enumerate(BLOCKS[name]):
        for place in range(blocks):
            stride = 2 if stage and not place else 1
            outputs, size = scale_channels(CHANNELS[stage], width), map_size(size, 3, stride, 1)
            build = partial(BasicBlock, channels, outputs, stride, batch_norm)
            atoms.append(Atom(f"block{len(atoms)}", build, (outputs, *size)))
            channels = outputs
    head = partial(pooled_linear, channels, num_classes)
    return Blueprint(name, input_shape, num_classes, tuple(atoms), head, batch_norm)


resnet10 = partial(_resnet, "resnet10")
resnet18 = partial(_resnet, "resnet18")
resnet34 = partial(_resnet, "resnet34")


def cifar_stem(inputs: int, outputs: int, batch_norm: str) -> nn.Module:
    """Return conv3x3-BN-ReLU, which keeps the size of the map."""
    return stack_layers(
        conv1=nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        bn1=norm_layer(outputs, batch_norm),
        relu=nn.ReLU(inplace=True),
    )


def _imagenet_stem(inputs: int, outputs: int, batch_norm: str) -> nn.Module:
    return stack_layers(
        conv1=nn.Conv2d(inputs, outputs, 7, 2, padding=3, bias=False),
        bn1=norm_layer(outputs, batch_norm),
        relu=nn.ReLU(inplace=True),
        maxpool=nn.MaxPool2d(3, 2, padding=1),
    )
