"""ResNet-18 with pre-activation blocks, as SpaFL's authors build it for CIFAR-100 (NeurIPS 2024).

Width 1 has 64 channels in the stem: 11,159,232 weights in convolutions, the paper's count. Width 0.5 has 32, as the authors'
code and Table 4: 2,790,240. The stem has a ReLU, and no norm follows the last block's sum before the pooling.
"""

from functools import partial

from piecework.models.cascade import Atom, Blueprint, Shape
from piecework.models.layers import map_size, pooled_linear, require_size, scale_channels
from piecework.models.preresnet import PreActivationBlock
from piecework.models.resnet import BLOCKS, CHANNELS, cifar_stem


def resnet18_preact(num_classes: int, input_shape: Shape, width: float = 1.0, batch_norm: str = "running") -> Blueprint:
    """Build the atoms `stem`, `block1` .. `block8`. The feature map halves at blocks 3, 5 and 7."""
    require_size("resnet18-preact", input_shape, 8)
    channels, size = scale_channels(CHANNELS[0], width), (input_shape[1], input_shape[2])
    atoms = [Atom("stem", partial(cifar_stem, input_shape[0], channels, batch_norm), (channels, *size))]
    for stage, blocks in enumerate(BLOCKS["resnet18"]):
        for place in range(blocks):
            stride = 2 if stage and not place else 1
            outputs, size = scale_channels(CHANNELS[stage], width), map_size(size, 3, stride, 1)
            build = partial(PreActivationBlock, channels, outputs, stride, batch_norm, "mixed")
            atoms.append(Atom(f"block{len(atoms)}", build, (outputs, *size)))
            channels = outputs
    head = partial(pooled_linear, channels, num_classes)
    return Blueprint("resnet18-preact", input_shape, num_classes, tuple(atoms), head, batch_norm)
