"""How little memory a step of a whole model takes with `memory.fit`, and what cutting the model takes instead.

    python -m benchmarks.fit [--models preresnet20,resnet18] [--batch 32] [--seconds]

For each model: the bytes of the plain step, and the fewest bytes as a fraction of it, with each way of `memory.fit` and with
some together, each with its FLOPs (x), the MB that it reads and writes, and with `--seconds` its measured time on one thread
(t; disks of this machine), FLOPs and time as multiples of the plain step's. `exact` are the ways that are the plain step bit
for bit and move nothing to a disk, and `all` are all. Then the fractions that the largest piece takes when FeDepth, FedProphet
and ProFL cut the model as finely as they can and train all of it, without `memory.fit` and with those of `exact` and
micro-batches; their steps are clean here too. Inputs are those with which papers run the model. Batch norms keep running
statistics.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from piecework.models.step import with_step
from piecework.models.zoo import build_blueprint, is_token_model, usual_input
from piecework.planning.costs import CostModel, cost_model_for
from piecework.planning.cut import Cut
from piecework.planning.fit import smallest
from piecework.planning.part import Part, whole_model
from piecework.planning.step_cost import fake_batch, fake_examples
from piecework.strategies import find_method
from piecework.strategies.cascade.profl.cut import ProFLCut
from piecework.training.attacks import micro_batches
from piecework.training.loop import start, train_step
from piecework.training.paged import PagedCascade
from piecework.training.pages import PageFiles
from piecework.training.settings import Settings
from piecework.training.sgd import TrainingConfig

MODELS = "preresnet20,resnet18,resnet34,vgg16,lenet5,deit-tiny,lstm-imdb"
EXACT = ("step-in-backward", "recompute-cheap", "recompute")
WAYS = {way: (way,) for way in (*EXACT, "micro-batch")}
WAYS |= {"exact": EXACT, "page": ("page",), "all": (*EXACT, "page", "micro-batch")}
CUTS = ("fedepth", "fedprophet", "profl")
REPEATS = 3


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", action="store_true", help="also run the steps")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'batch ' + str(asked.batch):<14}{'plain':>10}  " + "".join(f"{way:<28}" for way in WAYS) + "  ".join(CUTS))
    for name in asked.models.split(","):
        print(line(name, asked.batch, asked.seconds), flush=True)


def line(name: str, batch: int, timed: bool) -> str:
    """Return the figures of a model."""
    shape, classes = usual_input(name)
    blueprint = build_blueprint(name, num_classes=classes, input_shape=shape, batch_norm="running")
    settings = Settings.from_run_config({"model": name, "training.batch-size": batch})
    costs = cost_model_for(settings, blueprint)
    plain = replace(whole_model(blueprint), pageable=True)
    found = [smallest(costs, plain, ways) for ways in WAYS.values()]
    seconds = [step_seconds(costs, part) for part in (plain, *found)] if timed else []
    cells = [
        cell(costs, plain, part, seconds[n] / seconds[0] if timed else 0.0) for n, part in enumerate(found, start=1)
    ]
    systems = CUTS[:1] if is_token_model(name) else CUTS  # the others attack images, or have basic layers for maps
    fitted = cost_model_for(settings.with_values({"memory.fit": ",".join((*EXACT, "micro-batch"))}), blueprint)
    cuts = [
        " to ".join(f"{largest(each, strategy, settings) / costs.bytes(plain):.2f}" for each in (costs, fitted))
        for strategy in systems
    ]
    return (
        f"{name:<14}{costs.bytes(plain) / 1e6:>7.1f} MB  " + "".join(f"{each:<28}" for each in cells) + "  ".join(cuts)
    )


def cell(costs: CostModel, plain: Part, part: Part, factor: float) -> str:
    """Return a step's fraction of the plain step's bytes, its multiple of the FLOPs, what it moves, and how it fits."""
    cost = costs.trace(part)
    how = f"of {part.micro_batch}" if part.micro_batch else ""
    disk = f"{(cost.bytes_read + cost.bytes_written) / 1e6:.0f} MB" if part.pages else ""
    said = f"{cost.peak_bytes / costs.bytes(plain):.2f} {cost.flops / costs.trace(plain).flops:.2f}x"
    return " ".join(filter(None, (said, disk, f"{factor:.2f}t" if factor else "", how)))


def largest(costs: CostModel, strategy: str, settings: Settings) -> int:
    """Return the bytes of the largest piece when a strategy cuts the model as finely as it can."""
    cut = finest(costs, strategy, settings)
    if isinstance(cut, ProFLCut):  # whose clients also run the frozen blocks, one atom at a time
        return cut.largest()[1]
    return max(costs.bytes(part) for stage in cut.stages for part in stage.parts)


def finest(costs: CostModel, strategy: str, settings: Settings) -> Cut:
    """Return the cut of a model that is as fine as a strategy can, so that every atom is in a piece."""
    cut = find_method(strategy).make_cut(costs.reference, costs, settings.with_values({"strategy": strategy}))
    alone = (
        [cut.needed_bytes(cut.item((atom,))) for atom in range(len(cut.blueprint.atoms))]
        if cut.can.single_atoms
        else []
    )
    return cut.with_smallest(max(cut.min_budget(), *alone, 0))


def step_seconds(costs: CostModel, part: Part) -> float:
    """Return the seconds of the fastest of some steps."""
    training_config = with_step(costs.training_config, part)
    if part.pages:
        return paged_seconds(training_config, part)
    pieces = [part.piece_class(part.blueprint, part.atoms, part.head, part.blueprint.build_unit)]
    loss, optimiser = start(pieces, training_config, part.make_loss)
    z, y = fake_examples(pieces[0], training_config.batch_size, targets=part.targets)
    z = z.normal_() if z.is_floating_point() else z.zero_()
    return fastest(lambda: train_step(loss, optimiser, z, y, None, micro_batches(part.micro_batch)))


def paged_seconds(training_config: TrainingConfig, part: Part) -> float:
    """Return the seconds of the fastest of some paged steps, whose files are on this machine's disk."""
    z = fake_batch(part.blueprint, part.atoms[0], training_config.batch_size)
    z = z.normal_() if z.is_floating_point() else z.zero_()
    y = torch.zeros(len(z), dtype=torch.int64)
    with TemporaryDirectory(dir=Path.cwd()) as folder:
        load, pages = part.blueprint.build_unit, PageFiles(Path(folder))
        cascade = PagedCascade(part.blueprint, part.atoms, part.head, load, training_config, pages)
        return fastest(lambda: cascade.step(z, y))


def fastest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest run."""
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


if __name__ == "__main__":
    main()
