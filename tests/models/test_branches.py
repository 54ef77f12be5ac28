"""Modules that check or branch on what they get."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piecework.models.cascade import Cascade, unset_weights
from piecework.models.imported.atoms import cut
from piecework.models.imported.module import Source, make
from piecework.models.zoo import build_blueprint

DIGIT, WIDTH = (1, 8, 8), 16
LAYERS = ("embed", "layers_0", "layers_1")


def longest(module: nn.Module, x: Tensor) -> Tensor:
    """Asserts that its input is no longer than a table."""
    _, _, length, _ = x.shape
    assert length <= 64, f"{length} steps"
    return x


def sliced(module: nn.Module, x: Tensor) -> Tensor:
    """Reads lengths of a slice of the shape, and by the name of an argument."""
    _, channels = x.shape[:2]
    height, width = x.shape[-2:]
    assert channels == 1
    return x.reshape(-1, 1, height, width) if width == x.size(dim=2) else x * 0


def raising(module: nn.Module, x: Tensor) -> Tensor:
    """Raises an error for the wrong number of axes, and is for images of one channel or more."""
    if x.dim() != 4:
        raise ValueError(x.dim())
    return x if x.size(1) == 1 else x.mean(1, keepdim=True)


def changed(module: nn.Module, x: Tensor) -> Tensor:
    """Asks for the number of axes after a change in place."""
    x = x.clone()
    x.squeeze_(1)
    return x.unsqueeze(1) if x.dim() == 3 else x * 0


def few(module: nn.Module, x: Tensor) -> Tensor:
    """Treats a single example in another way."""
    return x if x.shape[0] > 1 else x * 0.5


def counted(module: nn.Module, x: Tensor) -> Tensor:
    """Branches on the number of all values."""
    return x if x.numel() > 64 else x * 0.5


def bright(module: nn.Module, x: Tensor) -> Tensor:
    """Branches on values."""
    return x if x.sum() > 0 else -x


def rooted(module: nn.Module, x: Tensor) -> Tensor:
    """Computes with lengths as numbers."""
    return x / int(x.size(-1) ** 0.5) * math.sqrt(x.size(2))


def looped(module: nn.Module, x: Tensor) -> Tensor:
    """Goes through columns, rows and lengths."""
    columns = [x[..., number] for number in range(x.size(-1))]
    rows = list(torch.stack(columns, -1).unbind(2))
    *_, width = x.shape
    return torch.stack(rows, 2).reshape(*x.shape[:-1], width) if len(rows) == len(columns) == width else x * 0


def limited(module: nn.Module, x: Tensor) -> Tensor:
    """Masks with the lowest number of a type."""
    mask = torch.ones(8, 8).triu(1) > 0
    return x.masked_fill(mask, torch.finfo(x.dtype).min).softmax(-1)


def looking(module: nn.Module, x: Tensor) -> Tensor:
    """Asks for an attribute that tensors do not have."""
    return x.tensors * 0 if hasattr(x, "tensors") else x


def whole(module: nn.Module, x: Tensor) -> Tensor:
    """Makes as many numbers as there are examples, in lengths of their own."""
    return x + torch.zeros((x.size(0), 1, 8, 8))


def long(module: nn.Module, x: Tensor) -> Tensor:
    """Counts its examples."""
    return x * len(x)


class Branching(nn.Module):
    """Layers behind something that branches."""

    def __init__(self, classes: int, branch: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.out, self.branch = nn.Linear(8, WIDTH), nn.Linear(WIDTH, classes), branch
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.branch(self, x).squeeze(1))
        for layer in self.layers:
            assert x.shape[-1] == WIDTH
            x = layer(x).relu()
        return self.out(x.mean(1))


def maker(branch: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[int, Any], nn.Module]:
    return lambda num_classes, input_shape: Branching(num_classes, branch)


make_longest, make_raising, make_changed, make_sliced = map(maker, (longest, raising, changed, sliced))
make_few, make_counted, make_bright, make_long = map(maker, (few, counted, bright, long))
make_rooted, make_looped, make_limited, make_looking, make_whole = map(maker, (rooted, looped, limited, looking, whole))
KNOWN = ("longest", "raising", "changed", "sliced", "rooted", "looped", "limited", "looking", "whole")


@pytest.mark.parametrize("branch", KNOWN)
def test_lengths_and_numbers_of_axes_decide(branch: str) -> None:
    """The cut has all layers, and computes what the module computes."""
    name = f"{__file__}:make_{branch}"
    assert cut(Source(name, 10, DIGIT, "running")).names == LAYERS
    whole = make(Source(name, 10, DIGIT, "running"))
    with unset_weights():
        cascade = Cascade(build_blueprint(name, num_classes=10, input_shape=DIGIT, batch_norm="running"))
    arrays = whole.state_dict()
    cascade.load_state_dict({n: arrays[n.split(".", 1 if n[0] == "h" else 2)[-1]] for n in cascade.state_dict()})
    x = torch.randn(3, *DIGIT, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cascade(x), whole(x))
    assert cascade(x).abs().sum() > 0


@pytest.mark.parametrize("branch", ["few", "counted", "long"])
def test_the_number_of_examples_does_not_decide(branch: str) -> None:
    found = cut(Source(f"{__file__}:make_{branch}", 10, DIGIT, "running"))
    assert found.names == ("branching",)
    assert (
        found.reason
        == "Branching: its forward pass branches on more than lengths, such as values or the number of examples"
    )


def test_values_do_not_decide() -> None:
    with pytest.raises(ValueError, match="what depends on values cannot be priced"):
        cut(Source(f"{__file__}:make_bright", 10, DIGIT, "running"))
