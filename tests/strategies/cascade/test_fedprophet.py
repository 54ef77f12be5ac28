"""FedProphet from the first round to the last module, on the in-process grid; and jFAT."""

import shutil
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fedprophet_helpers import SMALL, boards
from flwr.app import Error, Message
from helpers import RecordingGrid, arrays_of, clients_of, model_of, run_in_parts, run_local, same, training

from piecework import load
from piecework.models.cascade import unit_of
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.server_app.records import RunDir

MODULES = [(0, 1, 2), (3,), (4,)]


def keys(*pieces: tuple[int, ...]) -> list[list[list[int]]]:
    return [[list(piece)] for piece in pieces]


def settled(run_dir: RunDir) -> list[dict[str, Any]]:
    """What the records say that does not depend on the clock or on who was asked who they are."""
    dropped = (
        "seconds",
        "train_seconds",
        "bytes_up",
        "bytes_down",
        "bytes_query",
        "bytes_evaluation",
        "query",  # its peak has the streaming of features that a run's end had removed
        "simulated_seconds",
    )
    machine = (
        "rss_peak",
        "rss_growth",
        "seconds",
        "simulated_seconds",
        "waited_seconds",
        "bytes_down",
        "bytes_up",
        "message_bytes",
        "note",
    )
    return [
        {k: v for k, v in record.items() if k not in (*dropped, "clients")}
        | {"clients": [{k: v for k, v in client.items() if k not in machine} for client in record["clients"]]}
        for record in run_dir.rounds()
    ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RecordingGrid]:
    """A run that nothing broke off, and its messages."""

    class Kept(RecordingGrid):
        """This run's."""

    run_dir = run_local(tmp_path_factory.mktemp("whole"), Kept, **SMALL)
    return run_dir, Kept.last


@pytest.fixture(scope="module")
def whole_run(recorded: tuple[RunDir, RecordingGrid]) -> RunDir:
    return recorded[0]


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same run, broken off where its second stage ends; tests go on with copies of it."""
    return run_local(tmp_path_factory.mktemp("two-stages"), **SMALL | {"num_rounds": 4})


def going_on(two_stages: RunDir, folder: Path, grid: type[RecordingGrid] = RecordingGrid, **changes: Any) -> RunDir:
    """A copy of the run that was broken off, gone on with."""
    path = folder / "run"
    if not path.exists():
        shutil.copytree(two_stages.path, path)
    return run_local(folder, grid, **SMALL | changes, resume_from=str(path))


@pytest.mark.slow
def test_a_cascade_that_is_over_says_so_where_it_is_to_go_on(
    whole_run: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The lengths of its stages come from the rounds of the first start: no rate is asked of rounds that will not be."""
    run = RunDir(Path(shutil.copytree(whole_run.path, tmp_path / "run")))
    run_local(tmp_path, **SMALL | {"num_rounds": 9}, resume_from=str(run.path))
    assert "all stages ended after round 6 of num-rounds = 9" in caplog.text
    assert len(run.rounds()) == 6
    assert (run.summary() or {})["status"] == "completed"


def test_module_after_module(whole_run: RunDir) -> None:
    rounds = whole_run.rounds()
    assert [record["stage"] for record in rounds] == ["module 1"] * 2 + ["module 2"] * 2 + ["module 3"] * 2
    assert [record["bytes_query"] > 0 for record in rounds] == [False, False, True, False, True, False]
    assert rounds[0]["epsilon"] == pytest.approx(8 / 255)
    for record in rounds[2:]:
        assert record["epsilon"] == record["alpha"] * record["distance"] > 0
    assert [record["alpha"] for record in rounds[::2]] == [1.0, 0.3, 0.3]
    for record in rounds:
        assert 0 <= record["client_adversarial_accuracy"] <= 1
        assert (record["aggregated"], record["enforced"], record["clients_evaluated"]) == (True, True, 3)
    assert whole_run.summary()["status"] == "completed"  # type: ignore[index]


def test_prophets_train_what_memory_and_time_allow(whole_run: RunDir) -> None:
    assigned = [[client["pieces"] for client in record["clients"]] for record in whole_run.rounds()]
    assert assigned[0] == keys((0, 1, 2), (0, 1, 2), (0, 1, 2, 3, 4))
    assert assigned[2] == keys((3,), (3,), (3, 4))
    assert assigned[4] == keys((4,), (4,), (4,))


def test_everybody_is_within_budget_and_as_predicted(whole_run: RunDir) -> None:
    for record in whole_run.rounds():
        for client in record["clients"]:
            assert client["status"] == "ok"
            assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]
            assert 0 < client["evaluation_peak"] <= client["budget"]


def test_fixed_modules_travel_once_and_do_not_change(recorded: tuple[RunDir, RecordingGrid]) -> None:
    run_dir, grid = recorded
    sent = {n: [m for m in training(grid.sent) if m.metadata.group_id == str(n)] for n in range(1, 7)}
    units = [[sorted(set(map(unit_of, arrays_of(m)))) for m in sent[n]] for n in (1, 3, 5)]
    one, two, three = ["atoms.0", "atoms.1", "atoms.2"], ["atoms.3"], ["atoms.4"]
    assert units[0] == [[*one, "aux.2"], [*one, "aux.2"], [*one, *two, *three, "aux.2", "aux.3", "head"]]
    assert units[1] == [[*two, "aux.3"], [*two, "aux.3"], [*two, *three, "aux.3", "head"]]
    assert units[2] == [[*three, "head"]] * 3
    brought = [sorted(set(map(unit_of, arrays_of(m)))) for m in grid.sent if m.metadata.message_type == "query.units"]
    assert [b for b in brought if b] == [one] * 3 + [two] * 3  # to each client once, when the module is fixed
    first = RunDir(run_dir.path).checkpoints / "round-00001"
    assert first.is_dir()
    last = model_of(run_dir)
    best = {name for name in last if unit_of(name) in one}
    fixed = [arrays_of(m) for m in grid.sent if m.metadata.message_type == "query.units" and len(arrays_of(m))]
    assert same({name: fixed[0][name] for name in best}, {name: last[name] for name in best})


@pytest.mark.slow
def test_resumed_within_a_stage_and_at_its_end(tmp_path: Path, whole_run: RunDir, two_stages: RunDir) -> None:
    going_on(two_stages, tmp_path, num_rounds=5)
    resumed = going_on(two_stages, tmp_path)
    assert same(model_of(resumed), model_of(whole_run))
    assert settled(resumed) == settled(whole_run)
    assert resumed.final() == whole_run.final()


class Forgetful(RecordingGrid):
    """Before the training of a round, `lose` has its way with the folder of the clients' stores, once."""

    root: Path
    before = "6"
    done = False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        hit = any(m.metadata.message_type == "train" and m.metadata.group_id == self.before for m in messages)
        if hit and not self.done:
            self.done = True
            (experiment,) = (self.root / "run" / "clients").iterdir()
            self.lose(experiment)
        return super().push_messages(messages)

    def lose(self, experiment: Path) -> None:
        """Client 0's features are gone, and client 1's are damaged."""
        shutil.rmtree(experiment / "0" / "features")
        (damaged,) = (experiment / "1" / "features").iterdir()
        damaged.write_bytes(damaged.read_bytes()[:-1000])


@pytest.mark.slow
def test_lost_features_are_recomputed_within_budget(tmp_path: Path, whole_run: RunDir, two_stages: RunDir) -> None:
    run_dir = going_on(two_stages, tmp_path, type("Here", (Forgetful,), {"root": tmp_path}))
    assert same(model_of(run_dir), model_of(whole_run))
    clients = clients_of(run_dir, 6)
    assert "features behind atom 3 are damaged" in clients[1]["note"]
    # from the images through two modules, one after another
    assert all(client["measured_peak"] == client["predicted_peak"] <= client["budget"] for client in clients)


class Bereft(Forgetful):
    """In the last stage, all that client 0 had on disk is gone."""

    before = "5"

    def lose(self, experiment: Path) -> None:
        """Its whole store."""
        shutil.rmtree(experiment / "0")


def test_a_lost_store_is_filled_again_within_budget(tmp_path: Path, two_stages: RunDir) -> None:
    """It names missing units, is sent both fixed modules, and computes its features from images, one module after another."""
    run_dir = going_on(two_stages, tmp_path, type("Here", (Bereft,), {"root": tmp_path}))
    missing, again = clients_of(run_dir, 5)[0], clients_of(run_dir, 6)[0]
    assert missing["reason"].startswith("frozen units atoms.0, atoms.1, atoms.2, atoms.3")
    assert again["status"] == "ok"
    assert again["measured_peak"] == again["predicted_peak"] <= again["budget"]


def test_a_client_that_comes_late_rebuilds_what_it_missed(tmp_path: Path) -> None:
    """One client a round: in the last stage some meet modules that they have never seen. All validate."""
    run_dir = run_local(tmp_path, **SMALL | {"clients_per_round": 1, "seed": 3})
    for record in run_dir.rounds():
        (client,) = record["clients"]
        assert client["status"] == "ok"
        assert client["measured_peak"] <= client["budget"]
        assert (record["asked"], record["clients_evaluated"]) == (1, 3)
    assert len({record["clients"][0]["client"] for record in run_dir.rounds()[:4]}) < 3


def test_without_adjustment_and_assignment(tmp_path: Path) -> None:
    run_dir = run_local(
        tmp_path,
        **SMALL | {"fedprophet__apa": False, "fedprophet__dma": False, "fedprophet__stage_rounds": 1, "num_rounds": 3},
    )
    rounds = run_dir.rounds()
    assert [record["stage"] for record in rounds] == ["module 1", "module 2", "module 3"]
    assert [record["alpha"] for record in rounds[1:]] == [0.3, 0.3]
    for record in rounds:
        module = MODULES[int(record["stage"].split()[1]) - 1]
        assert [client["pieces"] for client in record["clients"]] == keys(module) * 3


@pytest.mark.slow
def test_a_stage_ends_early_with_its_best_round(tmp_path: Path) -> None:
    run_dir = run_local(
        tmp_path,
        **SMALL
        | {"fedprophet__stage_rounds": 50, "fedprophet__stage_patience": 1, "num_rounds": 30, "training__lr": 0.5},
    )
    rounds = run_dir.rounds()
    last = [record for record, following in pairwise(rounds) if record["stage"] != following["stage"]]
    assert len(last) == 2
    for stage in {record["stage"] for record in rounds[: last[-1]["round"]]}:
        own = [record for record in rounds if record["stage"] == stage]
        rho = (
            own[0]["fixed_accuracy"] / own[0]["fixed_adversarial_accuracy"]
            if own[0]["fixed_adversarial_accuracy"]
            else 1.0
        )
        scores = [r["client_accuracy"] + rho * r["client_adversarial_accuracy"] for r in own]
        assert scores[-1] <= max(scores[:-1])  # the first that was not better ended it
        assert all(b > a for a, b in pairwise(scores[:-1]))
        best = own[scores.index(max(scores))]
        following = next(record for record in rounds if record["round"] == own[-1]["round"] + 1)
        assert following["fixed_accuracy"] == best["client_accuracy"]


def test_what_training_ends_with_is_the_best_round(tmp_path: Path) -> None:
    """Broken off in a stage's bad rounds, the model is that of its best one; the checkpoint goes on from the last."""
    settings = SMALL | {"fedprophet__stage_rounds": 4, "num_rounds": 4, "training__lr": 0.9}
    run_dir = run_local(tmp_path, **settings | {"num_rounds": 3})
    scores = [r["client_accuracy"] + r["client_adversarial_accuracy"] for r in run_dir.rounds()]
    checkpoint = run_dir.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.values["strategy-state"]["best"]["round"] == 1 + scores.index(max(scores))
    assert set(map(unit_of, checkpoint.kept)) == set(map(unit_of, checkpoint.arrays))


def test_a_run_that_ends_with_a_stage_leaves_what_was_trained(two_stages: RunDir) -> None:
    """The next stage's module and head are as they were made."""
    run_dir = two_stages
    final, rounds = run_dir.final(), run_dir.rounds()
    assert final is not None
    assert (final["accuracy"], final["loss"]) in [(record["accuracy"], record["loss"]) for record in rounds[2:]]
    model = load(run_dir.path)
    assert [
        *dict.fromkeys(name.split(".")[1] for name in model.network.state_dict() if name.startswith("atoms"))
    ] == list("0123")


def test_clean_rounds_come_first(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"attack__warmup": 1, "num_rounds": 3})
    assert [record["clean_round"] for record in run_dir.rounds()] == [True, False, True]
    warm, hot = (record["clients"][0] for record in run_dir.rounds()[:2])
    assert warm["flops"] < hot["flops"]
    assert warm["simulated_seconds"] < hot["simulated_seconds"]


LOCAL = SMALL | {
    "architecture__batch_norm": "local",
    "fedprophet__stage_rounds": 3,
    "fedprophet__stage_patience": 1,
    "num_rounds": 6,
    "training__lr": 0.3,
}


@pytest.mark.slow
def test_local_batch_norm_goes_back_with_the_model(tmp_path: Path) -> None:
    """A stage that ended behind its best round voids the states of the rounds after it; resumed or not."""
    unbroken = run_local(tmp_path / "unbroken", **LOCAL)
    checkpoint = unbroken.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.values["strategy-state"]["void"]
    resumed = run_in_parts(tmp_path / "resumed", [3, 4], **LOCAL)
    assert same(model_of(resumed), model_of(unbroken))
    assert settled(resumed) == settled(unbroken)


def test_features_of_emulated_clients_are_gone_in_the_end(whole_run: RunDir) -> None:
    assert list((whole_run.path / "clients").glob("*/*"))
    assert not list((whole_run.path / "clients").glob("*/*/features"))


def test_a_papers_memory_assigns_the_first_module_always(tmp_path: Path) -> None:
    fleet = boards(none=(1, 1e9), some=(10**7, 1e9), all=(10**9, 1e9))
    run_dir = run_local(
        tmp_path,
        **SMALL | {"memory__model": "fedprophet", "fleet": fleet, "num_rounds": 1, "fedprophet__r_min": "0.6x"},
    )
    (record,) = run_dir.rounds()
    assert (record["enforced"], record["answered"]) == (False, 3)
    none, some, _ = record["clients"]
    assert none["pieces"] == some["pieces"]
    assert none["simulated_seconds"] > some["simulated_seconds"]  # it swaps


def test_a_client_whose_process_died_can_still_train_its_module(tmp_path: Path) -> None:
    class Dying(RecordingGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            for reply in super().pull_messages(message_ids):
                first = reply.metadata.message_type == "train" and reply.metadata.group_id == "1"
                hit = first and reply.metadata.src_node_id == FIRST_NODE
                yield Message(Error(8, "died"), reply_to=self.sent_to(reply)) if hit else reply

        def sent_to(self, reply: Message) -> Message:
            return next(m for m in self.sent if m.metadata.message_id == reply.metadata.reply_to_message_id)

    run_dir = run_local(tmp_path, Dying, **SMALL | {"num_rounds": 2})
    one, two = (record["clients"][0] for record in run_dir.rounds())
    assert one["status"] == "crashed"
    assert (two["status"], two["pieces"]) == ("ok", [[0, 1, 2]])
    assert "given 75% of its budget" in two["note"]


# ---- jFAT


JOINT = SMALL | {"strategy": "jfat", "num_rounds": 1, "fedprophet__r_min": ""}


def test_jfats_swapping_costs_simulated_time(tmp_path: Path) -> None:
    poor = run_local(tmp_path / "poor", **JOINT | {"fleet": boards(poor=(100_000, 1e9))})
    rich = run_local(tmp_path / "rich", **JOINT | {"fleet": boards(rich=(10**9, 1e9))})
    assert same(model_of(poor), model_of(rich))
    for one, other in zip(poor.rounds(), rich.rounds(), strict=True):
        assert not one["enforced"]
        assert all(client["pieces"] == [[0, 1, 2, 3, 4]] for client in one["clients"])
        assert one["simulated_seconds"] > other["simulated_seconds"]
        assert all(client["measured_peak"] > client["budget"] for client in one["clients"])
    summary = poor.summary()
    assert summary is not None
    assert summary["max_peak_over_budget"] is None


def test_fedprophet_with_memory_for_everything_is_jfat(tmp_path: Path) -> None:
    """One module is the whole model, with its own head: the paper's section 7.3."""
    rich = SMALL | {"fleet": boards(rich=(10**9, 1e9)), "num_rounds": 2}
    joint = run_local(tmp_path / "joint", **rich | {"strategy": "jfat"})
    prophet = run_local(tmp_path / "prophet", **rich | {"fedprophet__r_min": "1x"})
    assert same(model_of(joint), model_of(prophet))
