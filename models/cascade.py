"""A model as a cascade: indivisible atoms a_1 .. a_L in order, then a head.

Everything that cuts a model (modules, blocks, stages) selects atoms. Parameter names are global, so a partial update is a
partial state dict: `atoms.3.conv1.weight`, `head.fc.bias`, and `exits.3.fc.bias` or `aux.3.fc.bias` for the separate head of a
piece that ends with atom 3.

A `Blueprint` describes the model without allocating its memory: a device builds only the atoms it is about to run.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from piecework.device_profiles.dispatch import without_data
from piecework.models.frozen_norm import FrozenBatchNorm2d
from piecework.models.narrow_convolution import leave_out_unread

Shape = tuple[int, ...]
AUXILIARY_INPUTS = 256  # of a head with the pooling `auto`: a linear classifier on fewer features is too weak


@dataclass(frozen=True)
class Atom:
    """One indivisible part of a model.

    `name` is the readable name (`stem`, `block3`). `build` makes the module with torch's default initialisation. `shape` is the
    output shape for one example, without the batch dimension: (C, H, W), (tokens, F) or (F,). `before` is the input shape where
    it differs from the output shape of the previous atom.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: Shape
    before: Shape | None = None


@dataclass(frozen=True, eq=False)  # compared by identity, because equal factories cannot be recognised
class Blueprint:
    """How to build a cascade, atom by atom."""

    name: str
    input_shape: Shape  # of one example: (C, H, W) of an image, (F,) of a vector, or (length,) of a text
    num_classes: int
    atoms: tuple[Atom, ...]
    build_head: Callable[[], nn.Module]
    batch_norm: str
    vocabulary: int = 0  # of a text, whose tokens are below it
    width: float = 1.0  # the fraction of channels in a width-scaled model; 1 for other sub-models
    num_replacement_atoms: int = 0  # the last atoms, which a method puts in place of others (ProFL's basic layers)
    zoo_name: str = ""  # with `options` the arguments of `build_blueprint`, which builds the model with other channels
    options: tuple[tuple[str, str | int], ...] = ()
    initialisation: str = "default"  # of `initial_state`, or kaiming-normal
    auxiliary_pool: str = "authors"  # the pooling before an `auxiliary_head`
    uncut: str = ""  # why a torch module is one atom, if it is
    stored_shape: Shape = ()  # of an image on disk, if images are resized to `input_shape` when they are read

    @property
    def reads(self) -> str:
        """`images`, `tokens` or `feature vectors`."""
        return "images" if len(self.input_shape) == 3 else "tokens" if self.vocabulary else "feature vectors"

    @property
    def feature_shape(self) -> Shape:
        """The shape of one example at the head's input."""
        return self.atoms[len(self.atoms) - self.num_replacement_atoms - 1].shape

    def shape_before(self, atom: int) -> Shape:
        """Return the shape of one example at the input of atom `atom`."""
        if (before := self.atoms[atom].before) is not None:
            return before
        return self.input_shape if atom == 0 else self.atoms[atom - 1].shape

    def build_unit(self, unit: str) -> nn.Module:
        """Build the module of a unit: `atoms.<i>`, `head`, or a head after atom i, `exits.<i>` or `aux.<i>`."""
        return leave_out_unread(self._build(unit))

    def _build(self, unit: str) -> nn.Module:
        kind, _, index = unit.partition(".")
        if kind == "head":
            return self.build_head()
        if kind == "atoms":
            return self.atoms[int(index)].build()
        if kind == "exits":
            logits = num_logits(self) if self.num_classes == 2 else self.num_classes  # of two, the head may have one
            return ExitHead(self.atoms[int(index)].shape, logits, self.batch_norm)
        if kind == "aux":
            return auxiliary_head(self.atoms[int(index)].shape, self.num_classes, self.auxiliary_pool)
        raise ValueError(f"unknown unit {unit!r}: expected 'head', 'atoms.<i>', 'exits.<i>' or 'aux.<i>'")

    def units(self, *, exits: bool = False) -> list[str]:
        """List the units of the whole model in order; with `exits`, also an exit head after every atom but the last."""
        atoms = [f"atoms.{i}" for i in range(len(self.atoms))]
        return [*atoms, "head", *(f"exits.{i}" for i in range(len(self.atoms) - 1) if exits)]


class Cascade(nn.Module):
    """The whole model, which only a server or a large enough device holds."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.atoms = nn.ModuleList(atom.build() for atom in blueprint.atoms)
        self.head = blueprint.build_head()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits[B, classes] for x[B, *input_shape]."""
        for atom in self.atoms:
            x = atom(x)
        logits: Tensor = self.head(x)
        return logits


class ExitHead(nn.Module):
    """m-FeDepth's exit head of a block: batch norm, global average pooling, linear (from the authors' code)."""

    def __init__(self, shape: Shape, num_classes: int, batch_norm: str) -> None:
        super().__init__()
        self.norm = norm_layer(shape[0], batch_norm) if len(shape) == 3 else nn.Identity()
        self.fc = nn.Linear(num_features(shape), num_classes)

    def forward(self, z: Tensor) -> Tensor:
        """Return logits[B, classes] for z[B, C, H, W], z[B, tokens, F] or z[B, F]."""
        logits: Tensor = self.fc(pool_features(self.norm(z)))
        return logits


def outputs(head: nn.Module) -> int:
    """Return the number of logits of a head: the outputs of its last linear layer, or of another layer that names them."""
    return [found for layer in head.modules() if isinstance(found := getattr(layer, "out_features", None), int)][-1]


def num_logits(blueprint: Blueprint) -> int:
    """Return the number of logits of the model: one per class, or a single one for two classes."""
    with without_data():
        return outputs(blueprint.build_head())


class MeanOverTokens(nn.Module):
    """Average [B, tokens, F] over its tokens to [B, F]."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the mean over tokens."""
        return z.mean(dim=1)


def auxiliary_head(shape: Shape, num_classes: int, pool: str) -> nn.Module:
    """Return FedProphet's auxiliary head of a module: the linear layer of section 5.1 (Eq. 9), after a pooling.

    Feature maps [C, H, W] larger than s x s are pooled to s x s. s is the smallest side with s^2 C >= inputs, where `pool` sets
    the inputs: `authors` as many as classes, as in the authors' code, `auto` 256, or more if there are more classes. `none`
    leaves the features as they are, as Eq. 9 does.
    """
    if pool == "none" or len(shape) == 1:
        return nn.Sequential(
            OrderedDict(pool=nn.Identity(), flatten=nn.Flatten(), fc=nn.Linear(math.prod(shape), num_classes))
        )
    if len(shape) == 2:
        return nn.Sequential(OrderedDict(pool=MeanOverTokens(), fc=nn.Linear(shape[-1], num_classes)))
    inputs = num_classes if pool == "authors" else max(num_classes, AUXILIARY_INPUTS)
    side = math.ceil(math.sqrt(inputs / shape[0]))
    larger = min(shape[1:]) > side
    pooling = nn.AdaptiveAvgPool2d(side) if larger else nn.Identity()
    features = shape[0] * side**2 if larger else math.prod(shape)
    return nn.Sequential(OrderedDict(pool=pooling, flatten=nn.Flatten(), fc=nn.Linear(features, num_classes)))


def pool_features(z: Tensor) -> Tensor:
    """Return the mean over space of z[B, C, H, W], the mean over tokens of z[B, tokens, F], or z[B, F] unchanged."""
    if z.dim() == 4:
        return z.mean(dim=(2, 3))
    return z.mean(dim=1) if z.dim() == 3 else z


def num_features(shape: Shape) -> int:
    """Return the inputs of a linear layer after `pool_features`: C of (C, H, W), F of (tokens, F) and of (F,)."""
    return shape[0] if len(shape) == 3 else shape[-1]


def norm_layer(channels: int, batch_norm: str) -> nn.Module:
    """Return the norm for a value of `architecture.batch-norm`, or of `architecture.norm` if that is not `batch`.

    `running` and `local` keep running statistics, and `batch` always uses those of the batch.
    """
    if batch_norm == "group":
        return group_norm(channels)
    if batch_norm == "frozen":
        return FrozenBatchNorm2d(channels)
    return nn.BatchNorm2d(channels, track_running_stats=batch_norm != "batch")


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a group norm of two groups, as in federated learning since Hsieh et al. (ICML 2020); one if channels are odd."""
    return nn.GroupNorm(1 if channels % 2 else 2, channels)


def fit_features(z: Tensor, shape: Shape) -> Tensor:
    """Bring z[B, C, H, W] (or [B, tokens, F], [B, F]) to `shape` without parameters: FeDepth's skip by zero padding.

    Space is subsampled (every s-th row and column), then cropped. Channels are padded with zeros, half before and half after
    (the authors' option A shortcut: 16 channels become 64 as 24 + 16 + 24).
    """
    have = tuple(z.shape[1:])
    if have == tuple(shape):
        return z
    if not can_fit(have, shape):
        raise ValueError(
            f"features {have} cannot be brought to {tuple(shape)}: channels are only added, and space only shrinks"
        )
    if len(shape) == 2:
        return fit_features(z.flatten(0, 1), shape[1:]).view(*z.shape[:2], -1)
    for dim, want in enumerate(shape[1:], start=2):
        step = kept_places(z.shape[dim], want).step
        z = z[(slice(None),) * dim + (slice(None, None, step),)].narrow(dim, 0, want)
    before, after = padding(z.shape[1], shape[0])
    return nn.functional.pad(z, (0, 0) * (z.dim() - 2) + (before, after))


def can_fit(have: Shape, want: Shape) -> bool:
    """Return whether `fit_features` can bring features of one shape to another."""
    if tuple(have) == tuple(want):
        return True
    if len(have) != len(want):
        return False
    if len(have) == 2:
        return have[0] == want[0] and have[1] <= want[1]
    return have[0] <= want[0] and all(h >= w for h, w in zip(have[1:], want[1:], strict=True))


def kept_places(have: int, want: int) -> slice:
    """Return the rows or columns that `fit_features` keeps: every s-th, starting with the first."""
    step = have // want
    return slice(0, want * step, step)


def padding(have: int, want: int) -> tuple[int, int]:
    """Return how many zero channels `fit_features` adds before and after."""
    before = (want - have) // 2
    return before, want - have - before


def run_atoms(blueprint: Blueprint, atoms: Sequence[int], modules: Sequence[nn.Module], z: Tensor) -> Tensor:
    """Run atoms in order on z. Where atoms in between are excluded, the features are fitted to the next one's input."""
    for index, module in zip(atoms, modules, strict=True):
        z = module(fit_features(z, blueprint.shape_before(index)))
    return z


def initial_state(
    blueprint: Blueprint, seed: int, *, exits: bool = False, units: Sequence[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the initial arrays by name, a pure function of (blueprint, units, seed). Only one unit is in memory at a time."""
    for number, unit in enumerate(units or blueprint.units(exits=exits)):
        with isolate_rng(int(np.random.SeedSequence([seed, number]).generate_state(1)[0])):
            module = blueprint.build_unit(unit)
            if blueprint.initialisation == "kaiming-normal":
                draw_kaiming_normal(module)
        for name, value in module.state_dict().items():
            yield f"{unit}.{name}", value


def draw_kaiming_normal(module: nn.Module) -> None:
    """Draw the weights of convolutions from N(0, 2 / (outputs k^2)).

    This is He et al., "Delving Deep into Rectifiers: Surpassing Human-Level Performance on ImageNet Classification", ICCV 2015,
    section 2.2, backward case, for k x k kernels.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


INITIALISERS = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "constant_",
    "ones_",
    "zeros_",
    "kaiming_uniform_",
    "kaiming_normal_",
)


_UNSET = ContextVar("unset", default=False)


@contextmanager
def unset_weights() -> Iterator[None]:
    """Build modules without drawing initial weights, for a caller that sets all of them: ResNet-18 takes 4 ms instead of 50.

    Layers call the functions of torch.nn.init by these names. No other thread may initialise a model meanwhile.
    """
    functions = {name: getattr(nn.init, name) for name in INITIALISERS}
    token = _UNSET.set(True)
    try:
        for name in functions:
            setattr(nn.init, name, lambda tensor, *_, **__: tensor)
        yield
    finally:
        for name, function in functions.items():
            setattr(nn.init, name, function)
        _UNSET.reset(token)


def weights_are_unset() -> bool:
    """Return whether modules are built for a caller that sets all of their weights."""
    return _UNSET.get()


@contextmanager
def isolate_rng(seed: int) -> Iterator[None]:
    """Seed torch's global generator, from which layers are initialised, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def unit_of(name: str) -> str:
    """Return the unit of a parameter: `atoms.3.conv1.weight` -> `atoms.3`, `head.fc.bias` -> `head`.

    The unit of an array beside the model has the array's prefix: `control_head.fc.bias` -> `control_head`.
    """
    kind, _, rest = name.partition(".")
    return kind if kind.endswith("head") or not rest else f"{kind}.{rest.split('.', 1)[0]}"


def parameter_names(blueprint: Blueprint, unit: str) -> list[str]:
    """List the global names of a unit's parameters in order, without its buffers."""
    with without_data():
        return [f"{unit}.{name}" for name, _ in blueprint.build_unit(unit).named_parameters()]


def is_bare(blueprint: Blueprint, unit: str) -> bool:
    """Return whether a unit of the model has neither parameters nor buffers, as an atom that only pools or flattens."""
    if unit not in blueprint.units():
        return False
    with without_data():
        return not blueprint.build_unit(unit).state_dict()


def has_statistics(blueprint: Blueprint, unit: str) -> bool:
    """Return whether a unit has batch norms with running statistics."""
    with without_data():
        return any(name.endswith("running_mean") for name, _ in blueprint.build_unit(unit).named_buffers())
