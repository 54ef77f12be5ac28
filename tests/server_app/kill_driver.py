"""Runs an experiment of test_resume.py in child processes that kill themselves: `kill_driver.py FOLDER SETTINGS POINT...`.

Each point is a moment of round 3, or of round 1 (`first-round`), or in the N-th tensor that goes to a page (`page-N`).
The child gets SIGKILL there, so nothing can tidy up after it.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from helpers import run_local  # noqa: E402

from piecework.client_app.store import Store  # noqa: E402
from piecework.device_profiles.memory import trace  # noqa: E402
from piecework.federation.evaluation import Evaluator  # noqa: E402
from piecework.server_app import records  # noqa: E402
from piecework.server_app.records import RunDir  # noqa: E402
from piecework.training import pages  # noqa: E402


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(owner: Any, name: str, number: int, *, after: bool = False) -> None:
    """Die when `owner.name` is called for the `number`-th time, before it does anything or after it did everything."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and not after:
            die()
        result = original(*args, **kwargs)
        if calls[0] == number:
            die()
        return result

    setattr(owner, name, counted)


def half_a_line(self: RunDir, record: dict[str, Any], original: Callable[..., None] = RunDir.append_round) -> None:
    if record["round"] < 3:
        return original(self, record)
    with self.rounds_file.open("ab") as file:
        file.write(json.dumps(record).encode()[:100])
    return die()


def sync_then_die(path: Path, original: Callable[[Path], None] = records.sync) -> None:
    original(path)
    if path.name == "arrays.safetensors" and path.parent.name == "round-00003.tmp":
        die()


def write_half_then_die(number: int, original: Callable[..., None] = pages._write_all) -> None:
    """Die in the middle of the `number`-th tensor that goes to a page."""
    calls = [0]

    def counted(descriptor: int, content: memoryview) -> None:
        calls[0] += 1
        if calls[0] == number:
            original(descriptor, content[: len(content) // 2])
            die()
        original(descriptor, content)

    pages._write_all = counted


def arm(point: str) -> None:
    if point == "first-round":
        at_call(Evaluator, "__call__", 1)
    elif point == "evaluation":
        at_call(Evaluator, "__call__", 3)
    elif point == "half-a-record":
        RunDir.append_round = half_a_line  # type: ignore[method-assign]
    elif point == "inside-checkpoint":
        records.sync = sync_then_die
    elif point == "after-checkpoint":
        at_call(RunDir, "save_checkpoint", 3, after=True)
    elif point == "client-has-committed":  # 3 clients a round: the second of round 3
        at_call(Store, "commit_state", 8, after=True)
    elif point.startswith("page-"):
        write_half_then_die(int(point.removeprefix("page-")))
    else:
        raise ValueError(point)


def main(folder: Path, settings: dict[str, Any], points: list[str]) -> None:
    trace(lambda: torch.zeros(1) + 1)  # imports torch's compiler once, rather than in every child
    for point in points:
        child = os.fork()
        if child == 0:
            try:
                arm(point)
                run_local(folder / point, **settings)
            except BaseException:
                traceback.print_exc()
            os._exit(1)  # it should be dead by now
        _, status = os.waitpid(child, 0)
        print(point, os.WTERMSIG(status) if os.WIFSIGNALED(status) else f"exit {status}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
