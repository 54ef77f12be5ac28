"""The short form of `python -m benchmarks.chaos`: kills, full disks, a clock that jumps, damaged files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def chaos(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What the benchmark notes."""
    call = [sys.executable, "-m", "benchmarks.chaos", *words, "--folder", str(folder)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "chaos.jsonl").read_text().splitlines()]


def test_a_run_that_is_killed_at_random_moments_is_the_unbroken_one(tmp_path: Path) -> None:
    killed = [each for each in chaos(tmp_path, "kills", "--only=spafl,fedavg", "--kills=1,1") if each["kind"] == "kill"]
    assert [(each["system"], each["completed"]) for each in killed] == [("spafl", True), ("fedavg", True)]
    assert [(each["differs"], each["left"], each["faults"]) for each in killed] == [([], [], [])] * 2
    assert all(each["kills"] for each in killed)


def test_a_run_whose_disk_was_full_is_resumed_to_the_unbroken_one(tmp_path: Path) -> None:
    words = "write rounds.jsonl,write checkpoint/round-00002.tmp/state.json,write clients,rename checkpoint"
    found = chaos(tmp_path, "disk", f"--only={words}", "--stride=10")
    assert len(found) >= 4
    assert [each for each in found if each["came"].startswith("FAULT")] == []


def test_a_clock_that_jumps_misleads_no_run(tmp_path: Path) -> None:
    (found,) = chaos(tmp_path, "clocks", "--only=fedavg", "--trials=1")
    assert found["came"] == "same result, durations in order"


def test_damaged_files_are_told_or_made_again(tmp_path: Path) -> None:
    found = chaos(tmp_path, "damage", "--only=rounds.jsonl,kept traces", "--trials=1")
    assert {each["file"] for each in found} == {"rounds.jsonl", "kept traces"}
    assert len(found) == 12
    assert [each for each in found if each["came"].startswith("FAULT")] == []
