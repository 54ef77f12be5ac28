"""Every model of the zoo: a traced step is the real one to the byte and agrees with torch.profiler; FLOPs counted by hand.

Costs are those of one thread (`training.torch-threads`), the default, which `helpers` sets.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import MODELLED_CPU, a_training_config
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from zoo_helpers import SMALL, blueprint_of, examples_for

from piecework.device_profiles.memory import PeakMemory, trace
from piecework.models.resizing import resize
from piecework.models.zoo import MODELS
from piecework.planning.step_cost import fake_batch, fake_load, piece_cost
from piecework.training.loop import LocalTrainer, PieceModel, single_loss, start, train_step
from piecework.training.memory_cap import MemoryCap

RNN = torch.ops.aten.mkldnn_rnn_layer
RNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward


def profiled_peak(work: Callable[[], object]) -> int:
    """The peak of the running sum of all allocations and frees of `work`, also those inside operators."""
    return int(np.cumsum(allocations(work)).max())


def allocations(work: Callable[[], object]) -> list[int]:
    """Bytes allocated (above 0) and freed (below), in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]


# ---- steps

# the whole model, a piece behind a frozen prefix, and pieces that end in an own head or skip to the model's
STEPS = [
    *((name, SMALL.get(name, {}), None, "head") for name in sorted(MODELS)),
    ("cnn3", {}, (1,), "head"),
    ("cnn3", {}, (0,), "exits.0"),
    ("cnn4", SMALL["cnn4"], (1,), "head"),
    ("cnn-femnist", {}, (0,), "exits.0"),
    ("cnn-femnist", {}, (1,), "head"),
    ("conv4", {}, (1,), "exits.1"),
    ("conv4", {}, (2, 3), "head"),
    ("convnet", {"batch_norm": "running"}, (2, 3), "head"),
    ("deit-tiny", {}, (4, 5), "exits.5"),
    ("deit-tiny", {}, (9, 10, 11, 12), "head"),
    ("lenet5", {}, (1,), "head"),
    ("lstm-imdb", SMALL["lstm-imdb"], (0,), "exits.0"),
    ("lstm-imdb", SMALL["lstm-imdb"], (1,), "head"),
    ("lstm-imdb", SMALL["lstm-imdb"], (1,), "exits.1"),
    ("lstm-imdb", SMALL["lstm-imdb"] | {"width": 0.3, "num_classes": 5}, (1, 2), "head"),
    ("preresnet20", {"batch_norm": "running"}, (4, 5), "head"),
    ("resnet10", {"input_shape": (3, 64, 64)}, (0,), "exits.0"),
    ("resnet10", {"width": 0.3}, (2, 3, 4), "head"),
    ("resnet18", {"batch_norm": "running"}, (6, 7, 8), "head"),
    ("resnet18-preact", {}, (3, 4), "head"),
    ("resnet34", {}, (8, 9, 10, 11), "head"),
    ("vgg11", {"pooling": "profl"}, (0, 1), "exits.1"),
    ("vgg11", {"norm": "none", "classifier": "prism"}, (3, 4), "exits.4"),
    ("vgg13", {}, (5, 6), "head"),
    ("vgg16", {"batch_norm": "running"}, (10, 11, 12), "head"),
    ("vit", SMALL["vit"], (0,), "head"),
    ("vit", SMALL["vit"], (5, 6), "exits.6"),
]


@MODELLED_CPU
@pytest.mark.parametrize(("name", "changes", "atoms", "head"), STEPS, ids=str)
def test_a_traced_step_is_the_real_one(name, changes, atoms, head) -> None:
    blueprint = blueprint_of(name, **changes)
    atoms = atoms or tuple(range(len(blueprint.atoms)))
    training_config = a_training_config(2 if name in ("resnet34", "vit", "cnn4") else 4)
    cost = piece_cost(blueprint, atoms, head, training_config).peak_bytes
    cap = MemoryCap(cost, enforced=True)
    trainer = LocalTrainer(lambda: [PieceModel(blueprint, atoms, head, fake_load(blueprint))], training_config)
    trainer.epoch(examples_for(blueprint, atoms[0], training_config.batch_size), np.random.default_rng(0), cap, "train")
    assert cap.peak_bytes == cost
    del trainer

    def step() -> None:
        pieces = [PieceModel(blueprint, atoms, head, fake_load(blueprint))]
        loss, optimiser = start(pieces, training_config, single_loss)
        z = fake_batch(blueprint, atoms[0], training_config.batch_size).fill_(1)
        train_step(loss, optimiser, z, torch.zeros(training_config.batch_size, dtype=torch.int64))

    assert profiled_peak(step) == pytest.approx(cost, rel=0.005)


# ---- inside operators: (bytes that the accounting adds) against (what the profiler sees)


def inside(work: Callable[[], object]) -> tuple[int, int]:
    """What one operator needs at its peak beyond what it leaves: by the accounting, and by the profiler."""
    memory, kept = PeakMemory(), []
    with memory:
        kept.append(work())
    accounted = memory.peak - memory.live
    kept.clear()
    seen = np.cumsum(allocations(lambda: kept.append(work())))
    return accounted, int(seen.max() - seen[-1])


LSTMS = [(60, 4, 64, 256), (9, 3, 256, 128), (7, 5, 20, 48), (2, 2, 16, 16), (13, 19, 130, 33)]


def lstm_layer(length: int, batch: int, inputs: int, hidden: int, dtype=torch.float32) -> tuple[Tensor, ...]:
    shapes = [(length, batch, inputs), (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)]
    return tuple(torch.randn(shape, dtype=dtype) for shape in [*shapes, (batch, hidden), (batch, hidden)])


def run_lstm(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return RNN(*tensors, False, [], 2, tensors[5].shape[1], 1, True, False, False, True)


@MODELLED_CPU
@pytest.mark.parametrize("sizes", LSTMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_lstm_keeps(sizes, dtype) -> None:
    kept: list[int] = []
    trace(lambda: kept.append(run_lstm(lstm_layer(*sizes, dtype))[3].numel()))
    assert kept == [run_lstm(lstm_layer(*sizes, dtype))[3].numel()]


@MODELLED_CPU
@pytest.mark.parametrize("sizes", LSTMS, ids=str)
def test_inside_an_lstm(sizes) -> None:
    length, batch, _, hidden = sizes
    tensors = lstm_layer(*sizes)
    assert len({*inside(lambda: run_lstm(tensors))}) == 1
    with torch.no_grad():  # tables vary by some bytes
        accounted, seen = inside(lambda: run_lstm(tensors))
        assert accounted == pytest.approx(seen, abs=128)
    *states, workspace = run_lstm(tensors)
    for gradient in (torch.randn(length, batch, hidden), torch.randn(batch, length, hidden).transpose(0, 1)):
        rest = (False, 2, hidden, 1, True, True, False, [], False, workspace)
        accounted, seen = inside(lambda g=gradient, r=rest: RNN_BACKWARD(*tensors, *states, g, None, None, *r))
        assert accounted == seen


@MODELLED_CPU
@pytest.mark.parametrize("sizes", LSTMS, ids=str)
@pytest.mark.parametrize("used", [(1,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_inside_an_lstm_of_which_the_last_state_or_cell_is_used(sizes, used) -> None:
    tensors = [tensor.requires_grad_() for tensor in lstm_layer(*sizes)]
    results = run_lstm(tensors)
    outputs, gradients = zip(*((results[n], torch.randn_like(results[n])) for n in used), strict=True)
    accounted, seen = inside(lambda: torch.autograd.grad(outputs, tensors, gradients, retain_graph=True))
    assert accounted == seen


@MODELLED_CPU
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "edge", "slack"),
    [
        ((64, 64), 3, 1, 16, 0),
        ((3, 64), 7, 2, 64, 0),
        ((20, 50), 5, 1, 12, 0),  # 50 channels become 64, 20 become 32
        ((10, 10), 3, 1, 8, 0),
        ((128, 256), 1, 2, 8, 0),
        ((3, 192), 4, 4, 32, 0),
        ((3, 192), 16, 16, 96, 400),  # a patch embedding: a matrix product, not a convolution
        ((3, 18), 16, 16, 64, 400),
    ],
    ids=str,
)
@pytest.mark.parametrize("flattened", [False, True])
def test_inside_a_convolution(channels, kernel, stride, edge, slack, flattened) -> None:
    inputs, outputs = channels
    x, weight = (
        torch.randn(shape).contiguous(memory_format=torch.channels_last)
        for shape in [(4, inputs, edge, edge), (outputs, inputs, kernel, kernel)]
    )
    rest = ([stride] * 2, [0] * 2, [1] * 2, False, [0] * 2, 1)
    forward, backward = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
    accounted, seen = inside(lambda: forward(x, weight, None, *rest))
    assert accounted == seen
    gradient = torch.randn_like(forward(x, weight, None, *rest))
    gradient = gradient.contiguous() if flattened else gradient
    accounted, seen = inside(lambda: backward(gradient, x, weight, None, *rest, [inputs > 3, True, False]))
    assert 0 <= seen - accounted <= slack


SIZES = [((32, 32), (224, 224)), ((224, 224), (32, 48)), ((30, 40), (17, 60)), ((28, 32), (32, 32)), ((9, 9), (9, 9))]


@pytest.mark.parametrize(("have", "want"), SIZES, ids=str)
@pytest.mark.parametrize("images", [1, 3])
def test_inside_resizing(have, want, images) -> None:
    x = torch.rand(images, *have, 3).permute(0, 3, 1, 2)
    accounted, seen = inside(lambda: resize(x, want))
    assert accounted == seen
    fake = trace(lambda: resize(torch.empty(images, *have, 3).permute(0, 3, 1, 2), want)).peak_bytes
    assert fake == 4 * 3 * images * (math.prod(have) + math.prod(want)) + seen


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_inside_the_optimiser(layout) -> None:
    shapes = [(8, 4, 3, 3), (16, 8, 3, 3), (5, 7)]
    lists = [
        [torch.randn(s).contiguous(memory_format=layout if len(s) == 4 else torch.contiguous_format) for s in shapes]
        for _ in range(3)
    ]
    options = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    memory = PeakMemory()
    with memory:
        torch._fused_sgd_(*lists, **options, **flags)
    copies = [n for n in allocations(lambda: torch._fused_sgd_(*lists, **options, **flags)) if n > 0]
    assert memory.peak - memory.live == max(copies, default=0) == (4 * 1152 if layout == torch.channels_last else 0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["cnn3", "deit-tiny", "resnet10", "resnet18-preact"])
def test_gradients_and_momentum_lie_as_their_weights_do(name, precision) -> None:
    """torch._fused_sgd_ goes through memory in order: where formats differ, it silently pairs the wrong numbers."""
    blueprint, training_config = blueprint_of(name), a_training_config(2, precision=precision)
    pieces = [PieceModel(blueprint, range(len(blueprint.atoms)), "head", fake_load(blueprint))]
    loss, optimiser = start(pieces, training_config, single_loss)
    loss(fake_batch(blueprint, 0, 2).fill_(1), torch.zeros(2, dtype=torch.int64)).backward()

    def layout(tensor: Tensor) -> list[int]:
        return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]

    for parameter, buffer in zip(optimiser.parameters, optimiser.buffers, strict=True):
        assert layout(parameter) == layout(parameter.grad) == layout(buffer)


# ---- FLOPs by hand: 2 per multiply-accumulate; B examples


def flops(name: str, atoms: tuple[int, ...], head: str, batch: int, **changes) -> int:
    return piece_cost(blueprint_of(name, **changes), atoms, head, a_training_config(batch)).flops


def test_flops_of_a_transformer() -> None:
    B, tokens, features, heads = 2, 5, 192, 3
    patches = 2 * B * 4 * features * 3 * 4 * 4
    linear = 2 * B * tokens * features * (3 * features + features + 2 * 4 * features)
    product = 2 * B * heads * tokens * tokens * (features // heads)  # queries with keys, or weights with values
    head = 2 * B * features * 10
    # Backward: twice the forward pass of every linear layer, but images need no gradient; of attention five products,
    # because its kernel computes the weights of the forward pass again.
    expected = 2 * patches + 3 * (linear + head) + (2 + 5) * product
    assert flops("deit-tiny", (0, 1), "head", B, input_shape=(3, 8, 8), depth=1) == expected
    alone = flops("deit-tiny", (1,), "exits.1", B, input_shape=(3, 8, 8), depth=2)
    # Features need no gradient: one product less in the first linear layer, whose input layer norm does.
    assert alone == 3 * (linear + head) + (2 + 5) * product


def test_flops_of_an_lstm() -> None:
    B, length = 3, 7
    layer1, layer2 = (2 * B * length * 4 * 256 * (inputs + 256) for inputs in (64, 256))
    whole = flops("lstm-imdb", (0, 1, 2), "head", B, input_shape=(length,))
    assert whole == 3 * (layer1 + layer2) + 3 * 2 * B * 256
    # oneDNN makes the gradient of the features too, whether or not anybody asks for it.
    assert flops("lstm-imdb", (2,), "head", B, input_shape=(length,)) == 3 * layer2 + 3 * 2 * B * 256


def test_flops_of_a_convolution() -> None:
    conv, fc = 2 * 2 * 24 * 24 * 20 * 25, 2 * 2 * (800 * 500 + 500 * 10)
    conv2 = 2 * 2 * 8 * 8 * 50 * 20 * 25
    assert flops("lenet5", (0, 1), "head", 2) == 2 * conv + 3 * (conv2 + fc)


# ---- batches


def test_fake_batches() -> None:
    reviews = blueprint_of("lstm-imdb", input_shape=(7,))
    tokens, features = fake_batch(reviews, 0, 2), fake_batch(reviews, 1, 2)
    assert (tokens.shape, tokens.dtype) == ((2, 7), torch.int64)
    assert (features.shape, features.dtype) == ((2, 7, 64), torch.float32)
    images = fake_batch(blueprint_of("cnn3", input_shape=(3, 5, 4)), 0, 2)
    assert (images.shape, images.stride()) == ((2, 3, 5, 4), (60, 1, 12, 3))
