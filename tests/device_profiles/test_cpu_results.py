"""A trace has the strides of the CPU: they decide formats, and with them what is copied."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import a_training_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from piecework.device_profiles.cpu_results import AsOnTheCPU
from piecework.device_profiles.memory import PeakMemory
from piecework.models.mix import mix_nets
from piecework.models.zoo import build_blueprint
from piecework.planning.step_cost import fake_examples, fake_load, piece_cost
from piecework.strategies.width.splitmix.client import mixed_loss
from piecework.training.loop import PieceModel, start, train_step

NARROW = f"{Path(__file__).parents[1] / 'models' / 'own_modules.py'}:narrow"

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    each.__name__: each
    for each in (
        *(F.relu, F.relu6, F.gelu, F.silu, F.hardswish, F.hardsigmoid, F.leaky_relu, F.elu, F.mish, F.softplus),
        *(torch.sigmoid, torch.tanh, torch.clone, torch.square, F.dropout),
    )
}
OPERATORS |= {
    "added to another": lambda x: x + x.relu(),
    "divided by a number": lambda x: x / 2,
    "clamped": lambda x: x.clamp(0, 1),
    "gated": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "max": lambda x: F.max_pool2d(x, 1),
    "concatenated": lambda x: torch.cat([x, x], 1),
    "viewed": lambda x: x.view_as(x),
    "split by a view": lambda x: x.view(x.shape[0], 1, *x.shape[1:]).squeeze(1),
    "convolution": lambda x: F.conv2d(x, x.new_ones(2, x.shape[1], 1, 1)),
}


def strides(operator: Callable[[Tensor], Tensor], shape: tuple[int, ...], layout: torch.memory_format) -> list[object]:
    """Those of a result and of gradients, with maps as a run has them: [B, H, W, C] in memory."""
    found: list[object] = []
    for contiguous in (False, True):
        n, c, h, w = shape
        x = torch.zeros(n, h, w, c).permute(0, 3, 1, 2) if layout is torch.channels_last else torch.zeros(shape)
        y = operator(x.requires_grad_())
        y.backward(torch.zeros(y.shape) if contiguous else torch.zeros_like(y))
        assert x.grad is not None
        found += [y.stride(), x.grad.stride()]
    return found


@pytest.mark.parametrize("name", OPERATORS)
def test_strides_of_one_channel_one_pixel_and_one_example(name: str) -> None:
    shapes = [(4, 1, 6, 6), (4, 3, 1, 1), (4, 1, 6, 1), (4, 3, 6, 6)]
    shapes += [(1, 3, 6, 6)] if name != "layer norm" else []
    for shape in shapes:
        for layout in (torch.channels_last, torch.contiguous_format):
            with PeakMemory():
                real = strides(OPERATORS[name], shape, layout)
            with FakeTensorMode(allow_fallback_kernels=False), AsOnTheCPU():
                assert strides(OPERATORS[name], shape, layout) == real, (shape, layout)


@pytest.mark.parametrize("nets", [1, 3])
def test_nets_of_one_channel_take_what_was_predicted(nets: int) -> None:
    """SplitMix's: maps of one channel have the formats and copies that the trace has."""
    small = build_blueprint(NARROW, num_classes=10, input_shape=(1, 8, 8), width=0.125)
    mixed, config = mix_nets(small, range(nets), 0.125), a_training_config(4)
    atoms, memory = tuple(range(len(mixed.atoms))), PeakMemory()
    with memory:
        piece = PieceModel(mixed, atoms, "head", fake_load(mixed))
        loss, optimiser = start([piece], config, mixed_loss)
        z, y = fake_examples(piece, config.batch_size, targets=False)
        train_step(loss, optimiser, z, y)
    assert memory.peak == piece_cost(mixed, atoms, "head", config, make_loss=mixed_loss).peak_bytes
