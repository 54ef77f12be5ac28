"""Cheap recomputation: what is kept, by hand, and gradients that are those of the plain backward pass."""

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.device_profiles.memory import PeakMemory
from piecework.models.recompute_cheap import recompute_cheaply

MAP = 4 * (2 * 4 * 8 * 8)  # bytes of a batch of two maps with four channels
STATISTICS = 2 * 4 * 4  # of a batch norm: two values for each of four channels


def conv(inputs: int = 4, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Sum(nn.Module):
    """A residual block: its input is added to what its layers return, in place, and then a ReLU is applied, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv(), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers(x)
        z += x
        return F.relu_(z)


def kept(net: nn.Module, cheap: bool) -> int:
    """Bytes that live because of a forward pass, beside weights, the input and the output."""
    memory, x = PeakMemory(), torch.randn(2, 3, 8, 8)
    for tensor in (x, *net.state_dict().values()):
        memory.count(tensor)
    before = memory.live
    with memory, recompute_cheaply(cheap):
        out = net(x)
    return memory.live - before - out.untyped_storage().nbytes()


def learn(net: nn.Module, cheap: bool, *, train: bool = True, backward: int = 1) -> list[Tensor]:
    """Gradients of the input and of all weights, buffers, and the next random number."""
    torch.manual_seed(3)
    net = deepcopy(net).train(train)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with recompute_cheaply(cheap):
        out = net(x)
    for left in reversed(range(backward)):
        out.square().sum().backward(retain_graph=left > 0)
    gradients = [p.grad for p in (x, *net.parameters())]
    assert all(g is not None and g.any() for g in gradients[:1])
    return [*(g for g in gradients if g is not None), *net.buffers(), torch.rand(1)]


def require_exact(net: nn.Module, **how) -> None:
    for one, other in zip(learn(net, False, **how), learn(net, True, **how), strict=True):
        assert torch.equal(one, other)


def test_a_norm_and_a_relu_keep_the_input_of_the_norm() -> None:
    net = nn.Sequential(conv(3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv())
    assert kept(net, cheap=False) == 2 * MAP + STATISTICS
    assert kept(net, cheap=True) == MAP + STATISTICS
    require_exact(net)
    require_exact(net, train=False)
    require_exact(net, backward=2)


def test_a_relu_alone_keeps_its_output() -> None:
    net = nn.Sequential(conv(3), nn.ReLU(), conv())
    assert kept(net, cheap=False) == kept(net, cheap=True) == MAP


def test_max_pooling_keeps_its_input() -> None:
    """Not its output of a quarter of the size, nor the indices of 8 bytes for each of its values."""
    net = nn.Sequential(conv(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), conv())
    assert kept(net, cheap=False) == MAP + MAP // 4 + 2 * MAP // 4
    assert kept(net, cheap=True) == MAP
    require_exact(net)
    require_exact(nn.Sequential(conv(3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), conv()))


def test_dropout_draws_its_mask_again() -> None:
    net = nn.Sequential(conv(3), nn.GELU(), nn.Dropout(0.4), conv(), nn.Dropout(0.3))
    assert (
        kept(net, cheap=False) == 4 * MAP
    )  # beside the output: both masks, and the inputs of GELU and of the second layer
    assert kept(net, cheap=True) == MAP
    require_exact(net)


def test_residual_sums_are_kept_in_turns() -> None:
    """Else the last one would lead back to the first. A block keeps the inputs of both norms and what it returns."""
    net = nn.Sequential(conv(3), nn.BatchNorm2d(4), *(Sum() for _ in range(4)), conv())
    full = (2 + 4 * 4) * MAP  # the input of the first norm and what it returns; in each block two more of each
    assert kept(net, cheap=False) == full + 9 * STATISTICS
    assert kept(net, cheap=True) < full - 4 * MAP + 9 * STATISTICS
    require_exact(net)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    name: getattr(nn, name)
    for name in ("ReLU", "ReLU6", "LeakyReLU", "ELU", "SiLU", "Mish", "Hardswish", "Hardsigmoid", "Hardtanh")
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, inplace: bool) -> None:
    """In the middle, where they work on what norms return, and at the end, where they work on what is not kept."""
    layers = nn.Sequential(conv(3), nn.GroupNorm(2, 4), ACTIVATIONS[name](inplace=inplace), conv(), nn.BatchNorm2d(4))
    net = nn.Sequential(layers, ACTIVATIONS[name](inplace=inplace), conv(), ACTIVATIONS[name](inplace=inplace))
    assert kept(net, cheap=True) < kept(net, cheap=False)
    require_exact(net)


class Changed(nn.Module):
    """Changes the input of an activation that does not need it for its gradient, after it was used."""

    def __init__(self, activation: Callable[[Tensor], Tensor], before: nn.Module) -> None:
        super().__init__()
        self.activation, self.before, self.after = activation, before, conv()

    def forward(self, x: Tensor) -> Tensor:
        z = self.before(x)
        y = self.activation(z)
        z += 1
        return self.after(y) * self.after(torch.cat([z[:1].exp(), z[1:]]))


@pytest.mark.parametrize("activation", [F.relu, torch.sigmoid, torch.tanh, torch.clone])
def test_an_input_that_changes_afterwards(activation: Callable[[Tensor], Tensor]) -> None:
    for before in (conv(3), nn.Sequential(conv(3), nn.BatchNorm2d(4))):
        require_exact(Changed(activation, before))


class Views(nn.Module):
    """Activations of parts of what a norm returns, one of them in place, and a layer that reads it transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.last = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        y = self.norm(self.layer(z))
        first, second = y[:, :2], y[:, 2:]
        F.relu_(first)
        mixed = F.gelu(second.transpose(2, 3))
        return self.last(mixed * first[:, :1]) + self.layer(first.sigmoid())[:, :1]


def test_views() -> None:
    net = nn.Sequential(conv(3), Views())
    require_exact(net)
    assert kept(net, cheap=True) < kept(net, cheap=False)


def test_a_graph_without_a_backward_pass_is_freed() -> None:
    net = nn.Sequential(conv(3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv())
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    net[0].register_forward_hook(lambda *given: seen.append(weakref.ref(given[2].untyped_storage())))
    gc.disable()
    try:
        with recompute_cheaply():
            out = net(torch.randn(2, 3, 8, 8))
        assert seen[0]() is not None
        del out
        assert seen[0]() is None
    finally:
        gc.enable()


def test_nothing_is_done_without_gradients() -> None:
    with torch.no_grad():
        before = torch._C._len_torch_dispatch_stack()
        with recompute_cheaply():
            assert torch._C._len_torch_dispatch_stack() == before
