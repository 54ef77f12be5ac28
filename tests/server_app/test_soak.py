"""Rounds with clients that come, go, stall and lie, and a worker that is killed: nothing is left, the short form of a soak."""

import tempfile
from pathlib import Path

import pytest

from benchmarks.soak import Soak

ROUNDS, KILLED = 30, 20


@pytest.mark.slow
def test_a_run_with_faults_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    soak = Soak(tmp_path, ROUNDS, workers=2, seed=1, every=5)
    soak.kill_every = KILLED
    soak.run()
    assert (soak.run_dir.summary() or {})["status"] == "completed"
    assert [record["round"] for record in soak.run_dir.rounds()] == [*range(1, ROUNDS + 1)]
    assert soak.faults.came["lie"] > 0
    assert soak.faults.came["returned"] > 0
    assert soak.faults.came["SIGKILL"] == 1
    first, last = soak.samples[0], soak.samples[-1]
    assert last.open_files[0] <= first.open_files[0]
    assert last.threads <= first.threads + 1  # the thread of a killed worker may still be ending
    assert last.objects - soak.samples[-2].objects < 1000
    assert {path.name.partition("_")[0] for path in temporary.iterdir()} <= {"torchinductor"}  # a cache of torch's own
    assert len(soak.run_dir.checkpoint_paths()) <= 3
    for client in (soak.run_dir.path / "clients").glob("*/[0-9]*"):
        assert {path.name for path in client.iterdir() if path.is_dir()} <= {"state", "frozen", "features"}
        assert len([*client.glob("state/*")]) <= 2
