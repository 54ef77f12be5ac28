"""What a recorded forward pass branches on: lengths and numbers of axes may decide, as in `assert x.size(1) <= 64`."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from piecework.device_profiles.dispatch import without_data
from piecework.models.imported.calls import CHANGES
from piecework.models.imported.constants import is_length
from piecework.models.imported.logits import NUMBERS, zeros_like_examples
from piecework.models.imported.module import Source


class Values(fx.Interpreter):
    """Runs recorded calls, and keeps the result of each in `env`. Nodes note in `meta` which of their inputs they change."""

    def run_node(self, n: fx.Node) -> Any:
        """Return the result of a call."""
        versions = {node: value._version for node in n.all_input_nodes if isinstance(value := self.env[node], Tensor)}
        found = super().run_node(n)
        changed = {node for node, own in versions.items() if self.env[node]._version != own}
        n.meta[CHANGES] = n.meta.get(CHANGES, set()) | changed
        return found

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
    module = fx.GraphModule(root, graph)
    runs = [Values(module) for _ in NUMBERS]
    try:
        with torch.no_grad(), without_data():
            for run, number in zip(runs, NUMBERS, strict=True):
                run.run_all(zeros_like_examples(source, vocabulary, number))
    except Exception:  # what the module cannot compute is said where it is evaluated
        return None
    pending = [copies[asked]]
    while pending:
        node = pending.pop()
        first, *others = (run.env[node] for run in runs)
        if isinstance(first, Tensor):
            continue
        if not _is_of_shape(node) or any(type(each) is not type(first) or each != first for each in others):
            return None
        pending += [] if is_length(node) else node.all_input_nodes
    answer = runs[0].env[copies[asked]]
    return None if isinstance(answer, Tensor) else bool(answer)


def _is_of_shape(node: fx.Node) -> bool:
    """Return whether a number is a length, a number of axes, or computed of these: others are not those of real tensors."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "ndimension", "numel", "nelement")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    return node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "math")
