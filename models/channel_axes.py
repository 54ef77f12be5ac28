"""Which dimensions of tensors are channels, and which of these belong together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """A dimension of `outer` x C x `inner`, C channels of a group: a flattened map has C x (H W), an LSTM's gates 4 x C."""

    group: int
    outer: int = 1
    inner: int = 1


Axes = tuple[Axis | None, ...]  # one entry per dimension; None: no channels, e.g. space, or the colours of images


class Follower:
    """Records the axes of the tensors that a model makes and of the arrays it uses."""

    def __init__(self) -> None:
        super().__init__()
        self._fixed: list[Axis] = []  # all of whose channels a narrow model has
        self._links: list[Axis | None] = []  # for each group: the axis that it is a part of or equal to
        self._noted: dict[int, tuple[Tensor, Axes]] = {}  # the tensor is kept so that its id is not reused

    def new(self, **layout: int) -> Axis:
        """Return an axis for channels not seen before."""
        self._links.append(None)
        return Axis(len(self._links) - 1, **layout)

    def resolve(self, axis: Axis) -> Axis:
        """Return the axis in terms of the group it finally belongs to."""
        while (link := self._links[axis.group]) is not None:
            axis = Axis(link.group, axis.outer * link.outer, axis.inner * link.inner)
        return axis

    def axes(self, tensor: Tensor) -> Axes:
        """Return the known axes of a tensor. An unknown array gets a new axis in each dimension longer than 1."""
        if id(tensor) not in self._noted and isinstance(tensor, torch.nn.Parameter):
            self.note(tensor, [self.new() if size > 1 else None for size in tensor.shape])
        known = self._noted.get(id(tensor))
        return tuple(axis and self.resolve(axis) for axis in known[1]) if known else (None,) * tensor.dim()

    def free(self, tensor: Tensor) -> Axes:
        """Return the axes of a tensor of which a narrow model may have fewer channels."""
        fixed = {self.resolve(axis).group for axis in self._fixed}
        return tuple(axis if axis and axis.group not in fixed else None for axis in self.axes(tensor))

    def note(self, tensor: Tensor | None, axes: Sequence[Axis | None]) -> None:
        """Record the axes of a tensor."""
        if tensor is not None:
            if len(axes) != tensor.dim():
                raise ValueError(f"channels cannot be followed to a tensor of shape {tuple(tensor.shape)}")
            self._noted[id(tensor)] = tensor, tuple(axes)

    def bind(self, array: Tensor | None, axes: Sequence[Axis | None]) -> None:
        """Record the axes of an array that a layer uses. Those of an earlier use, and of what it is computed of, are joined."""
        if array is not None and id(array) in self._noted:
            for old, new in zip(self.axes(array), axes, strict=True):
                self.join(old, new)
        else:
            self.note(array, axes)

    def join(self, one: Axis | None, other: Axis | None) -> None:
        """Have two axes be one. Channels of one that has none elsewhere all stay."""
        if one is not None and other is not None:
            self.same(one, other)
        elif axis := one or other:
            self._fixed.append(axis)

    def same(self, one: Axis | None, other: Axis | None) -> Axis | None:
        """Return the common axis of tensors that are added, at least one of whose axes is known."""
        if one is None or other is None:
            return one or other
        one, other = self.resolve(one), self.resolve(other)
        if one.group != other.group:
            if (one.outer, one.inner) != (other.outer, other.inner):
                raise ValueError("channels are added up that are laid out in different ways")
            self._links[other.group] = Axis(one.group)
        return one

    def part(self, axis: Axis, runs: int) -> Axis:
        """Return the axis of one of the `runs` equal parts into which another axis is cut."""
        axis = self.resolve(axis)
        if axis.outer % runs == 0:
            return Axis(axis.group, axis.outer // runs, axis.inner)
        part = self.new()
        self._links[axis.group] = Axis(part.group, outer=runs)
        return Axis(part.group, axis.outer, axis.inner)

    def carry(self, name: str, out: Tensor, inputs: Sequence[Tensor]) -> None:
        """Carry axes through a function that treats all channels alike: dimensions are matched from the last one."""
        axes: list[Axis | None] = [None] * out.dim()
        for tensor in inputs:
            for place, axis in enumerate(reversed(self.axes(tensor)), start=1):
                if axis is not None:
                    if tensor.dim() > out.dim() or tensor.shape[-place] != out.shape[-place]:
                        raise ValueError(f"channels cannot be followed through {name}")
                    axes[-place] = self.same(axes[-place], axis)
        self.note(out, axes)
