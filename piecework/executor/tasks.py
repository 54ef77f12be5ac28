"""What the children do: Flower's own client app, and Flower's own loop that asks a SuperNode for tasks."""

import fcntl
import gc
import hashlib
import json
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr.common.constant import APP_DIR
from flwr.supercore.constant import ExecutorType, TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supercore.utils import get_flwr_home

from piecework.executor.lone_command import lone_command

IMPORTED = (
    "torch",
    "numpy",
    "safetensors.numpy",
    "psutil",
)  # by tasks beside Flower; what is not installed is left out


def import_poller() -> None:
    """Import what asks for tasks. What exists then is no garbage: its pages stay shared with the children."""
    lone_command("supercore", "flower_superexec")
    gc.collect()
    gc.freeze()


def import_all() -> None:
    """Import what tasks need, of which the same is true."""
    lone_command("supernode", "flwr_clientapp")
    for name in IMPORTED:
        if find_spec(name.partition(".")[0]) is not None:
            import_module(name)
    gc.collect()
    gc.freeze()


class ForkExecutor(SubprocessExecutor):
    """Has a client's task started by the process at the other end of a socket, and other tasks as Flower starts them.

    So are tasks that may install packages, because they must not find what is imported already.
    """

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self.requests, self.parent = requests, parent

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Send the words of the command that Flower would start."""
        if spec.task_type != TaskType.CLIENT_APP or spec.runtime_dependency_install:
            return super().launch(spec)
        words = ["flwr-clientapp", "--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
        words += ["--parent-pid", str(self.parent)]
        if spec.insecure:
            words += ["--insecure"]
        elif spec.root_certificates_path is not None:
            words += ["--root-certificates", spec.root_certificates_path]
        try:
            self.requests.send(json.dumps(words).encode())
        except OSError as error:
            return LaunchResult.failed(f"process {self.parent}, which starts tasks, took none: {error}")
        return LaunchResult.accepted()


def install_once(install: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that installs a bundle if it is not installed yet.

    Flower's own unpacks it for each task, which takes longer than importing the app, and drops that if a folder is there, also
    if another task is still filling it, or one died over it: here the others wait, and the folder is there when it is whole.
    """

    def install_bundle(bundle: bytes, **options: Any) -> Path:
        apps = get_flwr_home() / APP_DIR
        apps.mkdir(parents=True, exist_ok=True)
        with (apps / f".{hashlib.sha256(bundle).hexdigest()}").open("a+", encoding="utf-8") as note:
            fcntl.flock(note, fcntl.LOCK_EX)  # not client_app/file_lock.py: the bundle has its own client_app
            note.seek(0)
            known = note.read()
            if known and Path(known).is_dir():
                return Path(known)
            note.truncate(0)
            with tempfile.TemporaryDirectory(prefix=".", dir=apps) as unfinished:
                new = install(bundle, install_dir=Path(unfinished), **options)
                path = apps / new.name
                if path.exists():  # what nobody noted
                    shutil.rmtree(path)
                new.rename(path)
            note.write(str(path))
            return path

    return install_bundle


def run_task(words: list[str], note: int) -> None:
    """Run `flwr-clientapp`, and write to the pipe `note` which message it has, and that it answers (crash_reply.py)."""
    flower = vars(import_module("flwr.supernode.runtime.run_clientapp"))
    flower["install_from_fab"] = install_once(flower["install_from_fab"])
    notes = import_module("piecework.executor.crash_reply").Notes(note)
    flower["pull_task_input"] = notes.of_message(flower["pull_task_input"])
    flower["push_message"] = notes.of_failure("its reply was made", flower["push_message"])
    flower["push_task_output"] = notes.of_end(flower["push_task_output"])
    for name in [name for name in sys.modules if name.partition(".")[0] == "piecework"]:
        del sys.modules[name]  # the bundle has its own
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else each task would draw what the last one drew
    sys.argv = words
    lone_command("supernode", "flwr_clientapp").flwr_clientapp()


def run_poller(words: list[str], requests: socket.socket, parent: int) -> None:
    """Run `flower-superexec`, with our executor instead of its own."""
    flower = vars(run_superexec)
    choose = flower["get_executor"]

    def executor(kind: ExecutorType, **options: Any) -> Any:
        return ForkExecutor(requests, parent) if kind == ExecutorType.SUBPROCESS else choose(kind, **options)

    flower["get_executor"] = executor
    sys.argv = ["flower-superexec", *words]
    lone_command("supercore", "flower_superexec").flower_superexec()


def answer_for(words: list[str], notes: bytes, reason: str) -> None:
    """Answer the message of a task that was killed."""
    import_module("piecework.executor.crash_reply").answer(words, notes, reason)
