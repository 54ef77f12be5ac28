"""Resize images bilinearly, as torchvision's `resize` of a tensor does.

Clients do not import torchvision: it calls the same operator of torch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def resize(images: Tensor, size: Sequence[int]) -> Tensor:
    """Return float images[B, C, H, W] at another height and width. Where they shrink, they are smoothed (antialias)."""
    return F.interpolate(images, size=tuple(size), mode="bilinear", align_corners=False, antialias=True)


def resize_into(
    target: Tensor, pixels: Tensor, size: Sequence[int], places: Sequence[slice] = (slice(None),) * 2
) -> None:
    """Write pixels[h, w, C], resized to `size`, of which only these rows and columns are kept, into target[H, W, C]."""
    found = resize(pixels.permute(2, 0, 1).float().unsqueeze(0), size)[0]
    target.copy_(found[:, places[0], places[1]].permute(1, 2, 0))


def resize_one(batch: Tensor, stored: Sequence[int], size: Sequence[int], places: Sequence[slice]) -> None:
    """Do to a fake batch[B, H, W, channels] what reading does for each image of shape `stored` (C, h, w) in turn."""
    channels, height, width = stored
    target = batch[0, :, :, :channels]
    resize_into(target, torch.empty(height, width, channels, dtype=torch.uint8), size, places)


def resize_matrix(have: int, want: int) -> Tensor:
    """Return the matrix [want, have] that resizes a column of pixels as `resize` does.

    Resizing is linear in the pixels, and height and width are resized one after the other. So an image X becomes
    resize_matrix(h, H) X resize_matrix(w, W)^T, in operators that any runtime has.
    """
    columns = resize(torch.eye(have).reshape(1, 1, have, have), (want, have))
    return columns[0, 0]
