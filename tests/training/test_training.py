"""The local loop: optimiser, objectives, pieces, streaming, a local trainer."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import a_blueprint, a_client, a_training_config, digits, random_examples, same, tiny_settings
from torch.nn import functional as F

from piecework.models.cascade import Cascade, fit_features, isolate_rng
from piecework.strategies.cascade.fedepth.mutual import mutual_objective, soft_targets, taught_objective
from piecework.training.adam import OPTIMISERS
from piecework.training.examples import batches, training_examples
from piecework.training.loop import LocalTrainer, PieceModel
from piecework.training.memory_cap import MemoryCap
from piecework.training.sgd import SGD, Optimiser

# ---- optimiser


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_sgd_is_torchs(momentum: float, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(4, 3, 3, 3, generator=generator), torch.randn(7, generator=generator)]
    start[0] = start[0].contiguous(memory_format=torch.channels_last)
    ours = [torch.nn.Parameter(t.clone()) for t in start]
    theirs = [torch.nn.Parameter(t.clone()) for t in start]
    mine = SGD(ours, a_training_config(lr=0.3, momentum=momentum, weight_decay=weight_decay))
    reference = torch.optim.SGD(theirs, lr=0.3, momentum=momentum, weight_decay=weight_decay)
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            gradient = torch.randn(one.shape, generator=generator)
            if one.dim() == 4:
                gradient = gradient.contiguous(memory_format=torch.channels_last)
            one.grad, other.grad = gradient, gradient.clone()
        mine.step()
        reference.step()
        assert all(p.grad is None for p in ours)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert not torch.equal(ours[0], start[0])
    assert len(mine.buffers) == (2 if momentum else 0)


def test_sgd_by_hand() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0]))
    sgd = SGD([p], a_training_config(lr=0.5, momentum=0.5, weight_decay=0.25))
    p.grad = torch.tensor([1.0])
    sgd.step()  # g = 1 + 0.25, v = 1.25, p = 1 - 0.625
    assert p.item() == 0.375
    p.grad = torch.tensor([0.0])
    sgd.step()  # g = 0.09375, v = 0.625 + 0.09375 = 0.71875, p = 0.375 - 0.359375
    assert p.item() == 0.015625


@pytest.mark.parametrize(("kind", "decay", "first"), [("adam", 0.0, 0.9), ("adamw", 0.5, 0.85)])
def test_adam_by_hand(kind: Optimiser, decay: float, first: float) -> None:
    """The rate is 0.1, and x begins at 1. AdamW takes 0.05 x away before each step.

    Gradient 2: m = 0.2 and v = 0.004, divided by 1 - beta they are 2 and 4, so the step is 0.1 x 2 / 2.
    Gradient -2.2: m = 0.18 - 0.22 = -0.04, and -0.04 / 0.19 = -0.210526; v = 0.003996 + 0.00484 = 0.008836, and
    0.008836 / 0.001999 = 4.42021, of which the root is 2.10243; the step is 0.1 x 0.10014.
    """
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    adam = OPTIMISERS[kind]([parameter], a_training_config(lr=0.1, weight_decay=decay))
    parameter.grad = torch.tensor([2.0])
    adam.step()
    assert parameter.item() == pytest.approx(first)
    parameter.grad = torch.tensor([-2.2])
    adam.step()
    assert parameter.item() == pytest.approx((first * (1 - 0.1 * decay)) + 0.010014, abs=1e-6)


@pytest.mark.parametrize(("kind", "theirs"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_adam_is_torchs(kind: Optimiser, theirs: type[torch.optim.Adam]) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, other = (torch.nn.Parameter(torch.arange(6.0)) for _ in range(2))
    mine = OPTIMISERS[kind]([ours], a_training_config(lr=0.1, weight_decay=0.3))
    reference = theirs([other], lr=0.1, weight_decay=0.3)
    for _ in range(5):
        ours.grad = torch.randn(6, generator=generator)
        other.grad = ours.grad.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(ours.detach(), other.detach())


def test_values_that_an_optimiser_keeps() -> None:
    """`moments` counts the values of each parameter that are kept between steps."""
    counts = []
    for kind, momentum in (("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0), ("adamw", 0.9)):
        config = a_training_config(momentum=momentum, optimiser=kind)
        state = OPTIMISERS[config.optimiser]([torch.nn.Parameter(torch.ones(5))], config).state()
        counts.append(config.moments)
        assert sum(held[0].numel() == 5 for held in state.values()) == config.moments
    assert counts == [0, 1, 2, 2]


def test_momentum_in_bfloat16_by_hand() -> None:
    """8 bits of precision: 1 + 1/256 rounds to 1, and the step itself takes what was not rounded yet."""
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    sgd = SGD([parameter], a_training_config(lr=0.5, momentum=0.5, weight_decay=0.0, optimiser_state="bfloat16"))
    assert [buffer.dtype for buffer in sgd.buffers] == [torch.bfloat16]
    for gradient, momentum, value in ((1 + 1 / 256, 1.0, 1 - 0.5 * (1 + 1 / 256)), (1.0, 1.5, -0.25 - 0.5 / 256)):
        parameter.grad = torch.tensor([gradient])
        sgd.step()
        assert float(sgd.buffers[0]) == momentum
        assert float(parameter.detach()) == value
    decayed = SGD([parameter], a_training_config(lr=1.0, momentum=0.5, weight_decay=0.5, optimiser_state="bfloat16"))
    before, parameter.grad = float(parameter.detach()), torch.tensor([1.0])
    decayed.step()
    assert float(parameter.detach()) == before - (1 + 0.5 * before)


def test_sgd_leaves_alone_what_has_no_gradient() -> None:
    still, moving = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    sgd = SGD([still, moving], a_training_config(lr=0.1, momentum=0.9, weight_decay=0.5))
    for _ in range(3):
        moving.grad = torch.ones(2)
        sgd.step()
    assert still.tolist() == [1.0, 1.0]
    assert moving[0].item() < 0.7


# ---- mutual distillation: p1 = (1/4, 3/4), p2 = (1/2, 1/2), the label is the second class

LOG3 = math.log(3)
CE1, CE2 = -math.log(0.75), math.log(2)
KL21 = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)  # KL(p2 || p1), which teaches the first model
KL12 = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)


def logits(batch: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h1, h2 = torch.tensor([[0.0, LOG3]] * batch), torch.tensor([[5.0, 5.0]] * batch)
    return h1.requires_grad_(), h2.requires_grad_(), torch.ones(batch, dtype=torch.int64)


@pytest.mark.parametrize("batch", [1, 3])
def test_mutual_objective_of_two(batch: int) -> None:
    h1, h2, y = logits(batch)
    assert mutual_objective([h1, h2], y, "paper").item() == pytest.approx((CE1 + CE2) / 2 + KL21 + KL12)
    assert mutual_objective([h1, h2], y, "authors").item() == pytest.approx(CE1 + CE2 + KL21 + KL12)


def test_mutual_objective_of_one_logit() -> None:
    """It says what two would whose other one is 0: log 3 and 0 against class 1, a probability of 3/4 and of 1/2."""
    h1, h2, y = torch.tensor([[LOG3]]), torch.tensor([[0.0]]), torch.ones(1, dtype=torch.int64)
    assert mutual_objective([h1, h2], y, "paper").item() == pytest.approx((CE1 + CE2) / 2 + KL21 + KL12)


def test_mutual_objective_of_three() -> None:
    h1, h2, y = logits()
    h3 = h2.detach().clone()
    expected = (CE1 + 2 * CE2) / 3 + (2 * KL21 + 2 * KL12) / 2  # models 2 and 3 agree
    assert mutual_objective([h1, h2, h3], y, "paper").item() == pytest.approx(expected)
    assert mutual_objective([h1, h2, h3], y, "authors").item() == pytest.approx(CE1 + 2 * CE2 + KL21 + KL12)


@pytest.mark.parametrize(("kind", "weight"), [("paper", 0.5), ("authors", 1.0)])
def test_soft_targets_are_the_label_and_the_teacher(kind: str, weight: float) -> None:
    """The teacher says (1/4, 3/4), or 3/4 with one logit, and the labels are the second class and the first."""
    teacher, labels = np.array([[0.0, LOG3]] * 2, np.float32), np.array([1, 0])
    expected = [[0.25, 0.75 + weight], [0.25 + weight, 0.75]]
    assert soft_targets(teacher, labels, kind) == pytest.approx(np.array(expected, np.float32))
    assert soft_targets(teacher[:, 1:], labels, kind) == pytest.approx(np.array([[0.75 + weight], [0.75]], np.float32))


@pytest.mark.parametrize("kind", ["paper", "authors"])
def test_a_taught_model_minimises_its_part_of_the_mutual_objective(kind: str) -> None:
    """The gradients are equal; the loss is the cross-entropy and the divergence, and the teacher's entropy, log 2."""
    h1, h2, y = logits(3)
    mutual_objective([h1, h2], y, kind).backward()
    pupil = h1.detach().clone().requires_grad_()
    targets = torch.from_numpy(soft_targets(h2.detach().numpy(), y.numpy(), kind))
    loss = taught_objective(pupil, targets, kind)
    loss.backward()
    torch.testing.assert_close(pupil.grad, h1.grad)
    weight = 0.5 if kind == "paper" else 1.0
    assert loss.item() == pytest.approx(weight * CE1 + KL21 + math.log(2))
    one = torch.tensor([[LOG3]] * 3)
    halves = torch.from_numpy(soft_targets(np.zeros((3, 1), np.float32), y.numpy(), kind))
    assert taught_objective(one, halves, kind).item() == pytest.approx(loss.item())


def test_the_other_models_logits_are_constants() -> None:
    h1, h2, y = logits()
    mutual_objective([h1, h2], y, "paper").backward()
    # of CE / 2 and of KL with a constant teacher: (p - onehot) / 2 + (p - teacher)
    assert h1.grad is not None
    assert h2.grad is not None
    torch.testing.assert_close(h1.grad, torch.tensor([[0.25 / 2 - 0.25, -0.25 / 2 + 0.25]]))
    torch.testing.assert_close(h2.grad, torch.tensor([[0.5 / 2 + 0.25, -0.5 / 2 - 0.25]]))


# ---- pieces


def test_a_block_is_followed_by_the_common_head() -> None:
    blueprint = a_blueprint(batch_norm="running")
    with isolate_rng(0):
        whole = Cascade(blueprint).eval()
    units: dict[str, Any] = {f"atoms.{i}": atom for i, atom in enumerate(whole.atoms)} | {"head": whole.head}
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        piece = PieceModel(blueprint, (0,), "head", units.__getitem__)
        skipped = fit_features(whole.atoms[0](x), (64, 4, 4))
        assert torch.equal(piece.logits(x), whole.head(skipped))
        # channels 16 -> 64 with 24 zeros before, every second row and column
        assert torch.equal(skipped[:, 24:40], whole.atoms[0](x)[:, :, ::2, ::2])
        assert not skipped[:, :24].any()
        assert torch.equal(PieceModel(blueprint, range(5), "head", units.__getitem__).logits(x), whole(x))
        own = blueprint.build_unit("exits.0").eval()
        with_own = PieceModel(blueprint, (0,), "exits.0", (units | {"exits.0": own}).__getitem__)
        assert torch.equal(with_own.logits(x), own(whole.atoms[0](x)))
    assert list(piece.units()) == ["atoms.0", "head"]
    assert [p.shape[0] for p in piece.parameters()] == [16, 16, 16, 10, 10]


# ---- streaming


@pytest.mark.parametrize("batch_norm", ["running", "batch"])
@pytest.mark.parametrize("rows", [40, 33])
def test_a_stream_is_the_direct_forward_pass(tmp_path: Path, batch_norm: str, rows: int) -> None:
    client = a_client(tmp_path, tiny_settings(architecture__batch_norm=batch_norm), rows=rows)
    piece = PieceModel(client.blueprint, (0,), "head", client.load())
    piece.train(False)
    examples = client.local_data(0)
    streamed = client.stream(piece, examples, "train-0", 1)
    order = client.rng("stream train-0").permutation(rows)
    if batch_norm == "batch" and rows == 33:
        order = order[:32]  # a last batch of one has no statistics
    assert len(streamed) == len(order)
    assert streamed.labels.tolist() == examples.labels[order].tolist()
    conv, bn = piece.modules["atoms.0"].conv, piece.modules["atoms.0"].bn
    with torch.no_grad():
        for start in range(0, len(order), 16):
            z = conv(examples.read(order[start : start + 16]))
            if batch_norm == "batch":
                mean, var = z.mean((0, 2, 3), keepdim=True), z.var((0, 2, 3), unbiased=False, keepdim=True)
            else:
                mean, var = bn.running_mean.view(1, -1, 1, 1), bn.running_var.view(1, -1, 1, 1)
            expected = F.relu((z - mean) / (var + bn.eps).sqrt())  # weight 1, bias 0 at the start
            positions = np.arange(start, min(start + 16, len(order)))
            torch.testing.assert_close(streamed.read(positions), expected, rtol=1e-4, atol=1e-5)
    # the file is as large as it has to be, and float32
    path = client.store.feature_path("train-0")
    assert path.stat().st_size == 128 + 4 * len(order) * 16 * 8 * 8


def test_a_stream_is_fitted_to_the_next_piece(tmp_path: Path) -> None:
    client = a_client(tmp_path, tiny_settings(architecture__batch_norm="running"), rows=20)
    piece = PieceModel(client.blueprint, (0,), "head", client.load())
    piece.train(False)
    to_last = client.stream(piece, client.local_data(0), "train-0", 4)  # conv5 takes 32 x 4 x 4
    z = to_last.read(np.arange(20))
    assert z.shape == (20, 32, 4, 4)
    assert not z[:, :8].any()
    assert not z[:, 24:].any()
    assert z[:, 8:24].any()


def test_a_stream_of_nothing(tmp_path: Path) -> None:
    client = a_client(tmp_path)
    piece = PieceModel(client.blueprint, (0,), "head", client.load())
    nothing = training_examples(digits(), np.arange(0))
    streamed = client.stream(piece, nothing, "validation-0", 1)
    assert len(streamed) == 0
    assert client.evaluate(piece.logits, streamed) == {}


# ---- a local trainer


def trained(folder: Path, pause: bool) -> dict[str, np.ndarray]:
    client = a_client(folder, tiny_settings(architecture__batch_norm="running"))
    trainer = LocalTrainer(
        lambda: [PieceModel(client.blueprint, (0, 1), "head", client.load())], client.training_config
    )
    for epoch in range(3):
        trainer.epoch(client.local_data(0), client.rng("batches", 0, epoch), client.cap, "train")
        if pause and epoch < 2:
            client.save(trainer.pieces[0])
            trainer.pause(client.store.root / "optimiser")
            assert trainer.pieces == []
    assert trainer.seen == 120
    client.save(*trainer.finish())
    return dict(client.store.read(["atoms.0", "atoms.1", "head"]))


def test_a_pause_changes_nothing(tmp_path: Path) -> None:
    straight = trained(tmp_path / "straight", pause=False)
    paused = trained(tmp_path / "paused", pause=True)
    assert same(straight, paused)
    assert straight["atoms.0.bn.num_batches_tracked"] == 9


def test_without_its_momentum_a_pause_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = trained(tmp_path / "straight", pause=False)
    monkeypatch.setattr(SGD, "load", lambda self, path: None)
    assert not same(straight, trained(tmp_path / "paused", pause=True))


def test_the_loss_is_summed_over_examples() -> None:
    blueprint = a_blueprint()
    training_config = a_training_config(8, lr=1e-30, momentum=0.0, weight_decay=0.0)
    examples = random_examples(20, (1, 8, 8))
    with isolate_rng(1):
        built = {unit: blueprint.build_unit(unit) for unit in blueprint.units()}
    trainer = LocalTrainer(lambda: [PieceModel(blueprint, range(5), "head", built.__getitem__)], training_config)
    trainer.epoch(examples, np.random.default_rng(3), MemoryCap(10**8, enforced=True), "train")
    piece = PieceModel(blueprint, range(5), "head", built.__getitem__)
    expected = 0.0
    for positions in batches(20, 8, np.random.default_rng(3), drop_single=True):
        loss = F.cross_entropy(piece.logits(examples.read(positions)), examples.targets(positions), reduction="sum")
        expected += loss.item()
    assert trainer.total_loss == pytest.approx(expected, rel=1e-6)
    assert trainer.seen == 20


def test_dropout_is_a_function_of_the_seed(tmp_path: Path) -> None:
    """It draws from torch's global generator, whose state depends on what a process did before."""
    trained = []
    for state in (1, 2):
        client = a_client(tmp_path / str(state), blueprint=a_blueprint("vgg11", (1, 16, 16)))
        trainer = LocalTrainer(lambda c=client: [PieceModel(c.blueprint, [7], "head", c.load())], a_training_config(4))
        with isolate_rng(state):
            trainer.epoch(random_examples(8, (512, 2, 2)), client.rng("batches"), client.cap, "train")
        (piece,) = trainer.finish()
        trained.append({name: value.numpy().copy() for name, value in piece.head.state_dict().items()})
    assert same(*trained)
