"""What a run says of itself while a round goes on, in its own process and in `now.json`; and its log file."""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message
from helpers import SPEEDS, TRIO, RecordingGrid, run_local

from piecework.federation.errors import RunAbortedError
from piecework.planning.now import NOW
from piecework.server_app import moment
from piecework.server_app.moment import FILE, Moment, read_moment, seconds_left
from piecework.server_app.ordered_grid import FIRST_NODE

# Client 1 has the slowest device, then client 2.
FLEET = json.dumps(
    {
        "name": "test",
        "assignment": "round-robin",
        "device": [
            {"name": name, "memory-ratio": 1.5, **SPEEDS, "flops": flops}
            for name, flops in (("fast", 4e9), ("slow", 1e9), ("middle", 2e9))
        ],
    }
)


class SecondFails(RecordingGrid):
    """The answer of client 1 is an error."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in super().pull_messages(message_ids):
            failed = reply.metadata.src_node_id == FIRST_NODE + 1 and reply.metadata.message_type == "train"
            task = next(m for m in self.sent if m.metadata.message_id == reply.metadata.reply_to_message_id)
            yield Message(Error(2, "as told"), reply_to=task) if failed else reply


class Heard(logging.Handler):
    """What was said of a run, and what `now.json` had at the same time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.DEBUG)
        self.folder, self.said = folder, list[tuple[str, str]]()
        self.files = list[Moment | None]()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((record.getMessage(), record.details(0.0) if hasattr(record, "details") else ""))
        self.files.append(read_moment(self.folder))


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    monkeypatch.setattr(moment, "SAY_EVERY", -1.0)
    monkeypatch.setattr(moment, "WRITE_EVERY", -1.0)
    heard = Heard(tmp_path / "run")
    NOW.addHandler(heard)
    yield heard
    NOW.removeHandler(heard)


def test_a_round_counts_its_answers(tmp_path: Path, grids: Any, heard: Heard) -> None:
    run = run_local(tmp_path, grids(SecondFails), strategy="fedavg", **TRIO | {"fleet": FLEET})
    training = [(text, details) for text, details in heard.said if text.startswith("round 1: training")]
    assert [text for text, _ in training] == [
        "round 1: training",
        "round 1: training 0/3",
        "round 1: training 1/3",
        "round 1: training 2/3 (1 failed)",
        "round 1: training 3/3 (1 failed)",
    ]
    assert training[0][1] == ""
    assert training[1][1] == "slowest: slow (client 1)"
    assert training[2][1].endswith(" s  slowest: slow (client 1)")
    assert training[3][1].endswith(" s  slowest: middle (client 2)")
    assert training[4][1] == ""
    assert [text for text, _ in heard.said if "round" not in text and "tracing" not in text] == [
        "waiting for the clients",
        "writing the trained model",
        "evaluating the models that devices deploy",
    ]
    assert not (run.path / FILE).exists()


def test_others_read_the_same_in_the_folder_of_the_run(tmp_path: Path, grids: Any, heard: Heard) -> None:
    run_local(tmp_path, grids(SecondFails), strategy="fedavg", num_rounds=2, **TRIO | {"fleet": FLEET})
    # The file is written after its text is said.
    for (text, details), file in zip(heard.said, heard.files[1:], strict=False):
        assert file is not None
        assert (file.text(), file.details(0.0), file.rounds) == (text, details, 2)
        assert file.written >= file.since > 0  # also where a phase begins
    second = [f for f in heard.files if f and (f.round, f.phase, f.done) == (2, "training", 1)]
    assert second[0].failed == 0
    assert second[0].seconds_left is not None


def test_a_clock_that_is_set_back_hides_nothing(
    tmp_path: Path, grids: Any, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an hour each time that anyone looks: every answer is counted, and no phase takes less than no time."""
    shown = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(moment.time, "time", lambda: float(next(shown)))
    run_local(tmp_path, grids(RecordingGrid), strategy="fedavg", num_rounds=2, **TRIO)
    counted = [text for text, _ in heard.said if text.startswith("round 2: training ")]
    assert counted == [f"round 2: training {done}/3" for done in range(4)]
    left = [file.seconds_left for file in heard.files if file and file.seconds_left is not None]
    assert left
    assert all(-60 < seconds < 60 for seconds in left)


def test_a_run_that_ends_in_an_error_says_nothing_more(tmp_path: Path, grids: Any) -> None:
    with pytest.raises(RunAbortedError):
        run_local(tmp_path, grids(SecondFails), strategy="fedavg", **TRIO, faults__min_clients=3)
    assert not (tmp_path / "run" / FILE).exists()
    log = (tmp_path / "run" / "run.log").read_text()
    assert "WARNING client 1 (full): failed: error 2: as told" in log
    assert "ERROR   failed after 1 rounds: only 2 clients trained (faults.min-clients = 3) in round 1" in log


@pytest.mark.parametrize(
    ("before", "elapsed", "done", "awaited", "parallel", "left"),
    [
        ([], 6.0, 0, 3, False, None),
        ([], 6.0, 2, 3, False, 9.0),
        ([], 6.0, 2, 3, True, None),
        ([4.0, 20.0, 10.0], 6.0, 2, 3, True, 4.0),
        ([100.0, 9.0, 9.0, 8.0, 7.0, 7.0], 6.0, 2, 3, False, 2.0),  # the median of the last five
        ([4.0], 6.0, 2, 3, False, -2.0),  # late
        ([4.0], 6.0, 3, 0, False, None),
    ],
)
def test_what_is_left_of_a_phase(
    before: list[float], elapsed: float, done: int, awaited: int, parallel: bool, left: float | None
) -> None:
    assert seconds_left(before, elapsed, done, awaited, parallel=parallel) == left


@pytest.mark.parametrize(
    ("left", "now", "said"),
    [
        (3.2, 100.0, "training ends in 4 s"),
        (3.2, 103.0, "training ends in 1 s"),  # and nothing was written since
        (3.0, 103.0, "training should end now"),
        (-0.9, 100.0, "training should end now"),
        (3.0, 123.5, "training is late by 20 s"),
        (-1.0, 100.0, "training is late by 1 s"),
        (None, 100.0, ""),
    ],
)
def test_a_phase_that_takes_longer_than_expected_is_late(left: float | None, now: float, said: str) -> None:
    found = Moment(2, 20, "training", 3, 1, slowest="", since=90.0, written=100.0, seconds_left=left)
    assert found.details(now) == said


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"round": 1, "other": 2}', '{"phase": "training"}', '{"round": "1"}']
)
def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path, content: str) -> None:
    assert read_moment(tmp_path) is None
    (tmp_path / FILE).write_text(content)
    assert read_moment(tmp_path) is None


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_local(tmp_path, strategy="fedavg", **TRIO)
    (run.path / "run.log").unlink()
    (run.path / "run.log").mkdir()
    (run.path / FILE).mkdir()
    run = run_local(tmp_path, strategy="fedavg", num_rounds=2, **TRIO, resume_from=str(run.path))
    assert run.summary()["status"] == "completed"  # type: ignore[index]
    warnings = [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
    assert len(warnings) == 2


def test_a_resumed_run_appends_to_its_log(tmp_path: Path) -> None:
    run = run_local(tmp_path, strategy="fedavg", **TRIO)
    run_local(tmp_path, strategy="fedavg", num_rounds=2, **TRIO, resume_from=str(run.path))
    lines = (run.path / "run.log").read_text().splitlines()
    said = [line.split(maxsplit=3)[3] for line in lines if "every part of the model" not in line]
    assert said[0].startswith("the run begins: fedavg, ")
    assert said[1].startswith("round 1/1  accuracy ")
    assert said[2] == "completed after 1 rounds"
    assert said[3].startswith("the run goes on: fedavg, ")
    assert said[4].startswith("round 2/2  accuracy ")
    assert said[5] == "completed after 2 rounds"
