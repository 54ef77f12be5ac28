"""Measure what a round costs the head of a Ray cluster: seconds for each client, by model, and so how many clients a second.

    python -m benchmarks.head [--models lenet5,resnet18x0.5] [--strategies fedavg,heterofl] [--asked 10,40] [--rounds 3]
                              [--json]

The run is real, with the engine `ray` and one worker, but this trains only once: it then answers every task with the update
that it has. So the head does all that it does. `x0.5` is the width of a model. Its data, four images of 32x32 a client, are
random. The head's milliseconds for a client are:

    send     its message is built, taken apart, and given to a node
    share    its arrays are hashed, and put into Ray's store if they are not there yet
    receive  the answer is copied from there, and taken apart
    check    its arrays are read, and compared with the model; it is recorded
    add      it is added to the running sum

A client's costs are how much longer a round takes with the second number of `--asked` than with the first, for each client
more; `a round` is what is left then. Seconds in which the head waits for the worker are left out. What a network takes is left
out too: `MB/s in` are the answers of so many clients a second. Seconds are medians over the rounds after the first.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from piecework.engines.cluster.address import protect

if TYPE_CHECKING:
    from benchmarks.head_run import Costs

STEPS = ("send", "share", "receive", "check", "add")
HEADS = ("model", "MB", "strategy", *(f"{step}, ms" for step in STEPS), "a round, s", "clients/s", "MB/s in")


def line(found: "Costs") -> str:
    """Return a row of the table."""
    milliseconds = [f"{1e3 * max(0.0, each):.1f}" for each in (getattr(found, step) for step in STEPS)]
    rest = [f"{found.round:.2f}", f"{found.clients:.1f}", f"{found.clients * found.bytes / 1e6:.0f}"]
    return f"| {' | '.join([found.model, f'{found.megabytes:.2f}', found.strategy, *milliseconds, *rest])} |"


def main() -> None:
    """Print a line for each model and strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="lenet5x0.3,lenet5,resnet18x0.15,resnet18x0.5,resnet18")
    parser.add_argument("--strategies", default="fedavg")
    parser.add_argument("--asked", default="10,40", help="two numbers of clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    asked = [int(each) for each in options.asked.split(",")]
    protect()
    from benchmarks.head_run import costs, write_images

    if not options.json:
        print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        write_images(Path(temporary) / "random.npz", max(asked))
        for strategy in options.strategies.split(","):
            for model in options.models.split(","):
                found = costs(model, strategy, asked, options.rounds, Path(temporary))
                print(json.dumps(found._asdict()) if options.json else line(found), flush=True)


if __name__ == "__main__":
    main()
