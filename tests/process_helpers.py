"""A client's message in a file, and scripts that run in a process of their own."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict
from helpers import digits, first_arrays, tiny_settings

from piecework.models.work_item import WorkItem
from piecework.server_app.ordered_grid import FIRST_NODE, identify
from piecework.training.messages import Task
from piecework.training.parcels import pack
from piecework.training.setup import blueprint_for

ROOT = Path(__file__).resolve().parents[1]


def a_message(folder: Path, **settings: Any) -> Path:
    """A file with a pickled train message for client 0, of the whole model at once, and the run's configuration."""
    chosen = tiny_settings(**settings)
    blueprint = blueprint_for(chosen, digits())
    task = Task(
        experiment_id="experiment",
        round=1,
        state_round=0,
        strategy=chosen.strategy,
        budget=10**12,
        reference=10**9,
        lr=chosen.training.lr,
        state_dir=str(folder / "clients"),
        costs={WorkItem(tuple(range(len(blueprint.atoms)))): 1},
    )
    arrays = pack(first_arrays(chosen).items())
    identify(1)
    content = RecordDict({"task": task.to_record(), "arrays": arrays})
    message = pickle.dumps(Message(content, dst_node_id=FIRST_NODE, message_type="train"), protocol=5)
    (folder / "message.pickle").write_bytes(pickle.dumps((message, chosen.to_run_config()), protocol=5))
    return folder / "message.pickle"


def in_a_fresh_process(code: str, *arguments: Path | str) -> str:
    """What a script prints that runs in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
