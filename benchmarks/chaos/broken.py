"""A run that is broken off at the end of a round, as if it had been killed there; copies of it are then disturbed."""

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.chaos.children import Ended, run
from benchmarks.chaos.systems import dataset_in, results, settings_of, words_for
from piecework.server_app.records import RunDir


def die_after(server_round: int) -> None:
    """Kill this process when the checkpoint of a round has been written."""
    save = RunDir.save_checkpoint

    def save_then_die(self: RunDir, arrays: Any, values: Mapping[str, Any], kept: Any = None) -> None:
        save(self, arrays, values, kept)
        if values["round"] == server_round:
            os.kill(os.getpid(), signal.SIGKILL)

    RunDir.save_checkpoint = save_then_die  # type: ignore[method-assign]


def whole_and_broken(folder: Path, system: str, after: int, **changes: Any) -> tuple[dict[str, Any], Path]:
    """Return the results of a system's run that nothing disturbs, and the folder of one that was killed after a round."""
    values = settings_of(system, "local", dataset_in(folder)) | changes
    for name, prepare in ((f"whole-{system}", lambda: None), (f"broken-{system}", lambda: die_after(after))):
        shutil.rmtree(folder / name, ignore_errors=True)
        ended = run(words_for(values, folder, name), folder / f"{name}.txt", prepare)
        if ended.code != (0 if name.startswith("whole") else -signal.SIGKILL):
            raise SystemExit(f"{name} ended with exit code {ended.code}:\n{ended.said}")
    return results(folder / f"whole-{system}"), folder / f"broken-{system}"


def said_by(ended: Ended) -> str:
    """Return the output of a process in one line of words, as a console wraps it."""
    return " ".join(ended.said.split())
