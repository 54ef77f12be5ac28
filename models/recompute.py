"""Recomputation: a segment of a network keeps only its input, and runs again when the backward pass needs its activations.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174. torch.utils.checkpoint
does the same, but its first call imports torch's compiler, which takes a board 75 MB and more than a second.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from piecework.models.recompute_cheap import Keeper, Packed, unpack
from piecework.models.replayed_random import RandomState


def recompute(
    run: Callable[[Tensor], Tensor], z: Tensor, modules: Sequence[nn.Module], *, cheap: bool = False
) -> Tensor:
    """Return `run(z)` without keeping what its backward pass needs; `modules` are those that `run` uses.

    The second run has the random numbers and the autocast mode of the first, and leaves running statistics as they are. With
    `cheap`, it keeps no more than what models/recompute_cheap.py leaves of it.
    Gradients are exactly those of `run(z)`. The result can be differentiated once.
    """
    if not torch.is_grad_enabled():
        return run(z)
    segment = _Segment(run, z, modules, cheap)
    with saved_tensors_hooks(segment.count, segment.activation):
        return run(z)


class _Segment:
    """The input of a segment, and during its backward pass its activations in the order in which they were saved."""

    def __init__(self, run: Callable[[Tensor], Tensor], z: Tensor, modules: Sequence[nn.Module], cheap: bool) -> None:
        self.run, self.z, self.modules, self.cheap = run, z, modules, cheap
        self.device, self.random = z.device.type, RandomState(z.device)
        self.autocast = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)
        # What a batch norm in training mode returns does not depend on its statistics; other buffers may decide it.
        self.buffers = [(buffer, buffer.clone()) for buffer in _deciding_buffers(modules)]
        self.saved = 0
        self.activations: dict[int, Tensor | Packed] | None = None

    def count(self, _: Tensor) -> int:
        """Return the number of a tensor that is not kept."""
        self.saved += 1
        return self.saved - 1

    def activation(self, number: int) -> Tensor:
        """Return a tensor by its number, and release it; the first call runs the segment again."""
        if self.activations is None:
            self.activations = dict(enumerate(self._run_again()))
        return unpack(self.activations.pop(number))

    def _run_again(self) -> list[Tensor | Packed]:
        found: list[Tensor | Packed] = []
        keeper = Keeper() if self.cheap else None
        enabled, dtype = self.autocast

        def keep(tensor: Tensor) -> None:
            tensor = tensor.detach()
            found.append(keeper.pack(tensor) if keeper else tensor)

        with (
            torch.enable_grad(),
            self.random.restored(),
            restore_buffers(self.modules),
            torch.autocast(self.device, dtype, enabled=enabled),
            saved_tensors_hooks(keep, _not_kept),
            keeper or nullcontext(),
        ):
            for buffer, value in self.buffers:
                buffer.data.copy_(value)
            self.run(self.z.detach().requires_grad_(self.z.requires_grad))
        return found


def _deciding_buffers(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    layers = (layer for module in modules for layer in module.modules())
    return (buffer for layer in layers if not isinstance(layer, _BatchNorm) for buffer in layer.buffers(recurse=False))


def _not_kept(_: None) -> Tensor:
    raise RuntimeError("the second run of a segment is not differentiated")


@contextmanager
def restore_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give buffers back the values that they have at the start."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, value in zip(buffers, before, strict=True):
        buffer.data.copy_(value)  # past autograd, for which they did not change: they are only read in evaluation mode
