"""What a recorded forward pass computes of examples without values, and what of it is the same for all examples."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from piecework.models.imported.branches import Values, decide
from piecework.models.imported.calls import keep_numbers
from piecework.models.imported.constants import find_constants, is_length
from piecework.models.imported.graph import record_calls
from piecework.models.imported.logits import EXAMPLES, logits_of
from piecework.models.imported.module import Source


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

    It runs on two numbers of examples: what differs depends on how many there are.
    """
    graph = record_calls(root, partial(decide, root, source, vocabulary))
    modules = dict(root.named_modules())
    nodes = [node for node in graph.nodes if node.op != "output"]
    values, others = (_run(root, graph, source, vocabulary, number) for number in (EXAMPLES, EXAMPLES + 1))
    keep_numbers(nodes, values)
    axes = {node: axis for node in nodes if (axis := _axis_of(values[node], others[node])) is not None}
    read = {node: (values[node], others[node]) for node in nodes if is_length(node)}
    lengths: dict[fx.Node, int | None] = {
        node: n for node, (n, other) in read.items() if isinstance(n, int) and n == other
    }
    lengths |= {node: None for node, found in read.items() if found == (EXAMPLES, EXAMPLES + 1)}
    constants = find_constants(nodes, modules, values, lengths)
    return Recording(nodes, modules, values, axes, lengths, constants)


def _run(root: nn.Module, graph: fx.Graph, source: Source, vocabulary: int, examples: int) -> dict[fx.Node, Any]:
    """Return what each node returns for a number of examples."""
    values = Values(fx.GraphModule(root, graph))
    logits_of(values.run_all, source, vocabulary, examples)
    return values.env


def _axis_of(value: Any, other: Any) -> int | None:
    """Return the axis along which a tensor has one entry for each example, or None if there is none."""
    if not (isinstance(value, Tensor) and isinstance(other, Tensor) and value.dim() == other.dim()):
        return None
    unlike = [axis for axis in range(value.dim()) if value.shape[axis] != other.shape[axis]]
    if len(unlike) != 1 or (value.shape[unlike[0]], other.shape[unlike[0]]) != (EXAMPLES, EXAMPLES + 1):
        return None
    return unlike[0]
