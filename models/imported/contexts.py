"""What holds while a forward pass is recorded: makers of tensors are recorded too, and the module stays as it was."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from piecework.models.imported.caches import apart
from piecework.models.imported.calls import is_in_place
from piecework.models.imported.containers import contents_of, restore
from piecework.models.imported.gradients import GradientTracer, refuse_autocast, refuse_own_backward

INTERNAL = set(vars(nn.Module()))  # attributes in which torch itself keeps something
SEED = 2358105927  # one that no module sets in its forward pass, which would not be seen then
# Tensors that a forward pass makes are made anew in each pass, like those that torch's layers make.
MAKERS = (torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros)


@contextmanager
def recording(tracer: GradientTracer, root: nn.Module) -> Iterator[None]:
    """Record what is called, and leave torch and the module as they were."""
    with (
        apart(),
        _RecordMakers(tracer),
        _keep_buffers(root),
        _record_lengths_and_types(tracer),
        refuse_own_backward(),
        refuse_autocast(tracer),
        _keep_attributes(root),
        torch.enable_grad(),
    ):
        yield


class _RecordMakers(TorchFunctionMode):
    """Records the calls that make tensors of nothing, which torch.fx would run, and keep what they made."""

    def __init__(self, tracer: GradientTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record or pass on a call."""
        kwargs = kwargs or {}
        if func in MAKERS and self.tracer.recording:
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)


def _packing(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a maker that takes recorded lengths as one tuple: torch refuses them before a mode sees the call."""

    def packed(*size: Any, **kwargs: Any) -> Tensor:
        recorded = len(size) > 1 and any(isinstance(length, fx.Proxy) for length in size)
        return make(size, **kwargs) if recorded else make(*size, **kwargs)

    return packed


def _limits(find: Callable[..., Any], tracer: GradientTracer) -> Callable[..., Any]:
    """Return torch.finfo or torch.iinfo for types that may be recorded, which torch refuses."""

    def found(kind: Any = torch.float32) -> Any:
        recorded = isinstance(kind, fx.Proxy)
        return tracer.create_proxy("call_function", find, (kind,), {}) if recorded else find(kind)

    return found


@contextmanager
def _record_lengths_and_types(tracer: GradientTracer) -> Iterator[None]:
    """Have `torch.ones(length, length)` be recorded like `torch.ones((length, length))`, and `torch.finfo(x.dtype)` too."""
    own = {name: getattr(torch, name) for name in ("ones", "zeros", "finfo", "iinfo")}
    try:
        for name, function in own.items():
            setattr(torch, name, _packing(function) if name in ("ones", "zeros") else _limits(function, tracer))
        yield
    finally:
        for name, function in own.items():
            setattr(torch, name, function)


@contextmanager
def _keep_buffers(root: nn.Module) -> Iterator[None]:
    """Refuse that a forward pass puts a recorded value in the place of a buffer, whose module would keep it.

    What an operator in place assigns, as `self.steps += 1` does, is the buffer that it changed.
    """

    buffers = dict(root.named_buffers())

    def keep(module: nn.Module, name: str, value: Any) -> Any:
        if not isinstance(value, fx.Proxy):
            return None
        node, buffer = value.node, module._buffers.get(name)
        while is_in_place(node, {}):
            node = node.all_input_nodes[0]
        if buffer is not None and node.op == "get_attr" and buffers.get(str(node.target)) is buffer:
            return buffer
        raise TypeError(f"its forward pass assigns {name!r} anew; change the buffer in place (copy_, mul_)")

    handle = register_module_buffer_registration_hook(keep)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _keep_attributes(root: nn.Module) -> Iterator[None]:
    """Restore what a forward pass assigns to attributes of modules. Raises TypeError for one, which names it.

    Recorded values are left: a later pass that goes on from them is refused.
    """
    with restored(root, lambda value: not any(isinstance(each, fx.Proxy) for each in tree_leaves(value))) as changed:
        yield
    if changed:
        raise TypeError(f"its forward pass changes {changed[0]!r}, which no file has")


@contextmanager
def drawing_alike() -> Iterator[None]:
    """Have all generators draw what they draw after one seed, and leave them as they were."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


@contextmanager
def restored(root: nn.Module, chosen: Callable[[Any], bool] = lambda _: True) -> Iterator[list[str]]:
    """Give attributes of modules the values back that they had, if those that they have now are `chosen`.

    What dicts, lists, sets and plain objects among them hold is given back, too. The list that is yielded has the names in the
    end.
    """
    before = {module: dict(vars(module)) for module in root.modules()}
    held = [
        (name, contents_of([value])) for own in before.values() for name, value in own.items() if name not in INTERNAL
    ]
    changed = list[str]()
    try:
        yield changed
    finally:
        changed += [name for name, contents in held if restore(contents, chosen)]
        for module, own in before.items():
            attributes = vars(module)
            unlike = [name for name, value in attributes.items() if name not in own or own[name] is not value]
            for name in filter(lambda name: chosen(attributes[name]), unlike):
                changed.append(name)
                if name in own:
                    attributes[name] = own[name]
                else:
                    del attributes[name]
