"""Whether the parts of a module run the operators that the module runs.

A recording knows less than a pass: isinstance(x, Tensor) is false there, and torch.is_grad_enabled() is true. Code that asks
such things takes another way than in training or in evaluation. So both run once more, on examples without values.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from piecework.device_profiles.dispatch import Mode, without_data
from piecework.models.imported.caches import apart
from piecework.models.imported.calls import memory_of
from piecework.models.imported.contexts import drawing_alike, restored
from piecework.models.imported.graph import UntraceableError
from piecework.models.imported.logits import zeros_like_examples
from piecework.models.imported.module import Source

EXAMPLES = 1024  # more than a recording's passes have: the length of x[:100] is not the number of examples
# They move numbers and compute none: parts have examples first, and copy a view where maps lie channels last.
MOVES = {
    "_reshape_alias", "_reshape_copy", "_unsafe_view", "alias", "as_strided", "clone", "contiguous", "copy_", "detach",
    "empty", "empty_like", "expand", "permute", "split", "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip
Operators = Counter[tuple[str, str]]


class _Count(Mode):  # type: ignore[no-untyped-call]
    """Counts operators by name and arguments: in a forward pass, those on what depends on examples or learned weights.

    The others make constants, of which each part makes its own, unless they change one of `arrays`. These are told from one
    another by name, also where operators get views of them.
    """

    def __init__(self, roots: Sequence[Tensor], arrays: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.found: Operators = Counter()
        self.arrays = arrays  # kept so that no other tensor gets the memory of one that is replaced
        self.names: dict[int | None, str] = {}
        for name, array in arrays.items():
            self.names.setdefault(memory_of(array), name)
        self.forward = True
        self.kept = list(roots)  # so that no other tensor gets the id of one that is gone
        self.reached = {id(each) for each in roots}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it."""
        given = tree_leaves((args, kwargs or {}))
        shown = ", ".join(map(self._show, given))
        depends = any(id(each) in self.reached for each in given)
        result = func(*args, **(kwargs or {}))
        if depends:
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            self.kept += made
            self.reached |= {id(each) for each in made}
        name = func.overloadpacket.__name__
        counts = (depends or not self.forward) and name not in MOVES
        if counts or (self.forward and self._changes_array(func, args)):
            self.found[name, shown] += 1
        return result

    def _show(self, argument: Any) -> str:
        """Return an argument in words. Backward passes have tensors that are made anew."""
        if not isinstance(argument, Tensor):
            return repr(argument)
        name = self.names.get(memory_of(argument)) if self.forward else None
        return f"{name} {tuple(argument.shape)}" if name else str(tuple(argument.shape))

    def _changes_array(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an operator changes an array of the module."""
        written = [each for each, kind in zip(args, func._schema.arguments, strict=False) if kind.is_write]
        return any(isinstance(each, Tensor) and memory_of(each) in self.names for each in written)


def require_same_operators(root: nn.Module, parts: Sequence[nn.Module], source: Source, vocabulary: int) -> None:
    """Raise UntraceableError if parts, each run on the result of the one before it, run other operators than their module.

    They run in training, with a backward pass, and in evaluation. A module that cannot do that is refused where it is priced.
    """
    whole, cascade = nn.Sequential(root), nn.Sequential(*parts)
    for training in (True, False):
        with restored(root):
            expected = _operators(whole, root, source, vocabulary, training)
        if isinstance(expected, Exception):
            continue
        with restored(root):
            found = _operators(cascade, root, source, vocabulary, training)
        if isinstance(found, Exception):
            raise UntraceableError(f"{type(root).__name__}: its parts cannot be run: {found}")
        if expected != found:
            when = "in training" if training else "in evaluation"
            raise UntraceableError(f"{type(root).__name__}: {_difference(expected, found, when)}, {_cause(root)}")


def _difference(expected: Operators, found: Operators, when: str) -> str:
    """Return which operator a module runs, and its parts do not, or the other way round."""
    missing = expected - found
    name, arguments = next(iter(missing or found - expected))
    calls = f"calls {name}({arguments})"
    unlike = (
        f"{calls} {when} but not while it is recorded" if missing else f"{calls} while it is recorded but not {when}"
    )
    return f"its forward pass {unlike}"


def _cause(root: nn.Module) -> str:
    if type(root).train is not nn.Module.train:
        return "for its own train() changes what its layers do"
    return (
        "as code does that asks isinstance(x, torch.Tensor) or torch.is_grad_enabled(), or recomputes by checkpoint()"
    )


def _operators(
    function: nn.Module, root: nn.Module, source: Source, vocabulary: int, training: bool
) -> Operators | Exception:
    """Return the operators that a module of the arrays of `root` runs in a pass, or what it raises."""
    x = zeros_like_examples(source, vocabulary, EXAMPLES)
    learned = [each for each in function.parameters() if each.requires_grad]
    arrays = dict(root.named_parameters()) | dict(root.named_buffers())
    function.train(training)
    try:
        with (
            apart(),
            drawing_alike(),
            without_data(),
            torch.set_grad_enabled(training),
            _Count([x, *learned], arrays) as count,
        ):
            logits: Tensor = function(x)
            count.forward = False
            if training:
                torch.autograd.grad(logits.sum(), learned, allow_unused=True)
    except Exception as error:  # whatever the user's code raises
        return error
    finally:
        function.eval()
    operators: Operators = count.found
    return operators
