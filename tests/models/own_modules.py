"""Modules as users write them, which know nothing of this project."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A block whose skip crosses its layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.conv2(F.relu(self.norm1(self.conv1(x)))))


class Net(nn.Module):
    """Two convolutions and a residual block; the second norm's activation works in place."""

    def __init__(self, classes: int, colours: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(colours, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)), Residual(8))
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(F.max_pool2d(self.stem(x), 2)).mean((2, 3)))


class Shaped(nn.Module):
    """Branches on the number of its examples, which recorded calls cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.shape[0] > 0 else x


class Tied(nn.Module):
    """Uses one layer twice, and another one between."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.twice, self.between, self.last = (nn.Linear(64, 64) for _ in range(4))
        self.out = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1)).relu()
        x = self.twice(x).relu()
        x = self.between(x).relu()
        x = self.twice(x).relu()
        return self.out(self.last(x).relu())


class Ushaped(nn.Module):
    """Each level's features skip to the way up, so that no single tensor crosses."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.down, self.deep, self.up = (nn.Conv2d(1, 1, 3, padding=1) for _ in range(3))
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        one = self.down(x).relu()
        two = self.deep(F.avg_pool2d(one + x, 2)).relu()
        y = self.up(F.interpolate(two, scale_factor=2.0) + one) + x
        return y.flatten(1)[:, : self.classes]


class Valued(nn.Module):
    """Branches on a value."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x.flatten(1))
        return y if float(x.sum()) > 0 else -y


class Loose(nn.Module):
    """Keeps a tensor that its state dict does not have."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(64, classes)
        self.scale = torch.ones(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1) * self.scale)


TABLE = torch.ones(64)


class Global(nn.Module):
    """Uses a tensor of its file, before or after what it computes."""

    def __init__(self, classes: int, first: bool) -> None:
        super().__init__()
        self.fc, self.first = nn.Linear(64, classes), first

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(TABLE * x.flatten(1) if self.first else x.flatten(1) * TABLE)


class Asking(nn.Module):
    """Asks whether it is trained."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 16), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x.flatten(1)).relu()
        return self.two(x * 2 if self.training else x)


def net(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, input_shape[0])


def narrow(num_classes: int, input_shape: Any) -> nn.Module:
    """An eighth of its first convolution is one channel."""
    first = nn.Sequential(nn.Conv2d(input_shape[0], 8, 3, padding=1), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))


def branching(num_classes: int, input_shape: Any) -> nn.Module:
    first = nn.Sequential(nn.Conv2d(input_shape[0], 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(first, Shaped(), nn.Linear(8, num_classes))


def tied(num_classes: int, _: Any) -> nn.Module:
    return Tied(num_classes)


def ushaped(num_classes: int, _: Any) -> nn.Module:
    return Ushaped(num_classes)


def valued(num_classes: int, _: Any) -> nn.Module:
    return Valued(num_classes)


def loose(num_classes: int, _: Any) -> nn.Module:
    return Loose(num_classes)


def global_table(num_classes: int, _: Any) -> nn.Module:
    return Global(num_classes, first=False)


def global_mask(num_classes: int, _: Any) -> nn.Module:
    return Global(num_classes, first=True)


def asking(num_classes: int, _: Any) -> nn.Module:
    return Asking(num_classes)


def sequence(num_classes: int, _: Any) -> nn.Module:
    inner = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU())
    return nn.Sequential(nn.Flatten(), inner, nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, num_classes))


def inputs(num_classes: int, _: Any) -> nn.Module:
    """Changes its input in place behind its first layer."""

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, num_classes)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x.flatten(1))
            z = self.two(y.unsqueeze(1).squeeze(1).add_(1.0))
            return self.three(z)

    return Changes()


def wrong(num_classes: int, _: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes + 1))


def no_module(num_classes: int, _: Any) -> int:
    return num_classes


class Shares(nn.Module):
    """Uses a convolution's weight once more, as a function."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.shared, self.between = (nn.Conv2d(c, 4, 3, padding=1) for c in (1, 4, 4))
        self.out = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.shared(self.first(x)).relu()).relu()
        return self.out(F.conv2d(x, self.shared.weight).mean((2, 3)))


def shares(num_classes: int, _: Any) -> nn.Module:
    return Shares(num_classes)


def shared_norm(num_classes: int, _: Any) -> nn.Module:
    norm = nn.BatchNorm2d(4)
    blocks = [nn.Sequential(nn.Conv2d(c, 4, 3, padding=1), norm, nn.ReLU()) for c in (1, 4)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))


class Drops(nn.Module):
    """Leaves a layer out at random."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.two(x if self.training and float(torch.rand(1)) < 0.5 else self.one(x).relu())


def drops(num_classes: int, _: Any) -> nn.Module:
    return Drops(num_classes)


class Child(nn.Module):
    """Keeps its parent, in a list so that it is not a submodule."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.fc, self.parents = nn.Linear(64, 10), [parent]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


class Parent(nn.Module):
    """Refers to itself through its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Child(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


def circular(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return Parent()


class Arguments(nn.Module):
    """Has arguments besides the tensor, and makes tensors in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor, scale: float = 2.0, *, return_features: bool = False) -> Tensor:
        x = torch.relu(self.first(x)) + torch.arange(8) * scale
        x = torch.relu(self.second(x)).mean((2, 3)) * torch.ones((), device=x.device)
        return x if return_features else self.fc(x)


def arguments(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return Arguments()


def vector(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    (features,) = input_shape
    return nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, num_classes))


def shared(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes)]
    layers[3].weight = layers[1].weight
    return nn.Sequential(*layers)
