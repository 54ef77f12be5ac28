"""What a run says that it does at this moment (server_app/moment.py), in a file that may be absent, old, or half there."""

import os
from pathlib import Path
from typing import Any

from piecework.device_profiles.documents import read_json
from piecework.device_profiles.units import format_seconds
from piecework.serve.folders import open_plain
from piecework.server_app.moment import FILE

Record = dict[str, Any]
MOST = 65_536  # bytes
COUNTS = ("round", "rounds", "asked", "done", "failed")
TIMES = ("since", "written", "seconds_left")
TEXTS = ("phase", "slowest")
LONGEST = 120  # characters of a text
FARTHEST = 1e12  # seconds
SLACK = 2.0  # seconds that a file's time may be off


def read_now(folder: Path) -> Record:
    """Return what the file of a run says: those of its keys that are there and of the right type. Times are in seconds."""
    try:
        with os.fdopen(open_plain(folder / FILE), "rb") as file:
            found = read_json(file.read(MOST))
    except (OSError, ValueError):  # absent, being written, or of another version: it is only a hint
        return {}
    if not isinstance(found, dict):
        return {}
    counts = {key: found[key] for key in COUNTS if type(found.get(key)) is int and 0 <= found[key] < 2**53}
    times = {
        key: float(found[key]) for key in TIMES if type(found.get(key)) in (int, float) and _is_time(key, found[key])
    }
    texts = {key: found[key][:LONGEST] for key in TEXTS if isinstance(found.get(key), str) and found[key]}
    return counts | times | texts


def _is_time(key: str, seconds: float) -> bool:
    return (-FARTHEST if key == "seconds_left" else 0) <= seconds <= FARTHEST  # nan is not


def show_now(now: Record, rounds_done: int, begun: float, time: float) -> Record | None:
    """Return what a running run does in words, with the counts for a bar; None if nothing is known that is not over.

    `begun` is when the run was started or resumed, and `time` the present, both in Unix time like `since` and `written`.
    """
    number = now.get("round", 0)
    if not (now.get("phase") or number) or 0 < number <= rounds_done or now.get("since", begun) < begun - SLACK:
        return None  # that round is recorded, or the file was left by a process that was killed
    said = f"Round {number} of {now['rounds']}" if number and "rounds" in now else f"Round {number}" if number else ""
    parts = [": ".join(filter(None, [said, now.get("phase", "")]))]
    if now.get("asked"):
        parts.append(
            f"{now['done']} of {now['asked']} clients are done"
            if "done" in now
            else f"{now['asked']} clients are asked"
        )
    if now.get("failed"):
        parts.append(f"{now['failed']} failed")
    if now.get("slowest"):
        parts.append(f"the slowest to come is {now['slowest']}")
    if "since" in now and now["since"] <= time:
        parts.append(f"for {format_seconds(time - now['since'])}")
    if "seconds_left" in now:
        left = now["seconds_left"] - max(0.0, time - now.get("written", time))
        parts.append(
            f"probably {format_seconds(left)} to go" if left > 0 else f"{format_seconds(-left)} longer than expected"
        )
    return {"says": parts[0], "details": ", ".join(parts[1:]), "asked": now.get("asked", 0), "done": now.get("done", 0)}
