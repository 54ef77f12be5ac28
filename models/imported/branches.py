"""What the code of a recorded forward pass knows of its values: lengths and numbers of axes, as in `assert x.size(1) <= 64`."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from piecework.device_profiles.dispatch import without_data
from piecework.models.imported.caches import apart
from piecework.models.imported.calls import CHANGES
from piecework.models.imported.constants import is_length
from piecework.models.imported.contexts import restored
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

    def run_until(self, last: fx.Node) -> Any:
        """Return the result of a call, for which those before it are run that have not been.

        `run` would make a progress bar, whose lock a killed worker leaves.
        """
        for node in self.graph.nodes:
            if node not in self.env:
                self.env[node] = self.run_node(node)
            if node is last:
                break
        return self.env[last]

    def run_all(self, x: Tensor) -> Any:
        """Return the result of the last call for examples x."""
        self.args_iter = iter([x])
        return self.run_until(next(reversed(self.graph.nodes)))


class Branches:
    """Says what the code of a forward pass branches on, counts and iterates over, while it is recorded.

    What was recorded so far is run on several numbers of examples, each call once.
    """

    def __init__(self, root: nn.Module, source: Source, vocabulary: int) -> None:
        self.root, self.source, self.vocabulary = root, source, vocabulary
        self.graph: fx.Graph | None = None
        self.runs: list[Values] = []

    def number(self, asked: fx.Node) -> bool | float | None:
        """Return a recorded number or truth, or None if it does not depend on lengths alone."""
        found = self._results(asked)
        alike = bool(found) and self._depends_on_lengths(asked) and isinstance(found[0], bool | int | float)
        return found[0] if alike else None

    def length(self, asked: fx.Node) -> int | None:
        """Return how many elements a recorded value has, or None if examples decide, or it has no length."""
        found = self._results(asked)
        lengths = {len(each) if isinstance(each, tuple | list | Tensor) else None for each in found}
        return lengths.pop() if len(lengths) == 1 else None

    def has(self, asked: fx.Node, name: str) -> bool:
        """Return whether a recorded value has an attribute, if that is known, else True."""
        found = self._results(asked)
        return not found or hasattr(found[0], name)

    def _results(self, asked: fx.Node) -> list[Any]:
        """Return what a call returns for each number of examples; nothing if it cannot be computed."""
        if self.graph is not asked.graph:
            self.graph, self.runs = asked.graph, [Values(self.root, graph=asked.graph) for _ in NUMBERS]
            for run, number in zip(self.runs, NUMBERS, strict=True):
                run.args_iter = iter([zeros_like_examples(self.source, self.vocabulary, number)])
        if all(asked in run.env for run in self.runs):
            return [run.env[asked] for run in self.runs]
        try:
            with torch.no_grad(), without_data(), apart(), restored(self.root):
                return [run.run_until(asked) for run in self.runs]
        except Exception:  # what the module cannot compute is said where it is evaluated
            return []

    def _depends_on_lengths(self, asked: fx.Node) -> bool:
        """Return whether a value is computed of lengths and numbers of axes that are the same in all runs."""
        pending = [asked]
        while pending:
            node = pending.pop()
            first, *others = (run.env[node] for run in self.runs)
            if isinstance(first, Tensor):
                continue
            if not _is_of_shape(node) or any(type(each) is not type(first) or each != first for each in others):
                return False
            pending += [] if is_length(node) else node.all_input_nodes
        return True


def _is_of_shape(node: fx.Node) -> bool:
    """Return whether a number is a length, a number of axes, or computed of these: others are not those of real tensors."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "ndimension", "numel", "nelement")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    return node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "math")
