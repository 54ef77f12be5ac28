"""The model."""

from torch import nn


def make(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return a network for images of shape (C, H, W). Piecework cuts it where one tensor crosses."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(input_shape[0], 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )
