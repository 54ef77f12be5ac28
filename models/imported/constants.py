"""What a recorded forward pass computes without its examples, so that each atom can compute it by itself.

A causal mask, a table of rotations, and slices of them as long as the input are used by every layer of a transformer. If one
atom had to get them from another, no single tensor would cross between two layers.
"""

import operator
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from torch import fx, nn

from piecework.models.imported.calls import is_changed, is_in_place, module_of, name_of
from piecework.models.imported.contexts import MAKERS

# Functions, operators and methods that draw no random numbers. What others return is computed once, where it is written.
PURE = {
    *("getattr", "size", "dim", "getitem", "view", "reshape", "permute", "transpose", "t", "squeeze", "unsqueeze"),
    *("flatten", "expand", "repeat", "repeat_interleave", "contiguous", "chunk", "split", "unbind", "narrow", "cat"),
    *("stack", "tril", "triu", "outer", "einsum", "matmul", "where", "masked_fill", "cumsum", "detach", "clone"),
    *("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "neg", "pow", "sqrt", "rsqrt", "reciprocal"),
    *("cos", "sin", "exp", "log", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "invert"),
    *("logical_not", "logical_and", "logical_or", "ones_like", "zeros_like", "full_like"),
    *("abs", "clamp", "clip", "minimum", "maximum", "sign", "floor", "ceil", "round", "sum", "mean", "softmax", "roll"),
    *("meshgrid", "movedim", "unflatten", "expand_as", "view_as", "view_as_complex", "view_as_real", "polar", "flip"),
    *("to", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool"),
}
Modules = Mapping[str, nn.Module]
Values = Mapping[fx.Node, Any]


def find_constants(
    nodes: Sequence[fx.Node], modules: Modules, values: Values, lengths: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the nodes whose results are the same for all examples, or depend on their number, and that no later node changes.

    They are buffers, `lengths` of tensors and their device, tensors that are made of nothing, and what is computed of these.
    Parameters are none, because they learn, and neither are buffers of layers that are called, which may change them.
    """
    changed = {id(b) for node in nodes if (layer := module_of(node, modules)) is not None for b in layer.buffers()}
    for p, node in enumerate(nodes):
        if node.op == "get_attr" and is_changed(node, nodes[p + 1 :], modules, values):
            changed.add(id(_attribute(node, modules)))
    found = set[fx.Node]()
    for p, node in enumerate(nodes):
        if node.op == "get_attr":
            attribute = _attribute(node, modules)
            constant = not isinstance(attribute, nn.Parameter) and id(attribute) not in changed
        elif node in lengths or is_device(node):
            constant = True
        else:
            constant = _is_pure(node, found) and not is_changed(node, nodes[p + 1 :], modules, values)
        if constant:
            found.add(node)
    return found


def _attribute(node: fx.Node, modules: Modules) -> Any:
    """Return the parameter or buffer that a node reads."""
    owner, _, name = str(node.target).rpartition(".")
    return getattr(modules[owner], name)


def _is_pure(node: fx.Node, constants: Set[fx.Node]) -> bool:
    """Return whether a node computes the same of `constants` in each pass."""
    if node.op not in ("call_function", "call_method") or not constants >= set(node.all_input_nodes):
        return False
    return node.target in MAKERS or (name_of(node) in PURE and not is_in_place(node, {}) and "out" not in node.kwargs)


def is_length(node: fx.Node) -> bool:
    """Return whether a node returns the length of an axis of a tensor."""
    if node.op == "call_method":
        return node.target == "size" and len(node.args) + len(node.kwargs) == 2
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and _is_shape(node.args[0])


def _is_shape(node: fx.Node) -> bool:
    """Return whether a node returns the lengths of all axes of a tensor, or a slice of these."""
    if node.op == "call_method":
        return node.target == "size" and len(node.args) + len(node.kwargs) == 1
    if node.target is operator.getitem and isinstance(node.args[1], slice):
        return isinstance(node.args[0], fx.Node) and _is_shape(node.args[0])
    return node.target is getattr and node.args[1:] == ("shape",)


def is_device(node: fx.Node) -> bool:
    """Return whether a node returns the device of a tensor, which is that of all tensors."""
    return node.target is getattr and node.args[1:] == ("device",)


def find_needed(wanted: Set[fx.Node], constants: Set[fx.Node]) -> set[fx.Node]:
    """Return the constants that nodes use, and those that these are computed of."""
    found = set[fx.Node]()
    pending = [each for node in wanted for each in node.all_input_nodes if each in constants]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [each for each in node.all_input_nodes if each in constants]
    return found
