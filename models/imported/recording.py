"""What a recorded forward pass computes of examples without values, and what of it is the same for all examples."""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from piecework.models.imported.branches import Branches, Values
from piecework.models.imported.calls import copy_views, keep_numbers
from piecework.models.imported.constants import find_constants, is_length
from piecework.models.imported.graph import UntraceableError, record_calls, runnable
from piecework.models.imported.logits import NUMBERS, logits_of
from piecework.models.imported.module import Source

# In Python code that torch.fx has made of calls. `view` is left where its result is changed (see `copy_views`).
LAYOUT = re.compile(
    r"(?<![A-Za-z])(view|view_as|view_as_complex|as_strided_?|stride|is_contiguous|storage_offset|data_ptr|set_)\("
)


@dataclass(frozen=True)
class Recording:
    """The recorded calls (`nodes`) of a module's forward pass, and what each returns for examples without values.

    `axes` are the axes of examples in tensors that have one. `lengths` are those of axes that the pass reads, None for the
    number of examples. `constants` are the nodes whose results are the same for all examples.
    """

    nodes: Sequence[fx.Node]
    modules: Mapping[str, nn.Module]
    values: Mapping[fx.Node, Any]
    axes: Mapping[fx.Node, int]
    lengths: Mapping[fx.Node, int | None]
    constants: Set[fx.Node]


def record(root: nn.Module, source: Source, vocabulary: int) -> Recording:
    """Return the recorded forward pass of a module. Raises UntraceableError if it cannot be recorded.

    It runs on several numbers of examples, in training and in evaluation: what differs does not hold for all of them.
    """
    graph = record_calls(root, Branches(root, source, vocabulary))
    modules = dict(root.named_modules())
    nodes = [node for node in graph.nodes if node.op != "output"]
    try:
        runs = [
            _run(root.train(training), graph, source, vocabulary, number)
            for training in (True, False)
            for number in NUMBERS
        ]
    except UntraceableError:
        raise
    except ValueError as error:  # if the module itself cannot be run, it is refused afterwards
        raise UntraceableError(
            f"{type(root).__name__}: its recorded calls cannot be run, as of code that asks isinstance(x, tuple): "
            f"{str(error.__cause__ or error).partition(chr(10))[0]}"
        ) from error
    values, numbers = runs[len(NUMBERS)], (*NUMBERS, *NUMBERS)
    keep_numbers(nodes, values)
    found = {node: [run[node] for run in runs] for node in nodes}
    axes = {node: axis for node in nodes if (axis := _axis_of(found[node], numbers)) is not None}
    lengths: dict[fx.Node, int | None] = {}
    for node in filter(is_length, nodes):
        if tuple(found[node]) == numbers:
            lengths[node] = None
        elif isinstance(values[node], int) and len({*found[node]}) == 1:
            lengths[node] = values[node]
    constants = find_constants(nodes, modules, values, lengths)
    copy_views(nodes, modules, values)
    return Recording(nodes, modules, values, axes, lengths, constants)


def reads_layout(part: nn.Module) -> bool:
    """Return whether the recorded calls of a part depend on how its tensors lie in memory."""
    return LAYOUT.search(getattr(part, "_recorded_calls", "")) is not None


def _run(root: nn.Module, graph: fx.Graph, source: Source, vocabulary: int, examples: int) -> dict[fx.Node, Any]:
    """Return what each node returns for a number of examples."""
    values = Values(runnable(root, graph))
    logits_of(values.run_all, source, vocabulary, examples)
    return values.env


def _axis_of(found: Sequence[Any], numbers: Sequence[int]) -> int | None:
    """Return the axis along which a tensor has one entry for each example, or None if there is none."""
    if not all(isinstance(each, Tensor) and each.dim() == found[0].dim() for each in found):
        return None
    lengths = [*zip(*(each.shape for each in found), strict=True)]
    unlike = [axis for axis, along in enumerate(lengths) if len({*along}) > 1]
    return unlike[0] if len(unlike) == 1 and lengths[unlike[0]] == tuple(numbers) else None
