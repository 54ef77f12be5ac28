"""Batch norms of nets within nets: each width ratio has a scale and a shift of its own, and all nets share the other weights.

Horvath et al., "FjORD" (NeurIPS 2021), after Yu et al., "Slimmable Neural Networks" (ICLR 2019). Arrays of the ratio 1 keep
their names, `weight` and `bias`. Those of the ratio 0.5 are `weight_0_5` and `bias_0_5`, in the net of this ratio and in wider
ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint
from piecework.models.change import Change, Origin
from piecework.models.plain_norms import require_plain_norm

Channels = Mapping[float, int]  # by width ratio
MOST_RATIOS = 100  # nets within a net, each of which is built


class _Nested(_BatchNorm):
    """Mixin of a batch norm that uses the scale and shift of one width ratio."""

    ratio: float

    def keep_own(self, ratio: float, channels: Channels) -> None:
        """Add parameters for nets of other ratios, and use those of `ratio`. Without a net of ratio 1, its parameters go."""
        self.ratio = ratio
        for other, count in channels.items():
            if other != 1:
                self.register_parameter(own_name("weight", other), nn.Parameter(torch.ones(count)))
                self.register_parameter(own_name("bias", other), nn.Parameter(torch.zeros(count)))
        if ratio != 1:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x by the statistics of the batch; at ratio 1 running statistics are used as in any batch norm."""
        if self.ratio == 1:
            out: Tensor = super().forward(x)
            return out
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        scale, shift = (self.get_parameter(own_name(kind, self.ratio)) for kind in ("weight", "bias"))
        return F.batch_norm(x, None, None, scale, shift, training=True, eps=self.eps)


class NestedBatchNorm2d(_Nested, nn.BatchNorm2d):
    """Batch norm of maps [B, C, H, W] with parameters for each width ratio."""


class NestedBatchNorm1d(_Nested, nn.BatchNorm1d):
    """Batch norm of features [B, F] with parameters for each width ratio."""


def own_name(kind: str, ratio: float) -> str:
    """Return the name of a norm's array for a width ratio: `weight` or `bias` for the ratio 1, `weight_0_5` for 0.5."""
    return kind if ratio == 1 else f"{kind}_{ratio!r}".replace(".", "_")


@dataclass(frozen=True)
class NestedNorms(Change):
    """Batch norms with parameters of each net within this one (FjORD)."""

    nested_norms: Annotated[tuple[float, ...], Field(min_length=1, max_length=MOST_RATIOS)]  # the nets' width ratios

    def apply(self, model: Blueprint, origin: Origin) -> Blueprint:
        """Return the model with the norms of these nets."""
        return with_nested_norms(model, origin.width, {ratio: origin.at_width(ratio) for ratio in self.nested_norms})


def with_nested_norms(model: Blueprint, ratio: float, nets: Mapping[float, Blueprint]) -> Blueprint:
    """Return the net of width ratio `ratio`, whose batch norms also have the parameters of `nets`, given by their ratios.

    Raises ValueError if one of these keeps running statistics, which differ between nets.
    """
    found: dict[str, dict[str, dict[float, int]]] = {}
    for other, net in nets.items():
        for unit in net.units():
            for path, channels in norm_channels(net, unit).items():
                found.setdefault(unit, {}).setdefault(path, {})[other] = channels
    if ratio != 1 and model.batch_norm != "batch" and found:
        raise ValueError(
            f"batch_norm = {model.batch_norm!r}: nested nets have different statistics, so their norms must use those of the "
            "batch (batch)"
        )
    atoms = tuple(
        replace(atom, build=partial(_build, atom.build, ratio, found.get(f"atoms.{i}", {})))
        for i, atom in enumerate(model.atoms)
    )
    return replace(model, atoms=atoms, build_head=partial(_build, model.build_head, ratio, found.get("head", {})))


@lru_cache(maxsize=4096)
def norm_channels(model: Blueprint, unit: str) -> Mapping[str, int]:
    """Return the channels of a unit's batch norms by path."""
    with without_data():
        layers = model.build_unit(unit).named_modules()
    return {path: layer.num_features for path, layer in layers if isinstance(layer, _BatchNorm)}


def _build(build: Callable[[], nn.Module], ratio: float, channels: Mapping[str, Channels]) -> nn.Module:
    module = build()
    for path, of_nets in channels.items():
        norm = module.get_submodule(path)
        assert isinstance(norm, _BatchNorm)
        require_plain_norm(norm, "one with statistics of each nested net")
        norm.__class__ = NestedBatchNorm1d if isinstance(norm, nn.BatchNorm1d) else NestedBatchNorm2d
        assert isinstance(norm, _Nested)
        norm.keep_own(ratio, of_nets)
    return module
