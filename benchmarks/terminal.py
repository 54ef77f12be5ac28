"""What a command shows in a terminal, as it moves and as it ends: run in a pseudo-terminal, and drawn by rich as SVG.

`pyte` keeps the screen that the command's bytes make, with the lines that it wrote over.
"""

import copy
import errno
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.style import Style
from rich.text import Text

from piecework.commands.console import PlainConsole

COLUMNS, ROWS = 128, 80  # of the terminal: a run of 20 rounds is seen whole
FRAME = re.compile(rb"(?=\r?\x1b\[2K)")  # where rich begins to draw its last lines anew
NAMES = {"brown": "yellow"}  # pyte's names of colours that rich calls otherwise
Screen = pyte.Screen


def piecework(*arguments: str) -> bytes:
    """Run a command in a terminal; return all that it wrote there. Raises CalledProcessError."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    others = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    values = {name: value for name, value in os.environ.items() if name not in others}
    command = [sys.executable, "-m", "piecework", *arguments]
    with subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, env=values | {"TERM": "xterm-256color"}
    ) as process:
        os.close(its)
        written = b"".join(chunks(ours))
    os.close(ours)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, written)
    return written


def chunks(terminal: int) -> Iterator[bytes]:
    """Yield what is written to a terminal until all of its writers are gone."""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # as Linux says it
                raise
            return
        if not chunk:
            return
        yield chunk


def screens(command: str, written: bytes) -> Iterator[Screen]:
    """Yield the screen after each frame of what a command wrote; it is one object, which goes on changing."""
    screen = Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {command}\r\n".encode())
    for frame in FRAME.split(written):
        stream.feed(frame)
        yield screen


def in_the_middle(command: str, written: bytes, rounds: int) -> Screen:
    """Return the screen of a moment within a round: as late as half of the rounds, and as much said, as there is any.

    Raises ValueError if the command never said which round it is in.
    """
    best: tuple[tuple[int, ...], Screen] | None = None
    for screen in screens(command, written):
        last = next((line for line in reversed(screen.display) if line.strip()), "")
        if found := re.search(r"round (\d+): training (\d+)/(\d+)", last):
            now, done, asked = map(int, found.groups())
            said = ("ends in" in last) + ("slowest" in last) + (0 < done < asked)
            worth = (said, min(now, 1 + rounds // 2), -abs(2 * done - asked))
            if best is None or worth > best[0]:
                best = worth, copy.deepcopy(screen)
    if best is None:
        raise ValueError(f"{command} never showed a moment within a round: {written[-500:]!r}")
    return best[1]


def at_the_end(command: str, written: bytes) -> Screen:
    """Return the last screen."""
    *_, last = screens(command, written)
    return last


def draw(screen: Screen, path: Path) -> None:
    """Draw a screen up to its last line that is not empty, as rich draws a terminal."""
    lines = [line(screen, row) for row in range(screen.lines)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    console = PlainConsole(record=True, width=screen.columns, file=io.StringIO(), color_system="truecolor")
    for each in lines:
        each.rstrip()
        console.print(each, highlight=False, no_wrap=True, overflow="crop")
    plain = re.sub(r"@font-face {{.*?}}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # whose fonts would be fetched
    drawn = console.export_svg(title="piecework run", unique_id=path.stem, code_format=plain)
    path.write_text("\n".join(text.rstrip() for text in drawn.splitlines()) + "\n", encoding="utf-8")


def line(screen: Screen, row: int) -> Text:
    """Return a row of a screen with its colours."""
    letters = [screen.buffer[row][column] for column in range(screen.columns)]
    alike = groupby(letters, key=lambda each: (each.fg, each.bold, each.reverse))
    return Text.assemble(
        *(
            ("".join(each.data for each in run), Style(color=colour(fg), bold=bold, reverse=reverse))
            for (fg, bold, reverse), run in alike
        )
    )


def colour(name: str) -> str | None:
    """Return rich's name of a colour: pyte has names and six digits."""
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return NAMES.get(name, name).replace("bright", "bright_")
