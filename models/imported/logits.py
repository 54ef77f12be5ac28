"""What a module outside this project returns for examples without values: it has to be logits."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx, nn

from piecework.device_profiles.dispatch import without_data
from piecework.models.imported.caches import apart
from piecework.models.imported.calls import memory_of
from piecework.models.imported.module import Source, place_of

EXAMPLES = 2
# Numbers of examples: primes, so that what depends on how many there are differs between them.
NUMBERS = EXAMPLES, 3, 67


def zeros_like_examples(source: Source, vocabulary: int, examples: int = EXAMPLES) -> Tensor:
    """Return examples without values."""
    kind = torch.int64 if vocabulary else torch.float32
    with without_data():
        return torch.zeros(examples, *source.input_shape, dtype=kind)


def logits_of(function: Any, source: Source, vocabulary: int, examples: int = EXAMPLES) -> Tensor:
    """Return the logits of examples without values. Raises ValueError if there are none of the right shape."""
    try:
        with torch.no_grad(), without_data(), apart():
            found = function(zeros_like_examples(source, vocabulary, examples))
    except Exception as error:
        shape = "x".join(map(str, source.input_shape))
        reason = str(error).partition("\n")[0] or type(error).__name__
        if "meta tensor" in reason:
            reason += "; what depends on values cannot be priced, so write it with tensors (torch.where)"
        if "is not on the expected device" in reason:
            reason += "; a tensor of the model must be in its state dict (register_buffer), or made in forward without a device"
        said = f"model = {source.name!r} does not take examples of {shape}: {reason}{place_of(error)}"
        raise ValueError(said) from error
    _require_logits(found, source, examples)
    logits: Tensor = found
    return logits


def vocabulary_of(root: nn.Module, source: Source) -> int:
    """Return the size of the embedding that a module's tokens go to, the first of these, or 0 if it reads no tokens.

    It does not if another layer with weights would get whole numbers: torch does not mind that in tensors without values. A
    table of positions is another embedding. Without one that gets the tokens themselves, the first is taken.
    """
    tables = [layer for layer in root.modules() if isinstance(layer, nn.Embedding)]
    if not tables or len(source.input_shape) != 1:
        return 0
    strange, reading = list[nn.Module](), list[nn.Module]()
    tokens = list[Tensor]()

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        given = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
        if given is None or given.is_floating_point():
            return
        if not isinstance(layer, nn.Embedding):
            strange.append(layer)
        elif any(memory_of(given) == memory_of(each) for each in tokens):
            reading.append(layer)

    def run(x: Tensor) -> Any:
        tokens.append(x)
        return root(x)

    hooks = [layer.register_forward_pre_hook(note) for layer in root.modules() if hasattr(layer, "weight")]
    with suppress(ValueError):  # it is raised again where the calls are recorded
        logits_of(run, source, tables[0].num_embeddings)
    for hook in hooks:
        hook.remove()
    first = next((layer for layer in tables if layer in reading), tables[0])
    return 0 if strange else first.num_embeddings


def _require_logits(found: Any, source: Source, examples: int, when: str = "") -> None:
    """Raise ValueError for a result of examples that is no logits; `when` says when a module returned it."""
    if not isinstance(found, Tensor) or found.shape != (examples, source.num_classes):
        kind = "a dict" if isinstance(found, dict) else f"a {type(found).__name__}"
        shown = str(tuple(found.shape)) if isinstance(found, Tensor) else kind
        advice = "" if isinstance(found, Tensor) else "; have a module of yours call it, and return the logits alone"
        raise ValueError(
            f"model = {source.name!r} returns {shown} for {examples} examples{when}: expected logits of shape "
            f"{(examples, source.num_classes)}{advice}"
        )


def require_logits_in_training(root: nn.Module, source: Source, vocabulary: int) -> None:
    """Raise ValueError if a module returns something else in training, as with auxiliary logits. It stays in evaluation."""
    root.train()
    try:
        with torch.no_grad(), without_data(), apart():
            found = root(zeros_like_examples(source, vocabulary))
    except Exception:  # what it cannot compute is said where it is evaluated or priced
        return
    finally:
        root.eval()
    _require_logits(found, source, EXAMPLES, " in training (self.training)")


def require_stateless(root: nn.Module, source: Source, vocabulary: int) -> None:
    """Raise ValueError if a module that could not be recorded returns no logits, or needs what it kept of a pass before."""
    try:
        logits_of(root, source, vocabulary)
    except ValueError as error:
        for path, module in root.named_modules():  # what was kept of the recording is no tensor
            if kept := [name for name, value in vars(module).items() if isinstance(value, fx.Proxy)]:
                raise ValueError(
                    f"model = {source.name!r}: {path or type(root).__name__} keeps {kept[0]!r} from one forward pass to the "
                    "next, whose examples are others: begin each pass without it"
                ) from error
        raise
