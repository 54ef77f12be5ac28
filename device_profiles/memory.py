"""The one accounting of training memory: the bytes of every live tensor storage, and their peak.

`PeakMemory` is used three times: under fake tensors it *prices* a step without allocating anything (`trace`), around the real
run of a phase it *enforces* a budget, and tests hold the two against each other and against torch.profiler's memory events.
`fedepth_price` is a paper's own formula, for its tables and settings.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.cascade import Blueprint


class MemoryBudgetExceededError(RuntimeError):
    """A piece of work needs more training memory than its device has."""

    def __init__(self, needed: int, allowed: int, where: str) -> None:
        self.needed, self.allowed, self.where = needed, allowed, where
        super().__init__(f"{where} needs {needed:,} bytes of training memory, the budget allows {allowed:,}")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _relaid(gradient: Tensor, *copied: Tensor) -> int:
    """Bytes of what is copied where a gradient does not come in the memory format of the layer's input, `copied[0]`."""
    formats = {tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (gradient, copied[0])}
    return sum(map(_bytes, copied)) if len(formats) > 1 else 0


# What CPU operators allocate inside themselves, out of a dispatch mode's sight (read off torch.profiler's memory events):
# oneDNN's own layout of a convolution's weight, in the backward pass also of its gradient before it is copied out, and
# pooling's second copy where a gradient arrives in another memory format, as it does from a flattened map.
SCRATCH = 8216
WORKSPACE: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    torch.ops.aten.convolution.default: lambda args: _bytes(args[1]) + SCRATCH,
    torch.ops.aten.convolution_backward.default: lambda args: 2 * _bytes(args[2]),
    torch.ops.aten._adaptive_avg_pool2d_backward.default: lambda args: _relaid(args[0], args[1]),
    torch.ops.aten.max_pool2d_with_indices_backward.default: lambda args: _relaid(args[0], args[1], args[7]),
}


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live tensor storages; may be entered many times, and what stays alive in between stays counted.

    `peak` and `live` are bytes. A storage is counted from the first operation that makes or reads it until it is freed.
    With `allowed` (bytes), the operation that passes it raises MemoryBudgetExceededError.
    """

    def __init__(self, allowed: int | None = None, where: str = "this task") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allowed, self.where = allowed, where
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler: 75 MB and more than a second on a board

    def count(self, value: object) -> None:
        """Count the storage of a tensor, if it is one and not counted yet."""
        if not isinstance(value, Tensor):
            return
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            weakref.finalize(storage, self._forget, key).atexit = False
        elif known >= size:
            return
        self._sizes[key] = size
        self.live += size - (known or 0)
        self._reach(self.live)

    def _reach(self, size: int) -> None:
        self.peak = max(self.peak, size)
        if self.allowed is not None and size > self.allowed:
            raise MemoryBudgetExceededError(size, self.allowed, self.where)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            self.count(value)
        result = func(*args, **kwargs)
        for value in tree_leaves(result):
            self.count(value)
        if (workspace := WORKSPACE.get(func)) is not None:
            self._reach(self.live + workspace(args))
        return result


@dataclass(frozen=True)
class StepPrice:
    """What one training step costs: peak bytes, and FLOPs (2 per multiply-accumulate, forward and backward)."""

    peak_bytes: int
    flops: int


def trace(work: Callable[[], object]) -> StepPrice:
    """Run `work` on fake tensors: its price without its memory. Everything it uses must be made inside of it.

    A server's affair: fake tensors import torch's compiler, which no device should pay for.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    memory, flops = PeakMemory(), FlopCounterMode(display=False)
    with torch.random.fork_rng(devices=[]), FakeTensorMode(), memory, flops:
        work()
    return StepPrice(memory.peak, int(flops.get_total_flops()))


def fedepth_price(blueprint: Blueprint, atoms: Sequence[int], batch_size: int = 32) -> float:
    """FeDepth's own memory of a sub-problem (its Table 1): pytorch-summary's estimate, in bytes.

    2 x 4 bytes x the outputs of all layers that are modules, and of each block itself, x batch, + 4 bytes x parameters.
    Neither the stem (atom 0) nor the head is charged, and shortcuts count as if they had no parameters (option A).
    """
    return sum(_block_bytes(blueprint, atom, batch_size, shortcut_parameters=False) for atom in atoms if atom)


def fedepth_full_bytes(blueprint: Blueprint, batch_size: int = 32) -> float:
    """The bytes FeDepth's rule gives the whole model: all blocks with 1x1 shortcuts, the stem's convolution, the linear."""
    blocks = sum(_block_bytes(blueprint, atom, batch_size) for atom in range(1, len(blueprint.atoms)))
    stem = _layer_bytes(blueprint.atoms[0].build(), blueprint.input_shape, batch_size, (nn.Conv2d,))
    return stem + blocks + _layer_bytes(blueprint.build_head(), blueprint.feature_shape, batch_size, (nn.Linear,))


def _block_bytes(blueprint: Blueprint, atom: int, batch_size: int, *, shortcut_parameters: bool = True) -> float:
    module, shape = blueprint.atoms[atom].build(), blueprint.shape_before(atom)
    own_output = 2 * 4 * batch_size * math.prod(blueprint.atoms[atom].shape)
    total = own_output + _layer_bytes(module, shape, batch_size, (nn.Conv2d, nn.BatchNorm2d, nn.Linear))
    free = [] if shortcut_parameters else [p for name, p in module.named_parameters() if name.startswith("shortcut")]
    return total - 4 * sum(p.numel() for p in free)


def _layer_bytes(module: nn.Module, shape: Sequence[int], batch_size: int, kinds: tuple[type, ...]) -> float:
    """2 x 4 bytes x outputs of the layers of these kinds x batch + 4 bytes x their parameters."""
    outputs: list[int] = []
    layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
    hooks = [layer.register_forward_hook(lambda _m, _i, out: outputs.append(out[0].numel())) for layer in layers]
    with torch.no_grad():
        module.eval()(torch.zeros(2, *shape))
    for hook in hooks:
        hook.remove()
    parameters = sum(p.numel() for layer in layers for p in layer.parameters())
    return 2 * 4 * batch_size * sum(outputs) + 4 * parameters
