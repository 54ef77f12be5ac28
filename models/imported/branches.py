"""What a recorded forward pass branches on: lengths and numbers of axes may decide, as in `assert x.size(1) <= 64`."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from piecework.device_profiles.dispatch import without_data
from piecework.models.imported.constants import is_length
from piecework.models.imported.logits import EXAMPLES, zeros_like_examples
from piecework.models.imported.module import Source


class Values(fx.Interpreter):
    """Runs recorded calls, and keeps the result of each in `env`."""

    def run_all(self, x: Tensor) -> Any:
        """Return the result of the last call. `run` would make a progress bar, whose lock a killed worker leaves."""
        self.args_iter = iter([x])
        for node in self.graph.nodes:
            self.env[node] = self.run_node(node)
        return self.env[node]


def decide(root: nn.Module, source: Source, vocabulary: int, asked: fx.Node) -> bool | None:
    """Return whether a recorded value is true, or None if that depends on examples, or on their number."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in asked.graph.nodes:  # all until then, for one may have changed what another returned
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[asked])
    values, others = (Values(fx.GraphModule(root, graph)) for _ in range(2))
    try:
        with torch.no_grad(), without_data():
            values.run_all(zeros_like_examples(source, vocabulary, EXAMPLES))
            others.run_all(zeros_like_examples(source, vocabulary, EXAMPLES + 1))
    except Exception:  # what the module cannot compute is said where it is evaluated
        return None
    found = values.env[copies[asked]]
    pending = [copies[asked]]
    while pending:
        node = pending.pop()
        one, other = values.env[node], others.env[node]
        if isinstance(one, Tensor):
            continue
        if type(one) is not type(other) or one != other:
            return None
        pending += [] if is_length(node) else node.all_input_nodes
    return None if isinstance(found, Tensor) else bool(found)
