"""What the recorded calls of a forward pass do with their inputs: whether they return views of them, or change them."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

# Modules and functions whose result may share memory with their input.
VIEWS = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
VIEW_NAMES = {
    *("flatten", "view", "view_as", "reshape", "permute", "transpose", "t", "squeeze", "unsqueeze", "unflatten"),
    *("contiguous", "getitem", "chunk", "split", "unbind", "narrow", "expand", "dropout", "movedim", "swapaxes"),
}
# What these return is their input if it has the type already.
CASTS = {*("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "detach")}
IN_PLACE = {  # and the same operator that changes nothing
    **{operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul},
    **{operator.itruediv: operator.truediv, operator.ifloordiv: operator.floordiv, operator.imod: operator.mod},
    **{operator.ipow: operator.pow, operator.imatmul: operator.matmul, operator.iand: operator.and_},
    **{operator.ior: operator.or_, operator.ixor: operator.xor},
    **{operator.ilshift: operator.lshift, operator.irshift: operator.rshift},
}
CHANGES = "changes"  # the inputs that a node has been seen to change, in its `meta`
NORMING = {"batch_norm", "instance_norm"}  # functions that change the statistics they are given


def name_of(node: fx.Node) -> str:
    """Return the name of a function or of a tensor's method that a node calls."""
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def module_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return the module that a node calls."""
    return modules[str(node.target)] if node.op == "call_module" else None


def is_view(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the result of a node may share memory with its input."""
    module = module_of(node, modules)
    return isinstance(module, VIEWS) if module is not None else name_of(node) in VIEW_NAMES | CASTS


def is_in_place(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a node changes its first input."""
    module = module_of(node, modules)
    if module is not None:
        return any(getattr(layer, "inplace", False) for layer in module.modules())
    name = name_of(node)
    changes = name.endswith("_") and not name.endswith("__") and node.target not in (operator.and_, operator.or_)
    return changes or bool(node.kwargs.get("inplace")) or node.target in IN_PLACE


def is_changed(
    node: fx.Node, later: Sequence[fx.Node], modules: Mapping[str, nn.Module], values: Mapping[fx.Node, Any]
) -> bool:
    """Return whether a later node changes a node's value in place, itself or through what may share its memory.

    That is what does in `values`, and views by name, since a step may lay out its tensors in another way.
    """
    aliases, memory = {node}, memory_of(values[node])
    for other in later:
        for changed in _changed_by(other, modules):
            if changed in aliases or (memory is not None and memory_of(values[changed]) == memory):
                return True
        if other.args and other.args[0] in aliases and is_view(other, modules):
            aliases.add(other)
    return False


def keep_numbers(nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> None:
    """Have operators in place on numbers change nothing: in the code of a graph, `n += 1` would change all that n names."""
    for node in nodes:
        if node.target in IN_PLACE and not isinstance(values[node.all_input_nodes[0]], Tensor):
            node.target = IN_PLACE[node.target]


def copy_views(nodes: Sequence[fx.Node], modules: Mapping[str, nn.Module], values: Mapping[fx.Node, Any]) -> None:
    """Have `x.view(...)` copy where it has to, since a step may lay out x in another way, unless its result is changed."""
    for p, node in enumerate(nodes):
        kinds = [each for each in [*node.args, *node.kwargs.values()] if isinstance(each, torch.dtype)]
        if node.op != "call_method" or node.target != "view" or kinds:
            continue
        if not is_changed(node, nodes[p + 1 :], modules, values):
            node.target = "reshape"


def _changed_by(node: fx.Node, modules: Mapping[str, nn.Module]) -> Iterator[fx.Node]:
    """Yield the inputs that a node changes."""
    changed = [node.kwargs.get("out")]
    if is_in_place(node, modules):
        changed += [node.args[0] if node.args else node.kwargs.get("input")]
    if node.op == "call_function" and name_of(node) in NORMING:
        changed += [*node.args[1:3], node.kwargs.get("running_mean"), node.kwargs.get("running_var")]
    yield from {*(each for each in changed if isinstance(each, fx.Node)), *node.meta.get(CHANGES, ())}


def memory_of(value: Any) -> int | None:
    """Return what tells a tensor's memory from others', also that of one without values."""
    dense = isinstance(value, Tensor) and value.layout == torch.strided
    return value.untyped_storage()._cdata if dense else None
