"""The local loop: optimiser, objectives, examples, streaming, and what each trainer does to a client's share of the model."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import a_blueprint, a_client, a_recipe, digits, random_examples, same, tiny_settings
from torch.nn import functional as F

from client_app.client import Client, Update
from client_app.examples import Augmentation, Examples, batches, feature_examples, normalised, share_examples
from client_app.memory_cap import MemoryCap
from client_app.task import Task, piece_key
from client_app.trainers import fedavg, fedepth, find_trainer, m_fedepth
from client_app.trainers.fedepth import MUTUAL, choose_pieces, mutual_objective
from client_app.training import SGD, PieceModel, Trainee, evaluate_examples
from device_profiles.memory import MemoryBudgetExceededError
from models.cascade import Cascade, fit_features, isolated_rng
from models.partition import Piece

# ---- optimiser


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_sgd_is_torchs(momentum: float, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(4, 3, 3, 3, generator=generator), torch.randn(7, generator=generator)]
    start[0] = start[0].contiguous(memory_format=torch.channels_last)
    ours = [torch.nn.Parameter(t.clone()) for t in start]
    theirs = [torch.nn.Parameter(t.clone()) for t in start]
    mine = SGD(ours, a_recipe(lr=0.3, momentum=momentum, weight_decay=weight_decay))
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
    sgd = SGD([p], a_recipe(lr=0.5, momentum=0.5, weight_decay=0.25))
    p.grad = torch.tensor([1.0])
    sgd.step()  # g = 1 + 0.25, v = 1.25, p = 1 - 0.625
    assert p.item() == 0.375
    p.grad = torch.tensor([0.0])
    sgd.step()  # g = 0.09375, v = 0.625 + 0.09375 = 0.71875, p = 0.375 - 0.359375
    assert p.item() == 0.015625


def test_sgd_leaves_alone_what_has_no_gradient() -> None:
    still, moving = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    sgd = SGD([still, moving], a_recipe(lr=0.1, momentum=0.9, weight_decay=0.5))
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


def test_mutual_objective_of_three() -> None:
    h1, h2, y = logits()
    h3 = h2.detach().clone()
    expected = (CE1 + 2 * CE2) / 3 + (2 * KL21 + 2 * KL12) / 2  # models 2 and 3 agree
    assert mutual_objective([h1, h2, h3], y, "paper").item() == pytest.approx(expected)
    assert mutual_objective([h1, h2, h3], y, "authors").item() == pytest.approx(CE1 + 2 * CE2 + KL21 + KL12)


def test_the_other_models_logits_are_constants() -> None:
    h1, h2, y = logits()
    mutual_objective([h1, h2], y, "paper").backward()
    # of CE / 2 and of KL with a constant teacher: (p - onehot) / 2 + (p - teacher)
    assert h1.grad is not None
    assert h2.grad is not None
    torch.testing.assert_close(h1.grad, torch.tensor([[0.25 / 2 - 0.25, -0.25 / 2 + 0.25]]))
    torch.testing.assert_close(h2.grad, torch.tensor([[0.5 / 2 + 0.25, -0.5 / 2 - 0.25]]))


# ---- examples


def test_batches() -> None:
    def cut(count: int, size: int, *, drop: bool) -> list[list[int]]:
        return [b.tolist() for b in batches(count, size, np.random.default_rng(4), drop_single=drop)]

    kept, dropped = cut(17, 4, drop=False), cut(17, 4, drop=True)
    assert [len(b) for b in kept] == [4, 4, 4, 4, 1]
    assert kept[:4] == dropped
    flat = [position for batch in kept for position in batch]
    assert sorted(flat) == list(range(17))
    assert flat != list(range(17))
    assert [len(b) for b in cut(18, 4, drop=True)] == [4, 4, 4, 4, 2]
    assert cut(1, 4, drop=True) == cut(0, 4, drop=False) == []


IMAGE = np.array([[1, 2], [3, 4]], dtype=np.uint8)[None, :, :, None]


@pytest.mark.parametrize(
    ("flip", "shift", "expected"),
    [
        (False, (4, 4), [[1, 2], [3, 4]]),
        (True, (4, 4), [[2, 1], [4, 3]]),
        (False, (5, 4), [[3, 4], [0, 0]]),
        (False, (3, 4), [[0, 0], [1, 2]]),
        (False, (4, 5), [[2, 0], [4, 0]]),
        (False, (4, 3), [[0, 1], [0, 3]]),
        (True, (4, 3), [[1, 0], [3, 0]]),  # shifted, then flipped
        (False, (5, 5), [[4, 0], [0, 0]]),
        (False, (0, 0), [[0, 0], [0, 0]]),
        (False, (8, 8), [[0, 0], [0, 0]]),
    ],
)
def test_augmentation(flip: bool, shift: tuple[int, int], expected: list[list[int]]) -> None:
    augmentation = Augmentation(np.array([flip]), np.array([shift]))
    assert augmentation.apply(IMAGE, np.array([0]))[0, :, :, 0].tolist() == expected


def test_augmentation_belongs_to_the_position() -> None:
    augmentation = Augmentation(np.array([False, True, False]), np.array([[4, 4], [4, 4], [5, 4]]))
    both = augmentation.apply(np.repeat(IMAGE, 3, axis=0), np.array([2, 0, 1]))
    assert both[..., 0].tolist() == [[[3, 4], [0, 0]], [[1, 2], [3, 4]], [[2, 1], [4, 3]]]


def test_augmentation_is_drawn_evenly() -> None:
    drawn = Augmentation.draw(4000, np.random.default_rng(0))
    assert drawn.flips.mean() == pytest.approx(0.5, abs=0.03)
    assert drawn.shifts.shape == (4000, 2)
    for axis in (0, 1):
        counts = np.bincount(drawn.shifts[:, axis])
        assert len(counts) == 9
        assert counts.min() > 350
    again = Augmentation.draw(4000, np.random.default_rng(0))
    assert (drawn.shifts == again.shifts).all()
    assert (drawn.flips == again.flips).all()


def test_share_examples_are_the_rows_normalised() -> None:
    data = digits()
    rows = np.array([30, 4, 17])
    examples = share_examples(data, rows)
    x = examples.read(np.array([2, 0]))
    assert x.shape == (2, 1, 8, 8)
    assert x.dtype == torch.float32
    assert x.is_contiguous(memory_format=torch.channels_last)
    expected = (data.images[[17, 30]].astype(np.float64) / 255 - data.mean[0]) / data.std[0]
    np.testing.assert_allclose(x[:, 0].numpy(), expected[..., 0], atol=1e-6)
    assert len(examples) == 3
    assert examples.targets(np.array([1])).tolist() == [data.labels[4]]
    everything = normalised(data.images[:], data)
    assert everything.mean().item() == pytest.approx(0, abs=1e-4)
    assert everything.std().item() == pytest.approx(1, abs=1e-3)


def test_feature_examples() -> None:
    maps = np.arange(24, dtype=np.float32).reshape(2, 2, 3, 2)  # [n, H, W, C]
    z = feature_examples(maps, np.array([7, 8])).read(np.array([1]))
    assert z.shape == (1, 2, 2, 3)
    assert z[0, 1, 0, 2].item() == maps[1, 0, 2, 1]
    vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert feature_examples(vectors, np.array([7, 8])).read(np.array([1, 0])).tolist() == [[3, 4, 5], [0, 1, 2]]


def test_evaluate_examples_by_hand() -> None:
    rows = np.array([[0.0, LOG3], [0.0, LOG3], [LOG3, 0.0], [0.0, 0.0], [0.0, LOG3]], dtype=np.float32)
    examples = feature_examples(rows, np.array([1, 0, 0, 0, 1]))
    rng, cap = np.random.default_rng(0), MemoryCap(10**6, enforced=True)
    loss, correct, seen = evaluate_examples(lambda z: z, examples, 3, rng, cap)
    # right with 3/4: three times; wrong with 1/4; undecided, where the first class wins
    assert (correct, seen) == (4, 5)
    assert loss == pytest.approx(-3 * math.log(0.75) - math.log(0.25) - math.log(0.5))


# ---- pieces


def test_a_piece_skips_to_the_shared_head() -> None:
    blueprint = a_blueprint(batch_norm="running")
    with isolated_rng(0):
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
    client = a_client(tmp_path, tiny_settings(batch_norm=batch_norm), rows=rows)
    piece = PieceModel(client.blueprint, (0,), "head", client.load())
    piece.train(False)
    examples = client.share(0)
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
    client = a_client(tmp_path, tiny_settings(batch_norm="running"), rows=20)
    piece = PieceModel(client.blueprint, (0,), "head", client.load())
    piece.train(False)
    to_last = client.stream(piece, client.share(0), "train-0", 4)  # conv5 takes 32 x 4 x 4
    z = to_last.read(np.arange(20))
    assert z.shape == (20, 32, 4, 4)
    assert not z[:, :8].any()
    assert not z[:, 24:].any()
    assert z[:, 8:24].any()


def test_a_stream_of_nothing(tmp_path: Path) -> None:
    client = a_client(tmp_path)
    piece = PieceModel(client.blueprint, (0,), "head", client.load())
    nothing = share_examples(digits(), np.arange(0))
    streamed = client.stream(piece, nothing, "validation-0", 1)
    assert len(streamed) == 0
    assert client.evaluate(piece.logits, streamed) == {}


# ---- a trainee


def trained(folder: Path, pause: bool) -> dict[str, np.ndarray]:
    client = a_client(folder, tiny_settings(batch_norm="running"))
    trainee = Trainee(lambda: [PieceModel(client.blueprint, (0, 1), "head", client.load())], client.recipe)
    for epoch in range(3):
        trainee.epoch(client.share(0), client.rng("batches", 0, epoch), client.cap, "train")
        if pause and epoch < 2:
            client.save(trainee.pieces[0])
            trainee.pause(client.store.root / "momentum.safetensors")
            assert trainee.pieces == []
    assert trainee.seen == 120
    client.save(*trainee.finish())
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
    recipe = a_recipe(8, lr=1e-30, momentum=0.0, weight_decay=0.0)
    examples = random_examples(20, (1, 8, 8))
    with isolated_rng(1):
        built = {unit: blueprint.build_unit(unit) for unit in blueprint.units()}
    trainee = Trainee(lambda: [PieceModel(blueprint, range(5), "head", built.__getitem__)], recipe)
    trainee.epoch(examples, np.random.default_rng(3), MemoryCap(10**8, enforced=True), "train")
    piece = PieceModel(blueprint, range(5), "head", built.__getitem__)
    expected = 0.0
    for positions in batches(20, 8, np.random.default_rng(3), drop_single=True):
        loss = F.cross_entropy(piece.logits(examples.read(positions)), examples.targets(positions), reduction="sum")
        expected += loss.item()
    assert trainee.total_loss == pytest.approx(expected, rel=1e-6)
    assert trainee.seen == 20


# ---- trainers; here an atom costs 100 bytes, whatever it really takes


def a_task(strategy: str = "fedepth", extra: dict[Piece, int] | None = None, mutual: int = 10**9) -> Task:
    prices: dict[Piece, int] = {
        tuple(range(start, stop)): 100 * (stop - start) for start in range(5) for stop in range(start + 1, 6)
    }
    prices |= {(MUTUAL, 2): mutual} | (extra or {})
    return Task(
        experiment_id="experiment",
        round=1,
        state_round=0,
        strategy=strategy,
        budget=10**9,
        reference=500,
        lr=0.05,
        state_dir="",
        enforced=False,
        prices={piece_key(piece): price for piece, price in prices.items()},
    )


def poor_client(folder: Path, allowed: int, **settings: Any) -> Client:
    chosen = tiny_settings(**{"local_epochs": 2} | settings)
    return a_client(folder, chosen, allowed, cap=MemoryCap(allowed, enforced=False))


def stored(client: Client, units: Iterable[str]) -> dict[str, np.ndarray]:
    return dict(client.store.read(units))


def test_fedepth_in_one_piece_is_fedavg(tmp_path: Path) -> None:
    one, other = poor_client(tmp_path / "1", 500), poor_client(tmp_path / "2", 500)
    whole, pieces = fedavg.train(a_task("fedavg"), one), fedepth.train(a_task(), other)
    assert whole.pieces == pieces.pieces == [(0, 1, 2, 3, 4)]
    assert whole.units == pieces.units == one.blueprint.units()
    assert whole.metrics == pieces.metrics
    assert whole.seen == pieces.seen == [80]
    assert same(stored(one, whole.units), stored(other, pieces.units))


class Watched:
    """What a client's store held after each save."""

    def __init__(self, client: Client) -> None:
        self.saves: list[dict[str, np.ndarray]] = []
        save = client.save

        def watching(piece: PieceModel) -> None:
            save(piece)
            self.saves.append(stored(client, piece.units()))

        client.save = watching  # type: ignore[method-assign]


@pytest.mark.parametrize("batch_norm", ["running", "batch"])
def test_frozen_atoms_do_not_change(tmp_path: Path, batch_norm: str) -> None:
    client = poor_client(tmp_path, 200, batch_norm=batch_norm)
    before = stored(client, client.blueprint.units())
    watched = Watched(client)
    update = fedepth.train(a_task(), client)
    assert update.pieces == [(0, 1), (2, 3), (4,)]
    assert update.seen == [80, 80, 80]
    assert update.units == ["atoms.0", "atoms.1", "head", "atoms.2", "atoms.3", "atoms.4"]
    after = stored(client, update.units)
    assert len(watched.saves) == 3
    for save in watched.saves:
        atoms = [name for name in save if name.startswith("atoms")]
        assert same(save, after, atoms)  # as its piece left them
        assert not any(np.array_equal(save[name], before[name]) for name in atoms)  # which trained them
    heads = [save["head.fc.weight"] for save in [before, *watched.saves]]
    assert all(not np.array_equal(a, b) for i, a in enumerate(heads) for b in heads[:i])
    if batch_norm == "running":  # 40 images are 3 batches; 2 epochs of the own piece, no other
        assert [int(after[f"atoms.{i}.bn.num_batches_tracked"]) for i in range(5)] == [6] * 5


def test_validation_is_of_the_whole_model(tmp_path: Path) -> None:
    client = poor_client(tmp_path, 100, batch_norm="running")
    update = fedepth.train(a_task(), client)
    model = Cascade(client.blueprint).eval()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in stored(client, update.units).items()})
    with torch.no_grad():
        positions = np.arange(20)
        output, y = model(client.validation.read(positions)), client.validation.targets(positions)
    assert update.metrics["val-examples"] == 20
    assert update.metrics["val-accuracy"] == (output.argmax(1) == y).sum().item() / 20
    assert update.metrics["val-loss"] == pytest.approx(F.cross_entropy(output, y).item(), rel=1e-5)
    assert update.metrics["predicted-peak"] == 100


def test_m_fedepth_trains_own_heads(tmp_path: Path) -> None:
    client = poor_client(tmp_path, 200)
    before = stored(client, client.blueprint.units(exits=True))
    update = m_fedepth.train(a_task("m-fedepth"), client)
    assert update.pieces == [(0, 1), (2, 3), (4,)]
    assert set(update.units) == {*(f"atoms.{i}" for i in range(5)), "exits.1", "exits.3", "head"}
    after = stored(client, client.blueprint.units(exits=True))
    changed = {name for name in after if not same(before, after, [name])}
    sent = {name for name in after if any(name.startswith(f"{unit}.") for unit in update.units)}
    assert changed == sent


def test_a_piece_goes_on_with_the_head_of_the_one_before(tmp_path: Path) -> None:
    """Equation 1, done by hand: phi starts where the piece before left it, theta where the server did, z from the store."""
    client = poor_client(tmp_path / "1", 400)
    watched = Watched(client)
    assert fedepth.train(a_task(), client).pieces == [(0, 1, 2, 3), (4,)]
    by_hand = poor_client(tmp_path / "2", 400)
    by_hand.store.write_units(watched.saves[0])
    front = PieceModel(by_hand.blueprint, range(4), "head", by_hand.load())
    front.train(False)
    features = by_hand.stream(front, by_hand.share(0), "train-0", 4)
    trainee = Trainee(lambda: [PieceModel(by_hand.blueprint, (4,), "head", by_hand.load())], by_hand.recipe)
    for epoch in range(2):
        trainee.epoch(features, by_hand.rng("batches", 1, epoch), by_hand.cap, "train")
    by_hand.save(*trainee.finish())
    assert same(stored(client, ["atoms.4", "head"]), stored(by_hand, ["atoms.4", "head"]))


@pytest.mark.parametrize("batch_norm", ["running", "batch"])
@pytest.mark.parametrize("strategy", ["fedepth", "m-fedepth"])
def test_without_a_feature_cache_the_weights_are_the_same(tmp_path: Path, strategy: str, batch_norm: str) -> None:
    kept = poor_client(tmp_path / "kept", 200, batch_norm=batch_norm)
    anew = poor_client(tmp_path / "anew", 200, batch_norm=batch_norm, feature_cache=False)
    one, other = (find_trainer(strategy)(a_task(strategy), client) for client in (kept, anew))
    assert one.pieces == other.pieces
    assert one.seen == other.seen
    assert same(stored(kept, one.units), stored(anew, other.units))
    assert one.metrics == pytest.approx(other.metrics)


@pytest.mark.parametrize(("cache", "fills"), [(True, [0]), (False, [0, 1, 2, 1, 2, 1, 2])])
def test_augmentation_is_drawn_once_a_cache_fill(tmp_path: Path, cache: bool, fills: list[int]) -> None:
    client = poor_client(tmp_path, 200, feature_cache=cache, local_epochs=3)
    asked: list[int] = []
    share = client.share

    def asking(fill: int) -> Examples:
        asked.append(fill)
        return share(fill)

    client.share = asking
    fedepth.train(a_task(), client)
    assert asked == fills


def test_a_client_leaves_out_what_it_cannot_train(tmp_path: Path) -> None:
    task = a_task(extra={(1,): 300, (0, 2): 150})
    client = poor_client(tmp_path / "1", 200)
    before = stored(client, ["atoms.1"])
    update = fedepth.train(task, client)
    assert update.pieces == [(0, 2), (3, 4)]
    assert "atoms.1" not in update.units
    assert same(before, stored(client, ["atoms.1"]))
    diluting = poor_client(tmp_path / "2", 200, partial_training="dilute")
    update = fedepth.train(task, diluting)
    assert set(update.units) == set(client.blueprint.units())
    assert same(before, stored(diluting, ["atoms.1"]))


def test_mutual_models(tmp_path: Path) -> None:
    client = poor_client(tmp_path, 600)
    before = stored(client, client.blueprint.units())
    update = fedepth.train(a_task(mutual=600), client)
    assert update.pieces == [(MUTUAL, 2)]
    assert update.units == client.blueprint.units()
    assert not same(before, stored(client, update.units))
    client.commit()
    state = client.store.newest_state(1)
    assert state is not None
    companion = state / "companion-1"
    assert sorted(path.stem for path in companion.iterdir()) == sorted(client.blueprint.units())
    module = client.blueprint.build_unit("head")
    client.store.load("head", module, companion)
    assert not np.array_equal(module.fc.weight.detach().numpy(), stored(client, ["head"])["head.fc.weight"])


@pytest.mark.parametrize(
    ("allowed", "mutual_models", "pieces"),
    [
        (499, 3, [(0, 1, 2, 3), (4,)]),
        (500, 3, [(0, 1, 2, 3, 4)]),
        (1000, 3, [(MUTUAL, 2)]),
        (1500, 3, [(MUTUAL, 3)]),
        (9999, 3, [(MUTUAL, 3)]),
        (9999, 1, [(0, 1, 2, 3, 4)]),
    ],
)
def test_choice_of_pieces(allowed: int, mutual_models: int, pieces: list[Piece]) -> None:
    def price(piece: Piece) -> int:
        return 500 * piece[1] if piece[0] == MUTUAL else 100 * len(piece)

    assert choose_pieces(list("abcde"), price, allowed, mutual_models) == pieces


def test_refusals(tmp_path: Path) -> None:
    client = poor_client(tmp_path, 99)
    with pytest.raises(
        MemoryBudgetExceededError, match=r"training atom 'conv5' needs 100 bytes .* allows 99"
    ) as caught:
        fedepth.train(a_task(), client)
    assert (caught.value.needed, caught.value.allowed) == (100, 99)
    with pytest.raises(MemoryBudgetExceededError, match=r"training the whole model needs 500 bytes .* allows 99"):
        fedavg.train(a_task("fedavg"), client)


def test_unknown_trainer() -> None:
    with pytest.raises(ValueError, match="strategy 'magic' has no trainer: known are fedavg, fedepth, m-fedepth"):
        find_trainer("magic")


def test_training_learns(tmp_path: Path) -> None:
    losses = []
    for epochs in (1, 8):
        client = poor_client(tmp_path / str(epochs), 100, local_epochs=epochs)
        update: Update = fedepth.train(a_task(), client)
        losses.append(update.metrics["train-loss"])
    assert losses[1] < 0.6 * losses[0]
