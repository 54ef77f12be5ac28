"""Trackers of experiments: the real libraries, without a network, and runs that are killed."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from disk_helpers import files_of_at_most
from helpers import TRIO, run_local, tiny_settings
from settings_helpers import settings_with
from tracker_readers import mlflow_curves, trackio_curves, wandb_curves

from benchmarks.track_resume import Curves, tensorboard_curves
from piecework.server_app import callbacks
from piecework.server_app.callbacks import TRACKERS, Callback, find_callbacks
from piecework.server_app.records import RunDir
from piecework.server_app.trackers.scalars import flatten, parameters, round_scalars
from piecework.training.settings import SettingsError
from piecework.training.settings import track as named

HERE = Path(__file__).resolve().parent
FAST = TRIO | {"fleet": "unlimited", "strategy": "fedavg", "training__local_iterations": 1}
OFFLINE = {"HF_HUB_OFFLINE": "1", "MLFLOW_TRACKING_URI": "", "WANDB_MODE": "offline"}


@pytest.fixture(scope="module")
def killed_twice(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of four rounds with all trackers, in three processes, of which two were killed."""
    folder = tmp_path_factory.mktemp("tracked")
    settings = FAST | {"num_rounds": 4, "run__track": ",".join(TRACKERS)}
    environment = {key: value for key, value in (os.environ | OFFLINE).items() if value}
    environment["TRACKIO_DIR"] = str(folder / "trackio")
    command = [sys.executable, str(HERE / "track_driver.py"), str(folder), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["signal 9", "signal 9", "exit 0"], done.stderr
    assert "is told no more of this run" not in done.stderr
    return RunDir(folder / "run")


def states(run: RunDir) -> list[Path]:
    """The states of the callbacks, of the first checkpoint and of the last one."""
    return [run.path / "checkpoint" / f"round-0000{number}" / "state.json" for number in (1, 4)]


def require_one_curve(found: Curves, run: RunDir, *, rel: float = 0) -> None:
    """Each round once, in order, with the values of the records; a repeated round has the same, but for what time it takes."""
    records = {record["round"]: record for record in run.rounds()}
    assert list(records) == [1, 2, 3, 4]
    for name in ("accuracy", "loss", "train_loss", "bytes_down", "simulated_seconds", "answered"):
        steps, values = zip(*found[name], strict=True)
        assert (name, *steps) == (name, 1, 2, 3, 4)
        assert values == pytest.approx([records[step][name] for step in steps], rel=rel, abs=0), name
    assert [step for step, _ in found["seconds"]] == [1, 2, 3, 4]
    (device,) = records[1]["devices"]
    assert [value for _, value in found[f"answered_by_device/{device}"]] == [3] * 4


@pytest.mark.slow
def test_tensorboard_has_one_curve_of_a_run_that_was_killed_twice(killed_twice: RunDir) -> None:
    found, hidden = tensorboard_curves(killed_twice.path / "tensorboard")
    require_one_curve(found, killed_twice, rel=1e-6)  # float32
    assert [value for _, value in found["seconds"]] == pytest.approx([r["seconds"] for r in killed_twice.rounds()])
    assert hidden == 1, "round 2 was written twice, and the first is void"


@pytest.mark.slow
def test_mlflow_has_one_run_and_one_curve_of_a_run_that_was_killed_twice(killed_twice: RunDir) -> None:
    (run,) = mlflow_curves(killed_twice.path.parent / "mlflow.db")
    require_one_curve(run.curves, killed_twice)
    assert (run.name, run.status) == ("run", "FINISHED")
    assert (run.settings["training.lr"], run.settings["num-rounds"]) == ("0.05", "4")
    assert "prism.kappa" not in run.settings, "of another strategy"
    assert run.curves["summary/best_accuracy"] == [(4, max(r["accuracy"] for r in killed_twice.rounds()))]


@pytest.mark.slow
def test_wandb_has_one_folder_and_one_curve_of_a_run_that_was_killed_twice(killed_twice: RunDir) -> None:
    (run,) = wandb_curves(killed_twice.path / "wandb")
    require_one_curve(run.curves, killed_twice)
    assert (run.settings["training.lr"], run.settings["num-rounds"]) == (0.05, 4)
    first, last = (json.loads(path.read_text())["callbacks"]["run.track=wandb"]["id"] for path in states(killed_twice))
    assert first == last == run.name


@pytest.mark.slow
def test_trackio_has_one_run_and_one_curve_of_a_run_that_was_killed_twice(killed_twice: RunDir) -> None:
    (run,) = trackio_curves(killed_twice.path.parent / "trackio")
    require_one_curve(run.curves, killed_twice)
    assert (run.settings["training.lr"], run.settings["num-rounds"]) == (0.05, 4)


def test_a_tracker_that_is_asked_for_later_has_the_rounds_before(tmp_path: Path) -> None:
    run = run_local(tmp_path, **FAST, num_rounds=2)
    assert not (run.path / "tensorboard").exists()
    more = {"num_rounds": 3, "training__lr_rounds": 2, "run__track": "tensorboard", "resume_from": str(run.path)}
    run_local(tmp_path, **FAST | more)
    found, hidden = tensorboard_curves(run.path / "tensorboard")
    assert [step for step, _ in found["accuracy"]] == [1, 2, 3]
    assert hidden == 0


def test_a_tracker_that_fails_is_warned_about_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-store://somewhere")
    with caplog.at_level(logging.WARNING, "piecework"):
        run = run_local(tmp_path, **FAST, num_rounds=2, run__track="mlflow")
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "piecework"]
    assert warning.startswith("the callback 'run.track=mlflow' failed in 'start' and is told no more of this run")
    assert [record["round"] for record in run.rounds()] == [1, 2]


class FullFromRound2(Callback):
    """A disk that refuses what trackers write from round 2 on, and takes what the run itself writes."""

    def start(self, settings: Any, folder: Path, resumed: bool) -> None:
        self.refused = ExitStack()

    def round(self, number: int, record: dict[str, Any]) -> None:
        if number > 1:
            self.refused.enter_context(files_of_at_most(4096))  # more than run.log has

    def state(self) -> dict[str, Any]:
        self.refused.close()
        return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"), [("tensorboard", "OSError: [Errno 27] File too large"), ("mlflow", "(sqlite3.OperationalError) ")]
)
def test_a_full_disk_ends_a_tracker_without_a_traceback_and_its_curve_is_whole_when_the_run_is_resumed(
    name: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, "piecework"):
        run = run_local(tmp_path, **FAST, num_rounds=3, run__track=name, callbacks=own(FullFromRound2))
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "piecework"]
    assert warning.startswith(f"the callback 'run.track={name}' failed in 'round' and is told no more of this run")
    assert said in warning
    assert len(warning.splitlines()) == 1
    assert "Traceback" not in "".join(capfd.readouterr())
    assert (run.summary() or {})["status"] == "completed"
    more = {"num_rounds": 4, "training__lr_rounds": 3, "run__track": name, "resume_from": str(run.path)}
    run_local(tmp_path, **FAST | more)
    if name == "tensorboard":
        found, hidden = tensorboard_curves(run.path / name)
        assert hidden == 0
    else:
        (tracked,) = mlflow_curves(tmp_path / "mlflow.db")
        found = tracked.curves
    require_one_curve(found, run, rel=1e-6)


def test_a_library_that_is_missing_is_told_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuple(TRACKERS) == named.TRACKERS
    monkeypatch.setitem(callbacks.TRACKERS, "mlflow", (TRACKERS["mlflow"][0], "no_such_library"))
    with pytest.raises(
        SettingsError, match=r"run.track = 'mlflow': it is not installed: pip install 'piecework\[mlflow\]'"
    ):
        run_local(tmp_path, **FAST, run__track="mlflow")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("track", "said"),
    [
        (
            "tensorbord",
            "there is no tracker 'tensorbord', but tensorboard, mlflow, wandb, trackio; did you mean 'tensorboard'?",
        ),
        ("mlflow,mlflow", "name each tracker once"),
        ("boards", "there is no tracker 'boards', but tensorboard, mlflow, wandb, trackio"),
    ],
)
def test_a_wrong_name_is_refused_with_the_settings(track: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_with(run__track=track)
    assert str(caught.value) == f"run.track = {track!r}: {said}"


@pytest.mark.slow
def test_no_library_is_imported_unless_it_is_asked_for() -> None:
    code = (
        "import sys; from piecework.server_app import callbacks; from piecework.training.settings import Settings;"
        "callbacks.find_callbacks(Settings());"
        "callbacks.find_callbacks(Settings.from_run_config({'run.track': 'tensorboard,mlflow,wandb,trackio'}));"
        "print([name for name in ('tensorboard', 'mlflow', 'wandb', 'trackio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_figures_have_names_that_all_trackers_take() -> None:
    values = {
        "accuracy": 0.5,
        "loss": None,
        "stage": "one",
        "aggregated": True,
        "lists": [1],
        "devices": {"Pi 5 (4 GB)": 2},
    }
    assert flatten(values) == {"accuracy": 0.5, "devices/Pi 5 _4 GB_": 2.0}


def test_figures_of_a_round_by_device_class() -> None:
    client = {"status": "ok", "budget": 100, "measured_peak": 50, "simulated_seconds": 2.0, "device": "poor"}
    failed = client | {"status": "memory", "measured_peak": 0}
    rich = client | {"device": "rich", "budget": 1000, "measured_peak": 250, "simulated_seconds": 0.5}
    record = {"round": 7, "enforced": True, "clients": [client, failed, rich], "accuracy_by_device": {"rich": 0.25}}
    assert round_scalars(record) == {
        "accuracy_by_device/rich": 0.25,
        "peak_over_budget": 0.5,
        "peak_over_budget_by_device/poor": 0.5,
        "peak_over_budget_by_device/rich": 0.25,
        "answered_by_device/poor": 1.0,
        "answered_by_device/rich": 1.0,
        "simulated_seconds_by_device/poor": 2.0,
        "simulated_seconds_by_device/rich": 0.5,
    }
    assert "peak_over_budget" not in round_scalars(record | {"enforced": False})


def test_parameters_are_the_settings_that_a_run_uses() -> None:
    found = parameters(tiny_settings(strategy="fedprox").to_run_config())
    assert {"seed", "fedprox.mu", "training.momentum"} <= found.keys()
    assert not {"fedprophet.dma", "data.partition-alpha"} & found.keys()  # the partition is iid


# ---- the state of a callback of one's own


class Counter(Callback):
    """Counts the rounds of all processes of a run, in its state."""

    told: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.rounds = 0

    def restore(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]

    def start(self, settings: Any, folder: Path, resumed: bool) -> None:
        self.told.append(("start", self.rounds))

    def round(self, number: int, record: dict[str, Any]) -> None:
        self.rounds += 1

    def state(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def error(self, error: BaseException) -> None:
        self.told.append(str(error))

    def end(self, summary: dict[str, Any]) -> None:
        self.told.append((summary["status"], self.rounds))


class Bad(Callback):
    """Has a state that is no JSON."""

    def state(self) -> dict[str, Any]:
        return {"folder": Path()}


class Older:
    """Written for an earlier version: derives from nothing, and keeps an attribute of a newer method's name."""

    state = "fine"

    def start(self, settings: Any, folder: Path, resumed: bool) -> None: ...

    def round(self, number: int, record: dict[str, Any]) -> None: ...

    def end(self, summary: dict[str, Any]) -> None: ...


@pytest.fixture
def told() -> Iterator[list[Any]]:
    yield Counter.told
    Counter.told.clear()


def own(*kinds: type) -> str:
    return ",".join(f"{__name__}:{kind.__name__}" for kind in kinds)


def test_a_state_is_that_of_the_checkpoint_and_not_of_the_last_round(
    tmp_path: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save = RunDir.save_checkpoint

    def fail_in_round_3(self: RunDir, arrays: Any, values: Any, kept: Any) -> None:
        if values["round"] == 3:
            raise OSError("the disk is gone")
        save(self, arrays, values, kept)

    monkeypatch.setattr(RunDir, "save_checkpoint", fail_in_round_3)
    asked = FAST | {"num_rounds": 3, "callbacks": own(Counter, Older, Bad)}
    with pytest.raises(OSError, match="the disk is gone"), caplog.at_level(logging.WARNING, "piecework"):
        run_local(tmp_path, **asked)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "piecework"]
    assert "Bad' failed in 'state'" in warning
    assert told == [("start", 0), "the disk is gone", ("failed", 3)]
    monkeypatch.undo()
    told.clear()
    run_local(tmp_path, **asked | {"callbacks": own(Counter, Older)}, resume_from=str(tmp_path / "run"))
    assert told == [("start", 2), ("completed", 3)]


def test_a_run_that_was_killed_before_its_first_checkpoint_has_the_state_of_its_start(
    tmp_path: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Counter, "__init__", lambda self: setattr(self, "rounds", 5))
    monkeypatch.setattr(RunDir, "save_checkpoint", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        run_local(tmp_path, **FAST, callbacks=own(Counter))
    monkeypatch.undo()
    told.clear()
    run_local(tmp_path, **FAST, callbacks=own(Counter), resume_from=str(tmp_path / "run"))
    assert told == [("start", 5), ("completed", 6)]


def test_callbacks_are_found_beside_trackers() -> None:
    found = find_callbacks(settings_with(callbacks=own(Counter), run__track="tensorboard, mlflow"))
    assert list(found) == [own(Counter), "run.track=tensorboard", "run.track=mlflow"]
