"""The recorded calls of a module's forward pass, by torch.fx, on tensors without values.

torch.fx is a part of `import torch`, and records the Python code of `forward` itself, so that a client finds the same cut from
the same code, without the compiler (which torchvision imports by itself), and without memory for weights. torch.export, and the
splitter of torch.distributed.pipelining, which is built on it, import the compiler.
"""

import inspect
import keyword
import operator
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from piecework.models.imported.branches import Branches
from piecework.models.imported.calls import IN_PLACE
from piecework.models.imported.contexts import recording
from piecework.models.imported.gradients import GradientTracer

Answer = TypeVar("Answer")
UNKNOWN = "its forward pass branches on more than lengths, such as values or the number of examples"
# What torch.fx keeps in the module that runs a graph, where a layer of this name would be in its place or hidden by it.
GRAPH_NAMES = {"meta", "shape_env", "_code", "_graph", "_prologue_start"} | {*dir(fx.GraphModule)} - {*dir(nn.Module)}
OPENED = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)  # of torch's own classes, and what derives from these


class UntraceableError(ValueError):
    """The forward pass of a module cannot be recorded. The message names the module and the reason."""


class _Proxy(fx.Proxy):
    """A value in a recorded call. `x += y` changes the memory that x has, which fx.Proxy would record as `x = x + y`.

    What `x.T` computes is recorded where it stands, and not where it is used first, which may be outside of a torch.no_grad.
    """

    tracer: "_Tracer"

    def __getattr__(self, k: str) -> Any:
        """Record that an attribute is read, or that a method is called. Raises AttributeError if there is none."""
        if not (hasattr(Tensor, k) or k.startswith("__") or self.tracer.ask(self.tracer.branches.has, self.node, k)):
            raise AttributeError(k)
        if inspect.isgetsetdescriptor(getattr(Tensor, k, None)):
            return self.tracer.create_proxy("call_function", getattr, (self, k), {})
        return super().__getattr__(k)

    def __iter__(self) -> Iterator[Any]:
        return self.tracer.iter(self)

    def __len__(self) -> int:
        return self.tracer.length(self.node)

    def __int__(self) -> int:
        return int(self.tracer.number(self.node))

    def __index__(self) -> int:
        found = self.tracer.ask(self.tracer.branches.number, self.node)
        if found is None:  # not refused: torch, which takes recorded lengths in another way, catches it
            raise TypeError(UNKNOWN)
        self.tracer.asked.append(self.tracer.create_node("call_function", require_number, (self.node, found), {}))
        return operator.index(cast("int", found))

    def __float__(self) -> float:
        return float(self.tracer.number(self.node))


def require_number(found: float, recorded: float) -> None:
    """Raise ValueError for another number than the one that code has been recorded with, as in a narrower model."""
    if found != recorded:
        raise ValueError(f"its code was recorded with the length {recorded}, and has {found} here")


def _recorded(change: Callable[..., Any]) -> Callable[[_Proxy, Any], Any]:
    """Return the method that records an operator in place."""

    def method(self: _Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", change, (self, other), {})

    return method


for _change in IN_PLACE:
    setattr(_Proxy, f"__{_change.__name__}__", _recorded(_change))


class _BufferProxy(_Proxy):
    """A buffer in a recorded call, whose lengths and type are known."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, buffer: Tensor) -> None:
        super().__init__(node, tracer)
        self.shape, self.dtype, self.ndim = buffer.shape, buffer.dtype, buffer.ndim
        self.size, self.dim, self.numel = buffer.size, buffer.dim, buffer.numel

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return map(partial(operator.getitem, self), range(len(self)))


class _Tracer(GradientTracer):
    """Records calls of torch's own layers and of the modules in `leaves`, and enters all others. `inside` are those entered.

    It does not record meanwhile what `branches` run.
    """

    def __init__(self, root: nn.Module, leaves: set[str], branches: Branches) -> None:
        super().__init__(root)
        self.leaves, self.branches = leaves, branches
        self.asked: list[fx.Node] = []
        self.inside: list[str] = []

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *others: Any, **more: Any) -> fx.Node:
        """Record a call. Where it takes a length that torch has just asked for, it depends on no number of the recording."""
        node = super().create_node(kind, target, args, kwargs, *others, **more)
        while self.asked and target is not require_number:
            check = self.asked.pop()
            if check.graph is self.graph and check.args[0] in node.all_input_nodes:
                self.graph.erase_node(check)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the value that a node stands for."""
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is called as a whole."""
        hooked = bool(m._backward_hooks or m._backward_pre_hooks)
        return (
            hooked
            or (m is not self.root and type(m).train is not nn.Module.train)  # which a part would not call
            or module_qualified_name in self.leaves
            or any(kind.__module__.startswith("torch.nn") and kind not in OPENED for kind in type(m).__mro__)
        )

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Record a forward pass that gets one tensor, so that its other arguments have their own defaults."""

        def forward(self: nn.Module, x: Any) -> Any:
            return root_fn(self, x)

        return super().create_args_for_root(forward, is_module)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Record that a buffer is read: what is computed of it at once would be computed of a tensor without values."""
        if not self.recording:
            return attr_val
        if not isinstance(attr_val, Tensor) or isinstance(attr_val, nn.Parameter):
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        name = next((name for name, buffer in self.root.named_buffers() if buffer is attr_val), None)
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy(
                "get_attr", name, (), {}, proxy_factory_fn=lambda node: _BufferProxy(node, self, attr_val)
            )
        return parameter_proxy_cache[name]

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Return whether a recorded value is true, which has to be known."""
        return bool(self._require(self.ask(self.branches.number, obj.node)))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Return the elements of a recorded value, whose number has to be known. Tensors are unbound, as torch does."""
        length = self.length(obj.node)
        if self.ask(self.branches.has, obj.node, "unbind"):
            obj = self.create_proxy("call_function", torch.unbind, (obj,), {})
        return map(partial(operator.getitem, obj), range(length))

    def number(self, node: fx.Node) -> Any:
        """Return a recorded number, which has to be known; a part in which it is another one will refuse to run."""
        found = self._require(self.ask(self.branches.number, node))
        self.create_node("call_function", require_number, (node, found), {})
        return found

    def length(self, node: fx.Node) -> int:
        """Return how many elements a recorded value has, which has to be known."""
        return self._require(self.ask(self.branches.length, node))

    def ask(self, question: Callable[..., Answer], node: fx.Node, *more: str) -> Answer:
        """Return what `branches` know of a recorded value. Raises TraceError for one of a pass before."""
        if not self.recording:
            raise TraceError("its forward pass goes on from what it kept of the pass before")
        self.recording = False
        try:
            return question(node, *more)
        finally:
            self.recording = True

    def _require(self, answer: Answer | None) -> Answer:
        """Return an answer. Raises TypeError if there is none."""
        if answer is None:
            self.refuse(UNKNOWN)
        return answer

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record or enter a module; where recording fails, `inside` keeps the path to it."""
        if not self.recording or not (m is self.root or self._is_installed(m)):
            return forward(*args, **kwargs)  # one that is made in the forward pass is a function of torch's
        self.require_gradients(next(m.parameters(), None) is not None)
        self.inside.append(self.path_of_module(m))
        found = super().call_module(m, forward, args, kwargs)
        self.inside.pop()
        return found

    def _is_installed(self, m: nn.Module) -> bool:
        return any(m is each for each in self.root.modules())


def record_calls(root: nn.Module, branches: Branches) -> fx.Graph:
    """Return the calls of a module's forward pass, which takes one tensor.

    Where its code branches on a recorded value, or counts by it, `branches` know what that is. A submodule whose own code
    cannot be recorded, because it branches on values or on `self.training`, is called as a whole. Raises UntraceableError if
    that is the whole module.
    """
    leaves: set[str] = set()
    while True:
        tracer, before = _Tracer(root, leaves, branches), _random_states()
        try:
            trained = _trace(tracer, root.train(True))
            evaluated = _trace(tracer, root.train(False))
        except Exception as error:  # whatever the user's code raises on a tensor without values
            reason = str(error).partition("\n")[0] or type(error).__name__
            leaves.add(_inner(root, tracer.inside[-1:], leaves, reason))
            continue
        if _random_states() != before:
            raise UntraceableError(
                f"{type(root).__name__}: its forward pass draws random numbers outside torch's layers"
            )
        calls = len(trained.nodes), len(evaluated.nodes)
        pairs = [*zip(trained.nodes, evaluated.nodes, strict=False)]
        unlike = next((one for one, other in pairs if not _is_alike(one, other)), None)
        if unlike is None and calls[0] == calls[1]:
            return evaluated
        stack = list(unlike.meta.get("nn_module_stack", {})) if unlike is not None else []
        leaves.add(_inner(root, stack[-1:], leaves, "its forward pass asks for self.training"))


def _is_alike(trained: fx.Node, evaluated: fx.Node) -> bool:
    """Return whether a pass calls the same in training and in evaluation.

    Where one is given True and the other False, the latter reads `training` of the part that it belongs to from now on.
    """
    asks = [n for n, each in enumerate(evaluated.args) if each is False and trained.args[n : n + 1] == (True,)]
    named = [key for key, each in evaluated.kwargs.items() if each is False and trained.kwargs.get(key) is True]
    before, own = evaluated.args, evaluated.kwargs
    evaluated.args = tuple(True if n in asks else each for n, each in enumerate(before))
    evaluated.kwargs = {key: True if key in named else each for key, each in own.items()}
    if _call_of(trained) != _call_of(evaluated):
        evaluated.args, evaluated.kwargs = before, own
        return False
    if asks or named:
        with evaluated.graph.inserting_before(evaluated):
            training = evaluated.graph.get_attr("training")
        evaluated.args = tuple(training if n in asks else each for n, each in enumerate(before))
        evaluated.kwargs = {key: training if key in named else each for key, each in own.items()}
    return True


def _call_of(node: fx.Node) -> tuple[str, ...]:
    """Return what a node calls, in words: users of its result may differ."""
    return node.op, str(node.target), str(node.args), str(node.kwargs)


def _trace(tracer: _Tracer, root: nn.Module) -> fx.Graph:
    """Return the recorded calls. Raises what the code that was recorded has caught, too."""
    tracer.inside, tracer.refused, tracer.recording = [], None, True
    try:
        with recording(tracer, root):
            graph = tracer.trace(root)
    finally:
        tracer.recording = False
    if tracer.refused:
        raise tracer.refused
    return graph


class Recorded(nn.Module):
    """A part of a module: its submodules, run by recorded calls, whose Python is `_recorded_calls`.

    A GraphModule and its graph refer to each other, so that a dropped one would keep its weights until the next garbage
    collection; this one has no graph, and frees them at once.
    """

    _recorded_calls = ""  # no name that a layer of the user's may have


def runnable(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return what runs a graph. Raises UntraceableError for a layer whose name is torch.fx's or Python's own."""
    for node in graph.nodes:
        first, *others = str(node.target).split(".") if node.op in ("call_module", "get_attr") else [""]
        if first in GRAPH_NAMES or any(map(keyword.iskeyword, (first, *others))):
            raise UntraceableError(
                f"{type(root).__name__}: torch.fx cannot call what has the name {node.target!r}: rename it"
            )
    return fx.GraphModule(root, graph)


def as_module(root: nn.Module, graph: fx.Graph) -> Recorded:
    """Return the module that runs a graph on the submodules and parameters of `root`."""
    made = runnable(root, graph)
    forward = vars(type(made))["forward"]
    found: Recorded = type("Recorded", (Recorded,), {"forward": forward, "_recorded_calls": made.code})()
    found._parameters, found._buffers, found._modules = made._parameters, made._buffers, made._modules
    return found


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


def _inner(root: nn.Module, path: list[str], leaves: set[str], reason: str) -> str:
    """Return the path of the module that cannot be recorded. Raises UntraceableError if it is the whole."""
    if not path or path[0] in ("", *leaves):
        raise UntraceableError(f"{type(root).__name__}: {reason}")
    return path[0]
