"""Where a recorded forward pass is cut into atoms: where a single tensor crosses.

Residual blocks stay whole, because their skip crosses too. Layers that share a parameter stay in one atom, and so do an
operation in place and what it changes. Each atom has a layer with weights: norms, activations and pooling of maps belong to the
layer before them, and what only flattens, averages or drops features to the layer after. What depends on no example crosses
nowhere: each atom that uses it computes it by itself (constants.py).
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch
from torch import fx, nn

from piecework.models.imported.calls import VIEW_NAMES, VIEWS, is_changed, module_of, name_of
from piecework.models.imported.gradients import FACTS
from piecework.models.imported.recording import Recording

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
MOVES = {"permute", "transpose", "movedim", "swapaxes", "t"}  # they settle the layout of features
AVERAGES = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
AVERAGE_NAMES = {"mean", "adaptive_avg_pool2d", "size", "_assert", "require_number"}
Modules = Mapping[str, nn.Module]


def is_weighted(node: fx.Node, modules: Modules, constants: Collection[fx.Node] = ()) -> bool:
    """Return whether a node has weights other than a norm's. A kernel that is one of `constants` does not learn."""
    module = module_of(node, modules)
    if module is not None:
        return not isinstance(module, NORMS) and next(module.parameters(), None) is not None
    kernel = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    return (
        node.op == "call_function"
        and name_of(node) in ("conv2d", "linear", "conv1d", "embedding")
        and kernel not in constants
    )


def crossings(recording: Recording) -> list[int]:
    """Return the positions p of nodes whose result alone crosses to later nodes, and is a tensor that these leave as it is.

    One of its axes is that of the examples.
    """
    nodes, modules, constants = recording.nodes, recording.modules, recording.constants
    place = {node: p for p, node in enumerate(nodes)}
    last = {node: max((place.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes}
    tied = _ties(nodes, modules, constants)
    found: list[int] = []
    for p, node in enumerate(nodes[:-1]):
        live = [
            other for other in nodes[: p + 1] if last[other] > p and other.op != "get_attr" and other not in constants
        ]
        alone = live == [node] and _can_cross(node, recording) and not any(a <= p < b for a, b in tied)
        if alone and not is_changed(node, nodes[p + 1 :], modules, recording.values):
            found.append(p)
    return found


def _can_cross(node: fx.Node, recording: Recording) -> bool:
    """Return whether a result is numbers of examples that messages and files hold."""
    return node in recording.axes and recording.values[node].dtype == torch.float32


def _ties(nodes: Sequence[fx.Node], modules: Modules, constants: Collection[fx.Node]) -> list[tuple[int, int]]:
    """Return the first and the last place at which each parameter or buffer is used, of those that are used more than once.

    Buffers that are `constants` tie nothing.
    """
    uses: dict[int, list[int]] = {}
    for p, node in enumerate(nodes):
        module = module_of(node, modules)
        if module is not None:
            for array in [*module.parameters(), *module.buffers()]:
                uses.setdefault(id(array), []).append(p)
        elif node.op == "get_attr" and node not in constants:
            owner, _, name = str(node.target).rpartition(".")
            places = [nodes.index(user) for user in node.users if user.op != "output"]
            uses.setdefault(id(getattr(modules[owner], name)), []).extend(places)
    return [(min(places), max(places)) for places in uses.values() if places and min(places) < max(places)]


def choose(recording: Recording) -> list[int]:
    """Return the positions behind which the nodes are cut, so that each atom has a layer with weights."""
    nodes, modules, constants = recording.nodes, recording.modules, recording.constants
    possible = crossings(recording)
    weighted = [p for p, node in enumerate(nodes) if is_weighted(node, modules, constants)]
    found: list[int] = []
    for a, b in pairwise(weighted):
        between = [p for p in possible if a <= p < b]
        if not between:
            continue
        settled = max(p for p in range(a, b) if p == a or not (nodes[p] in constants or _is_passing(nodes[p], modules)))
        found.append(next((p for p in between if p >= settled), between[-1]))
    return found


def _is_passing(node: fx.Node, modules: Modules) -> bool:
    """Return whether a node only flattens, averages or drops features, or reads their shape."""
    module = module_of(node, modules)
    if module is not None:
        return isinstance(module, (*AVERAGES, *VIEWS))
    if node.target is getattr:
        return node.args[1] in FACTS
    return node.op == "get_attr" or name_of(node) in (VIEW_NAMES - MOVES) | AVERAGE_NAMES
