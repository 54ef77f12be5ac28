"""The models by name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial

from piecework.device_profiles.plugins import find_plugin, list_plugins, load_plugin
from piecework.models.cascade import Blueprint, Shape
from piecework.models.cnn import cnn3, cnn4, cnn_femnist, conv4
from piecework.models.convnet import convnet
from piecework.models.imported.atoms import imported
from piecework.models.imported.source import find_make, is_imported
from piecework.models.layers import narrowing, require_one_of
from piecework.models.lenet import lenet5
from piecework.models.lstm import lstm_imdb
from piecework.models.mlp import mlp
from piecework.models.preact_resnet import resnet18_preact
from piecework.models.preresnet import preresnet20
from piecework.models.resnet import resnet10, resnet18, resnet34
from piecework.models.vgg import vgg11, vgg13, vgg16
from piecework.models.vit import deit_tiny, vit

MODELS: dict[str, Callable[..., Blueprint]] = {
    "cnn3": cnn3,
    "cnn4": cnn4,
    "cnn-femnist": cnn_femnist,
    "conv4": conv4,
    "convnet": convnet,
    "deit-tiny": deit_tiny,
    "lenet5": lenet5,
    "lstm-imdb": lstm_imdb,
    "mlp": mlp,
    "preresnet20": preresnet20,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "resnet18-preact": resnet18_preact,
    "resnet34": resnet34,
    "vgg11": vgg11,
    "vgg13": vgg13,
    "vgg16": vgg16,
    "vit": vit,
}
TOKEN_MODELS = {"lstm-imdb"}  # they read int64 tokens [B, length]
VECTOR_MODELS = {"mlp"}  # they read feature vectors [B, F], and images; all others read images alone
BATCH_NORMS = ("running", "batch", "local", "group", "frozen")  # kinds of norm in training
COMMON = ("num_classes", "input_shape", "width", "batch_norm")

USUAL_INPUTS: dict[str, tuple[Shape, int]] = {
    "cnn4": ((3, 224, 224), 256),
    "cnn-femnist": ((1, 28, 28), 62),
    "convnet": ((1, 8, 8), 10),
    "lenet5": ((1, 28, 28), 10),
    "lstm-imdb": ((500,), 2),
    "resnet18-preact": ((3, 32, 32), 100),
    "vit": ((3, 224, 224), 10),
}


def build_blueprint(
    name: str,
    *,
    num_classes: int,
    input_shape: Shape,
    width: float = 1.0,
    batch_norm: str = "running",
    initialisation: str = "default",
    **options: str | int,
) -> Blueprint:
    """Return the blueprint of a model for examples of input_shape: (C, H, W) of images, (F,) of vectors, (length,) of tokens.

    `options` are the model's own (see `model_options`). Their values may be strings, as in a setting.
    """
    require_model(name)
    require_one_of("architecture.batch-norm", batch_norm, BATCH_NORMS)
    shape = tuple(input_shape)
    if name in MODELS:
        _require_shape(name, shape)
    if num_classes < 1 or width <= 0:
        raise ValueError(f"{name} needs at least one class and a width above 0, got {num_classes} and {width}")
    own = tuple(_convert_options(name, options).items())
    built = _build(_function(name), narrowing(), num_classes, shape, width, batch_norm, own)
    if not isinstance(built, Blueprint):
        raise ValueError(
            f"model {name!r} is a {type(built).__name__}, not a cascade: its function has to return a Blueprint with atoms in "
            "order and a head"
        )
    return _named(built, name, width, batch_norm, tuple(options.items()), initialisation)


@lru_cache(maxsize=256)  # the same object each time: what is kept of a model is found again
def _named(
    built: Blueprint, name: str, width: float, batch_norm: str, options: tuple[tuple[str, str | int], ...], initial: str
) -> Blueprint:
    """Return a model with the arguments by which it is built again."""
    return replace(built, width=width, batch_norm=batch_norm, zoo_name=name, options=options, initialisation=initial)


@lru_cache(maxsize=256)
def stored_as(blueprint: Blueprint, shape: Shape) -> Blueprint:
    """Return a model for images that have this shape on disk, () if it is the shape that the model reads."""
    return blueprint if blueprint.stored_shape == shape else replace(blueprint, stored_shape=shape)


@lru_cache(maxsize=256)
def _build(
    function: Callable[..., Blueprint],
    ratio: float,  # on which the function depends through `scale_channels`
    num_classes: int,
    shape: Shape,
    width: float,
    batch_norm: str,
    options: tuple[tuple[str, str | int], ...],
) -> Blueprint:
    """Call a model's function once for each choice of arguments: a run asks for its models again and again."""
    return function(num_classes, shape, width=width, batch_norm=batch_norm, **dict(options))


def known_models() -> tuple[str, ...]:
    """Return the names of the zoo's models, and of those that installed packages register."""
    return (*MODELS, *list_plugins("models"))


def require_model(name: str) -> None:
    """Raise ValueError unless there is a model of this name, in the zoo or outside this project (models/imported)."""
    if is_imported(name):
        find_make(name)
    elif name.endswith(".py"):
        raise ValueError(f"model = {name!r} is a file: add the function that makes the model, as in {name}:make")
    elif find_plugin("models", name, MODELS) is None:
        require_one_of("model", name, known_models())


def _function(name: str) -> Callable[..., Blueprint]:
    """Return the function that makes a model's blueprint, of (num_classes, input_shape, width, batch_norm, ...)."""
    if name in MODELS:
        return MODELS[name]
    if not is_imported(name):
        function = load_plugin("models", name)
        if {"width", "batch_norm"} <= inspect.signature(function).parameters.keys():
            found: Callable[..., Blueprint] = function
            return found
    return partial(imported, name)


def model_options(name: str) -> tuple[str, ...]:
    """Return the options that only this model has, such as `stem` of resnet18."""
    if is_imported(name):
        return ()
    return tuple(option for option in inspect.signature(_function(name)).parameters if option not in COMMON)


def is_token_model(name: str) -> bool:
    """Return whether a model reads tokens rather than images."""
    return name in TOKEN_MODELS


def usual_input(name: str) -> tuple[Shape, int]:
    """Return the input shape and number of classes with which a paper runs this model; CIFAR-10's if several do."""
    require_model(name)
    return USUAL_INPUTS.get(name, ((3, 32, 32), 10))


def _require_shape(name: str, shape: Shape) -> None:
    if name in VECTOR_MODELS:
        if len(shape) not in (1, 3) or min(shape) < 1:
            raise ValueError(
                f"{name} reads vectors and images: expected an input shape of (F,) or (C, H, W), got {shape}"
            )
        return
    kind, expected, axes = ("tokens", "(length,)", 1) if is_token_model(name) else ("images", "(C, H, W)", 3)
    if len(shape) != axes or min(shape) < 1:
        others = "; mlp reads feature vectors, lstm-imdb tokens" if axes == 3 and len(shape) == 1 else ""
        raise ValueError(f"{name} reads {kind}: expected an input shape of {expected}, got {shape}{others}")


def _convert_options(name: str, options: Mapping[str, str | int]) -> dict[str, str | int]:
    """Convert the options to the types of the model's function, because settings are strings."""
    own = model_options(name)
    parameters = inspect.signature(_function(name)).parameters if own else {}
    typed = dict(options)
    for option, value in options.items():
        if option not in own:
            raise ValueError(f"{name} has no option {option!r}: it has {', '.join(own) or 'none'}")
        if parameters[option].annotation is int:
            try:
                typed[option] = int(value)
            except ValueError:
                raise ValueError(f"{option} = {value!r} is not known: {name} needs a whole number there") from None
    return typed
