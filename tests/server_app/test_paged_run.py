"""Boards that page through the whole model train as if they had room for all of it."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import TRIO, fleet_json, model_of, run_local, same

from piecework.server_app.records import RunDir

PAGED = TRIO | {"strategy": "fedavg", "num_rounds": 2, "memory__fit": "page", "training__local_iterations": 2}
SMALL = PAGED | {"fleet": fleet_json(small=0.6)}
# Tensors that a run writes to pages: see below. One point is in round 1, before there is a checkpoint, and one in round 2.
POINTS = {"page-50": 0, "page-400": 1}


def kill_and_resume(folder: Path, points: list[str]) -> list[tuple[str, int, RunDir]]:
    """Runs that got SIGKILL at these points and were resumed, each with the rounds of its newest checkpoint."""
    driver = Path(__file__).with_name("kill_driver.py")
    command = [sys.executable, str(driver), str(folder), json.dumps(SMALL), *points]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-len(points) :] == [f"{point} 9" for point in points]
    found = []
    for point in points:
        run = RunDir(folder / point / "run")
        checkpoint = run.load_checkpoint()
        resume = {"resume_from": str(run.path)} if checkpoint else {}
        rounds = checkpoint.values["round"] if checkpoint else 0
        found.append((point, rounds, run_local(folder / point, **SMALL, **resume)))
    return found


@pytest.mark.slow
def test_boards_that_page_come_to_the_model_of_large_ones(tmp_path: Path) -> None:
    """In every round, and after a kill in the middle of a page; the records say what went to the disk and back."""
    large = run_local(tmp_path / "large", **PAGED | {"fleet": "unlimited"})
    small = run_local(tmp_path / "small", **SMALL)
    killed = kill_and_resume(tmp_path, list(POINTS))
    assert {point: rounds for point, rounds, _ in killed} == POINTS
    for run in (small, *(run for _, _, run in killed)):
        assert same(model_of(large), model_of(run))
        for record, other in zip(run.rounds(), large.rounds(), strict=True):
            assert (record["accuracy"], record["loss"]) == (other["accuracy"], other["loss"])
            moved = [[client[f"disk_{done}"] for client in record["clients"]] for done in ("read", "written")]
            assert [record["disk"][key] for key in ("read", "written")] == [sum(each) for each in moved]
            assert [record["disk"][key] for key in ("most_read", "most_written")] == [max(each) for each in moved]
            assert other["disk"] is None
            for client, plain in zip(record["clients"], other["clients"], strict=True):
                assert client["status"] == "ok"
                assert client["step"].startswith("pages through ")
                assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]
                assert client["train_loss"] == plain["train_loss"]
                assert min(client["disk_read"], client["disk_written"]) > 0
                assert (plain["step"], plain["disk_read"], plain["disk_written"]) == ("", 0, 0)


@pytest.mark.alone
def test_ten_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    """Each is at the write of a tensor to a page, of some 600 in the run."""
    large = run_local(tmp_path / "large", **PAGED | {"fleet": "unlimited"})
    points = [f"page-{n}" for n in sorted(random.Random(1).sample(range(1, 600), 10))]
    for _, _, run in kill_and_resume(tmp_path, points):
        assert same(model_of(large), model_of(run))
        for record, other in zip(run.rounds(), large.rounds(), strict=True):
            assert (record["accuracy"], record["loss"]) == (other["accuracy"], other["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("norms", ["measured", "static"])
def test_statistics_that_are_measured_after_paged_steps(tmp_path: Path, norms: str) -> None:
    """Two clients at a time, with their stores in one folder."""
    runs = [
        run_local(tmp_path / name, **PAGED | {"num_rounds": 1, "architecture__batch_norm": norms} | changes)
        for name, changes in (("large", {"fleet": "unlimited"}), ("small", {"fleet": SMALL["fleet"], "workers": 2}))
    ]
    assert same(*map(model_of, runs))
    plain, paged = (run.rounds()[0] for run in runs)
    assert (plain["accuracy"], plain["loss"]) == (paged["accuracy"], paged["loss"])
    assert {client["step"].partition(" ")[0] for client in paged["clients"]} == {"pages"}
    for client in paged["clients"]:
        assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]
