"""What recorded calls cannot say of gradients: that a part of a forward pass has none, or a backward pass of its own.

torch.fx records calls alone. A module that does so is called as a whole, because its parts would learn something else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import Function

from piecework.models.imported.calls import name_of

GRADLESS = {"size", "getattr", "dim", "detach"}  # what they return has no gradients: lengths, mostly


class GradientTracer(fx.Tracer):
    """Refuses to record, under torch.no_grad, a call that would have gradients outside it."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.parameters = {name for name, _ in root.named_parameters()}
        self.learning = set[fx.Node]()  # calls whose results have gradients

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *others: Any, **more: Any) -> fx.Node:
        """Record a call."""
        node = super().create_node(kind, target, args, kwargs, *others, **more)
        learns = bool(self.learning & {*node.all_input_nodes}) and name_of(node) not in GRADLESS
        self.require_gradients(learns and kind != "output")
        if (
            learns
            or (kind == "get_attr" and target in self.parameters)
            or (kind == "call_module" and self._has(target))
        ):
            self.learning.add(node)
        return node

    def _has(self, path: str) -> bool:
        """Return whether a module has parameters."""
        return any(name.startswith(f"{path}.") for name in self.parameters)

    def require_gradients(self, learns: bool) -> None:
        """Raise TypeError where gradients are off for what would have some."""
        if learns and not torch.is_grad_enabled():
            raise TypeError("a part of its forward pass is under torch.no_grad, for which it may use detach()")


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
