"""Plans systems in processes beside this one: each takes seconds of tracing, and none depends on another.

A helper reads the question as a line of JSON from its standard input, and answers READY once it has loaded torch. Then it reads
a system's name a line, and answers each with the system's row in a line. It ends with its input, and so also after this process
was killed.
"""

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
READY = "ready\n"
MOST = 4
MEMORY = 2**30  # bytes that a helper may take, most of them for torch
CODE = "import sys; sys.path.append(sys.argv[1]); from piecework.plans.beside import main; main()"


def usual_helpers() -> int:
    """Return how many helpers this machine has processors and memory for; none beside a single processor."""
    return min(MOST, usable_cpus(), available_memory() // MEMORY) if usable_cpus() > 1 else 0


class Helpers:
    """Processes that plan the named systems while the caller does something else; `rows` then helps them.

    A thread gives each of the `children` its systems. A system whose helper ends without an answer is planned by the caller,
    who meets the error.
    """

    def __init__(
        self, names: Iterable[str], settings: Settings, question: PlanQuestion, steps: int, count: int
    ) -> None:
        job = {"settings": settings.to_run_config(), "question": asdict(question), "attack-steps": steps}
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
        """Return the rows by system; `plan` plans one here."""
        while True:
            while (name := self._next()) is not None:
                self._rows[name] = plan(name)
            for thread in self.threads:
                thread.join()
            if not self._names:
                return self._rows

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
        with Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, env=environment) as child:
            self.children.append(child)
            ready = ask(child, self._job) == READY
            while ready and (name := self._next()) is not None:
                if answer := ask(child, name):
                    self._rows[name] = json.loads(answer)
                else:
                    self._names.append(name)
                    break
            child.kill()


def ask(child: Popen[str], line: str) -> str:
    """Return a helper's answer to a line, empty if it has ended."""
    assert child.stdin is not None and child.stdout is not None
    with suppress(OSError):
        child.stdin.write(f"{line}\n")
        child.stdin.flush()
    return child.stdout.readline()


def main() -> None:
    """Answer names until the input ends."""
    from piecework.plans.suggest import plan_system

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a module of one's own prints is no answer
    job = json.loads(sys.stdin.readline())
    given = job["question"]
    question = PlanQuestion(**given | {"input_shape": tuple(given["input_shape"])})
    settings = Settings.from_run_config(job["settings"])
    print(READY, end="", file=answers, flush=True)
    for line in sys.stdin:
        own = settings.with_values({"strategy": line.strip()})
        print(json.dumps(plan_system(own, question, job["attack-steps"])), file=answers, flush=True)
