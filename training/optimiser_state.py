"""What an optimiser keeps of parameters between steps, in float32, bfloat16 or 8 bits.

8 bits are those of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022), as bitsandbytes has them: a
value is kept as the nearest of 256, a fraction of the largest magnitude in its block of 256 values, which is kept in float32.
The fractions are denser towards 0: each power of ten down to 1e-6 has half as many as the one above. There is one departure.
Adam divides by the root of its averages of squares, which must not become 0 beside an average of gradients that does not: where
a gradient stays away for a step, such a parameter would leap. So positive values of an unsigned state never become 0.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

StatePrecision = Literal["float32", "bfloat16", "8-bit"]
BLOCK = 256
FEWEST = 4096  # values of a parameter; what is kept of smaller ones stays float32
CHUNK = 2**18  # values that are converted at once


def dynamic_codes(*, signed: bool) -> Tensor:
    """Return the fractions that 8 bits stand for, ascending: float32 [256], in [-1, 1] or, without a sign, in [0, 1].

    From each power of ten down to a tenth of it, they are the middles of equal intervals.
    """
    positive = [
        10.0 ** (power - 6) * (0.1 + 0.9 * (interval + 0.5) / intervals)
        for power in range(7)
        for intervals in [2 ** (power if signed else power + 1)]
        for interval in range(intervals)
    ]
    return torch.tensor(sorted([*(-value for value in positive if signed), 0.0, *positive, 1.0]))


class EightBit:
    """Values of one parameter in 8 bits each, at first zeros. `packed`, uint8 [...], has the blocks' scales, then the codes.

    Like a tensor it has a shape, is read with `float` and written with `copy_`. Blocks follow the parameter's memory.
    """

    def __init__(self, parameter: Tensor, codes: Tensor, *, signed: bool) -> None:
        self.shape, self._codes, self._signed = parameter.shape, codes, signed
        # The dimensions as they lie in memory: those of channels-last weights are not in order.
        self._order = sorted(range(parameter.dim()), key=lambda dim: -parameter.stride()[dim])
        self._blocks = -(-parameter.numel() // BLOCK)
        self.packed = torch.zeros(self._blocks * (4 + BLOCK), dtype=torch.uint8, device=parameter.device)

    def _chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield places in memory, their blocks' scales [blocks, 1] and their codes [blocks, BLOCK]."""
        scales = self.packed[: 4 * self._blocks].view(torch.float32).view(-1, 1)
        codes, step = self.packed[4 * self._blocks :].view(-1, BLOCK), CHUNK // BLOCK
        for first in range(0, self._blocks, step):
            rows = slice(first, first + step)
            yield slice(first * BLOCK, (first + step) * BLOCK), scales[rows], codes[rows]

    def float(self) -> Tensor:
        """Return the values as float32, in the parameter's memory format."""
        flat = torch.empty(self.shape.numel(), device=self.packed.device)
        for places, scales, codes in self._chunks():
            part = flat[places]
            part.copy_((self._codes[codes.int()] * scales).view(-1)[: len(part)])
        lying = flat.view([self.shape[dim] for dim in self._order])
        return lying.permute([self._order.index(dim) for dim in range(len(self._order))])

    def copy_(self, values: Tensor) -> None:
        """Keep the nearest to float32 values of the parameter's shape, which may be elsewhere."""
        edges = (self._codes[1:] + self._codes[:-1]) / 2
        if not self._signed:
            edges[0] = 0
        flat = values.to(self.packed.device).permute(self._order).reshape(-1)
        for places, scales, codes in self._chunks():
            part = flat[places]
            blocks = pad(part, (0, -len(part) % BLOCK)).view(-1, BLOCK)
            scales.copy_(blocks.abs().amax(1, keepdim=True))
            fractions = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)
            codes.copy_(torch.bucketize(fractions, edges, out_int32=True))


Held = Tensor | EightBit


def bytes_kept(precision: StatePrecision, *, signed: bool = True) -> float:
    """Return the bytes of a value of a large parameter that are kept between steps."""
    return {"float32": 4, "bfloat16": 2 if signed else 4, "8-bit": 1 + 4 / BLOCK}[precision]


def zeros(parameters: Sequence[Tensor], precision: StatePrecision, *, signed: bool = True) -> list[Held]:
    """Return zeros of the parameters' shapes. Without a sign, they stay float32 for bfloat16.

    Adam's averages of squares change by a thousandth a step at least, which bfloat16 rounds away.
    """
    if precision != "8-bit":
        dtype = torch.bfloat16 if precision == "bfloat16" and signed else None
        return [torch.zeros_like(p, dtype=dtype) for p in parameters]
    codes = dynamic_codes(signed=signed).to(parameters[0].device) if parameters else torch.empty(0)
    return [torch.zeros_like(p) if p.numel() < FEWEST else EightBit(p, codes, signed=signed) for p in parameters]
