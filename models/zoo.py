"""The models by name."""

import inspect
from collections.abc import Callable

from models.cascade import Blueprint, Shape, isolated_rng
from models.convnet import convnet
from models.layers import require_one_of
from models.lenet import lenet5
from models.preresnet import preresnet20
from models.resnet import resnet18
from models.vgg import vgg11, vgg16

MODELS: dict[str, Callable[..., Blueprint]] = {
    "convnet": convnet,
    "lenet5": lenet5,
    "preresnet20": preresnet20,
    "resnet18": resnet18,
    "vgg11": vgg11,
    "vgg16": vgg16,
}
BATCH_NORMS = ("running", "batch", "local")
COMMON = ("num_classes", "input_shape", "width", "batch_norm")


def build_blueprint(
    name: str,
    *,
    num_classes: int,
    input_shape: Shape,
    width: float = 1.0,
    batch_norm: str = "running",
    **options: str,
) -> Blueprint:
    """The blueprint of a model for images of input_shape (C, H, W); `options` are its own: see `model_options`."""
    require_one_of("model", name, tuple(MODELS))
    require_one_of("batch-norm", batch_norm, BATCH_NORMS)
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(f"input shape {tuple(input_shape)} is not an image's: expected (channels, height, width)")
    if num_classes < 1 or width <= 0:
        raise ValueError(f"{name} needs at least one class and a width above 0, got {num_classes} and {width}")
    own = model_options(name)
    for option in options.keys() - own:
        raise ValueError(f"{name} has no option {option!r}: it has {', '.join(own) or 'none'}")
    return MODELS[name](num_classes, tuple(input_shape), width=width, batch_norm=batch_norm, **options)


def model_options(name: str) -> tuple[str, ...]:
    """The options that only this model has, such as `stem` of resnet18."""
    return tuple(option for option in inspect.signature(MODELS[name]).parameters if option not in COMMON)


def num_parameters(blueprint: Blueprint) -> int:
    """Trainable parameters of atoms and head; one unit is held at a time."""
    total = 0
    for unit in blueprint.units():
        with isolated_rng(0):
            total += sum(parameter.numel() for parameter in blueprint.build_unit(unit).parameters())
    return total
