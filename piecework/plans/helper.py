"""The process that plans systems for another one (beside.py).

It reads the question as a line of JSON from its standard input, and answers READY. Then it reads a system's name a line, and
answers each with the system's row in a line. It ends at once with its input, and so also when the other process was killed.
"""

import json
import os
import sys
from queue import SimpleQueue
from threading import Thread
from typing import TextIO

from piecework.plans.beside import READY
from piecework.plans.question import PlanQuestion
from piecework.plans.suggest import plan_system
from piecework.training.settings import Settings


def read_lines(asked: TextIO, lines: SimpleQueue[str]) -> None:
    """Hand over each line, and end this process with the last one: nobody waits for it any more."""
    for line in asked:
        lines.put(line)
    os._exit(0)


def main() -> None:
    """Answer names until the input ends."""
    # modules of one's own may read and print as they like: what they read is no question, and what they print no answer
    asked, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    lines = SimpleQueue[str]()
    Thread(target=read_lines, args=(asked, lines), daemon=True).start()
    job = json.loads(lines.get())
    sys.path[:] = job["path"]
    given = job["question"]
    question = PlanQuestion(**given | {"input_shape": tuple(given["input_shape"])})
    settings = Settings.from_run_config(job["settings"])
    print(READY, end="", file=answers, flush=True)
    while True:
        own = settings.with_values({"strategy": lines.get().strip()})
        print(json.dumps(plan_system(own, question, job["attack-steps"])), file=answers, flush=True)
