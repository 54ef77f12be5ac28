"""ProFL from the last block's shrinking to the last one's growing, on the in-process grid."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    TRIO,
    RecordingGrid,
    a_blueprint,
    arrays_of,
    average,
    clients_of,
    few_digits,
    fleet_json,
    model_of,
    run_in_parts,
    run_local,
    same,
    tiny_settings,
    training,
)
from safetensors.torch import save_file

from piecework import load
from piecework.models.cascade import unit_of
from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.server_app.records import RunDir
from piecework.strategies.cascade.profl.phases import Phase, phases_of
from piecework.training.examples import normalise
from piecework.training.setup import open_dataset

ROOT = Path(__file__).parents[3]


# The convnet has the blocks (0, 1), (2, 3) and (4,); 5 and 6 are the basic layers of the second and the third. Client 2 has
# memory for the output layer in step 1, and for more later.
SMALL: dict[str, Any] = TRIO | {
    "strategy": "profl",
    "architecture__batch_norm": "running",
    "training__local_iterations": 2,
    "profl__cohort": "all",
    "profl__stage_rounds": 2,
    "profl__distil_rounds": 1,
    "profl__distil_lr": 0.01,
    "num_rounds": 13,
    "training__lr": 0.02,
    "fleet": fleet_json(rich=1.5, some=1.2, poor=0.5),
}
BLOCKS = [[0, 1], [2, 3], [4]]
LEGS = [
    ("statistics", 1),
    ("shrinking, step 3", 2),
    ("map, block 3", 1),
    ("shrinking, step 2", 2),
    ("map, block 2", 1),
    ("growing, step 1", 2),
    ("growing, step 2", 2),
    ("growing, step 3", 2),
]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RecordingGrid]:
    grids: list[RecordingGrid] = []

    class Kept(RecordingGrid):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            grids.append(self)

    return run_local(tmp_path_factory.mktemp("whole"), Kept, **SMALL), grids[0]


def test_legs_by_hand() -> None:
    down = [Phase("shrinking", 3), Phase("map", 3), Phase("shrinking", 2), Phase("map", 2)]
    up = [Phase("growing", 1), Phase("growing", 2), Phase("growing", 3)]
    assert phases_of(3, shrinking=True, maps=[2, 3]) == down + up
    assert phases_of(3, shrinking=True, maps=[3]) == down[:3] + up
    assert phases_of(3, shrinking=True, maps=[]) == down[::2] + up
    assert phases_of(3, shrinking=False, maps=[2, 3]) == up
    assert phases_of(3, shrinking=True, maps=[2, 3], statistics=True) == [Phase("statistics", 3), *down, *up]
    assert phases_of(3, shrinking=False, maps=[2, 3], statistics=True) == up
    assert phases_of(1, shrinking=True, maps=[], statistics=True) == up[:1]


@pytest.mark.slow
def test_phases_follow_one_another(whole_run: tuple[RunDir, RecordingGrid]) -> None:
    rounds = whole_run[0].rounds()
    assert [(stage, len(list(group))) for stage, group in groupby(record["stage"] for record in rounds)] == LEGS
    assert [(each["phase"], each["converged"]) for each in rounds[-1]["frozen"]] == [
        (phase[0], False) for phase in LEGS[:-1]
    ]
    for record in rounds:
        assert (record["answered"], record["enforced"]) == (3, True)
        kind = record["stage"].split(",")[0]
        assert (record["train_loss"] is None) == (kind in ("map", "statistics"))
        assert (record["distillation_loss"] is None) == (kind != "map")
        for client in record["clients"]:
            assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]


def units(message: Any) -> set[str]:
    return set(map(unit_of, arrays_of(message)))


def test_only_the_block_and_its_output_module_travel(whole_run: tuple[RunDir, RecordingGrid]) -> None:
    _, grid = whole_run
    asked = {2: "4", 4: "4 6", 5: "2 3 6", 7: "2 3 5 6", 8: "0 1 5 6", 10: "2 3 6", 12: "4"}
    came = {2: "4", 4: "6", 5: "2 3 6", 7: "5", 8: "0 1 5 6", 10: "2 3 6", 12: "4"}
    heads = {2: 1, 4: 1, 5: 1, 7: 0, 8: 1, 10: 1, 12: 1}
    for number, atoms in asked.items():
        down = [units(m) for m in training(grid.sent) if m.metadata.group_id == str(number)]
        assert down == [{f"atoms.{atom}" for atom in atoms.split()} | {"head"}] * 3
        up = [units(m) for m in training(grid.received) if m.metadata.group_id == str(number)]
        whole = {f"atoms.{atom}" for atom in came[number].split()} | ({"head"} if heads[number] else set())
        assert max(up, key=len) == whole
        assert all(each in (whole, {"head"}) for each in up)


@pytest.mark.slow
def test_who_cannot_afford_the_step_trains_the_output_layer(whole_run: tuple[RunDir, RecordingGrid]) -> None:
    run_dir, grid = whole_run
    pieces = {n: [client["pieces"] for client in clients_of(run_dir, n)] for n in (8, 12)}
    assert pieces == {8: [[[0, 1, 5, 6]], [[0, 1, 5, 6]], [[]]], 12: [[[4]]] * 3}
    replies = [m for m in training(grid.received) if m.metadata.group_id == "8"]
    assert [sorted({unit_of(name) for name in arrays_of(m)}) for m in replies][2] == ["head"]
    before = {name: a for m in training(grid.sent) if m.metadata.group_id == "8" for name, a in arrays_of(m).items()}
    after = next(arrays_of(m) for m in training(grid.sent) if m.metadata.group_id == "9")
    for name, array in after.items():
        np.testing.assert_array_equal(array, average(replies, name) if array.dtype.kind == "f" else array)
        assert not np.array_equal(array, before[name]) or array.dtype.kind != "f"


def sent_in(grid: RecordingGrid, number: int) -> dict[str, np.ndarray]:
    """What clients get in a round, frozen units too."""
    found: dict[str, np.ndarray] = {}
    for message in grid.sent:
        if message.metadata.group_id == str(number):
            found |= arrays_of(message)
    return found


def part(arrays: Mapping[str, np.ndarray], *chosen: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if unit_of(name) in chosen}


def test_growing_starts_from_what_shrinking_left(whole_run: tuple[RunDir, RecordingGrid]) -> None:
    """Block t from theta_t^ini, its output module as its step left it; step 1's from the last map."""
    run_dir, grid = whole_run
    shrunk3, shrunk2, mapped2 = sent_in(grid, 4), sent_in(grid, 7), sent_in(grid, 8)
    grown2, grown3 = sent_in(grid, 10), sent_in(grid, 12)
    assert same(part(grown2, "atoms.2", "atoms.3"), part(shrunk2, "atoms.2", "atoms.3"))
    assert same(part(grown2, "atoms.6", "head"), part(shrunk2, "atoms.6", "head"))
    assert same(part(grown3, "atoms.4", "head"), part(shrunk3, "atoms.4", "head"))
    assert same(part(mapped2, "atoms.6", "head"), part(shrunk2, "atoms.6", "head"))
    assert not same(part(mapped2, "atoms.5"), part(shrunk2, "atoms.5"))
    first = sent_in(grid, 2)
    assert same(part(mapped2, "atoms.0", "atoms.1"), part(first, "atoms.0", "atoms.1"))  # random until it is grown
    final = model_of(run_dir)
    assert not same(part(final, "atoms.0"), part(first, "atoms.0"))
    model = load(run_dir.path)
    assert len(model.network.atoms) == 5


@pytest.mark.slow
def test_stopped_anywhere_it_leaves_that_steps_model_and_goes_on(
    tmp_path: Path, whole_run: tuple[RunDir, RecordingGrid]
) -> None:
    """Within a phase and at its end: the model's file does as well on the test data as the last record says."""
    found = open_dataset(f"npz:{few_digits()}", "")
    resumed = run_local(tmp_path, **SMALL | {"num_rounds": 1})
    for stop in (2, 3, 4, 6, 7, 9, 10, 11, 13):
        resumed = run_local(tmp_path, **SMALL | {"num_rounds": stop}, resume_from=str(resumed.path))
        record, model = resumed.rounds()[-1], load(resumed.path, normalise=False)
        assert record["round"] == stop
        with torch.no_grad():
            right = model(normalise(found.test_inputs, found)).argmax(1).numpy() == found.test_labels
        # one image of 100 may lie on a border
        assert record["accuracy"] == pytest.approx(right.mean(), abs=0.011), f"after round {stop}, {record['stage']}"
    assert same(model_of(resumed), model_of(whole_run[0]))
    keys = ("stage", "accuracy", "effective_movement", "slope", "frozen")
    assert [[r[key] for key in keys] for r in resumed.rounds()] == [
        [r[key] for key in keys] for r in whole_run[0].rounds()
    ]


@pytest.mark.slow
def test_a_teachers_output_layer_counts_in_the_memory_cost(tmp_path: Path) -> None:
    """Where the last atom takes most, what it takes together with the output layer is what a map needs."""
    changes = {
        "model": "resnet18",
        "architecture__width": 0.125,
        "fleet": fleet_json(rich=2.0),
        "architecture__batch_norm": "running",
    }
    changes |= {"dataset": "digits", "profl__stage_rounds": 1, "num_rounds": 3, "training__local_iterations": 1}
    record = run_local(tmp_path, **SMALL | changes).rounds()[2]
    assert record["stage"] == "map, block 4"
    for client in record["clients"]:
        assert 0.98 * client["predicted_peak"] < client["measured_peak"] <= client["predicted_peak"]


def test_random_blocks_get_statistics_before_shrinking(whole_run: tuple[RunDir, RecordingGrid]) -> None:
    """The blocks before the last travel, and only what their batch norms have seen changes: the mean over the clients."""
    run_dir, grid = whole_run
    sent = [arrays_of(m) for m in training(grid.sent) if m.metadata.group_id == "1"]
    replies = [m for m in training(grid.received) if m.metadata.group_id == "1"]
    after = sent_in(grid, 2)
    assert [set(map(unit_of, arrays)) for arrays in sent] == [{f"atoms.{atom}" for atom in range(4)}] * 3
    for name, array in part(after, *(f"atoms.{atom}" for atom in range(4))).items():
        if name.endswith(("running_mean", "running_var")):
            np.testing.assert_allclose(array, average(replies, name), rtol=1e-6)
            assert not np.allclose(array, sent[0][name], atol=1e-3)
        elif not name.endswith("num_batches_tracked"):
            np.testing.assert_array_equal(array, sent[0][name])
    record = run_dir.rounds()[0]
    assert record["accuracy"] is None
    assert record["clients_evaluated"] == 0
    assert record["train_loss"] is None


@pytest.mark.parametrize(("atoms", "begins"), [((0, 1, 2, 3), "shrinking, step 3"), ((0, 1, 4), "statistics")])
def test_statistics_that_init_weights_bring_are_not_measured(
    tmp_path: Path, atoms: tuple[int, ...], begins: str
) -> None:
    """All of them, or all are measured."""
    model, file = a_blueprint(batch_norm="running"), tmp_path / "some.safetensors"
    units = {f"atoms.{atom}": model.build_unit(f"atoms.{atom}") for atom in atoms}
    save_file({f"{u}.{n}": value for u, unit in units.items() for n, value in unit.state_dict().items()}, file)
    run = run_local(tmp_path, **SMALL | {"training__init_weights": str(file), "num_rounds": 1})
    assert run.rounds()[0]["stage"] == begins


@pytest.mark.slow
def test_movements_survive_a_stop(tmp_path: Path) -> None:
    """Blocks freeze by their movements, after stops within a step, at its end and within a map as without any."""
    changes = SMALL | {
        "profl__movement_window": 2,
        "profl__movement_times": 1,
        "profl__movement_fraction": 0.99,
        "profl__movement_scalars": 70,
        "profl__stage_rounds": 6,
        "profl__distil_rounds": 3,
        "num_rounds": 11,
        "training__lr_rounds": 60,
    }
    through = run_local(tmp_path / "a", **changes)
    resumed = run_in_parts(tmp_path / "b", [4, 6, 8], **changes)
    assert same(model_of(resumed), model_of(through))
    keys = ("stage", "accuracy", "effective_movement", "slope", "slope_threshold", "times_below", "ended", "frozen")
    assert [[r[key] for key in keys] for r in resumed.rounds()] == [[r[key] for key in keys] for r in through.rounds()]
    assert any(phase["converged"] for phase in through.rounds()[-1]["frozen"])
    assert any(record["effective_movement"] for record in through.rounds())


@pytest.mark.slow
def test_a_block_that_converges_is_frozen_early(tmp_path: Path) -> None:
    """With H = 2 and W = 1 the earliest is round 3; a rate that falls makes movements alike."""
    changes = {
        "profl__movement_window": 2,
        "profl__movement_times": 1,
        "profl__movement_fraction": 0.99,
        "profl__stage_rounds": 20,
        "num_rounds": 60,
    }
    run_dir = run_local(tmp_path, **SMALL | changes | {"profl__distil_rounds": 0, "evaluation__every": 0})
    rounds = run_dir.rounds()
    phases = [list(group) for _, group in groupby(rounds, key=lambda record: record["stage"])]
    assert [each["converged"] for each in rounds[-1]["frozen"]] == [False] + [len(phase) < 20 for phase in phases[1:-1]]
    assert any(3 <= len(phase) < 20 for phase in phases)
    for phase in phases[1:]:
        assert [record["effective_movement"] is None for record in phase] == [True] + [False] * (len(phase) - 1)
        assert [record["slope"] is None for record in phase] == [True] * 2 + [False] * (len(phase) - 2)
        assert [record["ended"] for record in phase] == [""] * (len(phase) - 1) + [
            "rounds" if len(phase) == 20 else "frozen"
        ]


def test_some_scalars_are_enough(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"profl__movement_scalars": 50, "num_rounds": 2})
    checkpoint = run_dir.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.kept["scalars"].shape == (2, 50)


def test_growing_alone(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"profl__shrinking": False, "num_rounds": 6})
    assert [record["stage"] for record in run_dir.rounds()] == [f"growing, step {t}" for t in (1, 1, 2, 2, 3, 3)]


def test_rounds_by_parameters(tmp_path: Path) -> None:
    """Ten rounds of blocks of 5,082, 16,522 and 21,130 parameters: one each, and of seven 0.83, 2.71 and 3.46."""
    changes = {"profl__shrinking": False, "profl__freezing": "parameters", "num_rounds": 10, "profl__stage_rounds": 3}
    run_dir = run_local(tmp_path, **SMALL | changes)
    counts = [len(list(group)) for _, group in groupby(record["stage"] for record in run_dir.rounds())]
    assert counts == [2, 4, 4]


def test_where_no_client_can_train_a_step_every_atom_is_a_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "piecework")
    run_dir = run_local(
        tmp_path, **SMALL | {"fleet": fleet_json(all=0.77), "profl__shrinking": False, "num_rounds": 10}
    )
    assert "every atom is a block (layer-wise training)" in caplog.text
    rounds = run_dir.rounds()
    assert [record["stage"] for record in rounds][::2] == [f"growing, step {t}" for t in range(1, 6)]
    assert all(client["pieces"] == [[1, 5, 6]] for client in rounds[2]["clients"])


def test_a_plan_cuts_as_a_run_does() -> None:
    def stages(**changes: Any) -> list[str]:
        settings = tiny_settings(**SMALL | {"dataset": "digits"} | changes)
        return [row["name"] for row in make_plan(settings, ask(settings))["modules"]]

    assert stages() == ["conv1+conv2 + output module", "conv3+conv4 + output module", "conv5"]
    assert stages(fleet=fleet_json(all=0.77))[:2] == ["conv1 + output module", "conv2 + output module"]


def test_blocks_for_a_budget(tmp_path: Path) -> None:
    """As large as the poorest can train: everybody takes part in every step."""
    run_dir = run_local(
        tmp_path,
        **SMALL
        | {"profl__blocks": "budget", "fleet": fleet_json(a=0.8, b=1.5), "profl__shrinking": False, "num_rounds": 4},
    )
    for record in run_dir.rounds():
        assert all(client["pieces"] for client in record["clients"])
        assert all(client["measured_peak"] <= client["budget"] for client in record["clients"])


def test_a_run_with_frozen_blocks_in_training_mode(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"profl__frozen_mode": "training", "num_rounds": 5})
    for record in run_dir.rounds():
        for client in record["clients"]:
            assert client["measured_peak"] <= client["predicted_peak"] <= client["budget"]


@pytest.mark.slow
def test_a_vision_transformer_goes_through_all_stages(tmp_path: Path) -> None:
    """On images of 64 x 64: twelve encoders in three blocks, each replaced by one."""
    rng, path = np.random.default_rng(0), tmp_path / "images.npz"
    arrays = {f"x_{part}": rng.integers(0, 256, (24, 64, 64, 3), np.uint8) for part in ("train", "test")}
    np.savez(path, **arrays, **{f"y_{part}": np.arange(24) % 3 for part in ("train", "test")})
    model = {"dataset": f"npz:{path}", "model": "vit", "architecture__width": 0.125, "fleet": fleet_json(all=1.0)}
    rounds = {"num_rounds": 7, "profl__stage_rounds": 1}  # no batch norm, no statistics
    changes = model | rounds | {"clients": 2, "training__batch_size": 4, "training__local_iterations": 1}
    run_dir = run_local(tmp_path, **SMALL | changes)
    assert [record["stage"] for record in run_dir.rounds()] == [
        *("shrinking, step 3", "map, block 3", "shrinking, step 2", "map, block 2"),
        *(f"growing, step {t}" for t in (1, 2, 3)),
    ]
    for record in run_dir.rounds():
        for client in record["clients"]:
            assert client["status"] == "ok"
            assert client["measured_peak"] <= client["predicted_peak"] <= client["budget"]
            # a map's cost has the streams that a client needs which missed earlier steps
            assert client["measured_peak"] == client["predicted_peak"] or "map" in record["stage"]
    assert load(run_dir.path)(torch.zeros(2, 3, 64, 64)).shape == (2, 3)


# ---- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture__batch_norm": "local"}, "architecture.batch-norm = 'local': profl averages whole blocks"),
        (
            {"fleet": fleet_json(all=0.5)},
            "step 2 of layer-wise training needs 783,112 bytes, and the richest client has 515,284",
        ),
        (
            {"profl__stage_rounds": 0, "num_rounds": 7},
            r"num-rounds = 7 is too few: 5 steps, and 2 maps of profl.distil-rounds = 1, need 8, one of them for statistics",
        ),
        (
            {"evaluation.patience": 3},
            "patience = 3: it compares the models of different steps: use profl.stage-rounds and profl.movement-times",
        ),
        (
            {"evaluation__target_accuracy": 0.9},
            r"evaluation.target-accuracy = 0.9: it compares the models of different steps",
        ),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_local(tmp_path, **SMALL | changes)
