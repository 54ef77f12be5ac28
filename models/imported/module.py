"""The module that a user's function makes, with the norms that the settings ask for."""

import copy
import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from piecework.device_profiles.plugins import refuse_exit
from piecework.models.cascade import Shape, norm_layer
from piecework.models.imported.building import build, needs_values
from piecework.models.imported.calls import memory_of
from piecework.models.imported.source import find_make
from piecework.models.layers import norm_layer_1d


@dataclass(frozen=True)
class Source:
    """What the module is made of: the name of the model, and the arguments of its function. `batch_norm`: see `norm_layer`.

    `width` and `ratio` are those of `scale_channels`.
    """

    name: str
    num_classes: int
    input_shape: Shape
    batch_norm: str
    width: float = 1.0
    ratio: float = 1.0


def make(source: Source) -> nn.Module:
    """Return the module, with the norms of the source and only persistent buffers. Raises ValueError if its function fails."""
    function = find_make(source.name)
    try:
        with refuse_exit():
            root = build(partial(function, source.num_classes, source.input_shape))
    except Exception as error:  # whatever the user's code raises
        if needs_values(error):
            raise ValueError(
                f"model = {source.name!r} asks for values while it is built, which torch.device('meta') does not have: {error}"
            ) from error
        if isinstance(error, ValueError) and str(error).startswith("model = "):
            raise
        raise ValueError(
            f"model = {source.name!r} cannot be built: {type(error).__name__}: {error}{place_of(error)}"
        ) from error
    if not isinstance(root, nn.Module):
        raise ValueError(
            f"model = {source.name!r} returned a {type(root).__name__}: expected an nn.Module; a function that returns a "
            "Blueprint takes width and batch_norm too"
        )
    for module in root.modules():
        module._non_persistent_buffers_set.clear()  # a device has no more of a module than its state dict
    if source.batch_norm not in ("running", "local"):
        _follow_setting(root, source)
    return root


def place_of(error: Exception) -> str:
    """Return where the user's code raised an error, as ` (my_net.py, line 12)`; empty if it has no part in it."""
    others = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _follow_setting(root: nn.Module, source: Source) -> None:
    """Give a module the norms of the source, with the weights that it has. Raises ValueError for one that would be another."""
    made: dict[nn.Module, nn.Module] = {}  # a norm in several places stays one
    for path, layer in [*root.named_modules(remove_duplicate=False)]:
        if not isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d):
            continue
        if type(layer) in (nn.BatchNorm2d, nn.BatchNorm1d):
            if layer not in made:
                made[layer] = _replaced(layer, source.batch_norm)
            root.set_submodule(path, made[layer])
        elif source.batch_norm == "batch":  # timm's norms have the activation inside
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        else:
            raise ValueError(
                f"model = {source.name!r}: {path} is a {type(layer).__name__}, whose own code a norm of architecture.norm = "
                f"{source.batch_norm} would not have: use architecture.norm = batch"
            )


def _replaced(layer: nn.BatchNorm1d | nn.BatchNorm2d, batch_norm: str) -> nn.Module:
    """Return the norm of a setting in place of a batch norm: its epsilon, weights, and statistics if it keeps any."""
    change = norm_layer if isinstance(layer, nn.BatchNorm2d) else norm_layer_1d
    norm: Any = change(layer.num_features, batch_norm)
    norm.eps = layer.eps
    norm.affine, norm.weight, norm.bias = layer.affine, layer.weight, layer.bias
    if batch_norm == "frozen" and layer.track_running_stats:
        norm.load_state_dict(dict(layer.named_buffers()), strict=False)
    replaced: nn.Module = norm
    return replaced


@contextmanager
def kept_buffers(root: nn.Module, source: Source) -> Iterator[None]:
    """Restore the buffers that passes put in the place of others. Raises ValueError if they make some, or change a shape."""
    before = {path: dict(module._buffers) for path, module in root.named_modules()}
    yield
    for path, module in root.named_modules():
        own = before.get(path, {})
        unlike = [
            name for name, array in module._buffers.items() if name not in own or _sizes(array) != _sizes(own[name])
        ]
        if unlike:
            raise ValueError(
                f"model = {source.name!r}: {path or type(root).__name__} makes the buffer {unlike[0]!r} in its forward pass, "
                "so no file has it: register it where the module is built, as long as the longest input"
            )
        module._buffers.update(own)


def _sizes(array: Tensor | None) -> tuple[Any, ...]:
    return () if array is None else (array.shape, array.dtype)


def require_freed(root: nn.Module, source: Source) -> None:
    """Raise ValueError if a module refers to itself: when it is dropped, its parameters stay until a garbage collection."""
    dropped = copy.deepcopy(root)
    arrays = [weakref.ref(array) for array in dropped.parameters()]
    del dropped
    if any(array() is not None for array in arrays):
        raise ValueError(
            f"model = {source.name!r} refers to itself, as a layer does that keeps its parent, so a device could not free it "
            "when it is done: keep the parent by weakref.proxy, or give the layer what it needs of it"
        )


def require_state(root: nn.Module, source: Source) -> None:
    """Raise ValueError if a module keeps a tensor that no file has, or that no message can hold, or in another's memory."""
    own = {id(array): (name, array) for name, array in root.state_dict(keep_vars=True).items()}
    _require_memory(own.values(), source)
    arrays = set(own)
    known = {id(module) for module in root.modules()} | arrays
    for path, module in root.named_modules():
        held = {
            name: [each for each in tree_leaves(value) if id(each) not in known] for name, value in vars(module).items()
        }
        where = f"model = {source.name!r}: {path or type(root).__name__}"
        loose = [name for name, values in held.items() if any(isinstance(each, Tensor) for each in values)]
        if loose:
            raise ValueError(
                f"{where} keeps {loose[0]!r} outside its state dict, so a device that gets only a part of the model would not "
                "have it: register it as a buffer"
            )
        if unseen := [name for name, values in held.items() if any(isinstance(each, nn.Module) for each in values)]:
            raise ValueError(
                f"{where} keeps layers in {unseen[0]!r}, which is no module, so torch does not find their weights: make it an "
                "nn.ModuleList or nn.ModuleDict"
            )
        for name, buffer in module.named_buffers(recurse=False):
            if advice := _unsent(buffer.dtype):
                raise ValueError(
                    f"{where}: the buffer {name!r} is {buffer.dtype}, which messages do not hold: {advice}"
                )


def _unsent(kind: torch.dtype) -> str:
    """Return what to do about numbers that messages do not hold; empty for those that they do."""
    if kind.is_complex:
        return "register torch.view_as_real of it, and use torch.view_as_complex in the forward pass"
    try:
        torch.empty(0, dtype=kind, device="cpu").numpy()
    except TypeError:  # numpy has no such type
        return f"register it as torch.float32 (float()), and use .to({kind}) in the forward pass"
    return ""


def unused_arrays(root: nn.Module, parts: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return the names of the arrays of a module that none of its parts has, because no forward pass uses them."""
    used = {id(array) for part in parts for array in part.state_dict(keep_vars=True).values()}
    return tuple(name for name, array in root.state_dict(keep_vars=True).items() if id(array) not in used)


def _require_memory(arrays: Iterable[tuple[str, Tensor]], source: Source) -> None:
    """Raise ValueError if arrays lie in the memory of one: what changes one changes the others, until two devices have them."""
    seen = dict[int, str]()
    for name, array in arrays:
        memory = memory_of(array)
        first = seen.setdefault(memory, name) if memory is not None else name
        if first != name:
            raise ValueError(
                f"model = {source.name!r}: {name!r} lies in the memory of {first!r}, and a device may have only one of them: "
                "keep a copy of it (clone())"
            )


def require_finite(root: nn.Module, source: Source) -> None:
    """Raise ValueError if a module has initial values that an update may not have. A mask of -inf is the usual one."""
    for name, array in root.state_dict().items():
        if array.is_floating_point() and not array.isfinite().all():
            raise ValueError(
                f"model = {source.name!r}: {name!r} holds values that are not finite, so every update would be rejected: "
                "register a boolean mask, and use masked_fill, or attn_mask, in the forward pass"
            )
