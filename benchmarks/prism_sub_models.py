"""Evaluate PriSM's sub-models on the test images, which are what clients train, beside the served and the trained model.

    python -m benchmarks.prism_sub_models RUN [--images 2000] [--draws 4]

RUN is the folder of a finished run of PriSM. Kernels and output channels are drawn as in that run. The served model is composed
of the trained one (strategies/low_rank/prism/server.py). Trained models use statistics of the batch.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch import nn

from piecework import load
from piecework.commands.console import PlainConsole
from piecework.federated_data.datasets import ArrayDataset
from piecework.models.cascade import Blueprint, Cascade
from piecework.models.kernels import decompose, sample
from piecework.models.low_rank import factors, find_computed, is_place, low_rank
from piecework.server_app.records import RunDir
from piecework.strategies.low_rank.prism.settings import PriSMSettings
from piecework.training.examples import as_inputs
from piecework.training.scoring import predictions
from piecework.training.settings import Settings
from piecework.training.setup import blueprint_for, dataset_of

KEEPS = (0.2, 0.4, 0.6, 0.8)
Arrays = Mapping[str, np.ndarray]


def sub_model(
    blueprint: Blueprint, arrays: Arrays, keep: float, settings: Settings, rng: np.random.Generator
) -> Cascade:
    """Return a sub-model of the model with these arrays."""
    channels = settings.of(PriSMSettings).output_channels
    small = low_rank(blueprint, keep, narrow=channels != "all", scattered=channels == "random")
    model, state, rows = Cascade(small), dict(arrays), {}
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    for layer in factors(small):
        sigma, v, u = decompose(state.pop(layer.weight))
        chosen = sample(
            sigma, shapes[layer.v][0], settings.of(PriSMSettings).kappa, rng, settings.of(PriSMSettings).kernel_sampling
        )
        state[layer.v], state[layer.u] = v[chosen], u[:, chosen]
        kept = shapes[layer.u][0]
        rows[layer.weight] = (
            np.sort(rng.choice(len(u), kept, replace=False)) if channels == "random" else np.arange(kept)
        )
        if layer.bias:
            state[layer.bias[0]] = state.pop(layer.bias[1])
    for name, made in find_computed(small).items():
        if is_place(name):
            state[name] = rows[made[0]]
        for axis, weight in enumerate(made if not is_place(name) else ()):
            state[name] = state[name].take(rows[weight], axis) if weight and channels != "all" else state[name]
    model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(state[name])) for name in shapes})
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: ArrayDataset, images: int, batch: int) -> float:
    """Return the fraction of the first test images that is classified correctly."""
    model.eval()
    rows = np.array_split(np.arange(images), max(1, images // batch))
    right = [
        predictions(model(as_inputs(data.test_inputs[each], data))).numpy() == data.test_labels[each] for each in rows
    ]
    return float(np.concatenate(right).mean())


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--images", type=int, default=2000, help="test images")
    parser.add_argument("--draws", type=int, default=4, help="sub-models of each ratio")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run, images = given.run, given.images
    settings, checkpoint = Settings.from_run_config(RunDir(run).settings()), RunDir(run).load_checkpoint()
    if checkpoint is None:
        parser.error(f"{run} has no checkpoint: give the folder of a run with a finished round")
    data = dataset_of(settings)
    blueprint, arrays = blueprint_for(settings, data), {n: a.numpy() for n, a in checkpoint.arrays.items()}
    trained = Cascade(blueprint)
    trained.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    whole = {"1, the served model": load(run, normalise=False).network, "1, the trained model": trained}
    table = Table("keep ratio", "accuracy", "lowest", "highest", box=None)
    for name, model in whole.items():
        table.add_row(name, f"{accuracy(model, data, images, settings.evaluation.batch_size):.1%}", "", "")
    for keep in KEEPS:
        models = (sub_model(blueprint, arrays, keep, settings, np.random.default_rng(n)) for n in range(given.draws))
        found = [accuracy(model, data, images, settings.evaluation.batch_size) for model in models]
        table.add_row(f"{keep:g}", f"{np.mean(found):.1%}", f"{min(found):.1%}", f"{max(found):.1%}")
    PlainConsole().print(table)


if __name__ == "__main__":
    main()
