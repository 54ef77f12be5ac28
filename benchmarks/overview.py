"""Draw the README's picture of the demo: what each kind of board trains, and how much memory that takes.

    python -m benchmarks.overview docs/pictures/overview.svg docs/pictures/overview.png

The plan of the demo's settings gives pieces, bytes and budgets. The same drawing is written into each file, in the format that
the file's name ends in.
"""

import argparse
from pathlib import Path
from typing import Any

from piecework.device_profiles.fleet import load_fleet
from piecework.planning.assignment import Planner
from piecework.plans.plan import PlannedTask, planner_for, tasks_of_round
from piecework.plans.question import ask
from piecework.training.settings import Settings

COLOURS = ("#4477AA", "#66CCEE", "#228833", "#CCBB44", "#AA3377")  # Paul Tol's
WHITE_ON = ("#4477AA", "#228833", "#AA3377")
INK, GREY, PALE, RED = "#222222", "#bbbbbb", "#eeeeee", "#cc3311"
CLIENTS = 20  # as `piecework run` has
HEIGHT = 0.6  # of a box; a board's row is 1
NOTE = """Each board trains its pieces one after another (1, 2, ...), the head with every one of them. Red: the board's budget.
The server averages atom by atom. Nobody holds a training step of the whole model (100 %)."""


def main() -> None:
    """Plan and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, nargs="+")
    asked = parser.parse_args()
    settings = Settings.from_run_config({"clients": CLIENTS})
    question = ask(settings)
    planner, (states, *_) = planner_for(load_fleet(settings.fleet), settings, question)
    tasks = tasks_of_round(planner, 0, 1, states, question.examples)
    kinds = {task.state.device: task for task in sorted(tasks, key=lambda task: task.state.budget_bytes)}
    draw(planner, list(kinds.values()), asked.pictures)


def draw(planner: Planner, boards: list[PlannedTask], paths: list[Path]) -> None:
    """Write the picture: a row for the model and one for each board, atoms to the left and memory to the right."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": "piecework", "font.size": 9, "text.color": INK}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.6, 0.5 * len(boards) + 1.2), layout="constrained", facecolor="white")
        model, memory = figure.subplots(1, 2, width_ratios=(5, 2), sharey=True)
        atoms = [atom.name for atom in planner.cut.blueprint.atoms]
        for place, name in enumerate([*atoms, "head"]):
            box(model, 0, place, 1, PALE, name)
        for row, board in enumerate(boards, start=1):
            for number, part in enumerate(board.parts, start=1):
                box(model, row, part.atoms[0], len(part.atoms), COLOURS[(number - 1) % len(COLOURS)], str(number))
            box(model, row, len(atoms), 1, GREY, f"1..{len(board.parts)}" if len(board.parts) > 1 else "1")
            costs = planner.cut.cost_model
            peak, budget = (
                100 * count / costs.reference_bytes
                for count in (max(map(costs.bytes, board.parts)), board.state.budget_bytes)
            )
            memory.barh(row, peak, 0.35, color=COLOURS[0])
            memory.vlines(budget, row - HEIGHT / 2, row + HEIGHT / 2, color=RED, linewidth=2)
        model.set_yticks(range(len(boards) + 1), ["the model", *(board.state.device for board in boards)])
        model.set_xticks([])
        model.set(xlim=(0, len(atoms) + 1), ylim=(len(boards) + 0.5, -0.5))
        memory.set(xlim=(0, 100), xlabel="peak memory, % of a whole step")
        memory.tick_params(left=False, labelleft=False)
        model.spines[:].set_visible(False)
        memory.spines[["top", "left"]].set_visible(False)
        model.tick_params(left=False)
        figure.supxlabel(NOTE, x=0.01, ha="left", fontsize=8)
        for path in paths:
            none = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
            figure.savefig(path, dpi=110, metadata=none)


def box(axes: Any, row: int, first: int, count: int, colour: str, text: str) -> None:
    """Draw a box over `count` atoms, with its text."""
    white = colour in WHITE_ON
    axes.barh(row, count - 0.06, HEIGHT, left=first + 0.03, color=colour)
    axes.text(first + count / 2, row, text, ha="center", va="center", color="white" if white else INK)


if __name__ == "__main__":
    main()
