"""Recorded calls that depend on how maps lie in memory compute the same where weights lie channels last."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from piecework.models.cascade import Cascade
from piecework.models.imported.objects import name_object
from piecework.models.memory_layout import channels_last
from piecework.models.zoo import build_blueprint

SHAPE = (2, 8, 8)
Step = Callable[[Tensor], Tensor]


class Maps(nn.Module):
    """Two convolutions, and a step behind each."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.out, self.step = nn.Linear(4, 3), step

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            x = self.step(layer(x))
        return self.out(x.mean((2, 3)))


class Drop(nn.Module):
    """Does something else in training, so that it is not recorded, and its code has a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape) * 2 if self.training else x


def change_view(x: Tensor) -> Tensor:
    x.view(x.shape[0], -1).mul_(2)
    return x


STEPS: dict[str, Step] = {
    "strides": lambda x: torch.as_strided(x, (x.shape[0], 4, 8, 8), (256, 64, 8, 1)).relu(),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(x.shape[0], 4, 32, 2)) * 1j).reshape(
        x.shape
    ),
    "view that is changed": change_view,
    "view as": lambda x: x.relu().view_as(torch.ones(x.shape[0], 4, 64)).sigmoid().reshape(x.shape),
}


@pytest.mark.parametrize("step", STEPS)
def test_maps_that_lie_channels_last_give_the_same(step: str) -> None:
    module = Maps(STEPS[step]).eval()
    blueprint = build_blueprint(name_object(module), num_classes=3, input_shape=SHAPE)
    assert not blueprint.uncut
    cascade = Cascade(blueprint).eval()
    for part in (*cascade.atoms, cascade.head):
        channels_last(part)
    x = torch.randn(5, *SHAPE)
    torch.testing.assert_close(cascade(x.contiguous(memory_format=torch.channels_last)), module(x))


def test_a_layout_that_is_kept_does_not_keep_a_model_from_being_narrowed() -> None:
    name = name_object(Maps(Drop()))
    assert build_blueprint(name, num_classes=3, input_shape=SHAPE, width=0.5).atoms
