"""Measure what SpaFL's compact form saves: seconds and peak memory of a local step, against the dense and the masked model.

    python -m benchmarks.spafl_step [--model lenet5] [--batch-size 64] [--densities 0.75,0.5,0.35,0.25] [--steps 60] [--json]

A step is forward, backward and update as a client does it, on one thread; its time is the median of `--steps`. The fraction of
kept filters is the same in every layer except the last, which keeps all. `--densities layers=1,0.6,0.1,1` gives one for each
layer instead. The peak is that of the accounting that enforces budgets; the masked weights are in the store while the compact
form trains.
"""

import argparse
import json
import time
from math import ceil
from statistics import mean, median
from typing import Any

import torch

from piecework.device_profiles.memory import PeakMemory
from piecework.device_profiles.profile import available_memory
from piecework.models.cascade import Blueprint
from piecework.models.compact import layout
from piecework.models.masked import mask_model
from piecework.models.zoo import build_blueprint, usual_input
from piecework.strategies.sparse.spafl.forms import SparseModel, sparse_loss
from piecework.training.accelerator import without_denormals
from piecework.training.loop import MakeLoss, PieceModel, channels_last, single_loss, start, train_step
from piecework.training.memory_cap import keep_heap_tight
from piecework.training.sgd import TrainingConfig


def pruned(blueprint: Blueprint, densities: list[float]) -> SparseModel:
    """Return a model that keeps the first filters of each layer."""
    torch.manual_seed(0)
    model = SparseModel(
        blueprint, range(len(blueprint.atoms)), "head", lambda unit: channels_last(blueprint.build_unit(unit))
    )
    for layer, density in zip(model.layers(), densities, strict=True):
        layer.tau.data[ceil(density * len(layer.tau)) :] = 1.0
    return model


def measured(model: PieceModel, make_loss: MakeLoss, training_config: TrainingConfig, steps: int) -> tuple[float, int]:
    """Return the seconds of a step, and its peak in bytes with weights and momentum."""
    meter = PeakMemory()
    with meter:
        for module in model.units().values():
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.data = tensor.data.clone()
        loss, optimiser = start([model], training_config, make_loss)
        channels, height, width = model.blueprint.input_shape
        z = torch.rand(training_config.batch_size, height, width, channels).permute(
            0, 3, 1, 2
        )  # in the memory format of `Examples`
        y = torch.randint(model.blueprint.num_classes, (training_config.batch_size,))
        train_step(loss, optimiser, z, y)
    taken = []
    with without_denormals():  # as in a client's task
        for _ in range(steps + 2):
            started = time.perf_counter()
            train_step(loss, optimiser, z, y)
            taken.append(time.perf_counter() - started)
    return median(taken[2:]), meter.peak


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--densities", default="0.75,0.5,0.35,0.25")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--budget", type=int, default=24_000_000, help="bytes")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    shape, classes = usual_input(given.model)
    plain = build_blueprint(given.model, num_classes=classes, input_shape=shape)
    whole = mask_model(plain)
    layers = len(SparseModel(whole, range(len(whole.atoms)), "head", whole.build_unit).layers())
    if given.densities.startswith("layers="):
        choices = [[float(each) for each in given.densities.removeprefix("layers=").split(",")]]
    else:
        choices = [[float(each)] * (layers - 1) + [1.0] for each in given.densities.split(",")]
    torch.set_num_threads(1)
    keep_heap_tight(given.budget, available_memory())  # it decides the cost of allocations
    training_config = TrainingConfig(lr=1e-3, momentum=0.9, weight_decay=0.0, batch_size=given.batch_size, epochs=1)
    dense = PieceModel(plain, range(len(plain.atoms)), "head", lambda unit: channels_last(plain.build_unit(unit)))
    base = measured(dense, single_loss, training_config, given.steps)
    rows: list[dict[str, Any]] = [{"form": "dense", "density": 1.0, "seconds": base[0], "bytes": base[1]}]
    rows.append(
        dict(
            zip(
                ("seconds", "bytes"),
                measured(pruned(whole, [1.0] * layers), sparse_loss(0.002), training_config, given.steps),
                strict=True,
            )
        )
    )
    rows[1] |= {"form": "masked", "density": 1.0}
    for densities in choices:
        small, _ = pruned(whole, densities).compact(layout(plain, whole))
        found = measured(small, sparse_loss(0.002), training_config, given.steps)
        rows.append({"form": "compact", "density": mean(densities), "seconds": found[0], "bytes": found[1]})
    if given.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"{row['form']:8} density {row['density']:.3f}  {1e3 * row['seconds']:7.2f} ms, {row['seconds'] / base[0]:.3f} of "
            f"the dense model's  {row['bytes'] / 1e6:8.2f} MB, {row['bytes'] / base[1]:.3f}"
        )


if __name__ == "__main__":
    main()
