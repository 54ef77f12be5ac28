"""Draw the picture of each system's card: what four boards of different memory train of one model, and what it takes.

    python -m benchmarks.cards docs/pictures/systems [--only fedepth,prism]

The plan of the demo's model on the boards of benchmarks/cards.toml gives parts, bytes and budgets.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from piecework.device_profiles.fleet import load_fleet
from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.assignment import Planner
from piecework.planning.part import Part
from piecework.plans.plan import PlannedTask, planner_for, tasks_of_round
from piecework.plans.question import ask
from piecework.training.methods import METHODS
from piecework.training.settings import Settings

COLOURS = ("#4477AA", "#66CCEE", "#228833", "#CCBB44", "#EE6677", "#AA3377")  # Paul Tol's
WHITE_ON = ("#4477AA", "#228833", "#AA3377")
INK, PALE, RED = "#222222", "#eeeeee", "#cc3311"
CLIENTS, HEIGHT = 8, 0.76
SETTINGS: dict[str, dict[str, Any]] = {  # what a system needs to be planned
    "feddf": {"model": "cnn3", "feddf.family": "convnet", "data.public-fraction": 0.1},
    "fedet": {
        "model": "resnet18",
        "feddf.family": "resnet10",
        "data.public-fraction": 0.1,
    },
}
NOTE = """A box is what a board trains of a layer in a round. Its height is the share of the layer's weights.
Its numbers are the pieces in their order, or the stages of the run.{}
Bars: memory, % of a step of the whole model. Red: the board's budget."""
ROTATES = " Dashed: other channels, kernels or nets in each round."

Shares = dict[int, tuple[float, tuple[int, ...]]]  # of each layer's place: its trained share, and the numbers


def main() -> None:
    """Draw the systems that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="systems, separated by commas")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name in asked.only.split(",") if asked.only else METHODS:
        draw(name, asked.folder / f"{name}.svg")


def draw(name: str, path: Path) -> None:
    """Draw a system's picture into an SVG file."""
    import matplotlib
    from matplotlib.figure import Figure

    planner, boards = plan(name)
    layers = [atom.name for atom in planner.cut.blueprint.atoms]
    rotates = planner.cut.can.rotates if hasattr(planner.cut, "can") else METHODS[name].can.rotates
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "piecework",
        "font.size": 11 if len(layers) < 8 else 8,
        "text.color": INK,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.6, 4.0), layout="constrained", facecolor="white")
        model, memory = figure.subplots(1, 2, width_ratios=(5, 2), sharey=True)
        for place, layer in enumerate([*layers, "head"]):
            box(model, 0, (place, 1), 1.0, PALE, layer)
        found = [shares_of(planner, [task.parts for task in tasks]) for tasks in boards.values()]
        several = len({number for shares in found for _, numbers in shares.values() for number in numbers}) > 1
        for row, (tasks, shares) in enumerate(zip(boards.values(), found, strict=True), start=1):
            for places, share, numbers in runs_of(shares):
                text = written(numbers) if several else ""
                box(model, row, places, share, COLOURS[(numbers[0] - 1) % len(COLOURS)], text, dashed=rotates)
            if not shares:
                model.text(0.1, row, "nothing: no part fits", va="center", color=RED)
            draw_memory(memory, row, planner, tasks)
        model.set_yticks(range(len(boards) + 1), ["the model", *(f"board {each}" for each in boards)])
        model.set_xticks([])
        model.set(xlim=(0, len(layers) + 1), ylim=(len(boards) + 0.5, -0.5))
        memory.set(xlim=(0, 185), xlabel="memory, %")
        memory.axvline(100, color=INK, linewidth=0.8, linestyle=":")
        memory.tick_params(left=False, labelleft=False)
        model.tick_params(left=False)
        model.spines[:].set_visible(False)
        memory.spines[["top", "left", "right"]].set_visible(False)
        figure.supxlabel(NOTE.format(ROTATES if rotates else ""), x=0.01, ha="left", fontsize=9)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
    text = path.read_text("utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def plan(name: str) -> tuple[Planner, dict[str, list[PlannedTask]]]:
    """Return the planner of a system on the boards, and for each board its tasks, one for each stage."""
    fleet = str(Path(__file__).parent / "cards.toml")
    values = {"strategy": name, "clients": CLIENTS, "fleet": fleet, "memory.model": "traced"}
    settings = Settings.from_run_config(values | SETTINGS.get(name, {}))
    question = ask(settings)
    planner, (states, *_) = planner_for(load_fleet(fleet), settings, question)
    boards = defaultdict(list)
    for stage in range(len(planner.cut.stages)):
        kinds = {task.state.device: task for task in tasks_of_round(planner, stage, 1, states, question.examples)}
        for device, task in kinds.items():
            boards[device].append(task)
    return planner, dict(boards)


def shares_of(planner: Planner, stages: list[tuple[Part, ...]]) -> Shares:
    """Return what a board trains of each layer: the largest share of its weights, and in which pieces or stages."""
    full = planner.cut.blueprint
    places = {atom.name: place for place, atom in enumerate(full.atoms)} | {"head": len(full.atoms)}
    shares: Shares = {}
    numbered = [(number, part) for number, parts in enumerate(stages, start=1) for part in parts]
    if len(stages) == 1:
        numbered = list(enumerate(stages[0], start=1))
    for number, part in numbered:
        for unit, layer in units_of(part):
            if layer not in places or unit not in part.learned:
                continue
            place = places[layer]
            known, numbers = shares.get(place, (0.0, ()))
            share = max(known, share_of(part, unit, full, place))
            shares[place] = (share, tuple(sorted({*numbers, number})))
    return dict(sorted(shares.items()))


def units_of(part: Part) -> Iterable[tuple[str, str]]:
    """Return the units of a part, with the name of the layer of each."""
    for atom in part.atoms:
        yield f"atoms.{atom}", part.blueprint.atoms[atom].name
    yield part.head, "head"


def share_of(part: Part, unit: str, full: Blueprint, place: int) -> float:
    """Return the share of a layer's weights that a part has, at most 1."""
    of = "head" if place == len(full.atoms) else f"atoms.{place}"
    whole = layer_statistics(full, of).parameters
    return min(1.0, part.copies * layer_statistics(part.blueprint, unit).parameters / whole) if whole else 1.0


def runs_of(shares: Shares) -> Iterable[tuple[tuple[int, int], float, tuple[int, ...]]]:
    """Return boxes over neighbouring layers with as large a share in the same pieces: place and count, share, numbers."""
    for (numbers, _), group in groupby(shares.items(), key=lambda item: (item[1][1], round(item[1][0], 2))):
        found = list(group)
        start = found[0][0]
        while found:
            count = next((at for at, (place, _) in enumerate(found) if place != start + at), len(found))
            yield (start, count), found[0][1][0], numbers
            found = found[count:]
            start = found[0][0] if found else 0


def written(numbers: tuple[int, ...]) -> str:
    """Return numbers as text: 3, 1..4, or 1, 3."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}..{numbers[-1]}"
    return ", ".join(map(str, numbers))


def draw_memory(axes: Any, row: int, planner: Planner, tasks: list[PlannedTask]) -> None:
    """Draw the largest step of a board beside its budget."""
    costs = planner.cut.cost_model
    peaks = [costs.bytes(part) for task in tasks for part in task.parts]
    scale = 100 / costs.reference_bytes
    axes.barh(row, scale * max(peaks, default=0), 0.35, color=COLOURS[0])
    axes.vlines(scale * tasks[0].state.budget_bytes, row - 0.3, row + 0.3, color=RED, linewidth=2)


def box(
    axes: Any, row: int, places: tuple[int, int], share: float, colour: str, text: str, *, dashed: bool = False
) -> None:
    """Draw a box over `count` layers from `first` on, as high as the share, with its text."""
    first, count = places
    left, bottom = first + 0.03, row + HEIGHT / 2
    if share < 0.995:
        axes.bar(left, -HEIGHT, count - 0.06, bottom, align="edge", fill=False, edgecolor="#bbbbbb", linewidth=0.8)
    line = {"edgecolor": INK, "linestyle": "--", "linewidth": 1.0} if dashed else {}
    axes.bar(left, -HEIGHT * share, count - 0.06, bottom, align="edge", color=colour, **line)
    inside = share > 0.45
    axes.text(
        first + count / 2,
        bottom - HEIGHT * (share / 2 if inside else (1 + share) / 2),
        text,
        ha="center",
        va="center",
        color="white" if colour in WHITE_ON and inside else INK,
    )


if __name__ == "__main__":
    main()
