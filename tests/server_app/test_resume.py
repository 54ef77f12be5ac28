"""A run that was broken off, or killed anywhere, resumes to the very weights of the unbroken one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    TRIO,
    fleet_json,
    model_of,
    run_local,
    same,
)

from piecework.server_app.records import RunDir
from piecework.training.settings import SettingsError

HERE = Path(__file__).resolve().parent


# ---- resumption


# A client that teaches a companion and keeps it, one that trains in pieces, one whose companion is trained in pieces.
MUTUAL = TRIO | {"fleet": fleet_json(rich=2.2, poor=0.6, pair=1.7)}
LOCAL_NORMS = TRIO | {"fleet": fleet_json(poor=0.6, full=1.0), "architecture__batch_norm": "local"}
RESUMABLE = {
    "demo": {"fleet": "demo"},
    "dropped-local-norms": LOCAL_NORMS | {"strategy": "feddrop", "heterofl__width_ratios": "0.5,0.25"},
    "mutual-local-norms": MUTUAL
    | {
        "architecture__batch_norm": "local",
        "data__augment": True,
        "memory__feature_cache": False,
        "training__local_epochs": 2,
    },
}
UNTIMED = ("round", "accuracy", "loss", "train_loss", "accuracy_by_device", "privacy")


def results(run: RunDir) -> list[dict[str, Any]]:
    """All that a run's records say, but for seconds, the resident set, and bytes: a resumed run asks again who is there."""
    clients = ("client", "status", "pieces", "measured_peak", "train_loss", "val_accuracy", "examples", "flops")
    return [
        {key: record.get(key) for key in UNTIMED} | {"clients": [[c[k] for k in clients] for c in record["clients"]]}
        for record in run.rounds()
    ]


@pytest.mark.slow
def test_evaluation_on_clients_changes_nothing(tmp_path: Path) -> None:
    settings = MUTUAL | {"architecture__batch_norm": "local", "num_rounds": 3}
    without = run_local(tmp_path / "without", **settings)
    evaluated = run_local(tmp_path / "with", evaluation__on_clients_every=1, **settings)
    assert [record["clients_evaluated"] for record in evaluated.rounds()] == [3, 3, 3]
    assert same(model_of(without), model_of(evaluated))


@pytest.mark.parametrize("kind", RESUMABLE)
def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path, kind: str) -> None:
    settings = RESUMABLE[kind]
    unbroken = run_local(tmp_path / "unbroken", num_rounds=3, **settings)
    broken = run_local(tmp_path / "broken", num_rounds=2, **settings)
    assert not same(model_of(unbroken), model_of(broken))
    resumed = run_local(tmp_path / "elsewhere", num_rounds=3, resume_from=str(broken.path), **settings)
    assert resumed.path == broken.path
    assert same(model_of(unbroken), model_of(resumed))
    assert results(unbroken) == results(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["companion", "batch-norm"])
def test_what_clients_remember_matters(tmp_path: Path, what: str) -> None:
    """Else the test above would prove nothing about the clients' state."""
    settings = MUTUAL if what == "companion" else LOCAL_NORMS
    unbroken = run_local(tmp_path / "unbroken", num_rounds=2, **settings)
    broken = run_local(tmp_path / "broken", num_rounds=1, **settings)
    (kept,) = broken.path.glob(f"clients/*/0/state/1/{what}*")
    assert kept.name == {"companion": "companion-1", "batch-norm": "batch-norm"}[what]
    shutil.rmtree(broken.path / "clients")
    resumed = run_local(tmp_path, num_rounds=2, resume_from=str(broken.path), **settings)
    assert not same(model_of(unbroken), model_of(resumed))


def test_a_resumption_with_other_settings_is_refused_and_leaves_the_run_alone(tmp_path: Path) -> None:
    run = run_local(tmp_path)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(SettingsError, match=r"setting training.lr = 0\.25 differs from 0\.05 of the run to resume"):
        run_local(tmp_path, num_rounds=2, training__lr=0.25, resume_from=str(run.path))
    after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    changed = {path.name for path in before if after[path] != before[path]}
    assert changed <= {"summary.json"}
    assert after.keys() == before.keys()


KILLED = MUTUAL | {"architecture__batch_norm": "local", "num_rounds": 3, "training__local_iterations": 2}
POINTS = {  # where it was killed, and how many rounds the newest checkpoint holds
    "first-round": 0,
    "evaluation": 2,
    "half-a-record": 2,
    "inside-checkpoint": 2,
    "after-checkpoint": 3,
    "client-has-committed": 2,
}


PRIVATE = {
    "architecture__batch_norm": "auto",
    "architecture__norm": "group",
    "privacy__noise_multiplier": 0.5,
    "privacy__seed": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, PRIVATE], ids=["plain", "private"])
def test_a_killed_run_resumes_to_the_unbroken_one(tmp_path: Path, more: dict[str, Any]) -> None:
    """One process runs as often as there are points, and each run is killed with SIGKILL at its point."""
    killed: dict[str, Any] = KILLED | more
    # Without norms of their own the clients of the private run keep nothing.
    points = {point: rounds for point, rounds in POINTS.items() if not more or point != "client-has-committed"}
    command = [sys.executable, str(HERE / "kill_driver.py"), str(tmp_path), json.dumps(killed), *points]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-len(points) :] == [f"{point} 9" for point in points]
    never_killed = run_local(tmp_path / "never-killed", **killed)
    model = (never_killed.path / "model.safetensors").read_bytes()[-1000:]
    for point, rounds in points.items():
        run_dir = RunDir(tmp_path / point / "run")
        checkpoint = run_dir.load_checkpoint()
        assert (point, checkpoint.values["round"] if checkpoint else 0) == (point, rounds)
        assert not (run_dir.path / "model.safetensors").exists(), point
        # without a checkpoint nothing is left to resume, and the name is free
        resumed = run_local(tmp_path / point, **killed, **({"resume_from": str(run_dir.path)} if rounds else {}))
        assert len(list((run_dir.path / "clients").iterdir())) == 1, "the stores of one experiment"
        assert same(model_of(resumed), model_of(never_killed)), point
        assert (point, results(resumed)) == (point, results(never_killed))
        assert (resumed.path / "model.safetensors").read_bytes()[-1000:] == model, point
