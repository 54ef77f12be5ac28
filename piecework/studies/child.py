"""The process of one run: an ordinary `piecework run` that ends at once when what started it is gone, in whatever way.

That one holds this process's standard input open, which the kernel closes even after SIGKILL.
"""

import os
import sys
import threading
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import piecework

# `-P` keeps modules of the working directory from hiding others; Piecework that is not installed is found where it is here.
CODE = (
    "import sys; sys.path.append(sys.argv.pop(1)); from piecework.studies.child import end_with_starter; end_with_starter();"
    "from piecework.cli import main; main()"
)
GONE = 1  # exit code
PROMPT = "$ piecework "  # before the words of each process in a log


def spawn(words: list[str], log: Path) -> Popen[bytes]:
    """Start `piecework` with these words; what it prints is appended to `log`."""
    place = str(Path(piecework.__file__).resolve().parents[1])
    with log.open("ab") as file:
        file.write(f"{PROMPT}{' '.join(words)}\n".encode())
        file.flush()
        # a session of its own: Ctrl-C in a terminal reaches the starter alone, which ends its runs one by one
        return Popen(
            [sys.executable, "-P", "-c", CODE, place, *words],
            stdin=PIPE,
            stdout=file,
            stderr=STDOUT,
            start_new_session=True,
        )


def end_with_starter() -> None:
    """Exit at the end of standard input, there and then: a resumed run repeats the round that this breaks off."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(GONE)

    threading.Thread(target=wait, daemon=True).start()
