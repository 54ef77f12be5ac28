"""Where a recorded forward pass is cut into atoms: where a single tensor crosses.

Residual blocks stay whole, because their skip crosses too. Layers that share a parameter stay in one atom, and so do an
operation in place and what it changes. Each atom has a layer with weights: norms, activations and pooling of maps belong to the
layer before them, and what only flattens, averages or drops features to the layer after.
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
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
MOVES = {"permute", "transpose", "movedim", "swapaxes", "t"}  # they settle the layout of features
AVERAGES = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
AVERAGE_NAMES = {"mean", "adaptive_avg_pool2d", "size", "getattr", "_assert"}
IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}


def name_of(node: fx.Node) -> str:
    """Return the name of a function or of a tensor's method that a node calls."""
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def module_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return the module that a node calls."""
    return modules[str(node.target)] if node.op == "call_module" else None


def is_weighted(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a node has weights other than a norm's."""
    module = module_of(node, modules)
    if module is not None:
        return not isinstance(module, NORMS) and next(module.parameters(), None) is not None
    return node.op == "call_function" and name_of(node) in ("conv2d", "linear", "conv1d", "embedding")


def is_view(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the result of a node may share memory with its input."""
    module = module_of(node, modules)
    return isinstance(module, VIEWS) if module is not None else name_of(node) in VIEW_NAMES


def is_in_place(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a node changes its first input."""
    module = module_of(node, modules)
    if module is not None:
        return any(getattr(layer, "inplace", False) for layer in module.modules())
    name = name_of(node)
    changes = name.endswith("_") and not name.endswith("__")
    return changes or bool(node.kwargs.get("inplace")) or node.target in IN_PLACE


def crossings(nodes: Sequence[fx.Node], modules: Mapping[str, nn.Module], values: Mapping[fx.Node, Any]) -> list[int]:
    """Return the positions p of nodes whose result alone crosses to later nodes, and is a tensor that these leave as it is."""
    place = {node: p for p, node in enumerate(nodes)}
    last = {node: max((place.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes}
    tied = _ties(nodes, modules)
    found: list[int] = []
    for p, node in enumerate(nodes[:-1]):
        live = [other for other in nodes[: p + 1] if last[other] > p and other.op != "get_attr"]
        alone = live == [node] and isinstance(values[node], Tensor) and not any(a <= p < b for a, b in tied)
        if alone and not _changes(node, nodes[p + 1 :], modules):
            found.append(p)
    return found


def _ties(nodes: Sequence[fx.Node], modules: Mapping[str, nn.Module]) -> list[tuple[int, int]]:
    """Return the first and the last place at which each parameter or buffer is used, of those that are used more than once."""
    uses: dict[int, list[int]] = {}
    for p, node in enumerate(nodes):
        module = module_of(node, modules)
        if module is not None:
            for array in [*module.parameters(), *module.buffers()]:
                uses.setdefault(id(array), []).append(p)
        elif node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            places = [nodes.index(user) for user in node.users if user.op != "output"]
            uses.setdefault(id(getattr(modules[owner], name)), []).extend(places)
    return [(min(places), max(places)) for places in uses.values() if places and min(places) < max(places)]


def _changes(boundary: fx.Node, later: Sequence[fx.Node], modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a later node changes the boundary's value in place, itself or through a view."""
    aliases = {boundary}
    for node in later:
        if node.args and node.args[0] in aliases:
            if is_in_place(node, modules):
                return True
            if is_view(node, modules):
                aliases.add(node)
    return False


def choose(nodes: Sequence[fx.Node], modules: Mapping[str, nn.Module], values: Mapping[fx.Node, Any]) -> list[int]:
    """Return the positions behind which the nodes are cut, so that each atom has a layer with weights."""
    possible = crossings(nodes, modules, values)
    weighted = [p for p, node in enumerate(nodes) if is_weighted(node, modules)]
    found: list[int] = []
    for a, b in pairwise(weighted):
        between = [p for p in possible if a <= p < b]
        if not between:
            continue
        settled = max(p for p in range(a, b) if p == a or not _is_passing(nodes[p], modules))
        found.append(next((p for p in between if p >= settled), between[-1]))
    return found


def _is_passing(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a node only flattens, averages or drops features, or reads their shape."""
    module = module_of(node, modules)
    if module is not None:
        return isinstance(module, (*AVERAGES, *VIEWS))
    return node.op == "get_attr" or name_of(node) in (VIEW_NAMES - MOVES) | AVERAGE_NAMES
