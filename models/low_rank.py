"""Sub-models of low rank: a device holds two thin factors instead of a layer's weight (PriSM, section 3.2.1).

W[N, M k^2] = U S V^T has rank R = min(M k^2, N). v' = sqrt(S) V^T are R kernels of k x k with the layer's stride and padding.
u' = U sqrt(S) is a 1 x 1 convolution with the bias. A sub-model of keep ratio c has r = ceil(c R) of the R kernels.

The `u` of a convolution computes only the first ceil(c N) channels, and its norms are as narrow. The other channels are zero: a
residual sum gets nothing from them, and in a plain chain the next convolution does not read them. Shortcuts, the first atom, 1
x 1 convolutions and the head stay full. A transformer's MLPs and an LSTM's gates (its four matrices stacked) keep all outputs,
as in the authors' code.

With `scattered`, any channels may be computed; the array `rows` holds their positions. With `narrow =
false` a convolution computes all channels: these are the sub-models of FedHM, PriSM's baseline OrthDrop.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Atom, Blueprint
from piecework.models.change import Change, Origin
from piecework.models.lstm import Lstm
from piecework.models.padding import PadChannels, Padded, Padding
from piecework.models.preresnet import PreActivationBlock
from piecework.models.resnet import BasicBlock
from piecework.models.vit import Encoder

CHAIN = "chain"
SHOWN = 3  # atoms, in an error


@dataclass(frozen=True)
class LayerCut:
    """How a layer is cut: the fraction `keep` of its kernels, whether it is `narrow`, and whether channels are `scattered`."""

    keep: float
    narrow: bool = True
    scattered: bool = False

    def rank(self, inputs: int, outputs: int) -> int:
        """Return the rank r for a weight[outputs, inputs]."""
        return _ceil(self.keep * min(inputs, outputs))

    def channels(self, outputs: int) -> int:
        """Return the number of output channels that are computed."""
        return _ceil(self.keep * outputs) if self.narrow else outputs


def _ceil(number: float) -> int:
    return ceil(round(number, 6))  # so that a rounding error does not make 14 of 0.2 * 65


class Pair(Padded):
    """`v`, then `u`, in place of a layer whose arrays are `weight` and `bias` of the enclosing module.

    `reads` names the layer of the atom whose channels it reads: CHAIN is the previous layer of a plain chain, and an empty name
    means all channels.
    """

    def __init__(
        self, v: nn.Module, u: nn.Module, weight: str, bias: str = "", pad: Padding | None = None, reads: str = ""
    ) -> None:
        super().__init__()
        self.v, self.u = v, u
        self.weight, self.bias, self.reads = weight, bias, reads
        self.hold(pad)

    def forward(self, z: Tensor) -> Tensor:
        """Return the computed channels of the layer's output."""
        return self.pad(self.u(self.v(z)))

    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return v' and u'."""
        return self.v.get_parameter("weight"), self.u.get_parameter("weight")


class PaddedNorm(nn.BatchNorm2d, Padded):
    """A norm of the computed channels, with zeros for the others: the mask is applied after the shift."""

    follows: str  # the layer of the atom that makes these channels

    def forward(self, z: Tensor) -> Tensor:
        """Normalise z[B, c, H, W] and pad it, if it has a padding."""
        return self.pad(super().forward(z))


class LowRankLSTM(nn.Module):
    """nn.LSTM of one layer, batch first, with two pairs for its gates. The hidden state never meets a full matrix."""

    def __init__(self, whole: nn.LSTM, cut: LayerCut) -> None:
        super().__init__()
        gates, self.hidden = 4 * whole.hidden_size, whole.hidden_size
        for name, inputs in (("ih", whole.input_size), ("hh", whole.hidden_size)):
            rank = cut.rank(inputs, gates)
            v, u = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, gates)
            self.add_module(name, Pair(v, u, f"weight_{name}_l0", f"bias_{name}_l0"))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return out[B, length, hidden] for x[B, length, inputs], at the position where nn.LSTM returns it."""
        ih, hh = self.get_submodule("ih"), self.get_submodule("hh")
        h = c = x.new_zeros(x.shape[0], self.hidden)
        out = []
        for each in ih.get_submodule("v")(x).unbind(1):
            i, f, g, o = (ih.get_submodule("u")(each) + hh(h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(h)
        return torch.stack(out, 1), None


@dataclass(frozen=True)
class LowRank(Change):
    """A fraction of the rank of factorised layers (PriSM)."""

    keep: Annotated[float, Field(gt=0, le=1)]  # this fraction
    channels: Literal["first", "random", "all"] = "first"  # the output channels that they compute

    def apply(self, model: Blueprint, origin: Origin) -> Blueprint:
        """Return the sub-model."""
        return low_rank(model, self.keep, narrow=self.channels != "all", scattered=self.channels == "random")


def low_rank(blueprint: Blueprint, keep: float, *, narrow: bool = True, scattered: bool = False) -> Blueprint:
    """Return the sub-model of keep ratio `keep` in (0, 1]. Raises ValueError for a model with nothing to factorise."""
    first, *others = blueprint.atoms
    cut, live, atoms = LayerCut(keep, narrow, scattered), None, [first]
    for number, atom in enumerate(others, start=1):
        last = number == len(others)
        own = cut if len(atom.shape) == 3 else LayerCut(keep)  # only maps have channels that may be left out
        build = partial(build_thin, atom.build, own, live, last)
        with without_data():
            module = atom.build()
        if chained := isinstance(module, nn.Sequential):
            require_chain(module, f"atom {atom.name!r} of {blueprint.name}")
        live = cut.channels(atom.shape[0]) if chained and not last else None
        atoms.append(Atom(atom.name, build, (live or atom.shape[0], *atom.shape[1:])))
    cut_model = replace(blueprint, atoms=tuple(atoms), width=1.0)
    if not factors(cut_model):
        raise ValueError(f"{blueprint.name} cannot be cut by rank: {_describe_full(blueprint)}")
    return cut_model


def _describe_full(blueprint: Blueprint) -> str:
    """Return why no atom of a model has two factors: the atoms with the classes of their layers, and what would have them."""
    first, *others = blueprint.atoms
    if not others:
        reason = f", because of {blueprint.uncut}" if blueprint.uncut else ""
        return f"atom {first.name!r} is its only one{reason}, and the first atom of a model stays whole"
    shown = []
    for atom in others[:SHOWN]:
        with without_data():
            module = atom.build()
        layers = (type(layer).__name__ for layer in module.modules() if layer is not module and not [*layer.children()])
        shown.append(f"{atom.name!r} ({', '.join(layers) or type(module).__name__})")
    more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    return (
        f"the atoms after its first, {', '.join(shown)}{more}, stay whole. Two factors can replace the weights of this "
        "project's BasicBlock, PreActivationBlock, Encoder and Lstm, and of a chain with a convolution named 'conv', as in "
        "resnet18 or convnet; the recorded calls of another module have no such form"
    )


def require_chain(module: nn.Sequential, what: str) -> None:
    """Raise ValueError, which names `what`, for a plain chain that cannot be cut.

    Only its convolution `conv` and its norm `bn` may have arrays.
    """
    layers = dict(module.named_children())
    conv, norm = layers.get("conv"), layers.get("bn")
    odd = [
        name for name, layer in layers.items() if name not in ("conv", "bn") and [*layer.parameters(), *layer.buffers()]
    ]
    plain = isinstance(conv, nn.Conv2d) and conv.groups == 1 and set(conv.dilation) == {1}
    if not plain or odd or not isinstance(norm, nn.BatchNorm2d | None):
        there = ", ".join(f"{name} ({type(layer).__name__})" for name, layer in layers.items())
        raise ValueError(
            f"{what} cannot be cut by rank: it is a chain of {there}. A chain can be cut if it has one plain "
            "convolution named 'conv', and possibly a batch norm named 'bn' (nn.Sequential(OrderedDict(conv=.., bn=..)))"
        )


def build_thin(build: Callable[[], nn.Module], cut: LayerCut, live: int | None, last: bool) -> nn.Module:
    """Build an atom with pairs that read `live` channels (None = all), without ever allocating a full weight.

    The `last` atom of a plain chain passes all its channels to the head.
    """
    with without_data():
        module = build()
        for path, layer in thin_layers(module, cut, live, last):
            module.add_module(path, layer)
    return materialise(module)


def thin_layers(module: nn.Module, cut: LayerCut, live: int | None, last: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield, by name, the layers of an atom that are replaced or appended."""
    if isinstance(module, BasicBlock | PreActivationBlock):
        outputs = module.conv2.out_channels
        inner, padded_norm = ("bn1", "bn2") if isinstance(module, BasicBlock) else ("bn2", "")
        yield "conv1", _conv(module.conv1, "conv1", cut)
        yield inner, _norm(module.get_submodule(inner), cut, "conv1")
        wide = 0 if padded_norm else outputs
        yield "conv2", _conv(module.conv2, "conv2", cut, cut.channels(outputs), wide, reads="conv1")
        if padded_norm:
            yield padded_norm, _norm(module.get_submodule(padded_norm), cut, "conv2", outputs)
    elif isinstance(module, Encoder):
        yield from ((name, _linear(module.get_submodule(name), name, cut)) for name in ("fc1", "fc2"))
    elif isinstance(module, Lstm):
        yield "lstm", LowRankLSTM(module.lstm, cut)
    elif isinstance(module, nn.Sequential):
        children = dict(module.named_children())
        yield "conv", _conv(children["conv"], "conv", cut, live, reads=CHAIN if live else "")
        if "bn" in children:
            yield "bn", _norm(children["bn"], cut, "conv")
        if last and (pad := _padding(cut, len(children["conv"].get_parameter("weight")))):
            yield "pad", PadChannels(pad)


def materialise(module: nn.Module) -> nn.Module:
    """Allocate the memory of a meta module, with default initial values where its layers have them."""
    for layer in module.modules():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, nn.Parameter(torch.empty(parameter.shape)))
        for name, buffer in list(layer.named_buffers(recurse=False)):
            empty = torch.empty(buffer.shape, dtype=buffer.dtype)
            setattr(layer, name, torch.arange(len(buffer)) if name == "rows" else empty)
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()
    return module


def _padding(cut: LayerCut, wide: int) -> Padding | None:
    """Return the padding from the computed channels to `wide` channels, or None if that is 0."""
    return Padding(wide, cut.channels(wide) * cut.scattered) if wide and cut.narrow else None


def _conv(conv: nn.Module, name: str, cut: LayerCut, live: int | None = None, wide: int = 0, reads: str = "") -> Pair:
    """Return a pair that reads `live` channels of the layer `reads` and pads to `wide` channels, if given."""
    assert isinstance(conv, nn.Conv2d)
    outputs = cut.channels(conv.out_channels)
    rank = cut.rank(conv.weight[0].numel(), conv.out_channels)
    inputs = conv.in_channels if live is None else live
    v = nn.Conv2d(
        inputs, rank, bias=False, **{name: getattr(conv, name) for name in ("kernel_size", "stride", "padding")}
    )
    u = nn.Conv2d(rank, outputs, 1, bias=conv.bias is not None)
    return Pair(v, u, f"{name}.weight", f"{name}.bias" if conv.bias is not None else "", _padding(cut, wide), reads)


def _linear(linear: nn.Module, name: str, cut: LayerCut) -> Pair:
    assert isinstance(linear, nn.Linear)
    rank = cut.rank(linear.in_features, linear.out_features)
    v, u = nn.Linear(linear.in_features, rank, bias=False), nn.Linear(rank, linear.out_features)
    return Pair(v, u, f"{name}.weight", f"{name}.bias")


def _norm(norm: nn.Module, cut: LayerCut, follows: str, wide: int = 0) -> nn.Module:
    assert isinstance(norm, nn.BatchNorm2d)
    thin_norm = PaddedNorm(cut.channels(norm.num_features), track_running_stats=norm.track_running_stats)
    thin_norm.follows = follows
    thin_norm.hold(_padding(cut, wide))
    return thin_norm


@dataclass(frozen=True)
class Factors:
    """The arrays of a sub-model that stand for full arrays: v and u for `weight`, u's bias for `bias`, if any."""

    v: str
    u: str
    weight: str
    bias: tuple[str, str] | None


def factors(blueprint: Blueprint) -> list[Factors]:
    """List the pairs of a sub-model in order, by the global names of their arrays."""
    found = []
    for unit in blueprint.units():
        with without_data():
            module = blueprint.build_unit(unit)
        for path, layer in module.named_modules():
            if isinstance(layer, Pair):
                around = ".".join(filter(None, (unit, path.rpartition(".")[0])))
                bias = (f"{unit}.{path}.u.bias", f"{around}.{layer.bias}") if layer.bias else None
                v, u = f"{unit}.{path}.v.weight", f"{unit}.{path}.u.weight"
                found.append(Factors(v, u, f"{around}.{layer.weight}", bias))
    return found


def norms(blueprint: Blueprint) -> dict[str, str]:
    """Map the weight of each layer that a norm follows directly to the name of that norm."""
    found = {}
    for unit in blueprint.units():
        with without_data():
            module = blueprint.build_unit(unit)
        for path, layer in module.named_modules():
            if isinstance(layer, PaddedNorm):
                found[f"{unit}.{layer.follows}.weight"] = f"{unit}.{path}"
    return found


def find_computed(blueprint: Blueprint) -> dict[str, tuple[str, ...]]:
    """Map each array of a sub-model with computed channels to, per dimension, the weight of the layer that computes them.

    A dimension that is not about channels has an empty name.
    """
    found: dict[str, tuple[str, ...]] = {}
    before = ""
    for unit in blueprint.units():
        with without_data():
            module = blueprint.build_unit(unit)
        for path, layer in module.named_modules():
            if isinstance(layer, Pair) and isinstance(layer.u, nn.Conv2d):
                made = f"{unit}.{layer.weight}"
                read = before if layer.reads == CHAIN else f"{unit}.{layer.reads}.weight" if layer.reads else ""
                found |= {f"{unit}.{path}.v.weight": ("", read), f"{unit}.{path}.u.weight": (made,)}
                found |= {f"{unit}.{path}.u.bias": (made,)} if layer.bias else {}
                found |= {f"{unit}.{path}.rows": (made,)} if layer.rows is not None else {}
            elif isinstance(layer, PaddedNorm):
                made = f"{unit}.{layer.follows}.weight"
                names = [name for name in layer.state_dict() if not name.endswith("num_batches_tracked")]
                found |= {f"{unit}.{path}.{name}": (made,) for name in names}
            elif isinstance(layer, PadChannels) and layer.rows is not None:
                found[f"{unit}.{path}.rows"] = (f"{unit}.conv.weight",)
        before = f"{unit}.conv.weight"
    return found


def is_place(name: str) -> bool:
    """Return whether an array of a sub-model holds the positions of computed channels."""
    return name.endswith(".rows")
