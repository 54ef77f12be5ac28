"""Draw memory against time for three kinds of storage: whole models with `memory.fit`, and the same models cut by systems.

    python -m benchmarks.fit_curves docs/pictures/fit.svg [--models preresnet20,resnet18] [--batch 32] [--flops 8e9]

A curve has the steps that devices with less and less memory take with `memory.fit = auto`: the fastest that fits. A point is a
system that cuts the model as finely as it can: the largest piece's bytes, and the time of a step of every piece, of the forward
passes between them, and of writing and reading the features that these make. Bytes and times are multiples of a plain step of
the whole model. Times are predicted, as plans do, for a device that computes `--flops` FLOPs a second and moves files at the
speed of its storage. The figures are also printed, and for each system how its time compares with the whole model's in as much
memory.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

from benchmarks.fit import CUTS, finest, largest
from piecework.models.zoo import build_blueprint, usual_input
from piecework.planning.costs import CostModel, cost_model_for
from piecework.planning.fit import cheapest, seconds_of, smallest
from piecework.planning.page_plan import Speed
from piecework.planning.part import Part, whole_model
from piecework.training.settings import Settings
from piecework.training.settings.shared import WAYS

MODELS = "preresnet20,resnet18,vgg16,deit-tiny"
AUTO = ("auto", *WAYS)
STORAGE = {"SD card, 20 MB/s": 20e6, "eMMC, 80 MB/s": 80e6, "NVMe, 1 GB/s": 1e9}
MARKS = {"fedepth": "o", "fedprophet": "s", "profl": "^"}
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")  # Okabe and Ito's
TICKS = (1, 1.5, 2, 3, 4, 5)
STEPS = 10  # budgets of a curve
Point = tuple[float, float]  # bytes and seconds, as multiples of the plain step's
Panel = tuple[dict[str, list[Point]], dict[tuple[str, str], Point]]  # curves by model, points by model and system


def main() -> None:
    """Predict, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--flops", type=float, default=8e9)
    asked = parser.parse_args()
    panels = {}
    for storage, disk in STORAGE.items():
        panels[storage] = panel(asked.models.split(","), asked.batch, Speed(asked.flops, disk), storage)
    draw(panels, asked.picture)


def panel(models: list[str], batch: int, speed: Speed, storage: str) -> Panel:
    """Return the curves and points of one kind of storage, and print them."""
    curves: dict[str, list[Point]] = {}
    cuts: dict[tuple[str, str], Point] = {}
    for name in models:
        settings = Settings.from_run_config({"model": name, "training.batch-size": batch})
        shape, classes = usual_input(name)
        blueprint = build_blueprint(name, num_classes=classes, input_shape=shape, batch_norm="running")
        costs = cost_model_for(settings, blueprint)
        plain = replace(whole_model(blueprint), pageable=True)
        unit = costs.bytes(plain), seconds_of(costs, plain, speed)
        curves[name] = [relative(costs, part, speed, unit) for part in steps(costs, plain, speed)]
        print(f"{name}: {storage}:", *(f"{x:.2f} {y:.2f}t" for x, y in curves[name]), flush=True)
        for strategy in CUTS:
            own = settings.with_values({"strategy": strategy})
            parts = [part for stage in finest(costs, strategy, own).stages for part in stage.parts]
            size, seconds = largest(costs, strategy, own), cascade_seconds(costs, parts, speed)
            cuts[name, strategy] = size / unit[0], seconds / unit[1]
            whole = cheapest(costs, plain, size, AUTO, speed)
            beside = f"{seconds_of(costs, whole, speed) / unit[1]:.2f}t ({whole.step})" if whole else "does not fit"
            print(f"  {strategy}: {size / unit[0]:.2f} {seconds / unit[1]:.2f}t; whole: {beside}", flush=True)
    return curves, cuts


def relative(costs: CostModel, part: Part, speed: Speed, unit: tuple[int, float]) -> Point:
    """Return a step's bytes and seconds as multiples of the unit's."""
    return costs.bytes(part) / unit[0], seconds_of(costs, part, speed) / unit[1]


def steps(costs: CostModel, plain: Part, speed: Speed) -> Iterator[Part]:
    """Yield the different steps of devices whose memory falls evenly from the plain step's to the least."""
    full, last = costs.bytes(plain), smallest(costs, plain, AUTO)
    least, seen = costs.bytes(last), None
    for n in range(STEPS + 1):
        part = cheapest(costs, plain, full - (full - least) * n // STEPS, AUTO, speed) or last
        if part != seen:
            yield part
        seen = part


def cascade_seconds(costs: CostModel, parts: list[Part], speed: Speed) -> float:
    """Return the seconds of a step of every part, of a forward pass of each but the last, and of moving its features twice."""
    batch = costs.training_config.batch_size
    between = parts[:-1]
    flops = sum(costs.trace(part).flops for part in parts) + sum(part.forward_flops * batch for part in between)
    features = sum(4 * batch * prod(part.blueprint.atoms[part.atoms[-1]].shape) for part in between)
    return flops / speed.flops + 2 * features / speed.disk


def draw(panels: dict[str, Panel], path: Path) -> None:
    """Write the picture: one panel for each kind of storage."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    for axes, (storage, (curves, cuts)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for colour, (name, points) in zip(COLOURS, curves.items(), strict=False):
            axes.plot(*zip(*points, strict=True), color=colour, marker=".", label=f"{name}, whole")
            for strategy, mark in MARKS.items():
                axes.plot(*cuts[name, strategy], mark, color=colour, markersize=7)
        axes.set_title(storage, fontsize=10)
        axes.set(xlabel="memory / the plain step's", xlim=(0, 1.05), yscale="log", ylim=(0.9, 5))
        axes.set_yticks(TICKS, map(str, TICKS))
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    lines = figure.axes[0].get_legend_handles_labels()[0]
    marks = [
        Line2D([], [], color="#57606a", marker=mark, linestyle="", label=f"{s}: pieces") for s, mark in MARKS.items()
    ]
    figure.axes[0].set_ylabel("time of a batch / the plain step's")
    figure.legend(handles=[*lines, *marks], fontsize=8, frameon=False, loc="outside lower center", ncols=7)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "piecework"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
