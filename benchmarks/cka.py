"""How alike two runs' models see the same test examples, block by block: linear CKA, as in FeDepth's Figure 6.

    python -m benchmarks.cka RUN RUN [--examples 500] [--json]

CKA is by Simon Kornblith and others, "Similarity of Neural Network Representations Revisited", ICML 2019, Eq. 3 with a linear
kernel: 1 for features that differ by a rotation and a scale, 0 for unrelated ones. The models may be of different widths, but
have as many blocks. The paper compares clients' models; here each run leaves one: for two clients, run each alone
(`clients = 1`) on its own data.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from piecework import load
from piecework.commands.console import PlainConsole
from piecework.models.cascade import Cascade
from piecework.server_app.records import RunDir
from piecework.training.examples import as_inputs
from piecework.training.settings import Settings
from piecework.training.setup import dataset_of

BATCH = 100


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear CKA of features x[N, F] and y[N, G] of the same examples; 0 if one of them is constant."""
    x, y = (z.double() - z.double().mean(0) for z in (x, y))
    of_x, of_y = x @ x.T, y @ y.T  # |Y'X|^2 is the sum of their products, and takes N^2 values instead of F x G
    size = of_x.norm() * of_y.norm()
    return float((of_x * of_y).sum() / size) if size else 0.0


@torch.no_grad()
def features(network: Cascade, inputs: Tensor) -> Iterator[Tensor]:
    """Yield the output of each atom, and of the head, as z[N, F], in evaluation mode, one after the other."""
    network.eval()
    z = inputs
    for unit in (*network.atoms, network.head):
        z = torch.cat([unit(part) for part in z.split(BATCH)])
        yield z.flatten(1)


def compare(first: Cascade, second: Cascade, inputs: Tensor) -> list[float]:
    """Return the CKA of each atom, and of the head. Raises ValueError if one of the models has more atoms."""
    if len(first.atoms) != len(second.atoms):
        raise ValueError(f"the models have {len(first.atoms)} and {len(second.atoms)} blocks: give two with as many")
    pairs = zip(features(first, inputs), features(second, inputs), strict=True)
    return [linear_cka(x, y) for x, y in pairs]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--examples", type=int, default=500, help="the first test examples of the first run's data set")
    parser.add_argument("--json", action="store_true", help="print a list of numbers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    one, other = (RunDir(run).settings() for run in given.runs)
    for key in ("dataset", "data.pixel-scale", "data.image-size"):
        if one[key] != other[key]:
            parser.error(
                f"{key} is {one[key]!r} in the first run and {other[key]!r} in the second: they see other inputs"
            )
    data = dataset_of(Settings.from_run_config(one))
    inputs = as_inputs(data.test_inputs[np.arange(min(given.examples, len(data.test_inputs)))], data)
    first, second = (load(run, normalise=False).network for run in given.runs)
    found = compare(first, second, inputs)
    if given.json:
        print(json.dumps(found))
        return
    table = Table("block", "linear CKA", box=None)
    for number, value in enumerate(found):
        table.add_row(str(number) if number < len(first.atoms) else "logits", f"{value:.3f}")
    PlainConsole().print(table)


if __name__ == "__main__":
    main()
