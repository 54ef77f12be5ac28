"""The ladder of one device: every step of the whole model that it could take, with its price, beside the systems' pieces.

All figures are predicted for one device in one round, by the costs and the clock of plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.profile import DeviceState
from piecework.models.partition import atom_names
from piecework.models.static_norms import mixes_examples
from piecework.planning.coverage import consecutive
from piecework.planning.cut import Cut
from piecework.planning.fit import cheapest, smallest
from piecework.planning.less_memory import FIT
from piecework.planning.page_plan import speed_of
from piecework.planning.part import Part
from piecework.planning.timing import local_work, made_between, stored_bytes
from piecework.plans.plan import PlannedTask, client_task, planner_for, seconds_of
from piecework.plans.question import PlanQuestion
from piecework.strategies import find_method
from piecework.training.methods import METHODS, SIMPLEST
from piecework.training.settings import Settings, SettingsError
from piecework.training.settings.shared import WAYS

EXACT = ("step-in-backward", "recompute-cheap", "recompute")
# What each rung of a whole model may use.
RUNGS: dict[str, tuple[str, ...]] = {
    "plain step": (),
    "step-in-backward": ("step-in-backward",),
    "recompute-cheap": ("recompute-cheap",),
    "recompute": ("recompute",),
    "these three": EXACT,
    "micro-batch": ("micro-batch",),
    "page": ("page",),
    FIT: (FIT, *WAYS),
}


@dataclass(frozen=True)
class Rung:
    """A row. `bytes` and `disk_bytes` are of a step, and `seconds` of a round. `flops` are a multiple of those of plain steps.

    `model` says what is trained: the same step bit for bit, to rounding, another step, or pieces.
    """

    name: str
    how: str
    bytes: int
    flops: float
    disk_bytes: int
    seconds: float
    model: str
    fits: bool


def climb(settings: Settings, question: PlanQuestion, device: str = "") -> dict[str, Any]:
    """Return the ladder of a device of the fleet, by default of the poorest, as JSON values. Raises SettingsError."""
    settings = settings.with_values({"strategy": SIMPLEST, "memory.fit": FIT})
    if settings.memory.model != "traced":
        raise SettingsError(f"memory.model = {settings.memory.model}: steps are fitted by traced bytes only")
    planner, states = planner_for(load_fleet(settings.fleet), settings, question)
    state = choose(states[0], device)
    cut = planner.cut
    part = replace(cut.part(cut.whole), pageable=True)
    plain = cut.cost_model.trace(part).flops
    rungs = [rung(name, ways, cut, part, state, question.examples) for name, ways in RUNGS.items()]
    pieces = [row for name in cutting(settings) if (row := system(settings, question, name, state, plain)) is not None]
    return {
        "device": state.device,
        "budget_bytes": state.budget_bytes,
        "batch_size": settings.training.batch_size,
        "rungs": [vars(each) for each in (*rungs, *pieces)],
    }


def choose(states: list[DeviceState], device: str) -> DeviceState:
    """Return the state of a device by name, or of the poorest. Raises SettingsError for a name that the fleet lacks."""
    if not device:
        return min(states, key=lambda state: state.budget_bytes)
    named = [state for state in states if state.device == device]
    if not named:
        names = ", ".join(sorted({state.device for state in states}))
        raise SettingsError(f"--device {device}: the fleet has no such device, but {names}")
    return min(named, key=lambda state: state.budget_bytes)


def rung(name: str, ways: tuple[str, ...], cut: Cut, part: Part, state: DeviceState, examples: int) -> Rung:
    """Return the fastest step of some ways that fits a device; if none fits, the smallest."""
    costs, allowed, speed = cut.cost_model, state.allowed_bytes, speed_of(state)
    found = part
    if ways:
        found = cheapest(costs, part, allowed, ways, speed) or smallest(costs, part, ways)
    cost = costs.trace(found)
    return Rung(
        name,
        found.step,
        cost.peak_bytes,
        cost.flops / costs.trace(part).flops,
        cost.bytes_read + cost.bytes_written,
        seconds_of(cut, [found], state, examples),
        kind_of(found),
        cost.peak_bytes <= allowed,
    )


def kind_of(part: Part) -> str:
    """Return how near a step is to the plain one."""
    if not part.micro_batch:
        return "the same, bit for bit"
    return "another: norms see micro-batches" if mixes_examples(part.blueprint) else "the same, to rounding"


def cutting(settings: Settings) -> list[str]:
    """Return the systems that train the whole model in pieces, clean or adversarially as the settings ask."""
    unfit = "never" if settings.training.adversarial else "always"
    return [name for name, entry in sorted(METHODS.items()) if in_pieces(name) and entry.can.attack != unfit]


def in_pieces(name: str) -> bool:
    """Return whether a system trains all of a model, piece after piece."""
    can = find_method(name).can
    return can.cuts or can.stages


def system(settings: Settings, question: PlanQuestion, name: str, state: DeviceState, plain: int) -> Rung | None:
    """Return the row of a system's pieces on a device, as means over its stages; None if the device cannot train them.

    What it reads and writes are the features between the pieces.
    """
    settings = settings.with_values({"strategy": name, "memory.fit": ""})
    try:
        planner, _ = planner_for(load_fleet(settings.fleet), settings, question)
        stages = range(len(planner.cut.stages))
    except ValueError:
        return None
    tasks = [client_task(planner, stage, 0, state, state.flops_per_second, question.examples) for stage in stages]
    if not all(task.parts for task in tasks):
        return None
    _, seen = local_work(settings, question.examples)
    steps = seen / settings.training.batch_size
    held = {atom for task in tasks for part in task.parts for atom in part.atoms}
    names = atom_names(planner.cut.model)
    left_out = [name for number, name in enumerate(names) if number not in held]
    needed = max(task.needed for task in tasks)
    moved = fmean(moved_features(settings, task.parts, question.examples) for task in tasks)
    return Rung(
        name,
        f"{describe(tasks)}{f', without {consecutive(left_out, names)}' if left_out and len(tasks) == 1 else ''}",
        needed,
        fmean(task.flops for task in tasks) / (plain * steps),
        round(moved / steps),
        fmean(task.seconds for task in tasks),
        "pieces" if len(tasks) == 1 else f"pieces, in {len(tasks)} stages",
        needed <= state.allowed_bytes,
    )


def moved_features(settings: Settings, parts: Sequence[Part], examples: int) -> int:
    """Return the bytes that a round reads and writes of features between parts, and to make them."""
    made, (_, seen) = made_between(settings, parts, examples), local_work(settings, examples)
    used = sum(stored_bytes(settings, part) * seen for part in parts[1:]) if made.written else 0
    return made.read + made.written + used


def describe(tasks: list[PlannedTask]) -> str:
    """Return how many pieces a device trains in a round."""
    counts = sorted({len(task.parts) for task in tasks})
    return f"{counts[0]} piece{'s' if counts[0] > 1 else ''} a round" if len(counts) == 1 else "pieces"
