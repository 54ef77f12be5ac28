"""Sub-models by width: a model of a share of the channels is a choice of indices of every array of the full one.

HeteroFL takes the first channels (`ordered`), FedRolex a window that rolls on by one every round (`rolling`), FedDrop some
that are drawn again for every client and round (`drawn`). Channels that a residual sum joins are chosen together
(models/channels.py).
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from piecework.models.cascade import Blueprint, Shape
from piecework.models.channels import Axes, channel_axes

Select = Callable[[int, int], np.ndarray]  # (C, c) -> c channels of C, ascending or not
Indices = tuple[np.ndarray, ...]  # of each dimension of an array


def ordered(channels: int, kept: int) -> np.ndarray:
    """The first ones."""
    return np.arange(min(channels, kept))


def rolling(server_round: int) -> Select:
    """(t, .., t + c - 1) mod C in round t, counted from 1, which starts with channel 0."""
    return lambda channels, kept: (np.arange(kept) + server_round - 1) % channels


def drawn(rng: np.random.Generator) -> Select:
    """Some, in ascending order."""
    return lambda channels, kept: np.sort(rng.choice(channels, kept, replace=False))


def sub_indices(
    axes: Mapping[str, Axes], full: Mapping[str, Shape], small: Mapping[str, Shape], select: Select
) -> dict[str, Indices]:
    """Where each array of the small model lies in the full one.

    Raises ValueError where the small one has no channels of the full one to be made of.
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
    """Raises ValueError, which names the layer, where one of the `narrow` models, by their shares of the channels, is not
    a choice of channels of the full one.
    """
    axes, whole = channel_axes(full), shapes(full)
    for share, model in narrow.items():
        own = shapes(model)
        what = f"{full.name} cannot be cut by width: with {share:.4g} of its channels"
        if odd := sorted(own.keys() ^ whole.keys()):
            has, lacks = ("has", "the full model lacks") if odd[0] in own else ("lacks", "the full model has")
            unit, _, layer = odd[0].rpartition(".")
            raise ValueError(
                f"{what} it {has} {layer!r} of {unit!r}, which {lacks}; build the same layers at every width"
            )
        try:
            sub_indices(axes, whole, own, ordered)
        except ValueError as error:
            raise ValueError(f"{what}, {error}") from None


def shapes(blueprint: Blueprint) -> dict[str, Shape]:
    """Of a model's arrays, by name."""
    with torch.device("meta"):
        modules = {unit: blueprint.build_unit(unit) for unit in blueprint.units()}
    return {
        f"{unit}.{name}": tuple(value.shape)
        for unit, module in modules.items()
        for name, value in module.state_dict().items()
    }


def last_layer(model: Blueprint) -> dict[str, Shape]:
    """Of the arrays of a model's last linear layer, by name."""
    found = shapes(model)
    layer = list(found)[-1].rpartition(".")[0]
    return {name: shape for name, shape in found.items() if name.rpartition(".")[0] == layer}


def take(array: np.ndarray, indices: Indices) -> np.ndarray:
    """The small model's array."""
    return np.ascontiguousarray(array[np.ix_(*indices)]) if indices else array


class CoverageMean:
    """Of arrays that each cover a part of the model: sum_k w_k x_k / sum_k w_k entry by entry, over the clients that had it.

    Integer buffers (`num_batches_tracked`) take the maximum instead.
    """

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._weights: dict[str, np.ndarray] = {}

    def add(
        self, arrays: Mapping[str, np.ndarray], indices: Mapping[str, Indices], full: Mapping[str, Shape], weight: float
    ) -> None:
        """Take in one client's arrays; `weight` > 0."""
        for name, array in arrays.items():
            if not np.issubdtype(array.dtype, np.floating):
                self._sums[name] = np.maximum(self._sums.get(name, array), array)
                continue
            if name not in self._sums:
                self._sums[name], self._weights[name] = np.zeros(full[name]), np.zeros(full[name])
            place = np.ix_(*indices[name])
            self._sums[name][place] += weight * array.astype(np.float64)
            self._weights[name][place] += weight

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def over(self, name: str, previous: np.ndarray) -> np.ndarray:
        """The new array: what no client covered is as before, to the bit."""
        if not np.issubdtype(previous.dtype, np.floating):
            return np.asarray(self._sums[name])  # numpy makes scalars of arrays without dimensions
        weights = self._weights[name]
        covered = weights > 0
        fresh = previous.copy()
        fresh[covered] = (self._sums[name][covered] / weights[covered]).astype(previous.dtype)
        return fresh
