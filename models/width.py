"""Sub-models by width: a model with a fraction of the channels is a choice of indices of every full array.

HeteroFL takes the first channels (`take_first`), FedRolex a window that moves on by one every round (`rolling`), FedDrop a new
draw for every client and round (`draw_channels`). Channels that a residual sum joins are chosen together (models/channels.py).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import numpy as np

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint, Shape
from piecework.models.channel_axes import Axes
from piecework.models.channels import channel_axes

Select = Callable[[int, int], np.ndarray]  # (C, c) -> c channels of C, ascending or not
Indices = tuple[np.ndarray, ...]  # for each dimension of an array


def take_first(channels: int, kept: int) -> np.ndarray:
    """Return the first `kept` channels."""
    return np.arange(min(channels, kept))


def rolling(server_round: int) -> Select:
    """Select channels (t, .., t + c - 1) mod C in round t; rounds count from 1, and round 1 starts with channel 0."""
    return lambda channels, kept: (np.arange(kept) + server_round - 1) % channels


def draw_channels(rng: np.random.Generator) -> Select:
    """Select random channels, in ascending order."""
    return lambda channels, kept: np.sort(rng.choice(channels, kept, replace=False))


def sub_indices(
    axes: Mapping[str, Axes], full: Mapping[str, Shape], small: Mapping[str, Shape], select: Select
) -> dict[str, Indices]:
    """Return the indices of each array of the small model in the full one.

    Raises ValueError if the small model is not a choice of channels of the full one.
    """
    chosen: dict[int, np.ndarray] = {}
    return {name: tuple(_along(name, axes[name], full[name], shape, select, chosen)) for name, shape in small.items()}


def _along(
    name: str, axes: Axes, full: Shape, small: Shape, select: Select, chosen: dict[int, np.ndarray]
) -> Iterable[np.ndarray]:
    for axis, size, wanted in zip(axes, full, small, strict=True):
        if axis is None:
            if wanted != size:
                raise ValueError(
                    f"array {name!r} has {wanted} entries where the full model has {size}, and no channels"
                )
            yield np.arange(size)
            continue
        folds = axis.outer * axis.inner
        channels, kept = size // folds, wanted // folds
        if axis.group not in chosen:
            chosen[axis.group] = select(channels, kept) if kept < channels else np.arange(channels)
        picked = chosen[axis.group]
        if len(picked) != kept:
            raise ValueError(f"array {name!r} has {kept} channels where others of the same have {len(picked)}")
        yield np.add.outer(
            np.add.outer(np.arange(axis.outer) * channels, picked) * axis.inner, np.arange(axis.inner)
        ).reshape(-1)


def require_parts(full: Blueprint, narrow: Mapping[float, Blueprint]) -> None:
    """Raise ValueError, which names the layer, unless each of the `narrow` models is a choice of channels of the full one.

    `narrow` has the models by their width ratios.
    """
    require_narrower(full, narrow)
    axes, whole = channel_axes(full), shapes(full)
    for width, model in narrow.items():
        own = shapes(model)
        what = f"{full.name} cannot be cut by width: with {width:.4g} of its channels"
        if odd := sorted(own.keys() ^ whole.keys()):
            has, full_has = ("has", "does not have") if odd[0] in own else ("misses", "has")
            unit, _, layer = odd[0].rpartition(".")
            raise ValueError(
                f"{what} it {has} {layer!r} of {unit!r}, which the full model {full_has}; build the same layers at every width"
            )
        try:
            sub_indices(axes, whole, own, take_first)
        except ValueError as error:
            raise ValueError(f"{what}, {error}") from None


def require_narrower(full: Blueprint, narrow: Mapping[float, Blueprint]) -> None:
    """Raise ValueError if no model in `narrow`, by width ratio, has fewer channels: its function ignores the width."""
    ratios = [width for width in narrow if width < 1]
    if ratios and all(shapes(narrow[width]) == shapes(full) for width in ratios):
        raise ValueError(
            f"{full.name} is not narrower with {min(ratios):.4g} of its channels: its function has to multiply its channels by "
            "its argument `width`, and to round them to at least 1"
        )


@lru_cache(maxsize=256)
def shapes(blueprint: Blueprint) -> Mapping[str, Shape]:
    """Return the shapes of a model's arrays by name."""
    with without_data():
        modules = {unit: blueprint.build_unit(unit) for unit in blueprint.units()}
    return {
        f"{unit}.{name}": tuple(value.shape)
        for unit, module in modules.items()
        for name, value in module.state_dict().items()
    }


def last_layer(model: Blueprint) -> dict[str, Shape]:
    """Return the shapes of the arrays of a model's last linear layer by name."""
    found = shapes(model)
    layer = list(found)[-1].rpartition(".")[0]
    return {name: shape for name, shape in found.items() if name.rpartition(".")[0] == layer}


def take(array: np.ndarray, indices: Indices) -> np.ndarray:
    """Return the small model's array."""
    return np.ascontiguousarray(array[np.ix_(*indices)]) if indices else array
