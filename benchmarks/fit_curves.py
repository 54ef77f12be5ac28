"""Draw memory against time: whole models with `memory.fit`, and the same models cut by FeDepth, FedProphet and ProFL.

    python -m benchmarks.fit_curves docs/fit.svg [--models preresnet20,resnet18] [--batch 32]

A curve has the steps that devices with less and less memory take, with recomputation preferred to micro-batches. A point is a
system that cuts the model as finely as it can: the largest piece's bytes, and the time of a step of every piece and of the
forward passes between them. Hollow points are cuts with `memory.fit`. Bytes and times are multiples of a plain step of the
whole model; times are measured on one thread. The figures are also printed.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.fit import CUTS, finest, largest, step_seconds
from piecework.models.zoo import build_blueprint, usual_input
from piecework.planning.costs import CostModel, cost_model_for
from piecework.planning.fit import cheapest, smallest
from piecework.planning.part import Part, whole_model
from piecework.planning.step_cost import fake_batch
from piecework.training.loop import PieceModel
from piecework.training.settings import Settings

MODELS = "preresnet20,resnet18,vgg16,deit-tiny"
WAYS = ("recompute-cheap", "recompute", "micro-batch")
MARKS = {"fedepth": "o", "fedprophet": "s", "profl": "^"}
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")  # Okabe and Ito's
STEPS = 8  # budgets of a curve
Point = tuple[float, float]  # bytes and seconds, as multiples of the plain step's


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batch", type=int, default=32)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    curves, cuts = {}, {}
    for name in asked.models.split(","):
        settings = Settings.from_run_config({"model": name, "training.batch-size": asked.batch})
        shape, classes = usual_input(name)
        blueprint = build_blueprint(name, num_classes=classes, input_shape=shape, batch_norm="running")
        costs = cost_model_for(settings, blueprint)
        fitted = cost_model_for(settings.with_values({"memory.fit": ",".join(WAYS)}), blueprint)
        plain = whole_model(blueprint)
        unit = costs.bytes(plain), step_seconds(costs, plain)
        curves[name] = [relative(costs.bytes(part), step_seconds(costs, part), unit) for part in steps(costs, plain)]
        print(name, "whole", *shown(curves[name]), flush=True)
        for strategy in CUTS:
            own = settings.with_values({"strategy": strategy})
            finest_cuts = [finest(each, strategy, own) for each in (costs, fitted)]
            pieces = [[part for stage in cut.stages for part in stage.parts] for cut in finest_cuts]
            sizes = [largest(each, strategy, own) for each in (costs, fitted)]
            points = [relative(n, cascade_seconds(costs, parts), unit) for n, parts in zip(sizes, pieces, strict=True)]
            cuts[name, strategy] = points
            print(name, strategy, *shown(points), flush=True)
    draw(curves, cuts, asked.picture)


def steps(costs: CostModel, plain: Part) -> Iterator[Part]:
    """Yield the different steps of devices whose memory falls evenly from the plain step's to the least."""
    full, least = costs.bytes(plain), costs.bytes(smallest(costs, plain, WAYS))
    seen = None
    for n in range(STEPS + 1):
        part = cheapest(costs, plain, full - (full - least) * n // STEPS, WAYS) or smallest(costs, plain, WAYS)
        if part != seen:
            yield part
        seen = part


def cascade_seconds(costs: CostModel, parts: list[Part]) -> float:
    """Return the seconds of a step of every part, and of a forward pass of each but the last, which makes features."""
    return sum(step_seconds(costs, part) for part in parts) + sum(forward_seconds(costs, part) for part in parts[:-1])


@torch.no_grad()
def forward_seconds(costs: CostModel, part: Part) -> float:
    """Return the seconds of a forward pass in evaluation mode."""
    piece = PieceModel(part.blueprint, part.atoms, None, part.blueprint.build_unit)
    piece.train(False)
    z = fake_batch(part.blueprint, part.atoms[0], costs.training_config.batch_size)
    z = z.normal_() if z.is_floating_point() else z.zero_()
    return fastest(lambda: piece.features(z))


def fastest(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the seconds of the fastest run."""
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def relative(found: int, seconds: float, unit: tuple[int, float]) -> Point:
    """Return bytes and seconds as multiples of the unit's."""
    return found / unit[0], seconds / unit[1]


def shown(points: list[Point]) -> list[str]:
    """Return points as text."""
    return [f"{x:.2f} {y:.2f}t" for x, y in points]


def draw(curves: dict[str, list[Point]], cuts: dict[tuple[str, str], list[Point]], path: Path) -> None:
    """Write the picture."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for colour, (name, points) in zip(COLOURS, curves.items(), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, marker=".", label=f"{name}, whole")
        for strategy, mark in MARKS.items():
            for (x, y), face in zip(cuts[name, strategy], (colour, "none"), strict=True):
                axes.plot(x, y, mark, color=colour, markerfacecolor=face, markersize=7)
    marks = [
        Line2D([], [], color="#57606a", marker=mark, linestyle="", label=f"{s}: pieces") for s, mark in MARKS.items()
    ]
    hollow = Line2D([], [], color="#57606a", marker="o", markerfacecolor="none", linestyle="", label="pieces, with fit")
    axes.legend(handles=[*axes.get_legend_handles_labels()[0], *marks, hollow], fontsize=8, frameon=False)
    axes.set(xlabel="memory of a step, as a fraction of the plain step of the whole model", ylabel="time of a batch")
    axes.set_xlim(0, 1.05)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "piecework"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
