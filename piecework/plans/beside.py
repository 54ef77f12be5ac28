"""Plans systems in processes beside this one: each takes seconds of tracing, and none depends on another (see helper.py)."""

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread
from types import TracebackType
from typing import Any, Self

import piecework
from piecework.device_profiles.profile import available_memory, usable_cpus
from piecework.plans.question import PlanQuestion
from piecework.training.settings import Settings

Row = dict[str, Any]
READY = "ready\n"  # what a helper answers to the question
MOST = 4
MEMORY = 2**30  # bytes that a helper may take, most of them for torch
CODE = "import sys; sys.path.append(sys.argv[1]); from piecework.plans.helper import main; main()"


def usual_helpers() -> int:
    """Return how many helpers this machine has processors and memory for; none beside a single processor."""
    return max(0, min(MOST, usable_cpus() - 1, available_memory() // MEMORY - 1))


class Helpers:
    """Processes that plan the named systems while the caller does something else; `rows` then helps them.

    A thread gives each of the `children` its systems. A system whose helper ends without an answer is planned by the caller,
    who meets the error.
    """

    def __init__(
        self, names: Iterable[str], settings: Settings, question: PlanQuestion, steps: int, count: int
    ) -> None:
        job = {"settings": settings.to_run_config(), "question": asdict(question), "attack-steps": steps}
        job["path"] = [str(Path(place).resolve()) for place in sys.path]  # modules of one's own may import others
        self._job, self._names = json.dumps(job), deque(names)
        self._rows: dict[str, Row] = {}
        self.children: list[Popen[str]] = []
        self.threads = [Thread(target=self._serve, daemon=True) for _ in range(count)]

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._names.clear()
        for child in self.children:
            child.kill()
        for thread in self.threads:
            thread.join()

    def rows(self, plan: Callable[[str], Row]) -> dict[str, Row]:
        """Return the rows by system. `plan` plans one here, and again what a helper says cannot train: it may lack a module."""
        here: dict[str, Row] = {}
        while True:
            while (name := self._next()) is not None:
                here[name] = plan(name)
            for thread in self.threads:
                thread.join()
            if not self._names:
                refused = [name for name, row in self._rows.items() if row["reason"]]
                return self._rows | {name: plan(name) for name in refused} | here

    def _next(self) -> str | None:
        try:
            return self._names.popleft()
        except IndexError:
            return None

    def _serve(self) -> None:
        """Start a helper, and give it one system after another."""
        place = str(Path(piecework.__file__).resolve().parents[1])
        command = [sys.executable, "-P", "-c", CODE, place]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with (
            suppress(OSError),  # no process could be started, or this one has ended: the caller plans what is left
            Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, env=environment) as child,
        ):
            self.children.append(child)
            ready = ask(child, self._job) == READY
            while ready and (name := self._next()) is not None:
                row = row_in(ask(child, name))
                if row is None:
                    self._names.append(name)
                    break
                self._rows[name] = row
            child.kill()


def row_in(answer: str) -> Row | None:
    """Return the row of an answer, None if it is none: a helper that ends may leave half a line."""
    with suppress(ValueError):
        found = json.loads(answer)
        return found if isinstance(found, dict) else None
    return None


def ask(child: Popen[str], line: str) -> str:
    """Return a helper's answer to a line, empty if it has ended."""
    assert child.stdin is not None and child.stdout is not None
    with suppress(OSError):
        child.stdin.write(f"{line}\n")
        child.stdin.flush()
    return child.stdout.readline()
