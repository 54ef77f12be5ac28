"""Modules of a user whose layers share what depends on no example, as transformers do."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LENGTH = 8, 64


class Layer(nn.Module):
    """Attention with one head, whose mask and turns it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, turns: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q * turns) @ (k * turns).transpose(-2, -1)
        return x + self.out(scores.masked_fill(mask, float("-inf")).softmax(-1) @ v)


class Causal(nn.Module):
    """Three layers with the same mask and turns, which its files leave out. Its buffers are longer than its input."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(8, WIDTH), nn.ModuleList(Layer() for _ in range(3))
        self.out = nn.Linear(WIDTH, classes)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))
        angles = torch.arange(LENGTH)[:, None] / torch.arange(1, WIDTH + 1)
        self.register_buffer("turns", angles.cos(), persistent=False)

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        return self.mask[: x.shape[2], : x.shape[2]], self.turns[: x.size(2)]

    def forward(self, x: Tensor) -> Tensor:
        mask, turns = self.shared(x)
        x = self.embed(x.squeeze(1))
        for layer in self.layers:
            x = layer(x, mask, turns)
        return self.out(x.mean(1))


class Infinite(Causal):
    """Has a mask to be added, of minus infinity."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("added", nn.Transformer.generate_square_subsequent_mask(8))

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        return self.added < 0, super().shared(x)[1]


class Making(Causal):
    """Makes its mask anew in each pass, on the device of its input."""

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        _, _, length, _ = x.shape
        steps = torch.arange(length, device=x.device)
        return (steps[:, None] < steps) & self.mask[:length, :length], self.turns[:length].float()


class Placed(Causal):
    """Makes its mask on the device of its parameters, and takes its input there."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        steps = torch.arange(x.to(self.device).shape[2], device=self.device)
        return steps[:, None] < steps, self.turns[: x.shape[2]].to(device=self.device)


class Distant(Causal):
    """Weighs by distances, which it clamps, and makes its mask of two lengths."""

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        steps = torch.arange(x.shape[2], device=x.device)
        distances = (steps[:, None] - steps[None, :]).abs().clamp(max=4)
        return torch.ones(x.shape[2], x.shape[3]).triu(1).bool(), 1 / (1 + distances)


class Counting(Causal):
    """Changes the turns in place in each pass."""

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        length = x.shape[2]
        self.turns.add_(0.001)
        return self.mask[:length, :length], self.turns[:length]


class Stepping(Causal):
    """Counts its passes by `+=`, which assigns the buffer to itself."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("steps", torch.tensor(0))

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        self.steps += 1
        return super().shared(x)


class Late(Causal):
    """Makes its mask as long as what its embedding returns, with the first axis for steps, as some decoders do."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(1)).transpose(0, 1)
        length, _, width = x.shape
        mask = torch.ones(x.size(0), length, dtype=torch.bool, device=x.device).triu(1)
        turns = self.turns[:length] * (width + 0 * x.size(-1))
        for layer in self.layers:
            x = layer(x.transpose(0, 1), mask, turns).transpose(0, 1)
        return self.out(x.mean(0))


class Counted(Causal):
    """Expands its mask to its examples, and uses their number behind the last layer."""

    def forward(self, x: Tensor) -> Tensor:
        number = x.shape[0]
        mask, turns = self.shared(x)
        mask = mask.expand(number, -1, -1)
        x = self.embed(x.squeeze(1))
        for layer in self.layers:
            x = layer(x, mask, turns)
        return self.out(x.reshape(number, -1, WIDTH).mean(1))


class Replacing(Causal):
    """Makes the turns anew of those of the pass before."""

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        self.turns = self.turns * 0.999
        return super().shared(x)


class Measuring(Causal):
    """Counts in place in a number, whose value before is used too."""

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        length = end = x.shape[2]
        end += 1
        return self.mask[:length, :length], self.turns[1:end]


class Filling(Causal):
    """Fills a tensor that it made, after its first use."""

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        turns = torch.ones(8, WIDTH)
        turns.mul_(0.5)
        return self.mask[:8, :8], turns


class Hiding(Causal):
    """Changes the turns in place through what shares their memory, in a way of `change`."""

    def __init__(self, classes: int, change: str) -> None:
        super().__init__(classes)
        self.change = change

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        turns = self.turns
        if self.change == "operator":
            turns += 0.001
        elif self.change == "operator on a view":
            row = turns[0]
            row *= 1.001
        elif self.change == "transposed":
            turns.T.add_(0.001)
        elif self.change == "data":
            turns.data.add_(0.001)
        elif self.change == "diagonal":
            turns.diagonal().add_(0.001)
        elif self.change == "out":
            torch.mul(self.mask[:, :1], 0.5, out=turns[:, :1])
        else:
            F.batch_norm(x.squeeze(1), turns[0], turns[1], training=True)
        return self.mask[:8, :8], turns[:8] * 1.0


class Drawing(Causal):
    """Draws the turns of all layers at random."""

    def shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mask and the turns of all layers."""
        return self.mask[:8, :8], F.dropout(self.turns[:8], 0.5)


class Measured(nn.Module):
    """Reads the running mean of a norm, which each step in training changes, behind the last layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.one, self.two, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.two(self.one(self.norm(x.flatten(1))).relu()).relu() - self.norm.running_mean)


class Blurred(nn.Module):
    """Blurs an image and the maps of its layers with a kernel that does not learn."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.full((WIDTH, 1, 3, 3), 1 / 9))
        self.one, self.two = nn.Conv2d(1, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.out = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(F.conv2d(x, self.kernel[:1], padding=1)).relu()
        x = self.two(F.conv2d(x, self.kernel, padding=1, groups=WIDTH)).relu()
        return self.out(F.conv2d(x, self.kernel, padding=1, groups=WIDTH).mean((2, 3)))


def blurred(num_classes: int, input_shape: Any) -> nn.Module:
    return Blurred(num_classes)


def causal(num_classes: int, input_shape: Any) -> nn.Module:
    return Causal(num_classes)


def infinite(num_classes: int, input_shape: Any) -> nn.Module:
    return Infinite(num_classes)


def making(num_classes: int, input_shape: Any) -> nn.Module:
    return Making(num_classes)


def distant(num_classes: int, input_shape: Any) -> nn.Module:
    return Distant(num_classes)


def counting(num_classes: int, input_shape: Any) -> nn.Module:
    return Counting(num_classes)


def stepping(num_classes: int, input_shape: Any) -> nn.Module:
    return Stepping(num_classes)


def late(num_classes: int, input_shape: Any) -> nn.Module:
    return Late(num_classes)


def counted(num_classes: int, input_shape: Any) -> nn.Module:
    return Counted(num_classes)


def replacing(num_classes: int, input_shape: Any) -> nn.Module:
    return Replacing(num_classes)


def measuring(num_classes: int, input_shape: Any) -> nn.Module:
    return Measuring(num_classes)


def filling(num_classes: int, input_shape: Any) -> nn.Module:
    return Filling(num_classes)


def hiding(change: str) -> Callable[..., nn.Module]:
    return lambda num_classes, input_shape: Hiding(num_classes, change)


operator, on_view, transposed = hiding("operator"), hiding("operator on a view"), hiding("transposed")
data, diagonal, out, statistics = hiding("data"), hiding("diagonal"), hiding("out"), hiding("statistics")


def drawing(num_classes: int, input_shape: Any) -> nn.Module:
    return Drawing(num_classes)


def placed(num_classes: int, input_shape: Any) -> nn.Module:
    return Placed(num_classes)


def measured(num_classes: int, input_shape: Any) -> nn.Module:
    return Measured(num_classes)
