"""A model of one's own, and initial weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from piecework.models.cascade import Atom, Blueprint


def mlp(num_classes: int, input_shape: Any, width: float = 1.0, batch_norm: str = "running") -> Blueprint:
    """That of docs/howto/atoms.md."""
    pixels, hidden = input_shape[0] * input_shape[1] * input_shape[2], max(1, int(64 * width))
    first = partial(lambda: nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU()))
    second = partial(lambda: nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()))
    atoms = (Atom("fc1", first, (hidden,)), Atom("fc2", second, (hidden,)))
    return Blueprint("own-mlp", input_shape, num_classes, atoms, partial(nn.Linear, hidden, num_classes), batch_norm)


def initial(blueprint: Blueprint) -> Callable[[str, nn.Module], None]:
    """Fills a unit with the weights that its layers draw."""

    def fill(unit: str, module: nn.Module) -> None:
        module.load_state_dict(blueprint.build_unit(unit).state_dict())

    return fill
