"""The memory thresholds of ProFL's authors for ResNet-18, and a formula fitted to them for other models."""

from piecework.models.basic_layers import BASIC
from piecework.models.cascade import Blueprint
from piecework.models.depth_exits import EXIT
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.part import Part
from piecework.training.sgd import TrainingConfig

# The thresholds in the authors' code for ResNet-18 on 32 x 32 images, batch 64, in their MB, by the atoms trained. Without an
# output module it is what a method needs that trains block 1 with a classifier of its own, as DepthFL does.
OUTPUT = ("basic2", "basic3", "basic4")
BLOCK1, BLOCK2, BLOCK3, BLOCK4 = (
    ("stem", "block1", "block2"),
    ("block3", "block4"),
    ("block5", "block6"),
    ("block7", "block8"),
)
AUTHORS_MB = {
    (*BLOCK1, *BLOCK2, *BLOCK3, *BLOCK4): 840,
    (*BLOCK1, *OUTPUT): 506,
    BLOCK1: 478,
    (*BLOCK2, *OUTPUT[1:]): 220,
    (*BLOCK3, *OUTPUT[2:]): 112,
    BLOCK4: 100,
}
SETTING = ("resnet18", (3, 32, 32), 64, 64)  # model, images, batch size, channels of the first atom


def memory_bytes(part: Part, reference: Blueprint, training_config: TrainingConfig) -> float:
    """The authors' figure where their code has one, else the fitted formula; their MB are taken as 10^6 bytes."""
    model = part.blueprint
    setting = (model.name, model.input_shape, training_config.batch_size, model.atoms[0].shape[0])
    names = tuple(
        name for name in part.names() if not name.startswith(EXIT)
    )  # DepthFL's classifiers cost nothing there
    known = AUTHORS_MB.get(names) if setting == SETTING and not output_norms(part) else None
    return 10**6 * (fitted_mb(part, training_config.batch_size) if known is None else known)


def output_norms(part: Part) -> int:
    """Return the outputs per example of the batch norms behind basic layers (`profl.output-norm`)."""
    units = [f"atoms.{atom}" for atom in part.atoms if part.blueprint.atoms[atom].name.startswith(BASIC)]
    layers = [layer for unit in units for layer in layer_statistics(part.blueprint, unit).layers]
    return sum(layer.outputs for layer in layers if layer.kind == "BatchNorm2d")


def fitted_mb(part: Part, batch_size: int) -> float:
    """A fit to the authors' thresholds, within 4 %: activations and their gradients, 4 bytes each; parameters are ignored.

    A convolution of the main path counts three maps (its own, batch norm's, ReLU's), one of a shortcut or of a basic layer
    one, a max-pooling one. Batch norms of basic layers, which the authors do not have, count their outputs, and so do linear
    layers, LSTMs and norms without a convolution. In the authors' MB, which are 2^20 bytes: only so do the output modules' 28,
    12 and 4 MB come out.
    """
    elements = output_norms(part)
    for atom, unit in zip(part.atoms, part.units[:-1], strict=True):
        if part.blueprint.atoms[atom].name.startswith(EXIT):
            continue
        layers = layer_statistics(part.blueprint, unit).layers
        convolutions = [layer for layer in layers if layer.kind == "Conv2d"]
        if not convolutions:
            elements += sum(layer.outputs for layer in layers if layer.kind != "MaxPool2d")
        single = part.blueprint.atoms[atom].name.startswith(BASIC)
        elements += sum(layer.outputs for layer in layers if layer.kind == "MaxPool2d")
        for layer in convolutions:
            elements += layer.outputs * (1 if single or layer.on_shortcut else 3)
    if part.atoms and not elements:  # the output layer alone has no maps
        raise ValueError(f"memory.model profl counts maps of layers: {part.blueprint.name} has none that it knows")
    return 2 * 4 * part.copies * batch_size * elements / 2**20
