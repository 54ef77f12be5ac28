"""What each trainer does to a client's share of the model."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from helpers import a_client, same, tiny_settings
from torch.nn import functional as F

from piecework.client_app import whole as fedavg
from piecework.client_app.app import require_strategy_of_run
from piecework.client_app.client import Client, Update
from piecework.client_app.features import teacher_logits
from piecework.client_app.trainers import find_trainer
from piecework.device_profiles.memory import FlopCount, MemoryBudgetExceededError
from piecework.device_profiles.profile import allowance
from piecework.models.cascade import Cascade
from piecework.models.partition import Piece
from piecework.models.work_item import WorkItem
from piecework.planning.costs import cost_model_for
from piecework.planning.timing import made_between
from piecework.strategies import find_method
from piecework.strategies.cascade.fedepth import client as fedepth
from piecework.strategies.cascade.fedepth import client_of_m as m_fedepth
from piecework.strategies.cascade.fedepth.client import as_pupil, choose_items, train_blocks
from piecework.strategies.cascade.fedepth.mutual import Mutual, Taught, mutual_item, soft_targets, taught, taught_loss
from piecework.training.examples import Examples
from piecework.training.loop import LocalTrainer, PieceModel
from piecework.training.memory_cap import MemoryCap
from piecework.training.messages import Task

# ---- trainers; here an atom costs 100 bytes, whatever it really takes


def a_task(strategy: str = "fedepth", extra: dict[Piece, int] | None = None, mutual: int = 10**9) -> Task:
    costs: dict[Piece, int] = {
        tuple(range(start, stop)): 100 * (stop - start) for start in range(5) for stop in range(start + 1, 6)
    }
    own = strategy == "m-fedepth"
    listed = {
        WorkItem(piece, f"exits.{piece[-1]}" if own and piece[-1] != 4 else "head"): cost
        for piece, cost in (costs | (extra or {})).items()
    }
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
        costs=listed | {as_pupil(item): cost for item, cost in listed.items()} | {mutual_item(5, 2): mutual},
    )


def poor_client(folder: Path, allowed: int, **settings: Any) -> Client:
    chosen = tiny_settings(**{"training__local_epochs": 2} | settings)
    return a_client(folder, chosen, allowed, cap=MemoryCap(allowed, enforced=False))


def stored(client: Client, units: Iterable[str]) -> dict[str, np.ndarray]:
    return dict(client.store.read(units))


def test_fedepth_in_one_piece_is_fedavg(tmp_path: Path) -> None:
    one, other = poor_client(tmp_path / "1", 500), poor_client(tmp_path / "2", 500)
    whole, pieces = fedavg.train(a_task("fedavg"), one), fedepth.train(a_task(), other)
    assert whole.done == pieces.done == [WorkItem((0, 1, 2, 3, 4))]
    assert whole.units == pieces.units == one.blueprint.units()
    assert whole.metrics == pieces.metrics
    assert whole.seen == pieces.seen == [80]
    assert same(stored(one, whole.units), stored(other, pieces.units))


@pytest.mark.parametrize(
    ("allowed", "changes"),
    [
        (200, {}),
        (200, {"training__batch_size": 39}),  # the last batch would have one example: all that is left are 39
        (200, {"training__batch_size": 39, "memory__feature_cache": False}),
        (200, {"training__batch_size": 39, "training__local_iterations": 4, "memory__feature_cache": False}),
        (200, {"training__batch_size": 39, "architecture__batch_norm": "running"}),
        (800, {"fedepth__mutual_models": 2, "memory__feature_cache": False}),  # two pieces, and then the whole model
    ],
)
def test_the_clock_counts_the_features_that_clients_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int, changes: dict[str, Any]
) -> None:
    """Two epochs without a feature cache were counted as one if each drops a last batch of one example."""
    stream, flops = Client.stream, list[int]()

    def counted(self: Client, piece: PieceModel, examples: Examples, part: str, *rest: Any) -> Examples:
        with FlopCount() as counter:
            features = stream(self, piece, examples, part, *rest)
        flops.append(counter.total * part.startswith("train"))
        return features

    monkeypatch.setattr(Client, "stream", counted)
    client = poor_client(tmp_path, allowed, **changes)
    done = fedepth.train(a_task(), client).done
    assert len(done) == 3
    cut = find_method("fedepth").make_cut(
        client.blueprint, cost_model_for(client.settings, client.blueprint), client.settings
    )
    assert made_between(client.settings, [cut.part(item) for item in done], 40).flops == sum(flops)


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
    client = poor_client(tmp_path, 200, architecture__batch_norm=batch_norm)
    before = stored(client, client.blueprint.units())
    watched = Watched(client)
    update = fedepth.train(a_task(), client)
    assert [item.atoms for item in update.done] == [(0, 1), (2, 3), (4,)]
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
    client = poor_client(tmp_path, 100, architecture__batch_norm="running")
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
    assert [item.atoms for item in update.done] == [(0, 1), (2, 3), (4,)]
    assert set(update.units) == {*(f"atoms.{i}" for i in range(5)), "exits.1", "exits.3", "head"}
    after = stored(client, client.blueprint.units(exits=True))
    changed = {name for name in after if not same(before, after, [name])}
    sent = {name for name in after if any(name.startswith(f"{unit}.") for unit in update.units)}
    assert changed == sent


def test_a_piece_goes_on_with_the_head_of_the_one_before(tmp_path: Path) -> None:
    """Equation 1, done by hand: phi starts where the piece before left it, theta where the server did, z from the store."""
    client = poor_client(tmp_path / "1", 400)
    watched = Watched(client)
    assert [item.atoms for item in fedepth.train(a_task(), client).done] == [(0, 1, 2, 3), (4,)]
    by_hand = poor_client(tmp_path / "2", 400)
    by_hand.store.write_units(watched.saves[0])
    front = PieceModel(by_hand.blueprint, range(4), "head", by_hand.load())
    front.train(False)
    features = by_hand.stream(front, by_hand.local_data(0), "train-0", 4)
    trainer = LocalTrainer(
        lambda: [PieceModel(by_hand.blueprint, (4,), "head", by_hand.load())], by_hand.training_config
    )
    for epoch in range(2):
        trainer.epoch(features, by_hand.rng("batches", 1, epoch), by_hand.cap, "train")
    by_hand.save(*trainer.finish())
    assert same(stored(client, ["atoms.4", "head"]), stored(by_hand, ["atoms.4", "head"]))


@pytest.mark.parametrize("batch_norm", ["running", "batch"])
@pytest.mark.parametrize("strategy", ["fedepth", "m-fedepth"])
def test_without_a_feature_cache_the_weights_are_the_same(tmp_path: Path, strategy: str, batch_norm: str) -> None:
    kept = poor_client(tmp_path / "kept", 200, architecture__batch_norm=batch_norm)
    anew = poor_client(tmp_path / "anew", 200, architecture__batch_norm=batch_norm, memory__feature_cache=False)
    one, other = (find_trainer(strategy)(a_task(strategy), client) for client in (kept, anew))
    assert one.done == other.done
    assert one.seen == other.seen
    assert same(stored(kept, one.units), stored(anew, other.units))
    assert one.metrics == pytest.approx(other.metrics)


@pytest.mark.parametrize(("cache", "fills"), [(True, [0]), (False, [0, 1, 2, 1, 2, 1, 2])])
def test_augmentation_is_drawn_once_a_cache_fill(tmp_path: Path, cache: bool, fills: list[int]) -> None:
    client = poor_client(tmp_path, 200, memory__feature_cache=cache, training__local_epochs=3)
    asked: list[int] = []
    share = client.local_data

    def asking(fill: int) -> Examples:
        asked.append(fill)
        return share(fill)

    client.local_data = asking
    fedepth.train(a_task(), client)
    assert asked == fills


def test_a_client_leaves_out_what_it_cannot_train(tmp_path: Path) -> None:
    task = a_task(extra={(1,): 300, (0, 2): 150})
    client = poor_client(tmp_path / "1", 200)
    before = stored(client, ["atoms.1"])
    update = fedepth.train(task, client)
    assert [item.atoms for item in update.done] == [(0, 2), (3, 4)]
    assert "atoms.1" not in update.units
    assert same(before, stored(client, ["atoms.1"]))
    diluting = poor_client(tmp_path / "2", 200, fedepth__partial_training="dilute")
    update = fedepth.train(task, diluting)
    assert set(update.units) == set(client.blueprint.units())
    assert same(before, stored(diluting, ["atoms.1"]))


def test_mutual_models(tmp_path: Path) -> None:
    client = poor_client(tmp_path, 600)
    before = stored(client, client.blueprint.units())
    update = fedepth.train(a_task(mutual=600), client)
    assert update.done == [mutual_item(5, 2)]
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


def a_pair(*blocks: Piece) -> list[WorkItem]:
    return [WorkItem(block, mode=Taught(True)) for block in (*blocks, (0, 1, 2, 3, 4))]


def test_a_pair_teaches_each_other(tmp_path: Path) -> None:
    """The second model first learns from the received one, block after block, and the whole model then from the second."""
    client, other = poor_client(tmp_path / "1", 700), poor_client(tmp_path / "2", 700)
    update = fedepth.train(a_task(), client)
    assert update.done == a_pair((0, 1), (2, 3), (4,))
    assert update.units == client.blueprint.units()
    assert update.seen == [80, 80, 80, 80]
    assert update.metrics["predicted-peak"] == 500
    client.commit()
    state = client.store.newest_state(1)
    assert state is not None
    second = stored_in(client, state / "companion-1")
    assert sorted(second) == sorted(stored(client, client.blueprint.units()))

    whole, examples = (0, 1, 2, 3, 4), other.local_data(0)
    answers = teacher_logits(replace(client, folder=state / "companion-1"), [whole], examples)
    targets = soft_targets(answers, examples.labels, "paper")
    pupil = replace(other, local_data=lambda _: taught(examples, targets))
    train_blocks(pupil, [WorkItem(whole, mode=Taught(True))], taught_loss("paper"))
    assert same(stored(client, update.units), stored(other, update.units))


def stored_in(client: Client, folder: Path) -> dict[str, np.ndarray]:
    return dict(client.store.read(client.blueprint.units(), folder))


def test_the_second_model_of_a_pair_is_kept(tmp_path: Path) -> None:
    """It trains on from round to round, and its training starts anew without it."""
    ends = []
    for kept in (True, False):
        client = poor_client(tmp_path / str(kept), 700)
        fedepth.train(a_task(), client)
        client.commit()
        later = replace(client, round=2, old_state=client.store.newest_state(1) if kept else None, _new_state=None)
        fedepth.train(a_task(), later)
        ends.append(stored(later, ["head"]))
    assert not same(*ends)


def copies_of(item: WorkItem) -> int:
    return item.mode.copies if isinstance(item.mode, Mutual) else 1


def test_a_second_model_needs_all_blocks() -> None:
    def cost(item: WorkItem) -> int:
        return 150 if item.atoms == (1,) else 100 * copies_of(item) * len(item.atoms)

    whole = [WorkItem((0, 1, 2, 3, 4))]
    assert choose_items(list("abcde"), cost, 649, 2) == whole
    assert choose_items(list("abcde"), cost, 650, 2) == a_pair((0,), (1,), (2,), (3,), (4,))


@pytest.mark.parametrize(
    ("budget", "mutual_models", "items"),
    [
        (599, 3, [WorkItem((0, 1, 2, 3, 4))]),
        (600, 3, a_pair((0,), (1,), (2,), (3,), (4,))),
        (600, 1, [WorkItem((0, 1, 2, 3, 4))]),
        (999, 2, a_pair((0, 1, 2, 3), (4,))),
        (499, 3, [WorkItem((0, 1, 2, 3)), WorkItem((4,))]),
        (500, 3, [WorkItem((0, 1, 2, 3, 4))]),
        (1000, 3, [mutual_item(5, 2)]),
        (1500, 3, [mutual_item(5, 3)]),
        (9999, 3, [mutual_item(5, 3)]),
        (9999, 1, [WorkItem((0, 1, 2, 3, 4))]),
    ],
)
def test_choice_of_work_items(budget: int, mutual_models: int, items: list[WorkItem]) -> None:
    def cost(item: WorkItem) -> int:
        return 100 * copies_of(item) * len(item.atoms)

    assert choose_items(list("abcde"), cost, budget, mutual_models) == items


@pytest.mark.parametrize(
    ("budget", "items"),
    [
        (454, [WorkItem((0, 1, 2, 3)), WorkItem((4,))]),
        (455, [WorkItem((0, 1, 2, 3, 4))]),  # 500 are excused as 455 and a tenth
        (590, [WorkItem((0, 1, 2, 3, 4))]),  # 649 are allowed, but 90 and a tenth are left for the second model
        (591, a_pair((0,), (1,), (2,), (3,), (4,))),
        (999, a_pair((0, 1, 2, 3, 4))),
        (1000, [mutual_item(5, 2)]),
    ],
)
def test_tolerance_is_no_surplus(budget: int, items: list[WorkItem]) -> None:
    def cost(item: WorkItem) -> int:
        return 100 * copies_of(item) * len(item.atoms)

    assert choose_items(list("abcde"), cost, allowance(budget, 0.1), 2, tolerance=0.1) == items


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
    with pytest.raises(
        ValueError,
        match="unknown strategy 'magic': known are allsmall, cocofl, depthfl, exclusivefl, fedavg",
    ):
        find_trainer("magic")


def test_a_message_alone_has_no_module_imported() -> None:
    """A strategy outside the repository is a module's name, so a client trains only that of its run's configuration."""
    context = Context(1, 1, {}, RecordDict(), {"strategy": "my_prox:Prox"})
    require_strategy_of_run("my_prox:Prox", context)
    require_strategy_of_run("fedavg", context)
    with pytest.raises(ValueError, match="the task is of strategy 'this:s', which is neither"):
        require_strategy_of_run("this:s", context)
    board = Context(1, 1, {"state-dir": "x"}, RecordDict(), {"strategy": "my_prox:Prox"})
    with pytest.raises(ValueError, match="the task is of strategy 'my_prox:Prox', which is neither"):
        require_strategy_of_run("my_prox:Prox", board)


def test_training_learns(tmp_path: Path) -> None:
    losses = []
    for epochs in (1, 8):
        client = poor_client(tmp_path / str(epochs), 100, training__local_epochs=epochs)
        update: Update = fedepth.train(a_task(), client)
        losses.append(update.metrics["train-loss"])
    assert losses[1] < 0.6 * losses[0]
