"""Private rounds of every system that can be private: what one client can change, whatever it sends."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from helpers import fleet_json, numpy_of, run_in_parts, run_local, same, tiny_settings

from benchmarks.hostile import OWN, TINY, HostileGrid, small_digits
from piecework.federation.private_mean import PrivateMean
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.server_app.records import RunDir
from piecework.server_app.rounds import Run
from piecework.strategies.private_rounds import require_classes
from piecework.training.answers import AnswerError
from piecework.training.methods import METHODS
from piecework.training.parcels import pack, unpack
from piecework.training.settings import Settings

PRIVATE = [name for name, entry in METHODS.items() if entry.can.private]
CLIP, LIAR = 0.25, 3
SETTINGS = {
    "privacy.noise-multiplier": 1.0,
    "privacy.clip": CLIP,
    "privacy.seed": 5,
    "evaluation.on-clients-every": 0,
    "evaluation.every": 0,
    "data.validation-fraction": 0.0,
    "architecture.norm": "group",
}
BATCH = {"architecture.norm": "batch", "architecture.batch-norm": "batch"}
OF_ONE = {"orthdrop": BATCH, "prism": BATCH, "profl": {"fleet": "unlimited"}}
# The round that is played follows so many others: another part of the model, a map, other channels.
LATER = {"fedrolex": 1, "profl": 2, "slt": 2, "depthfl": 1}
FLEETS = {"fedavg": "unlimited", "fedprox": "unlimited", "exclusivefl": "unlimited"}


class LyingGrid(HostileGrid):
    """Five clients are honest, and one does what `lie` says to its answer to a training task."""

    lie: str = ""

    def _answer(self, message: Message) -> Message:
        answer = super()._answer(message)
        if message.metadata.dst_node_id != FIRST_NODE + LIAR or message.metadata.message_type != "train":
            return answer
        if self.lie == "absent":
            return Message(Error(3, "gone"), reply_to=message)
        content = RecordDict(dict(answer.content))
        arrays = unpack(content.array_records["arrays"])
        if self.lie == "huge":
            arrays = type(arrays)({name: Array(-1e6 * array.numpy()) for name, array in arrays.items()})
        elif self.lie == "not a number":
            arrays = type(arrays)({n: Array(np.full_like(a.numpy(), np.nan)) for n, a in arrays.items()})
        content["arrays"] = pack(arrays.items())
        return Message(content, reply_to=message)


class Target:
    """A private run, one round of which is played again and again, while one client lies in another way."""

    def __init__(self, strategy: str, folder: Path) -> None:
        values: dict[str, Any] = TINY | {"strategy": strategy, "fleet": FLEETS.get(strategy, "demo")}
        values |= OWN.get(strategy, {}) | SETTINGS | OF_ONE.get(strategy, {})
        values |= {"dataset": f"npz:{small_digits(folder)}", "output-dir": str(folder), "run-name": strategy}
        settings = Settings.from_run_config(values)
        self.grid = LyingGrid(settings.clients, settings.to_run_config(), 1)
        self.run = Run(self.grid, settings, RunDir(folder / strategy))
        self.run.prepare_run_dir()
        self.run.wait_for_clients()
        self.start = LATER.get(strategy, 0)
        for server_round in range(1, self.start + 1):
            self.run.one_round(server_round)
        method = self.run.server.method
        self.first = deepcopy(method.state.to_values()), self.run.arrays, method.kept

    def play(self, lie: str) -> tuple[PrivateMean, dict[str, np.ndarray], dict[str, Any]]:
        """Play the round. Returns its mean, the model that it made, and the record."""
        method, server, (values, arrays, kept) = self.run.method, self.run.server, self.first
        method.state = type(method.state).from_values(deepcopy(values))
        method.kept, self.run.arrays = ArrayRecord(dict(kept)), arrays
        assert server.privacy is not None
        server.privacy.releases, self.grid.lie = 0, lie
        record = self.run.one_round(self.start + 1).to_values()
        return server.round.mean, numpy_of(self.run.arrays), record


@pytest.fixture(params=PRIVATE, scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(request.param, tmp_path_factory.mktemp(request.param))


def sums_of(mean: PrivateMean) -> dict[str, np.ndarray]:
    """The sums of clipped changes, zero for what nobody changed."""
    return {name: mean._sums.get(name, np.zeros(mean._model[name].shape)) for name in mean._holders}


def distance(one: PrivateMean, other: PrivateMean) -> float:
    """The Euclidean distance of two rounds' sums."""
    pairs = zip(sums_of(one).values(), sums_of(other).values(), strict=True)
    return float(np.sqrt(sum(np.square(a - b).sum() for a, b in pairs)))


@pytest.mark.slow
def test_one_client_moves_the_sum_by_the_clip_at_most_and_the_divisors_not_at_all(target: Target) -> None:
    without, _, _ = target.play("absent")
    found = {lie: target.play(lie) for lie in ("", "huge", "not a number")}
    for mean, _, _ in found.values():
        assert mean._holders.keys() == without._holders.keys()
        assert all(np.array_equal(mean._holders[name], without._holders[name]) for name in without._holders)
        assert distance(mean, without) <= CLIP * (1 + 1e-9)
    assert distance(found["huge"][0], without) == pytest.approx(CLIP)
    assert distance(found["not a number"][0], without) == 0
    assert distance(found[""][0], without) > 0


@pytest.mark.slow
def test_nothing_that_an_honest_client_trained_is_left_out(target: Target) -> None:
    """What it sends of the model, but counts, is what is expected of it; the rest it did not change."""
    target.play("")
    current = target.run.server.round
    assert current.entries is not None
    for (node, kind, _, _), content in target.grid._true.items():
        if kind != "train":
            continue
        expected = current.entries[node - FIRST_NODE]
        for name in unpack(content.array_records["arrays"]):
            assert name in expected or name.endswith((".rows", "num_batches_tracked")), name


@pytest.mark.slow
def test_a_round_moves_the_model_if_nobody_answers_and_says_nothing_of_who_did(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LyingGrid, "_answer", lambda _, message: Message(Error(3, "gone"), reply_to=message))
    mean, arrays, record = target.play("")
    assert (record["aggregated"], record["answered"]) == (True, 0)
    assert not mean._sums
    before = numpy_of(target.first[1])
    assert not same(arrays, before)
    assert record["train_loss"] is None


@pytest.mark.slow
def test_no_figure_of_a_clients_data_is_told_but_how_much_it_went_through(target: Target) -> None:
    target.play("")
    for (_, kind, _, _), content in target.grid._true.items():
        if kind == "train":
            told = set(content.metric_records["metrics"])
            assert not told & {"train-loss", "val-loss", "val-accuracy", "val-examples", "classes"}


NO_STATISTICS = {"architecture__batch_norm": "batch", "evaluation__on_clients_every": 0}
DIGITS: dict[str, Any] = {
    "clients": 20,
    "clients_per_round": 5,
    "num_rounds": 4,
    "architecture__norm": "group",
    "privacy__noise_multiplier": 2.0,
}


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one_and_has_spent_as_much(tmp_path: Path) -> None:
    settings = DIGITS | {"strategy": "fedepth", "fleet": "demo", "privacy__seed": 9}
    whole = run_local(tmp_path / "whole", **settings)
    parts = run_in_parts(tmp_path / "parts", (1, 3), **settings)
    one, other = (run.load_checkpoint() for run in (whole, parts))
    assert one is not None and other is not None
    assert same(numpy_of(one.arrays), numpy_of(other.arrays))
    assert one.values["privacy"] == other.values["privacy"]
    spent = [[record["privacy"]["epsilon"] for record in run.rounds()] for run in (whole, parts)]
    assert spent[0] == spent[1] == sorted(set(spent[0]))


@pytest.mark.slow
def test_who_takes_part_and_the_noise_are_secret(tmp_path: Path) -> None:
    """Two runs of equal settings, which without privacy would be equal to the bit."""
    runs = [run_local(tmp_path / name, **DIGITS | {"num_rounds": 2}) for name in ("one", "other")]
    asked = [[[c["client"] for c in record["clients"]] for record in run.rounds()] for run in runs]
    assert asked[0] != asked[1]
    assert all(record["privacy"]["secret"] for run in runs for record in run.rounds())
    checkpoint = runs[0].load_checkpoint()
    assert checkpoint is not None
    secret = checkpoint.values["privacy"]["secret"]
    holding = [path for path in runs[0].path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert {path.name for path in holding} == {"state.json"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in holding)


@pytest.mark.slow
def test_a_run_ends_when_its_limit_is_spent_and_is_evaluated(tmp_path: Path) -> None:
    """Noise of 2, q = 1/4 and delta = 20^-1.1: four rounds spend 0.38, and a fifth would bring that to 0.45."""
    run = run_local(tmp_path, **DIGITS | {"num_rounds": 9, "privacy__epsilon": 0.4, "evaluation__every": 0})
    rounds = run.rounds()
    assert len(rounds) == 4
    assert 0.3 < rounds[-1]["privacy"]["epsilon"] <= 0.4
    assert [record["accuracy"] is not None for record in rounds] == [False, False, False, True]
    assert (run.path / "model.safetensors").exists()


REFUSED = {
    **{f"strategy {name}": {"strategy": name} for name, entry in METHODS.items() if not entry.can.private},
    "clients = 0": {"clients": 0},
    "clients = 1": {"clients": 1, "clients_per_round": 0},
    "faults.over-sample": {"faults__over_sample": 1},
    "faults.accept-late": {"faults__accept_late": 1},
    "faults.deadline-factor": {"faults__deadline_factor": 2.0},
    "faults.min-clients": {"faults__min_clients": 1},
    "evaluation.on-clients-every": {"evaluation__on_clients_every": 1},
    "evaluation.mode": {"evaluation__mode": "personal"},
    "privacy.delta": {"privacy__delta": 0.05},
    "architecture.batch-norm": {"architecture__norm": "batch"},
    "architecture.batch-norm running": {"architecture__norm": "batch", "architecture__batch_norm": "running"},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_break_the_promise_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{what.split(maxsplit=1)[0]}|cannot be private|set the number"):
        run_local(tmp_path, **DIGITS | REFUSED[what])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("strategy", ["heterofl", "prism"])
def test_the_served_model_does_not_tell_whether_a_client_has_data(strategy: str, tmp_path: Path) -> None:
    """The only client that trains the widest model, without and with an example: the server plans the same."""
    fleet = fleet_json(rich=2.0, a=0.4, b=0.4, c=0.4)
    settings = tiny_settings(
        strategy=strategy,
        clients=4,
        fleet=fleet,
        privacy__noise_multiplier=1.0,
        output_dir=str(tmp_path),
        **NO_STATISTICS,
    )
    found = []
    with LocalGrid(settings.clients, settings.to_run_config(), 1) as grid:
        for examples in (300, 0):
            run = Run(grid, settings, RunDir(tmp_path / f"{examples}"))
            run.registry.wait_for_clients(grid, 30)
            run.registry.members[0].examples = examples
            run.method.begin(run.server.resources)
            found.append((run.method.state.widest, run.method.fitting, run.server.serving.variant))
    assert found[0] == found[1]
    assert found[0][0] == 1.0 or strategy == "prism"


def test_an_accepted_update_does_not_widen_the_served_model(tmp_path: Path) -> None:
    target = Target("heterofl", tmp_path)
    target.run.method.state.widest = 0.125
    target.first = (target.run.method.state.to_values(), *target.first[1:])
    target.play("")
    assert target.run.method.state.widest == 0.125


def test_a_client_keeps_its_device_class_in_a_private_run(tmp_path: Path) -> None:
    target = Target("fedepth", tmp_path)
    registry, member = target.run.registry, target.run.registry.members[0]
    registry._check_device(member, 6)
    for device in ("board-a", "auto"):
        with pytest.raises(AnswerError, match=f"client 0 has device = '{device}', and began with ''"):
            registry._check_device(replace(member, device=device), 6)
    registry.classes = {}
    registry._check_device(replace(member, device="board-a"), 6)


def test_a_device_that_measures_itself_is_refused() -> None:
    require_classes(set())
    with pytest.raises(ValueError, match=r"client 3 has device = 'auto'"):
        require_classes({7, 3})
