"""A harness whose runs only leave files, for tests of its queue."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from claims_helpers import a_claim, finish

from benchmarks.claims import runner as of_claims
from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import folders
from benchmarks.claims.runner import Options
from piecework.studies import queue, runner
from piecework.studies.notes import Note

SMALL = """
title = "a"
question = "b"
paper = "c"
gap = "d"
seeds = [1, 2]
[search]
rates = [0.02, 0.05]
further = 0
[settings]
clients = 3
"num-rounds" = 6
[[case]]
name = "weak"
[[row]]
name = "FeDepth"
settings = { strategy = "fedepth" }
[[row]]
name = "FedAvg"
settings = { strategy = "fedavg", fleet = "unlimited" }
rate = 0.07
seeds = [1]
"""
IN_ORDER = [*(f"tiny: weak: FeDepth: search, rate {rate}" for rate in (0.02, 0.05))]
IN_ORDER += [f"tiny: weak: {row}: seed {seed}" for row, seed in (("FeDepth", 1), ("FedAvg", 1), ("FeDepth", 2))]
NOBODY = "exclusivefl: it needs 2,000 bytes, and the richest client has 1,000: no client can take part"
Leave = Callable[[Path, list[str]], int | None]


class Process:
    """A process that has left its files when it is started. It ends with `code`; while that is None, by a signal."""

    def __init__(self, code: int | None) -> None:
        self.returncode, self.stdin, self.signals = code, SimpleNamespace(close=lambda: None), list[int]()
        self.pid = os.getpid()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.returncode = 128 + number

    def wait(self, _: float) -> None:
        assert self.returncode is not None


class Harness:
    """Runs a claim with processes that leave what a test wants; `words` are those of each start, `said` all that it said."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.claim, self.out = a_claim(folder, SMALL), folder / "out"
        self.words, self.said = list[list[str]](), list[str]()
        self.leave: Leave = lambda run, words: finish(run, [0.5])
        monkeypatch.setattr(runner, "POLL", 0.0)
        monkeypatch.setattr(runner, "DYING", 0.0)
        monkeypatch.setattr(queue, "spawn", self.spawn)
        monkeypatch.setattr(of_claims, "this_commit", lambda: "abc")

    def spawn(self, words: list[str], log: Path) -> Any:
        self.words.append(words)
        log.write_text("error: no such data set\n", "utf-8")
        return Process(self.leave(log.with_name(log.name.removesuffix(".log")), words) or 0)

    def run(self, *others: Claim, **options: Any) -> list[str]:
        """The labels of the runs that were started."""
        self.said.clear()
        of_claims.run([self.claim, *others], Options(self.out, **options), self.said.append)
        return [line.removesuffix(how) for line in self.said for how in (" starts", " goes on") if line.endswith(how)]

    def folder(self, label: str) -> Path:
        found = {self.label(folder): folder for folder in folders(self.out, "tiny")}
        return found[label]

    @staticmethod
    def label(folder: Path) -> str:
        note = Note.read(folder)
        assert note is not None
        job = note.job
        what = f"search, rate {job['rate']}" if job["searched"] else f"seed {job['seed']}"
        return f"tiny: {job['case']}: {job['row']}: {what}"
