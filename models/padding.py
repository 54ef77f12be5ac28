"""Zeros in place of channels that a layer does not compute (PriSM's sub-models, models/low_rank.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Padding:
    """Pad to `channels` channels: zeros follow the computed ones, or surround them if their number, `computed`, is given."""

    channels: int
    computed: int = 0


class Padded(nn.Module):
    """A module that pads its output: channel i becomes channel `rows[i]` if it has `rows`."""

    channels: int
    rows: Tensor | None

    def hold(self, pad: Padding | None) -> None:
        """Set the padding, once."""
        self.channels = pad.channels if pad else 0
        self.register_buffer("rows", torch.arange(pad.computed) if pad and pad.computed else None)

    def pad(self, z: Tensor) -> Tensor:
        """Return z[B, c, H, W] padded to the full number of channels."""
        missing = max(0, self.channels - z.shape[1])
        if self.rows is None:
            return nn.functional.pad(z, (0, 0) * (z.dim() - 2) + (0, missing)) if missing else z
        shape = (z.shape[0], self.channels, *z.shape[2:])
        out = torch.empty(shape, dtype=z.dtype, device=z.device, memory_format=torch.channels_last).zero_()
        out[:, self.rows] = z
        return out


class PadChannels(Padded):
    """The last layer of a plain chain, which pads."""

    def __init__(self, pad: Padding) -> None:
        super().__init__()
        self.hold(pad)

    def forward(self, z: Tensor) -> Tensor:
        """Return z[B, c, H, W] with all channels."""
        return self.pad(z)
