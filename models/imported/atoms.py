"""Atoms of a model outside this project: the module's own submodules, run by the recorded calls.

A device builds an atom from a copy of the module without values, and reads its weights from a file, so it never holds the rest.
"""

import copy
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Atom, Blueprint, Shape, unset_weights, weights_are_unset
from piecework.models.channels import channel_axes
from piecework.models.imported.agreement import require_same_operators
from piecework.models.imported.boundaries import choose, is_weighted
from piecework.models.imported.caches import apart, caches_of, find_caches, keep_caches, watching
from piecework.models.imported.constants import find_needed, is_device
from piecework.models.imported.contexts import drawing_alike, restored
from piecework.models.imported.graph import UntraceableError, as_module
from piecework.models.imported.initial import allocate, needs_arguments, take_initial
from piecework.models.imported.logits import EXAMPLES, require_logits_in_training, require_stateless, vocabulary_of
from piecework.models.imported.module import (
    Source,
    kept_buffers,
    make,
    require_finite,
    require_freed,
    require_state,
    unused_arrays,
)
from piecework.models.imported.narrow import kept_channels, narrow_all, require_linked
from piecework.models.imported.objects import FORGETTING, code_of, is_object, may_view, require_trainable
from piecework.models.imported.recording import Recording, reads_layout, record
from piecework.models.imported.source import find_make, is_own
from piecework.models.layers import narrowing, scale_channels
from piecework.models.memory_layout import keep_layout


@dataclass(frozen=True)
class CutModule:
    """A module in parts without values, the last of which is the head, with their names and the shapes of their outputs.

    `reason` says why a module is one part; `digest` is of its code and sizes. `vocabulary` is that of its tokens. Parts with
    code of the user's that is not recorded may be `viewing` their tensors, which maps with channels last do not allow, and some
    recorded calls do. `unused`
    are the module's arrays that are in no part.
    """

    parts: tuple[nn.Module, ...]
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    digest: str
    vocabulary: int = 0
    reason: str = ""
    viewing: frozenset[int] = frozenset()
    unused: tuple[str, ...] = ()


class Same(nn.Module):
    """Says how many logits its input has: the end of a head without a linear layer, or the head of a model that is one atom."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.out_features = num_classes

    def forward(self, z: Tensor) -> Tensor:
        """Return z[B, classes]."""
        return z


@lru_cache(maxsize=64)
def cut(source: Source) -> CutModule:
    """Return the module in parts, or as one with the reason. Raises ValueError if it does not map examples to classes."""
    # Tracing has only tensors of its own mode. Code that draws numbers has one cut, here and on the devices.
    with _disable_current_modes(), drawing_alike():
        return _narrow_cut(source) if source.width != 1 else _whole_cut(source)


FORGETTING.append(cut.cache_clear)


def _whole_cut(source: Source) -> CutModule:
    with without_data(), unset_weights(), apart(find_caches([find_make(source.name)])):
        root = make(source).eval()
    require_state(root, source)
    require_freed(root, source)
    require_trainable(root, source.name)
    with (
        restored(root),
        kept_buffers(root, source),
        watching(caches_of(root)),
    ):  # what passes assign is no part of the model that a device builds
        return _recorded_cut(root, source)


def _recorded_cut(root: nn.Module, source: Source) -> CutModule:
    with restored(root):
        vocabulary = vocabulary_of(root, source)
    parts, names, shapes, reason = list[nn.Module](), list[str](), list[Shape](), ""
    try:
        recording = record(root, source, vocabulary)
        if positions := _join_classifier(root, recording, choose(recording)):
            ends = [*positions, len(recording.nodes) - 1]
            parts = [_part(root, recording, a + 1, b + 1) for a, b in zip([-1, *ends[:-1]], ends, strict=True)]
            names, shapes = _names(recording, positions), [_shape(recording, recording.nodes[p]) for p in positions]
            require_same_operators(root, parts, source, vocabulary)
        else:
            reason = f"{type(root).__name__}: no point is crossed by one tensor alone"
    except UntraceableError as error:
        reason = str(error)
    if reason:
        require_stateless(root, source, vocabulary)
        parts = [root, Same(source.num_classes)]
        names, shapes = [type(root).__name__.lower()], [(source.num_classes,)]
    require_logits_in_training(root, source, vocabulary)
    viewing = frozenset(number for number, part in enumerate(parts) if may_view(part) or reads_layout(part))
    digest = _digest(root, parts, source)
    unused = unused_arrays(root, parts)
    return CutModule(tuple(parts), tuple(names), tuple(shapes), digest, vocabulary, reason, viewing, unused)


def _digest(root: nn.Module, parts: Sequence[nn.Module], source: Source) -> str:
    """Return a digest of what costs depend on: recorded calls, sizes, and the files of all code that is not torch's."""
    found = hashlib.sha256()
    for part in parts:
        found.update(
            f"{part}\n{getattr(part, '_recorded_calls', '')}\n{[tuple(a.shape) for a in part.state_dict().values()]}".encode()
        )
    for code in sorted({code_of(kind) for module in root.modules() for kind in type(module).__mro__}):
        found.update(code)
    file = getattr(sys.modules.get(getattr(find_make(source.name), "__module__", "")), "__file__", None)
    found.update(Path(file).read_bytes() if file is not None and not is_object(source.name) else b"")
    return found.hexdigest()


def _narrow_cut(source: Source) -> CutModule:
    """Return the cut of a sub-model by width. Raises ValueError, which names the layer that is in its way."""
    whole = imported(source.name, source.num_classes, source.input_shape, batch_norm=source.batch_norm)
    full, axes = cut(replace(source, width=1.0, ratio=1.0)), channel_axes(whole)
    last = max(
        (name for name in axes if name.startswith("head.") and len(axes[name]) > 1), key=list(axes).index, default=""
    )
    classes = axes[last][0] if last else None
    if classes is None:
        raise ValueError(f"{whole.name} cannot be cut by width: its head has no layer that ends in classes")
    kept = kept_channels(
        axes, shapes_of(full.parts), classes.group, lambda channels: scale_channels(channels, source.width)
    )
    with without_data():
        x: Any = torch.zeros(EXAMPLES, *source.input_shape)
    x = x.long() if full.vocabulary else x
    names = dict(zip(whole.units(), [*full.names, "head"], strict=True))
    parts, spare = (dict(zip(names, map(copy.deepcopy, full.parts), strict=True)) for _ in range(2))
    try:
        found = [tuple(made.shape[1:]) for made in narrow_all(parts, names, axes, kept, x)]
        require_linked(spare, names, axes, {classes.group: source.num_classes}, x)
    except ValueError as error:
        raise ValueError(f"{whole.name} cannot be cut by width: {error}") from error
    digest = hashlib.sha256(f"{full.digest} {source}".encode()).hexdigest()
    shapes = tuple(found[:-1])
    return CutModule(tuple(parts.values()), full.names, shapes, digest, full.vocabulary, full.reason, full.viewing)


def shapes_of(parts: Sequence[nn.Module]) -> dict[str, Shape]:
    """Return the shapes of a cut's arrays by global name."""
    units = [*(f"atoms.{i}" for i in range(len(parts) - 1)), "head"]
    return {
        f"{unit}.{name}": tuple(array.shape)
        for unit, part in zip(units, parts, strict=True)
        for name, array in part.state_dict().items()
    }


def _join_classifier(root: nn.Module, recording: Recording, positions: list[int]) -> list[int]:
    """Return the positions without those between the layers of a classifier behind maps, if it is at most half of the model.

    Some systems put the head behind every atom, so it takes the maps that atoms make. A larger classifier is cut nevertheless.
    """
    nodes, modules = recording.nodes, recording.modules
    maps = [p for p in positions if recording.values[nodes[p]].dim() > 2]
    if not maps or maps == positions or positions[: len(maps)] != maps:
        return positions
    behind = {str(node.target) for node in nodes[maps[-1] + 1 :] if node.op == "call_module"}
    light = sum(p.numel() for target in behind for p in modules[target].parameters())
    return maps if light <= sum(p.numel() for p in root.parameters()) / 2 else positions


def _part(root: nn.Module, recording: Recording, begin: int, end: int) -> nn.Module:
    """Return the module that runs nodes[begin:end] on the result of the node before them.

    It computes the constants that these use by itself, and has the lengths of tensors that it does not have. What goes from
    one part to the next has its examples along the first axis, as messages and files do.
    """
    nodes, constants, lengths = recording.nodes, recording.constants, recording.lengths
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    if begin:
        z = graph.placeholder("z")
        copies[nodes[begin - 1]] = _swapped(graph, z, recording.axes[nodes[begin - 1]])
    wanted = {node for node in nodes[begin:end] if node.op != "get_attr" and node not in constants}
    wanted |= {node for node in nodes if node.op == "get_attr" and wanted & set(node.users)}
    for node in sorted(wanted | find_needed(wanted, constants), key=nodes.index):
        if begin and is_device(node):
            copies[node] = graph.call_function(getattr, (z, "device"))
        elif node in lengths and node.args[0] not in copies:
            length = lengths[node]
            copies[node] = graph.call_method("size", (z, 0)) if length is None else length
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(_swapped(graph, copies[nodes[end - 1]], recording.axes[nodes[end - 1]]))
    return as_module(root, graph)


def _swapped(graph: fx.Graph, node: fx.Node, axis: int) -> fx.Node:
    """Return a tensor with its first axis in the place of another, and that in the first place."""
    return graph.call_method("transpose", (node, 0, axis)) if axis else node


def _shape(recording: Recording, node: fx.Node) -> Shape:
    """Return the shape of one example of what a part returns, whose examples are along the first axis."""
    lengths, axis = [*recording.values[node].shape], recording.axes[node]
    lengths[0], lengths[axis] = lengths[axis], lengths[0]
    return tuple(lengths[1:])


def _names(recording: Recording, positions: Sequence[int]) -> list[str]:
    """Return the name of each atom: the path that its layers with weights have in common."""
    nodes, names = recording.nodes, list[str]()
    for a, b in zip([-1, *positions[:-1]], positions, strict=True):
        weighted = [n for n in nodes[a + 1 : b + 1] if n.op == "call_module" and is_weighted(n, recording.modules)]
        paths = [str(n.target).split(".") for n in weighted]
        common = [steps[0] for steps in takewhile(lambda steps: len({*steps}) == 1, zip(*paths, strict=False))]
        name = "_".join(common) or (paths[0][0] if paths else f"atom{len(names)}")
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def build_part(source: Source, digest: str, number: int) -> nn.Module:
    """Build part `number` of a module. `digest` is of the cut that it belongs to, so that other code has other costs.

    The weights are those that the module's own function draws, unless the caller sets all of them or only traces.
    """
    with _disable_current_modes():
        found = cut(source)
        module = copy.deepcopy(found.parts[number])
        if number in found.viewing:
            keep_layout(module)
        keep_caches(module)
    without_values, traced = torch.get_default_device().type == "meta", is_in_torch_dispatch_mode()
    if without_values and not traced:
        return module
    allocate(module)
    if without_values:
        return module
    for layer in module.modules():
        if callable(reset := getattr(layer, "reset_parameters", None)) and not needs_arguments(reset):
            reset()
    if not weights_are_unset() and not traced:
        whole = make(source)
        require_finite(whole, source)
        take_initial(module, whole)
    return module


def imported(
    name: str, num_classes: int, input_shape: Shape, width: float = 1.0, batch_norm: str = "running"
) -> Blueprint:
    """Return the blueprint of a model outside this project. Raises ValueError, which says what is wrong with it."""
    source = Source(name, num_classes, input_shape, batch_norm, width, narrowing() if width != 1 else 1.0)
    found = cut(source)
    builds = [partial(build_part, source, found.digest, i) for i in range(len(found.parts))]
    atoms = [Atom(name, build, shape) for name, build, shape in zip(found.names, builds, found.shapes, strict=False)]
    shown = name if not is_own(name) else PurePath(name).name
    return Blueprint(
        shown,
        input_shape,
        num_classes,
        tuple(atoms),
        builds[-1],
        batch_norm,
        found.vocabulary,
        uncut=found.reason,
    )
