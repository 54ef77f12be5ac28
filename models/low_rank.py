"""PriSM's sub-model: every k x k convolution behind the first atom becomes two thin ones (section 3.2.1).

For a convolution W[N, M k^2] = U S V^T: Conv_V has r = ceil(keep N) kernels of k x k, Conv_U r kernels of 1 x 1, so that r
instead of N channels leave it ("PriSM only computes r output channels"). Whatever follows has r channels too: norms,
1 x 1 shortcuts, the next Conv_V's input. The first atom stays whole (the stem is not factorised), its first r channels are
read; the head stays whole and sees zeros for the channels that are not there.

Of a transformer the two linear layers of each MLP become two thin ones each, of rank ceil(keep x the smaller of their sizes);
all channels leave them, and attention stays whole (the authors' code for DeiT). The authors' LSTM is not here: its gates are
rebuilt from their kernels, so that a sub-model takes no less memory.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil

from torch import Tensor, nn

from models.cascade import Atom, Blueprint
from models.layers import named
from models.vit import Encoder


def low_rank(blueprint: Blueprint, keep: float) -> Blueprint:
    """The sub-model of keep ratio `keep` in (0, 1). Raises ValueError for a model without anything to factorise."""
    first, *others = blueprint.atoms
    if all(isinstance(atom.build, partial) and atom.build.func is Encoder for atom in others):
        mlps = [Atom(atom.name, partial(_thin_mlp, atom.build, keep), atom.shape) for atom in others]
        return replace(blueprint, atoms=(first, *mlps), width=1.0)
    if len(blueprint.input_shape) != 3 or any(len(atom.shape) != 3 for atom in blueprint.atoms):
        raise ValueError(
            f"{blueprint.name} cannot be cut by rank: only convolutions and a transformer's MLPs are factorised"
        )
    atoms = [Atom(first.name, partial(_first, first.build, _rank(first.shape[0], keep)), _thin(first.shape, keep))]
    atoms += [Atom(atom.name, partial(_factorised, atom.build, keep), _thin(atom.shape, keep)) for atom in others]
    head = partial(_padded, blueprint.build_head, blueprint.feature_shape[0])
    return replace(blueprint, atoms=tuple(atoms), build_head=head, width=1.0)


def _rank(channels: int, keep: float) -> int:
    return ceil(round(keep * channels, 6))  # 0.2 * 65 must not become 14 for a rounding error


def _thin(shape: tuple[int, ...], keep: float) -> tuple[int, ...]:
    return (_rank(shape[0], keep), *shape[1:])


class FirstChannels(nn.Module):
    """z[B, C, H, W] to its first `channels` channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, z: Tensor) -> Tensor:
        """z[B, channels, H, W]."""
        return z[:, : self.channels]


class PadChannels(nn.Module):
    """z[B, c, H, W] to `channels` channels, with zeros."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, z: Tensor) -> Tensor:
        """z[B, channels, H, W]."""
        return nn.functional.pad(z, (0, 0, 0, 0, 0, self.channels - z.shape[1]))


def _first(build: Callable[[], nn.Module], rank: int) -> nn.Module:
    return named(whole=build(), narrow=FirstChannels(rank))


def _padded(build: Callable[[], nn.Module], channels: int) -> nn.Module:
    return named(pad=PadChannels(channels), whole=build())


def _factorised(build: Callable[[], nn.Module], keep: float) -> nn.Module:
    module = build()
    for path, layer in list(module.named_modules()):
        thin = _thin_layer(layer, keep)
        if thin is not None:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, thin)
    return module


def _thin_mlp(build: Callable[[], nn.Module], keep: float) -> nn.Module:
    encoder = build()
    for name in ("fc1", "fc2"):
        whole = encoder.get_submodule(name)
        assert isinstance(whole, nn.Linear)
        rank = _rank(min(whole.in_features, whole.out_features), keep)
        thin = named(v=nn.Linear(whole.in_features, rank, bias=False), u=nn.Linear(rank, whole.out_features))
        setattr(encoder, name, thin)
    return encoder


def _thin_layer(layer: nn.Module, keep: float) -> nn.Module | None:
    if isinstance(layer, nn.BatchNorm2d):
        return nn.BatchNorm2d(_rank(layer.num_features, keep), track_running_stats=layer.track_running_stats)
    if not isinstance(layer, nn.Conv2d):
        return None
    inputs, rank = _rank(layer.in_channels, keep), _rank(layer.out_channels, keep)
    (size, _), (stride, _), padding = layer.kernel_size, layer.stride, int(layer.padding[0])
    bias = layer.bias is not None
    if size == 1:
        return nn.Conv2d(inputs, rank, 1, stride, padding, bias=bias)
    return named(
        v=nn.Conv2d(inputs, rank, size, stride, padding, bias=False),
        u=nn.Conv2d(rank, rank, 1, bias=bias),
    )
