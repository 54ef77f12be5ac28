"""Modules of a user that say what recorded calls cannot say of gradients, and one that says nothing by it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Rounding(torch.autograd.Function):
    """Rounds, and passes gradients on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rounded(nn.Module):
    """A layer whose result is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return Rounding.apply(self.layer(x))


class Gated(nn.Module):
    """A layer whose gates do not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gates = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gates = self.gates(x).sigmoid()
        return self.layer(x) * gates


class Centred(nn.Module):
    """Follows the mean of what it gets, and subtracts it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("centre", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.centre.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.layer(x - self.centre)


class Scaled(nn.Module):
    """Scales by a table, one row after the other, whose scales no gradient would reach anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("table", torch.arange(32.0).view(2, 16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scales = self.table.cos()
        x = self.layer(x * scales[0])
        for row in self.table:
            x = x + row
        return x


class Net(nn.Module):
    """Two layers around another one."""

    def __init__(self, classes: int, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(64, 16), middle
        self.last, self.out = nn.Linear(16, 16), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.last(self.middle(self.first(x.flatten(1)).relu())).relu())


def rounded(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, Rounded())


def gated(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, Gated())


def centred(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, Centred())


def scaled(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, Scaled())


class Counting(nn.Module):
    """A layer that warms up with its passes, which it counts in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.count: Any = {"dict": {"n": 0}, "list": [0], "nested": {"of": [{"n": 0}]}, "object": SimpleNamespace(n=0)}[
            kind
        ]

    def counted(self) -> int:
        held: Any = self.count
        if isinstance(held, SimpleNamespace):
            held.n += 1
            return int(held.n)
        place: Any = 0 if isinstance(held, list) else "n"
        held = held["of"][0] if isinstance(held, dict) and "of" in held else held
        held[place] += 1
        return int(held[place])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * min(1.0, self.counted() / 4)


def counts_in_dict(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, Counting("dict"))


def counts_in_list(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, Counting("list"))


def counts_within(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, Counting("nested"))


def counts_in_object(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, Counting("object"))


class Exact(nn.Module):
    """A layer in whole precision, whatever is outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.layer(x.float())
        return self.other(x)


class Decorated(Exact):
    """The same, all of it."""

    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.layer(x.float()))


class Halved(Exact):
    """A layer in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layer(x)
        return self.other(x.float())


def exact(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, Exact())


def decorated(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, Decorated())


def halved(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, Halved())
