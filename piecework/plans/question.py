"""The input of a plan: an example's shape, classes, a client's examples, a budget, and the kind of step."""

import logging
from dataclasses import dataclass
from math import prod
from typing import cast, get_args

from piecework.device_profiles.documents import abbreviate
from piecework.federated_data.datasets import PUBLISHED
from piecework.federated_data.labels import label_remarks
from piecework.models.cascade import Shape
from piecework.models.model_file import LARGEST_EXAMPLE
from piecework.models.zoo import usual_input
from piecework.planning.costs import fraction_or_bytes
from piecework.training.settings import Settings, SettingsError
from piecework.training.setup import dataset_of, prepare_dataset
from piecework.training.sgd import Precision

LOG = logging.getLogger("piecework")
DIGITS = 7  # of an edge
EXAMPLES = 500  # examples per client if no data set defines them


@dataclass(frozen=True)
class PlanQuestion:
    """The input of a plan besides settings: shape of an example on disk, classes, a client's training examples, and a budget.

    `budget` is as a person writes it (`60MB`, `0.2x`); empty = the minimum in the fleet. `attack_steps` None = as many as the
    method's own training takes.
    """

    input_shape: Shape
    num_classes: int
    examples: int
    budget: str = ""
    precision: Precision = "float32"
    attack_steps: int | None = None


def ask(
    settings: Settings,
    usual: bool = False,
    input_shape: str = "",
    classes: int | None = None,
    examples: int | None = None,
    budget: str = "",
    precision: str = "float32",
    attack_steps: int | None = None,
) -> PlanQuestion:
    """Return the question of a command line, about one of three inputs.

    It is about `input_shape` (`3x224x224`, `500`) if given, else with `usual` about the model's usual input, else about the
    run's data set. Without `examples` a client has an equal part of the training examples, less its validation data, or 500
    without a data set. Raises SettingsError.
    """
    if input_shape:
        shape, default = parse_shape(input_shape), EXAMPLES
        if classes is None:
            raise SettingsError(f"--input-shape {input_shape} needs the number of classes beside it: --classes")
    elif classes:
        raise SettingsError(f"--classes {classes} belongs to --input-shape; a data set has its own classes")
    elif usual:
        shape, classes = usual_input(settings.model)
        default = EXAMPLES
    else:
        shape, classes, total = data_shape(settings)
        clients = total * (1 - settings.data.public_fraction)
        default = max(2, int(clients / settings.clients * (1 - settings.data.validation_fraction)))
    if precision not in get_args(Precision):
        raise SettingsError(f"--precision {precision}: expected one of {', '.join(get_args(Precision))}")
    if precision != "float32" and settings.memory.model != "traced":
        raise SettingsError(f"--precision {precision}: memory.model {settings.memory.model} knows float32 only")
    return PlanQuestion(shape, classes, examples or default, budget, cast(Precision, precision), attack_steps)


def parse_shape(text: str) -> Shape:
    """Parse `3x224x224` for images or `500` for tokens. Raises SettingsError."""
    edges = text.lower().split("x")
    if len(edges) not in (1, 3) or not all(edge.isdecimal() and len(edge) < DIGITS and int(edge) for edge in edges):
        raise SettingsError(
            f"--input-shape {abbreviate(text)}: expected channels, height and width as 3x224x224, or tokens as 500, each of "
            f"less than {DIGITS} digits"
        )
    shape = tuple(map(int, edges))
    if prod(shape) > LARGEST_EXAMPLE:
        raise SettingsError(f"--input-shape {text}: an example has {prod(shape):,} values, at most {LARGEST_EXAMPLE:,}")
    return shape


def data_shape(settings: Settings) -> tuple[Shape, int, int]:
    """Return shape of an example on disk, classes, and training examples. Published sets need not exist here.

    Raises DatasetError.
    """
    if settings.dataset in PUBLISHED:
        return PUBLISHED[settings.dataset]
    prepare_dataset(settings)
    data = dataset_of(settings)
    for remark in label_remarks(data):
        LOG.warning("%s", remark)
    return data.stored_shape, data.num_classes, data.examples


def budget_bytes(text: str, full: int) -> int:
    """Return the bytes of `60MB`, `57MiB`, or `0.2x` of the full model. Raises SettingsError."""
    try:
        return fraction_or_bytes(text, full)
    except ValueError as error:
        raise SettingsError(f"--budget {text}: {error}") from None
