"""The process of one run: an ordinary `piecework run` that ends at once when the harness is gone, in whatever way.

The harness holds this process's standard input open, which the kernel closes even after SIGKILL.
"""

import os
import sys
import threading
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

from benchmarks.claims.notes import ROOT

CODE = "from benchmarks.claims.child import main; main()"
GONE = 1  # exit code
PROMPT = "$ piecework "  # before the words of each process in a log


def spawn(words: list[str], log: Path) -> Popen[bytes]:
    """Start `piecework` with these words, on one thread; what it prints is appended to `log`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        file.write(f"{PROMPT}{' '.join(words)}\n".encode())
        file.flush()
        # a session of its own: Ctrl-C in a terminal reaches the harness alone, which ends its runs one by one
        return Popen(
            [sys.executable, "-c", CODE, *words],
            cwd=ROOT,
            env=environment,
            stdin=PIPE,
            stdout=file,
            stderr=STDOUT,
            start_new_session=True,
        )


def main() -> None:
    """Run the command line of Piecework with the words of this process."""
    threading.Thread(target=end_with_harness, daemon=True).start()
    from piecework.cli import main as piecework

    piecework()


def end_with_harness() -> None:
    """Wait for the end of standard input, and exit there and then: a resumed run repeats the round that this breaks off."""
    while os.read(0, 1):
        pass
    os._exit(GONE)
