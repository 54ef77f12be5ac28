"""What recorded calls cannot say of gradients: that a part of a forward pass has none, or a backward pass of its own.

torch.fx records calls alone. A module that does so is called as a whole, because its parts would learn something else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.autograd import Function

from piecework.models.imported.calls import name_of

GRADLESS = {"size", "dim", "numel", "detach"}  # what they return has no gradients: lengths, mostly
FACTS = {
    "shape",
    "ndim",
    "device",
    "dtype",
    "layout",
    "requires_grad",
    "is_cuda",
    "is_leaf",
}  # of tensors; `x.T` is none


class GradientTracer(fx.Tracer):
    """Refuses to record, under torch.no_grad, a call that would have gradients outside it."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.parameters = {name for name, _ in root.named_parameters()}
        self.learning = set[fx.Node]()  # calls whose results have gradients
        self.contexts = _contexts()
        self.refused: TypeError | None = None
        self.recording = False

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *others: Any, **more: Any) -> fx.Node:
        """Record a call. What it makes on the device of the recording's parameters is made on that of its examples."""
        args, kwargs = fx.node.map_aggregate((args, kwargs), self._place)
        node = super().create_node(kind, target, args, kwargs, *others, **more)
        self._require_contexts()
        if any(each.graph is not self.graph for each in node.all_input_nodes):
            self.refuse("its forward pass goes on from what it kept of the pass before")
        gradless = node.args[1] in FACTS if node.target is getattr else name_of(node) in GRADLESS
        learns = bool(self.learning & {*node.all_input_nodes}) and not gradless
        self.require_gradients(learns and kind != "output")
        if (
            learns
            or (kind == "get_attr" and target in self.parameters)
            or (kind == "call_module" and self._has(target))
        ):
            self.learning.add(node)
        return node

    def _place(self, argument: Any) -> Any:
        """Return the argument of a call, or the device of the examples in place of `meta`."""
        if not isinstance(argument, torch.device) or argument.type != "meta":
            return argument
        examples = next(node for node in self.graph.nodes if node.op == "placeholder")
        return super().create_node("call_function", getattr, (examples, "device"), {})

    def _has(self, path: str) -> bool:
        """Return whether a module has parameters."""
        return any(name.startswith(f"{path}.") for name in self.parameters)

    def require_gradients(self, learns: bool) -> None:
        """Raise TypeError where gradients are off for what would have some."""
        if learns and not torch.is_grad_enabled():
            self.refuse("a part of its forward pass is under torch.no_grad, for which it may use detach()")

    def _require_contexts(self) -> None:
        """Raise TypeError where precision or random numbers are other ones than at the beginning."""
        if _contexts() != self.contexts:
            self.refuse("a part of its forward pass is under torch.autocast, or has a seed of its own")

    def refuse(self, reason: str) -> NoReturn:
        """Raise TypeError, and keep it: the code that is recorded may catch it."""
        self.refused = TypeError(reason)
        raise self.refused


def _contexts() -> tuple[bool, torch.dtype, int]:
    """Return what the calls of a forward pass depend on, but do not say."""
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.initial_seed()


@contextmanager
def refuse_autocast(tracer: GradientTracer) -> Iterator[None]:
    """Have code that is recorded refuse torch.autocast, also where it is turned off: a run may have turned it on outside."""
    own: Any = torch.autocast.__enter__

    def enter(context: torch.autocast) -> Any:
        if tracer.recording:
            tracer.refuse("a part of its forward pass is under torch.autocast, which calls alone do not say")
        return own(context)

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = own  # type: ignore[method-assign]


@contextmanager
def refuse_own_backward() -> Iterator[None]:
    """Have functions with a backward pass of their own refuse recorded values, not record their forward pass alone."""
    own = Function.__dict__["apply"]

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, fx.Proxy) for each in [*args, *kwargs.values()]):
            raise TypeError(f"{kind.__name__} has a backward pass of its own")
        return own.__get__(None, kind)(*args, **kwargs)

    Function.apply = classmethod(apply)
    try:
        yield
    finally:
        Function.apply = own
