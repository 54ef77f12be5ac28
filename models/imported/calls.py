"""What the recorded calls of a forward pass do with their inputs: whether they return views of them, or change them."""

import operator
from collections.abc import Mapping, Sequence

from torch import fx, nn

# Modules and functions whose result may share memory with their input.
VIEWS = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
VIEW_NAMES = {
    *(
        "flatten",
        "view",
        "reshape",
        "permute",
        "transpose",
        "squeeze",
        "unsqueeze",
        "unflatten",
        "contiguous",
        "getitem",
    ),
    *("chunk", "split", "unbind", "narrow", "expand", "dropout", "movedim", "swapaxes", "view_as", "t"),
}
CASTS = {
    "to",
    "type",
    "type_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "int",
    "long",
    "bool",
    "detach",
}  # or the input
IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}


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


def is_changed(node: fx.Node, later: Sequence[fx.Node], modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a later node changes a node's value in place, itself or through a view."""
    aliases = {node}
    for other in later:
        if other.args and other.args[0] in aliases:
            if is_in_place(other, modules):
                return True
            if is_view(other, modules):
                aliases.add(other)
    return False
