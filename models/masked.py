"""SpaFL's model: a filter is masked when its weights are below its threshold (section 3).

tau_i is the threshold of filter (convolution) or neuron (linear layer) i. p_i = 1 where mu_i = mean|w_i| over its fan-in is
above tau_i, else 0 (Eq. 1). The pruned weights are p w. The gradient passes the step function as if it were the identity (Eq.
9), so tau_i gets -sum_j g_ij w_ij, where g is the gradient with respect to the pruned weights. The weights get p g (Eq. 3).

A pruned filter is silent: its bias and its batch norm's output are masked too, so that it can be removed (models/compact.py).
Linear layers with a bias are not masked: the authors mask all layers of LeNet-5 and Conv4, none of which has a bias, and not
the classifier of ResNet-18, which has one.

The authors' variants are options. With `flowing` the gradient also goes through mu into the weights. With `clipped`, in
addition, it passes the step function only where |mu - tau| > 1. With `silent = false` batch norms of pruned filters stay on.
With `clamped = false` thresholds may leave [0, 1].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Atom, Blueprint, Shape
from piecework.models.change import Change, Origin
from piecework.models.plain_norms import is_plain_norm

StraightThrough = Literal["paper", "flowing", "clipped"]
MIN_DENSITY = 0.01  # of a layer; at or below it the thresholds restart at 0 (appendix A.1)


class StraightThroughMask(torch.autograd.Function):
    """p w of weights w[N, ...], where tau gets -sum_j g_ij w_ij where `passed` (None = everywhere), with g the output's
    gradient.

    w gets p g and, if `spread` > 0, also the gradient of mu: -spread sign(w) times the gradient of tau. The backward pass
    allocates nothing of the size of w.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tau: Tensor, mask: Tensor, passed: Tensor | None, spread: float) -> Tensor:
        """Return p w; tau, mask and passed are [N]."""
        ctx.save_for_backward(weight, mask, passed)
        ctx.spread = spread
        masked: Tensor = weight * per_filter(mask, weight)
        return masked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Return the gradients of weight and tau. `grads` is g alone, which becomes the weight's gradient in place."""
        (g,), (weight, mask, passed) = grads, ctx.saved_tensors
        by_tau = -torch.bmm(as_rows(g)[:, None], as_rows(weight)[:, :, None]).flatten()
        if passed is not None:
            by_tau = by_tau * passed
        by_weight = g.mul_(per_filter(mask, weight))
        if ctx.spread:
            by_weight.addcmul_(weight.sign(), per_filter(by_tau, weight), value=-ctx.spread)
        return by_weight, by_tau, None, None, None


def per_filter(values: Tensor, weight: Tensor) -> Tensor:
    """Return values[N] in a shape that broadcasts with weight[N, ...]."""
    return values.view(-1, *(1,) * (weight.dim() - 1))


def as_rows(weight: Tensor) -> Tensor:
    """Return weight[N, ...] as [N, n_in], a view if it is contiguous in either memory format."""
    return (weight.permute(0, 2, 3, 1) if weight.dim() == 4 else weight).flatten(1)


class Masked(nn.Module):
    """A layer with thresholds `tau`[N] for N filters `weight`[N, ...].

    In a compact form `rows` are the numbers of the kept filters, `absent` is the contribution to sum|w_i| of weights on removed
    inputs, and `zero_filled` says that zeros stand for removed filters. `open` is the mask p of the filters in the last
    forward pass, and `macs` counts the multiply-accumulates of all forward passes in training.
    """

    weight: Tensor
    tau: nn.Parameter
    straight_through: StraightThrough
    fan_in: int
    rows: Tensor | None
    absent: Tensor | None
    zero_filled: bool
    open: Tensor
    macs: int
    clamped: bool

    def begin(self, straight_through: StraightThrough, *, clamped: bool = True) -> None:
        """Start masking, with thresholds of 0, which stay within [0, 1] if they are `clamped`."""
        self.clamped = clamped
        self.straight_through, self.fan_in = straight_through, self.weight[0].numel()
        self.rows = self.absent = None
        self.zero_filled, self.macs = False, 0
        self.tau = nn.Parameter(torch.zeros(len(self.weight), device=self.weight.device))

    def above(self) -> Tensor:
        """Return mu - tau of the kept filters."""
        total: Tensor = torch.linalg.vector_norm(self.weight.detach(), 1, dim=tuple(range(1, self.weight.dim())))
        if self.absent is not None:
            total += self.absent
        return total / self.fan_in - self.own(self.tau.detach())

    def own(self, tau: Tensor) -> Tensor:
        """Return the thresholds of the kept filters."""
        return tau if self.rows is None else tau[self.rows]

    def masked_weight(self) -> Tensor:
        """Return p w, with the gradient of the straight-through estimator."""
        above = self.above()
        self.open = (above > 0).to(self.weight.dtype)
        passed = (above.abs() > 1).to(self.weight.dtype) if self.straight_through == "clipped" else None
        spread = 0.0 if self.straight_through == "paper" else 1 / self.fan_in
        masked: Tensor = StraightThroughMask.apply(self.weight, self.own(self.tau), self.open, passed, spread)
        return masked

    def restore_removed(self, out: Tensor) -> Tensor:
        """Return out[B, n, ...], with zeros for removed filters if `zero_filled`."""
        if self.training:
            self.macs += out.numel() * self.weight[0].numel()
        if self.rows is None or not self.zero_filled:
            return out
        place = (slice(None), self.rows)
        wide = out.new_zeros((len(out), len(self.tau), *out.shape[2:]))
        if out.dim() == 4:
            wide = wide.contiguous(memory_format=torch.channels_last)
        wide[place] = out
        self.open = torch.zeros_like(self.tau).index_copy_(0, self.rows, self.open)
        return wide

    @torch.no_grad()
    def mask(self) -> Tensor:
        """Return the present mask p, bool, of the kept filters."""
        return self.above() > 0

    @torch.no_grad()
    def after_step(self) -> None:
        """Clamp weights to [-1, 1], and thresholds to [0, 1] if they are `clamped`, after a step (section 3.1).

        At a density of 1 % the thresholds restart at 0 (appendix A.1).
        """
        self.weight.clamp_(-1, 1)
        if self.clamped:
            self.tau.clamp_(0, 1)
        self.tau.mul_(self.mask().sum() > MIN_DENSITY * len(self.tau))


class MaskedConv2d(nn.Conv2d, Masked):
    """A convolution whose pruned filters output zeros."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the output for z[B, C, H, W]."""
        weight = self.masked_weight()
        return self.restore_removed(self._conv_forward(z, weight, None if self.bias is None else self.bias * self.open))


class MaskedLinear(nn.Linear, Masked):
    """A linear layer whose pruned neurons output zeros."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the output for z[B, F]."""
        return self.restore_removed(F.linear(z, self.masked_weight()))


class Silent(nn.Module):
    """A batch norm that is masked together with the layer before it."""

    of: tuple[Masked]  # a tuple, so that the layer is not registered as a submodule

    def silence(self, z: Tensor) -> Tensor:
        """Set pruned filters of z[B, C, ...] to zero in place, so that they have no shift."""
        return z.mul_(self.of[0].open.view(1, -1, *(1,) * (z.dim() - 2)))


class SilentNorm2d(nn.BatchNorm2d, Silent):
    """Silent batch norm after a convolution."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the output for z[B, C, H, W]."""
        return self.silence(super().forward(z))


class SilentNorm1d(nn.BatchNorm1d, Silent):
    """Silent batch norm after a linear layer."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the output for z[B, F]."""
        return self.silence(super().forward(z))


@dataclass(frozen=True)
class Masks(Change):
    """Filters that are pruned below a learned threshold (SpaFL)."""

    thresholds: StraightThrough  # have this gradient
    silent: bool = True  # biases and norms of pruned filters are pruned too
    clamped: bool = True  # thresholds stay in [0, 1]

    def apply(self, model: Blueprint, origin: Origin) -> Blueprint:
        """Return the model with thresholds."""
        return mask_model(model, self.thresholds, silent=self.silent, clamped=self.clamped)


def mask_model(
    blueprint: Blueprint, straight_through: StraightThrough = "paper", *, silent: bool = True, clamped: bool = True
) -> Blueprint:
    """Return the same model with thresholds `tau`, which start at 0. Its other arrays and their initial values do not change.

    Raises ValueError if there is nothing to mask.
    """
    atoms = []
    for index, atom in enumerate(blueprint.atoms):
        norms = norms_behind(atom.build, blueprint.shape_before(index)) if silent else ()
        build = partial(with_masks, atom.build, straight_through, norms, clamped)
        atoms.append(Atom(atom.name, build, atom.shape, atom.before))
    norms = norms_behind(blueprint.build_head, blueprint.feature_shape) if silent else ()
    head = partial(with_masks, blueprint.build_head, straight_through, norms, clamped)
    model = replace(blueprint, atoms=tuple(atoms), build_head=head, width=1.0)
    if not thresholds(model):
        raise ValueError(f"{blueprint.name} has neither convolutions nor linear layers without bias to mask")
    return model


def with_masks(
    build: Callable[[], nn.Module],
    straight_through: StraightThrough,
    norms: tuple[tuple[str, str], ...],
    clamped: bool = True,
) -> nn.Module:
    """Build a module with thresholds; `norms` are pairs of a batch norm and the layer it is masked with, by path."""
    module = build()
    for layer in list(module.modules()):
        if is_maskable(layer):
            layer.__class__ = MaskedConv2d if isinstance(layer, nn.Conv2d) else MaskedLinear
            assert isinstance(layer, Masked)
            layer.begin(straight_through, clamped=clamped)
    for path, before in norms:
        norm, layer = module.get_submodule(path), module.get_submodule(before)
        assert isinstance(layer, Masked)
        norm.__class__ = SilentNorm1d if isinstance(norm, nn.BatchNorm1d) else SilentNorm2d
        assert isinstance(norm, Silent)
        norm.of = (layer,)
    return module


def norms_behind(build: Callable[[], nn.Module], shape: Shape) -> tuple[tuple[str, str], ...]:
    """List the batch norms that read only the output of one masked layer, each with that layer, by path."""
    found, made = [], dict[int, tuple[str, Tensor]]()
    with without_data():
        module = build().eval()
        example = torch.zeros(2, *shape)
    if not any(map(is_plain_norm, module.modules())):
        return ()

    def after(path: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if is_maskable(layer):
            made[id(output)] = path, output
        elif id(inputs[0]) in made:
            found.append((path, made[id(inputs[0])][0]))

    for path, layer in module.named_modules():
        if is_maskable(layer) or is_plain_norm(layer):
            layer.register_forward_hook(partial(after, path))
    with torch.no_grad():
        module(example)
    return tuple(found)


def is_maskable(layer: nn.Module) -> bool:
    """Return whether a layer gets thresholds: a convolution, or a linear layer without bias."""
    return isinstance(layer, nn.Conv2d) or (isinstance(layer, nn.Linear) and layer.bias is None)


def masked_layers(module: nn.Module) -> Iterator[tuple[str, Masked]]:
    """Yield the masked layers of a module with their paths, in order."""
    yield from ((path, layer) for path, layer in module.named_modules() if isinstance(layer, Masked))


def thresholds(blueprint: Blueprint) -> dict[str, int]:
    """Return the number of thresholds of each layer of a masked model, by the global name of its weight, in order."""
    found = dict[str, int]()
    for unit in blueprint.units():
        with without_data():
            module = blueprint.build_unit(unit)
        found |= {f"{unit}.{path}.weight": len(layer.tau) for path, layer in masked_layers(module)}
    return found


def update_from_importance(layer: Masked, change: Tensor, divisor: int) -> None:
    """Apply w_ij -= sign(sum_j w_ij) change_i / divisor (Eq. 13); `change`[N] is that of the global thresholds.

    The XOR there is read as follows: a filter whose weights have a positive sum moves against the change, one with a negative
    sum along with it. So |w| shrinks where the threshold rose, which means that the filter matters less.
    """
    with torch.no_grad():
        sign = layer.weight.flatten(1).sum(1).sign()
        layer.weight.sub_(per_filter(sign * change / divisor, layer.weight))


@torch.no_grad()
def fix_thresholds(module: nn.Module) -> None:
    """Put zeros in the place of pruned filters, in layers of torch's own classes, which then compute the same in evaluation."""
    module.eval()
    for layer in list(module.modules()):
        if isinstance(layer, SilentNorm1d | SilentNorm2d):
            kept = layer.of[0].mask().float()
            scale, shift = kept if layer.weight is None else layer.weight * kept, torch.zeros_like(kept)
            layer.bias = nn.Parameter(shift if layer.bias is None else layer.bias * kept, requires_grad=False)
            layer.weight = nn.Parameter(scale, requires_grad=False)
            layer.affine = True
            own: type[nn.Module] = nn.BatchNorm1d if isinstance(layer, SilentNorm1d) else nn.BatchNorm2d
            layer.__class__ = own  # type: ignore[assignment]
    for layer in list(module.modules()):
        if isinstance(layer, MaskedConv2d | MaskedLinear):
            kept = layer.mask().to(layer.weight.dtype)
            layer.weight.mul_(per_filter(kept, layer.weight))
            if layer.bias is not None:
                layer.bias.mul_(kept)
            del layer.tau
            own = nn.Conv2d if isinstance(layer, MaskedConv2d) else nn.Linear
            layer.__class__ = own  # type: ignore[assignment]
