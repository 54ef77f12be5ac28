"""Run `flower-supernode` with our executor: `piecework-supernode [--look-seconds 3] ARGUMENTS`.

With `--isolation subprocess` a SuperNode starts the command `flower-superexec` that is first on PATH: here that is
`piecework-executor`. With `--look-seconds` it looks for messages, and for its task's reply, more often than Flower lets one
choose (3 and 0.5 s); each look is a request to the SuperLink. The other arguments are those of `flower-supernode`.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from importlib import import_module
from importlib.metadata import entry_points
from logging import WARNING
from pathlib import Path
from types import SimpleNamespace

import click
from flwr.supercore import log
from flwr.supercore.utils import get_flwr_home

NO_PORT = "Runtime HTTP API failed to start"  # Flower's error if --port is taken


def main() -> None:
    """Be a SuperNode until told to end."""
    parser = argparse.ArgumentParser(prog="piecework-supernode", add_help=False, allow_abbrev=False)
    parser.add_argument("--look-seconds", type=parse_seconds, default=math.inf)
    known, rest = parser.parse_known_args()
    if {"-h", "--help"} & {*rest}:
        print(__doc__)
    sys.argv[1:] = rest
    if "process" not in rest:  # the word after --isolation with which a SuperNode starts none
        put_executor_on_path()
    look_every(known.look_seconds)
    (command,) = entry_points(group="console_scripts", name="flower-supernode")
    try:
        command.load()()
    except click.ClickException as error:  # wrong arguments
        sys.exit(f"piecework-supernode: {error}")
    except OSError as error:
        if str(error.filename) not in {str(Path(argument).expanduser()) for argument in rest}:
            raise
        sys.exit(f"piecework-supernode: {error.filename}: {error.strerror}")  # such as the file after --node-config
    except RuntimeError as error:
        if NO_PORT not in str(error):  # an error of its work, whose place is in the traceback
            raise
        sys.exit(f"piecework-supernode: {str(error).rstrip('.')}; a second SuperNode on a machine needs another --port")


def parse_seconds(text: str) -> float:
    """Parse a time of more than 0 seconds. Raises ArgumentTypeError."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: give seconds above 0, such as 0.5")
    return found


def look_every(most: float) -> None:
    """Let the loop of a SuperNode in this process, which sleeps for fixed times, sleep at most so many seconds at once."""
    loop = import_module("flwr.supernode.start_client_internal")
    sleep = time.sleep
    vars(loop)["time"] = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: sleep(min(seconds, most))})


def put_executor_on_path() -> None:
    """Put a folder with our executor, by the name of Flower's, in front of PATH; where none can be written, say so."""
    folder = get_flwr_home() / "piecework"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # the folder may be another SuperNode's too
            link = Path(own) / "link"
            link.symlink_to(Path(sys.executable).with_name("piecework-executor"))
            link.replace(folder / "flower-superexec")
    except OSError as error:
        log(WARNING, "tasks start slowly, by Flower's own executor, because %s cannot be written: %s", folder, error)
        return
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


if __name__ == "__main__":
    main()
