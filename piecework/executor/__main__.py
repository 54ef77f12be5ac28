"""The command line of the executor: `piecework-executor`, and `piecework-supernode`, whose SuperNode starts one."""

import os
import shutil
import sys
from argparse import ArgumentParser
from logging import INFO
from pathlib import Path

from flwr.supercore import log
from flwr.supercore.utils import get_flwr_home

from piecework.executor.fork_server import Executor
from piecework.executor.tasks import import_poller

IDLE_SECONDS = 120.0


def main() -> int:
    """Serve until told to end; returns the exit code."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runtime-api-address", action="append", default=[])
    parser.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS)
    parser.add_argument("--parent-pid", type=int)
    known, others = parser.parse_known_args()
    import_poller()
    executor = Executor(known.idle_seconds)
    addresses = known.runtime_api_address
    log(INFO, "process %s executes the tasks of %s", os.getpid(), ", ".join(addresses) or "nobody")
    pollers = [["--runtime-api-address", each, *others] for each in addresses]
    try:
        return executor.serve(pollers or [others], known.parent_pid)
    finally:
        executor.end()


def supernode() -> None:
    """Be `flower-supernode` with the same options, which finds this package's executor where it looks for `flower-superexec`.

    With `--isolation subprocess` it starts the command of that name on PATH.
    """
    commands = Path(sys.executable).parent
    folder = get_flwr_home() / "piecework"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / f".{os.getpid()}"
    link.symlink_to(commands / "piecework-executor")
    link.replace(folder / "flower-superexec")
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    command = shutil.which("flower-supernode", path=str(commands)) or "flower-supernode"
    os.execv(command, ["flower-supernode", *sys.argv[1:]])  # noqa: S606  (the user's own command)


if __name__ == "__main__":
    sys.exit(main())
