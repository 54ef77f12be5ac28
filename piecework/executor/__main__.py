"""The command line of the executor: `piecework-executor`."""

import os
import sys
from argparse import ArgumentParser
from logging import INFO

from flwr.supercore import log

from piecework.executor.fork_server import Executor
from piecework.executor.tasks import import_poller

IDLE_SECONDS = 30.0  # what it costs, and what it saves: docs/results/speed.md


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


if __name__ == "__main__":
    sys.exit(main())
