"""Runs an experiment with trackers that is killed twice and resumed: `track_driver.py FOLDER SETTINGS`.

Each of the processes is a child of this one, which imports the trackers' libraries once for all of them. The first is killed
when round 2 is recorded and told, before its checkpoint: round 2 is repeated. The second is killed in round 4. The third ends.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from helpers import run_local  # noqa: E402
from kill_driver import at_call  # noqa: E402

from piecework.device_profiles.memory import trace  # noqa: E402
from piecework.federation.evaluation import Evaluator  # noqa: E402
from piecework.server_app.records import RunDir  # noqa: E402

LIBRARIES = ("torch.utils.tensorboard", "mlflow", "wandb", "trackio")


def in_a_child(arm: Callable[[], None], **settings: Any) -> str:
    """How a process ends that runs the experiment after it was armed: its signal or its exit code."""
    child = os.fork()
    if child == 0:
        try:
            arm()
            run_local(**settings)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def main(folder: Path, settings: dict[str, Any]) -> None:
    trace(lambda: torch.zeros(1) + 1)  # imports torch's compiler once, rather than in every child
    for library in LIBRARIES:
        importlib.import_module(library)
    settings |= {"tmp_path": folder}
    resumed = settings | {"resume_from": str(folder / "run")}
    ends = [
        in_a_child(lambda: at_call(RunDir, "save_checkpoint", 2), **settings),
        in_a_child(lambda: at_call(Evaluator, "__call__", 3), **resumed),
        in_a_child(lambda: None, **resumed),
    ]
    print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
