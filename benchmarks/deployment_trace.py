"""Notes when each step of a round begins and ends, in every Python process that `benchmarks.deployment` starts with it.

A folder that holds this file as `sitecustomize.py` stands in PYTHONPATH, and DEPLOYMENT_TRACE names the file to which every
process adds lines of JSON: its pid, the step and its node, begin and end in seconds of clock and processor, and its peak.
A forked process, which imports nothing, begins with the line `fork`.
"""

import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

# Module: {function, perhaps of a class: the step that it is}
STEPS = {
    "flwr.supernode.start_client_internal": {"_pull_and_store_message": "receive", "_push_messages": "answer"},
    "flwr.supernode.runtime.run_clientapp": {
        "run_clientapp": "task",
        "pull_task_input": "pull",
        "install_from_fab": "install",
        "push_message": "push",
        "push_task_output": "report",
    },
    "flwr.clientapp.utils": {"load_app": "load"},
    "flwr.clientapp.client_app": {"ClientApp.__call__": "app"},
    "piecework.client_app.app": {"prepare_client": "unpack", "open_local_data": "unpack", "pack": "pack"},
    "piecework.federation.transport": {"Transport._send": "send"},
    "piecework.federation.reply_guard": {"ReplyGuard.pull_messages": "collect"},
    "piecework.server_app.rounds": {"Run.one_round": "round"},
}
# Of which node a step is, from its arguments and its result
NODES: dict[str, Callable[[Any, Any, Any], int]] = {
    "send": lambda arguments, options, result: arguments[2].metadata.dst_node_id,
    "receive": lambda arguments, options, result: options["state"].get_node_id(),
    "answer": lambda arguments, options, result: options["state"].get_node_id(),
    "pull": lambda arguments, options, result: result[1].node_id,
}


def peak() -> int:
    """Return this process's peak resident set in kB, 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0


def note(step: str, began: float, cpu: float, node: int = 0) -> None:
    """Add a line, in one write, so that lines of several processes do not mix."""
    line: dict[str, Any] = {"pid": os.getpid(), "step": step, "node": node, "began": began, "ended": time.time()}
    line |= {"cpu_began": cpu, "cpu_ended": time.process_time(), "peak": peak()}
    with Path(os.environ["DEPLOYMENT_TRACE"]).open("ab", buffering=0) as file:
        file.write((json.dumps(line) + "\n").encode())


def noted(function: Callable[..., Any], step: str) -> Callable[..., Any]:
    """Return a function that does the same and is noted; steps that find nothing to do are not."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        began, cpu = time.time(), time.process_time()
        if step == "task":
            note("start", began, cpu)
        try:
            result = function(*arguments, **options)
        except BaseException:
            note(step, began, cpu)
            raise
        if result or step not in ("receive", "collect"):
            note(step, began, cpu, NODES[step](arguments, options, result) if step in NODES else 0)
        return result

    return call


class Finder:
    """Finds the modules of STEPS, once each, so that their functions are replaced when they have been imported."""

    def __init__(self) -> None:
        self.left = dict(STEPS)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that replaces functions; None leaves it to the other finders."""
        steps = self.left.pop(name, None)
        spec = importlib.util.find_spec(name) if steps else None
        if steps is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            for place, step in steps.items():
                *owners, attribute = place.split(".")
                owner = functools.reduce(getattr, owners, module)
                setattr(owner, attribute, noted(getattr(owner, attribute), step))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Finder())
    os.register_at_fork(after_in_child=lambda: note("fork", time.time(), time.process_time()))
    note("python", time.time(), 0.0)
