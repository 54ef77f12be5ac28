"""What the live page reads: files that grow, are replaced or are damaged; a lock that it does not take; hints that are old."""

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from report_helpers import client, round_record
from serve_helpers import client_of, completed, going_on, listed, next_round

from piecework.serve.fold import KINDS, Fold
from piecework.serve.folders import DEEPEST, LARGEST, Found, find_runs
from piecework.serve.now import read_now, show_now
from piecework.serve.reading import Runs, ServedRun
from piecework.server_app.run_lock import LOCK_FILE, holder, run_lock

NOBODY = 65534


def cut(path: Path) -> None:
    """Break off in the middle of the last record."""
    path.write_bytes(path.read_bytes()[:-100])


def line_of(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(path.read_text("utf-8") + text + "\n", encoding="utf-8")


def text(content: str | bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode()) and None


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def pipe(path: Path) -> None:
    """Whoever opened it would wait for ever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def huge(path: Path) -> None:
    os.truncate(path, LARGEST + 1)


def without(key: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        first, *others = path.read_text("utf-8").splitlines()
        record = {name: value for name, value in json.loads(first).items() if name != key}
        path.write_text("\n".join([json.dumps(record), *others, ""]), encoding="utf-8")

    return change


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "cut": ("rounds.jsonl", cut, "rounds.jsonl is damaged: it has 1 whole records, and summary.json counts 2 rounds"),
    "no rounds": ("rounds.jsonl", Path.unlink, "it has 0 whole records, and summary.json counts 2 rounds"),
    "bad line": ("rounds.jsonl", line_of("{"), "rounds.jsonl, line 3, is damaged: Expecting property name"),
    "no record": ("rounds.jsonl", line_of("[1]"), "rounds.jsonl, line 3, is damaged: not the record of a round"),
    "again": ("rounds.jsonl", line_of('{"round": 2}'), "rounds.jsonl, line 3, is damaged: round 2 follows round 2"),
    "deep": ("rounds.jsonl", line_of('{"round": 3, "a": ' + "[" * 9999), "line 3, is damaged: it is nested too deeply"),
    "no clients": ("rounds.jsonl", without("clients"), "rounds.jsonl, line 1, is damaged, or of another version"),
    "a folder": ("rounds.jsonl", folder, "rounds.jsonl is not a file"),
    "a pipe": ("rounds.jsonl", pipe, "rounds.jsonl is not a file"),
    "bad summary": ("summary.json", text("{"), "summary.json is damaged (JSONDecodeError"),
    "a list": ("summary.json", text("[]"), "summary.json is damaged: not a JSON object"),
    "bare": (
        "summary.json",
        text("{}"),
        "summary.json, is damaged, or of another version of Piecework: status is missing",
    ),
    "huge": ("summary.json", huge, f"summary.json has {LARGEST + 1:,} bytes: at most {LARGEST:,} are read"),
    "bad final": ("final.json", text('{"accuracy": 7}'), "final.json, is damaged, or of another version"),
    "no settings": ("settings.toml", Path.unlink, "settings.toml is missing"),
    "bad settings": ("settings.toml", text("strategy ="), "is not the folder of a run: Invalid value"),
    "no text": ("settings.toml", text(b"\xff\xfe"), "is not the folder of a run: 'utf-8' codec"),
    "settings folder": ("settings.toml", folder, "settings.toml is not a file"),
    "lock folder": ("lock", folder, "lock is not a file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_shown_with_the_reason_and_others_as_ever(tmp_path: Path, damage: str) -> None:
    name, harm, reason = DAMAGES[damage]
    completed(tmp_path / "whole")
    harm(completed(tmp_path / "harmed").path / name)
    rows, browser = listed(tmp_path), client_of(tmp_path)
    assert (rows["whole"]["state"], rows["whole"]["accuracy"]) == ("completed", "75.00%")
    assert rows["harmed"]["state"] == "damaged"
    assert reason in rows["harmed"]["why"]
    assert str(tmp_path) not in rows["harmed"]["why"].replace(f"{tmp_path}/harmed is not", "")
    shown = browser.get("/api/run/harmed")
    assert (shown.status_code, shown.json()["state"]) == (200, "damaged")
    assert browser.get("/run/harmed").status_code == 200
    assert browser.get("/report/harmed").status_code in (200, 422)
    assert browser.get("/compare", params={"run": ["whole", "harmed"]}).status_code in (200, 422)


def test_a_run_that_was_mended_is_whole_again(tmp_path: Path) -> None:
    run = completed(tmp_path / "a")
    served, kept = ServedRun(Found("a", run.path)), run.rounds_file.read_bytes()
    states = []
    for content in (kept, kept + b"{\n", kept, kept[:-100], kept):
        run.rounds_file.write_bytes(content)
        os.utime(run.rounds_file, ns=(0, len(states)))  # two of them may be written within the clock's step
        served.read()
        states.append((served.state, len(served.fold.rounds)))
    assert states == [("completed", 2), ("damaged", 2), ("completed", 2), ("damaged", 1), ("completed", 2)]


def test_half_a_line_is_a_record_that_is_being_written(tmp_path: Path) -> None:
    run = going_on(tmp_path / "a", rounds=1)
    line = json.dumps(next_round(2)).encode() + b"\n"
    served, seen = ServedRun(Found("a", run.path)), []
    with run_lock(run.path), run.rounds_file.open("ab") as file:
        for part in (line[:50], line[50:], line.replace(b'"round": 2', b'"round": 3')):
            file.write(part)
            file.flush()
            served.read()
            seen.append((served.state, served.fold.last_accuracy))
    assert seen == [("running", 0.01), ("running", 0.02), ("running", 0.02)]
    assert [record["round"] for record in served.fold.rounds] == [1, 2, 3]


def test_a_resumed_run_is_read_anew(tmp_path: Path) -> None:
    """It replaces its file by the rounds before its checkpoint, and goes on."""
    run = going_on(tmp_path / "a", rounds=5)
    served = ServedRun(Found("a", run.path))
    served.read()
    run.forget_after(3)
    run.append_round(next_round(4) | {"accuracy": 0.5})
    served.read()
    assert [record["accuracy"] for record in served.fold.rounds] == [0.01, 0.02, 0.03, 0.5]
    assert served.fold.clients[1].failed == 4


@contextmanager
def nobody() -> Iterator[None]:
    """Without root's rights, for which every folder can be read."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


def test_a_folder_that_may_not_be_read() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        root.chmod(0o755)
        closed, hidden = completed(root / "closed").path, completed(root / "hidden").path
        completed(root / "open")
        closed.chmod(0)
        (hidden / "rounds.jsonl").chmod(0)
        with nobody():
            rows = listed(root)
        closed.chmod(0o700)
    assert {name: row["state"] for name, row in rows.items()} == {
        "closed": "damaged",
        "hidden": "damaged",
        "open": "completed",
    }
    assert rows["closed"]["why"] == f"{closed} cannot be read: Permission denied"
    assert rows["hidden"]["why"] == "rounds.jsonl cannot be read: Permission denied"


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    run = completed(root / "a")
    browser = client_of(root)
    assert browser.get("/api/run/a").status_code == 200
    run.path.rename(tmp_path / "a")
    assert [browser.get(path).status_code for path in ("/api/runs", "/api/run/b")] == [200, 404]
    root.rmdir()
    assert browser.get("/").status_code == 200
    answer = browser.get("/api/runs")
    assert (answer.status_code, answer.json()) == (
        503,
        {"problem": f"{root} cannot be read: No such file or directory"},
    )


def test_how_far_runs_are_looked_for(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*map(str, range(DEEPEST)))
    completed(deep / "a")
    completed(deep / "b" / "too-deep")
    completed(tmp_path / "run" / "clients" / "of-it")
    completed(tmp_path / "run")
    found, left_out = find_runs(tmp_path)
    assert ({*found}, left_out) == ({"run"}, "")
    assert {*find_runs(deep)[0]} == {"a", "b/too-deep"}


def test_many_runs_are_read_little_by_little(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        completed(tmp_path / name)
    runs = Runs(tmp_path)
    assert runs.list_all(lambda run: run.state, seconds=-1.0) == ["reading"] * 3
    assert runs.look("b", lambda run: run.state) == "completed"
    assert sorted(runs.list_all(lambda run: run.state, seconds=-1.0)) == ["completed", "reading", "reading"]
    assert runs.list_all(lambda run: run.state, seconds=60.0) == ["completed"] * 3


def test_the_newest_run_is_first(tmp_path: Path) -> None:
    for at, name in enumerate(("b", "a", "c")):
        os.utime(completed(tmp_path / name).path / "settings.toml", (at, at))
    assert Runs(tmp_path).list_all(lambda run: run.found.name) == ["c", "a", "b"]


def test_reasons_that_differ_in_words_are_counted_up_to_a_number() -> None:
    fold = Fold()
    clients = [client(n, status="failed", reason="a" * (n + 1)) for n in range(KINDS + 5)]
    fold.add(round_record(1, None, clients))
    assert len(fold.failures) == KINDS + 1
    assert fold.failures["", "other reasons"].count == 5
    assert fold.devices == {"small": [KINDS + 5, KINDS + 5]}


def test_a_client_is_shown_in_the_round_that_came_closest_to_its_budget() -> None:
    fold = Fold()
    for number, peak in enumerate((500, 950, 700), start=1):
        fold.add(round_record(number, None, [client(7, measured_peak=peak)]))
    shown = fold.clients[7]
    assert (shown.closest["measured_peak"], shown.last["measured_peak"], shown.round) == (950, 700, 3)


def test_a_killed_writer_is_told_from_a_living_one_and_the_lock_is_left_alone(tmp_path: Path) -> None:
    run, released = going_on(tmp_path / "a"), tmp_path / "a" / LOCK_FILE
    served = ServedRun(Found("a", run.path))

    def state() -> str:
        served.read()
        return served.state

    assert state() == "interrupted"
    pid, ready = os.fork(), tmp_path / "ready"
    if pid == 0:
        with suppress(BaseException), run_lock(run.path):
            ready.touch()
            signal.pause()
        os._exit(1)
    while not ready.exists():
        os.sched_yield()
    assert state() == "running"
    assert (served.writer or "").startswith(f"process {pid} on ")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert state() == "interrupted"
    assert f'"pid": {pid}' in released.read_text("utf-8")  # a kill leaves it
    with run_lock(run.path):
        assert state() == "running"
    assert (state(), released.read_text("utf-8"), holder(run.path)) == ("interrupted", "", None)


WHOLE = {
    **{"round": 3, "rounds": 20, "phase": "training", "asked": 10, "done": 7, "failed": 1},
    **{"slowest": "board-64 (client 4)", "since": 100.0, "seconds_left": 12.0},
}
SAID = "7 of 10 clients are done, 1 failed, the slowest to come is board-64 (client 4), for 35 s, probably 12 s to go"


@pytest.mark.parametrize(
    ("changes", "done", "says", "details"),
    [
        ({}, 2, "Round 3 of 20: training", SAID),
        (
            {"rounds": None, "slowest": 4, "failed": 0},
            2,
            "Round 3: training",
            "7 of 10 clients are done, for 35 s, probably 12 s to go",
        ),
        ({"seconds_left": None, "asked": 0, "failed": -1, "slowest": ""}, 2, "Round 3 of 20: training", "for 35 s"),
        ({"round": 0, "phase": "AutoAttack"}, 20, "AutoAttack", SAID),
        ({"phase": ""}, 2, "Round 3 of 20", SAID),
        ({"written": 130.0}, 2, "Round 3 of 20: training", SAID.replace("12 s", "7.0 s")),
        (
            {"written": 110.0},
            2,
            "Round 3 of 20: training",
            SAID.replace("probably 12 s to go", "13 s longer than expected"),
        ),
        (
            {"seconds_left": -20},
            2,
            "Round 3 of 20: training",
            SAID.replace("probably 12 s to go", "20 s longer than expected"),
        ),
        (
            {"since": float("inf"), "done": "7", "seconds_left": True, "slowest": []},
            *(2, "Round 3 of 20: training", "10 clients are asked, 1 failed"),
        ),
    ],
)
def test_what_a_run_does_now(tmp_path: Path, changes: dict[str, Any], done: int, says: str, details: str) -> None:
    (tmp_path / "now.json").write_text(json.dumps(WHOLE | changes))
    shown = show_now(read_now(tmp_path), done, 50.0, 135.0)
    assert shown is not None
    assert (shown["says"], shown["details"]) == (says, details)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"done": 3}', json.dumps(WHOLE | {"since": 40.0})])
def test_a_hint_that_says_nothing_or_is_old(tmp_path: Path, content: str) -> None:
    assert show_now(read_now(tmp_path), 2, 50.0, 135.0) is None
    (tmp_path / "now.json").write_text(content)
    assert show_now(read_now(tmp_path), 2, 50.0, 135.0) is None


def test_a_hint_about_a_round_that_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "now.json").write_text(json.dumps(WHOLE))
    assert show_now(read_now(tmp_path), 3, 50.0, 135.0) is None
