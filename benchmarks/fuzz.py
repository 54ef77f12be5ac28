"""Fuzzing: changed messages to a client, and changed files to whatever reads them.

    python -m benchmarks.fuzz messages [--messages 100000] [--only fedavg,prism] [--seed 1]
    python -m benchmarks.fuzz files [--files 10000] [--only preset,fleet] [--seed 1]

Changed answers to the server are those of `benchmarks.hostile`. Each message and each file must lead to success or to a clear
error in one sentence, within seconds, and leave nothing behind; memory may not grow. Exits 1 if one does not.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.fuzz_files import KINDS, Reader, World
from benchmarks.fuzz_messages import Client, Watch
from piecework.training.methods import METHODS

MOST_GROWN = 16e6  # bytes of a process, after the first fifth of what one system or reader got


def fuzz_messages(systems: list[str], messages: int, seed: int) -> list[str]:
    """Send changed messages to clients of these systems, and print a line for each. Returns what is wrong."""
    watch, wrong, came = Watch(), list[str](), Counter[str]()
    for strategy in systems:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            client = Client(strategy, Path(folder), watch)
            grown = client.attack(-(-messages // len(systems)), seed)
        came += client.came
        wrong += [f"unclear, {count} times: {text}" for text, count in client.unclear.items()]
        wrong += [f"{strategy}: memory grew by {grown / 1e6:.1f} MB"] if grown > MOST_GROWN else []
        took = time.monotonic() - started
        print(f"{strategy}: {dict(client.came)}, memory {grown / 1e6:+.1f} MB, {took:.0f} s", flush=True)
    print(f"{sum(came.values())} messages: {dict(came)}")
    return wrong


def fuzz_files(kinds: list[str], files: int, seed: int) -> list[str]:
    """Give changed files of these kinds to their readers, and print a line for each. Returns what is wrong."""
    wrong, came = list[str](), Counter[str]()
    for kind in kinds:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            reader = Reader(kind, World(Path(folder)))
            grown = reader.attack(-(-files // len(kinds)), seed)
        came += reader.came
        wrong += [f"{kind}: {text}" for text in reader.wrong]
        wrong += [f"{kind}: memory grew by {grown / 1e6:.1f} MB"] if grown > MOST_GROWN else []
        took = time.monotonic() - started
        print(f"{kind}: {dict(reader.came)}, memory {grown / 1e6:+.1f} MB, {took:.0f} s", flush=True)
    print(f"{sum(came.values())} files: {dict(came)}")
    return wrong


def main() -> None:
    """Fuzz what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["messages", "files"])
    parser.add_argument("--messages", type=int, default=100_000, help="of all systems together")
    parser.add_argument("--files", type=int, default=10_000, help="of all kinds together")
    parser.add_argument("--only", default="", help="systems or kinds of files, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.getLogger("piecework").setLevel(logging.CRITICAL)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    only = arguments.only.split(",") if arguments.only else []
    if arguments.what == "messages":
        wrong = fuzz_messages(only or [*METHODS], arguments.messages, arguments.seed)
    else:
        wrong = fuzz_files(only or [*KINDS], arguments.files, arguments.seed)
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
