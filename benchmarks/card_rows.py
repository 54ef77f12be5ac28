"""What the pictures of the systems' cards show: the program's own plan of one small fleet, as rows of boxes.

cards.py draws them. A row is what a board does in one step, stage or round.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.profile import DeviceState
from piecework.models.cascade import unit_of
from piecework.models.layer_statistics import layer_statistics
from piecework.models.width import shapes
from piecework.planning.assignment import Context
from piecework.planning.part import Part
from piecework.plans.parts import fractions, union, weigh
from piecework.plans.plan import PlannedTask, planner_for, tasks_of_round
from piecework.plans.question import ask
from piecework.training.methods import METHODS
from piecework.training.settings import Settings

USUAL = {"A": 0.57, "B": 0.7, "C": 0.9, "D": 1.7}  # memory of the boards, of a step of the whole model
SMALL = {"A": 0.15, "B": 0.3, "C": 0.6, "D": 1.7}  # for systems that also use little memory
FEW_SMALL = {"A": 0.15, "B": 0.6, "C": 1.7}  # where a board has several rows
FEW = {"A": 0.57, "B": 0.8, "C": 1.7}
CASCADE = {"A": 0.57, "B": 0.77, "C": 1.2}
FLEETS = {
    **dict.fromkeys(["allsmall", "fjord", "heterofl"], SMALL),
    **dict.fromkeys(["fedrolex", "feddrop", "splitmix"], FEW_SMALL),
    **dict.fromkeys(["fedepth", "m-fedepth", "fedprophet"], CASCADE),
    **dict.fromkeys(["slt", "cocofl", "prism"], FEW),
    **dict.fromkeys(["feddf", "fedet"], FEW_SMALL),
    "profl": {"A": 0.57, "B": 0.9, "C": 1.7},
    "origdrop": {"A": 0.2, "B": 0.4, "C": 0.6, "D": 1.7},
    "depthfl": {"A": 0.57, "B": 0.9, "C": 1.4, "D": 2.2},
}
SPEED = 2e9  # FLOP/s of the first board; each further one is twice as fast
ROUNDS = {"fedrolex": (1, 4, 7), **dict.fromkeys(["feddrop", "splitmix", "prism", "cocofl"], (1, 2, 3))}
FAMILY = {"model": "resnet18", "feddf.family": "resnet10,cnn3", "data.public-fraction": 0.1}
OWN = {"feddf": FAMILY, "fedet": FAMILY}  # settings
MB = 1e6
Runs = tuple[tuple[float, float], ...]  # of the channels that are filled, as fractions of a box from its top
ALL: Runs = ((0.0, 1.0),)


@dataclass(frozen=True)
class Cell:
    """A box in a column, or between two columns: what happens to this piece of the model there."""

    place: float
    width: float
    kind: str
    runs: Runs = ALL
    text: str = ""


@dataclass
class Row:
    """What a board does in one step, stage or round; `peak` is of a step of the whole model. Without cells it does nothing."""

    number: str = ""
    cells: list[Cell] = field(default_factory=list)
    peak: float = 0.0
    sent: tuple[int, int] | None = None
    note: str = ""


@dataclass
class Board:
    """A board, its memory in bytes and as a fraction of a step of the whole model, and its rows."""

    name: str
    memory: int
    budget: float
    trains: str
    rows: list[Row]


class Picture:
    """What the picture of one system shows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fleet = FLEETS.get(name, USUAL)
        links = {"bandwidth": 1.25e6, "disk-bandwidth": 2e7}
        table = [
            {"name": board, "memory-ratio": ratio, "flops": SPEED * 2**n, **links}
            for n, (board, ratio) in enumerate(self.fleet.items())
        ]
        fleet = json.dumps({"name": "picture", "assignment": "round-robin", "device": table})
        self.settings = Settings.from_run_config(
            {"clients": len(table), "strategy": name, "fleet": fleet, "num-rounds": 20, **OWN.get(name, {})}
        )
        self.question = ask(self.settings)
        planner, (self.states, *_) = planner_for(load_fleet(fleet), self.settings, self.question)
        self.method: Any = planner
        self.cut: Any = planner.cut
        self.atoms = [atom.name for atom in self.cut.blueprint.atoms]

    @cached_property
    def columns(self) -> list[str]:
        """The names of the model's parts in forward order, the head last."""
        return [*self.atoms, "head"]

    @property
    def title(self) -> str:
        """What stands above many columns."""
        return "architectures of several sizes"

    @property
    def server(self) -> list[Cell]:
        """What the server trains, in systems that distil."""
        if "feddf" not in METHODS[self.name].tables:
            return []
        names = list(self.cut.names)
        trained = names[:1] if self.name == "fedet" else names
        width = len(self.columns) / len(trained)
        return [Cell(n * width, width, "server", ALL, name) for n, name in enumerate(trained)]

    @property
    def unit(self) -> float:
        """The bytes in which messages are given."""
        rows = [row for board in self.boards for row in board.rows]
        return MB if max(max(row.sent or (0,)) for row in rows) > MB else 1e3

    @cached_property
    def boards(self) -> list[Board]:
        """The boards with what they do, by memory."""
        stages = range(len(self.cut.stages))
        tasks = [tasks_of_round(self.method, stage, 1, self.states, self.question.examples) for stage in stages]
        return [self.board(client, [of_stage[client] for of_stage in tasks]) for client in range(len(self.states))]

    def board(self, client: int, tasks: list[PlannedTask]) -> Board:
        """Return a board with what it does in each stage, or with each part, or in several rounds."""
        state = self.states[client]
        if len(tasks) > 1:
            rows = [self.row(client, task, task.parts, stage) for stage, task in enumerate(tasks)]
            rows = [replace(row, number=stage_number(self.cut.stages[n].name)) for n, row in enumerate(rows)]
        elif len(tasks[0].parts) > 1:
            rows = [self.row(client, tasks[0], [part]) for part in tasks[0].parts]
            rows = [replace(row, number=str(n), sent=None) for n, row in enumerate(rows, start=1)]
            rows[0].sent = tasks[0].message_bytes
        elif tasks[0].parts:
            rounds = ROUNDS.get(self.name, (1,))
            rows = [self.row(client, tasks[0], tasks[0].parts, 0, number) for number in rounds]
            rows = [replace(row, number=str(n) if len(rounds) > 1 else "") for n, row in zip(rounds, rows, strict=True)]
        else:
            rows = [self.row(client, tasks[0], ())]
        budget = state.budget_bytes
        return Board(
            f"board {state.device}", budget, budget / self.cut.cost_model.reference_bytes, self.share(tasks), rows
        )

    def share(self, tasks: Iterable[PlannedTask]) -> str:
        """Return how much of the run's model the tasks train."""
        if "feddf" in METHODS[self.name].tables:
            return ""
        full = self.cut.blueprint
        sizes = {unit: layer_statistics(full, unit).parameters for unit in full.units()}
        found = union(fractions(full, task.parts) for task in tasks)
        if self.name == "cocofl":  # of whose network the other layers are frozen
            found = {
                unit: share for unit, share in found.items() if any(unit in p.covered for t in tasks for p in t.parts)
            }
        trained = 100 * weigh(found, sizes)
        return f"trains {trained:.0f} %" if trained else ""

    def row(self, client: int, task: PlannedTask, parts: Iterable[Part], stage: int = 0, number: int = 1) -> Row:
        """Return what a client does with some parts of its task."""
        parts, costs = list(parts), self.cut.cost_model
        if not parts:
            what = "is not asked" if self.method.asks == "able" else "refuses"
            return Row(note=f"{what}: a step takes {100 * task.needed / costs.reference_bytes:.0f} %")
        if self.name == "cocofl":  # a plan has the first round alone
            parts = [self.cut.part(self.assigned(client, number).items[0])]
        peak = max(task.needed if len(task.parts) == 1 else 0, *map(costs.bytes, parts))
        row = Row(peak=peak / costs.reference_bytes, sent=self.cut.traffic(parts).bytes)
        chosen = self.chosen(self.states[client], client, number)
        for part in parts:
            kind = self.kind(part)
            frozen = self.frozen(task.state, client, stage, part)
            row.cells += [Cell(atom, 1, "frozen") for atom in frozen]
            row.cells += self.cells(part, kind, chosen)
        return row

    def kind(self, part: Part) -> str:
        """Return how the units of a part are trained."""
        if self.name in ("fedprophet", "jfat", "fedrbn"):
            return "trained" if part.clean else "attacked"
        return {"spafl": "kept", "local": "kept", "fedpm": "masked"}.get(self.name, "trained")

    def frozen(self, state: DeviceState, client: int, stage: int, part: Part) -> list[int]:
        """Return the atoms that run before the part, and are not trained."""
        if not self.cut.can.stages or not part.atoms:
            return []
        key = self.cut.stages[stage].key
        assigned = self.method.assign(Context(state, stage=key, client=client, clients=len(self.states)))
        named = {int(unit.removeprefix("atoms.")) for unit in assigned.frozen}
        return sorted(named - set(part.atoms)) or [atom for atom in range(part.atoms[0]) if atom < len(self.atoms)]

    def cells(self, part: Part, kind: str, chosen: Mapping[str, Runs]) -> list[Cell]:
        """Return the boxes of a part: its atoms, its head, and what stands in for the rest of the model."""
        if "feddf" in METHODS[self.name].tables:
            return self.family(part)
        own = [atom for atom in part.atoms if atom < len(self.atoms)]
        units = {f"atoms.{atom}": atom for atom in own} | ({"head": len(self.atoms)} if part.head == "head" else {})
        cells = [
            Cell(place, 1, kind if unit in part.learned else "int8", chosen.get(unit) or self.width(part, unit))
            for unit, place in units.items()
        ]
        if self.name == "depthfl":
            ends = [block[-1] for block in self.cut.blocks[:-1] if block[-1] in own]
            return cells + [Cell(end + 0.72, 0.24, "extra") for end in ends]
        if part.head != "head":
            cells.append(Cell(own[-1] + 1, 0.5, "extra"))
        extra = [atom for atom in part.atoms if atom >= len(self.atoms)]  # ProFL's basic layers
        blocks = self.cut.blocks[-len(extra) :] if extra else []
        return cells + [Cell(block[0], len(block), "extra") for block in blocks]

    def family(self, part: Part) -> list[Cell]:
        """Return the boxes of a model of another architecture, over the whole width."""
        width = len(self.columns) / (len(part.atoms) + 1)
        boxes = [Cell(n * width, width, "trained") for n in range(len(part.atoms) + 1)]
        middle = len(boxes) // 2
        return [replace(box, text=part.blueprint.name if n == middle else "") for n, box in enumerate(boxes)]

    def assigned(self, client: int, number: int) -> Any:
        """Return the client's assignment in a round."""
        return self.method.assign(Context(self.states[client], client=client, clients=len(self.states), round=number))

    def width(self, part: Part, unit: str) -> Runs:
        """Return the first channels of a narrower model; of the head its inputs."""
        full, own = (weight_shape(each, unit) for each in (self.cut.blueprint, part.blueprint))
        axis = 1 if unit == "head" else 0
        if len(full) < 2 or len(own) < 2 or full == own:
            return ALL
        return ((0.0, min(1.0, own[axis] / full[axis])),)

    def chosen(self, state: DeviceState, client: int, number: int) -> dict[str, Runs]:
        """Return the channels, kernels or base nets that a client has in a round, by unit; none if the method has no choice."""
        ctx = Context(state, client=client, place=client, clients=len(self.states), round=number)
        if self.name == "splitmix":
            nets, count = self.method.nets(ctx, self.cut.nets_of(state)), self.cut.count
            return dict.fromkeys(self.cut.blueprint.units(), tuple((net / count, (net + 1) / count) for net in nets))
        if not hasattr(self.method, "select"):
            return {}
        if "prism" in METHODS[self.name].tables and self.name != "origdrop":
            return self.kernels(replace(ctx, arrays=self.arrays), self.cut.level_of(state))
        indices, full = self.method.indices(ctx, self.cut.level_of(state)), self.method.full
        found: dict[str, Runs] = {}
        for name, where in indices.items():
            unit, axis = (unit_of(name), int(name.startswith("head")))
            if len(where) > 1:
                found.setdefault(unit, runs_of(where[axis], full[name][axis]))
        return self.nested(found, self.cut.level_of(state)) if self.name == "fjord" else found

    def nested(self, found: dict[str, Runs], level: int) -> dict[str, Runs]:
        """Return FjORD's channels, split where narrower nets end."""
        ratios = [0.0, *sorted(self.cut.ratios[level:])]
        return dict.fromkeys(found, tuple(pairwise(ratios)))

    @cached_property
    def arrays(self) -> ArrayRecord:
        """The initial model."""
        return ArrayRecord({name: Array(np.asarray(value)) for name, value in self.method.initial().items()})

    def kernels(self, ctx: Context, level: int) -> dict[str, Runs]:
        """Return the drawn kernels of each factorised layer, the one with the largest singular value first."""
        assert ctx.arrays is not None
        drawn = self.method.draw(ctx, level, ctx.arrays).kernels
        counts = {layer.weight: self.method.full[layer.v][0] for layer in self.method.factors}
        return {unit_of(name): runs_of(chosen, counts[name]) for name, chosen in drawn.items()}


def stage_number(name: str) -> str:
    """Return the number in a stage's name, or P for a pretraining."""
    return next((word for word in name.split() if word.isdigit()), name[:1].upper())


def weight_shape(blueprint: Any, unit: str) -> tuple[int, ...]:
    """Return the shape of a unit's first weight with several axes."""
    found = shapes(blueprint)
    return next((shape for name, shape in found.items() if name.startswith(f"{unit}.") and len(shape) > 1), ())


def runs_of(chosen: Iterable[int], count: int) -> Runs:
    """Return the runs of consecutive channels among `count`, as fractions."""
    runs: list[list[int]] = []
    for channel in sorted({int(each) for each in chosen}):
        if runs and runs[-1][1] == channel:
            runs[-1][1] += 1
        else:
            runs.append([channel, channel + 1])
    return tuple((start / count, end / count) for start, end in runs)
