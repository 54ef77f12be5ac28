"""Coverage: which parts of the model the clients of a fleet can train, and which they trained in rounds.

A part is an atom of the run's model, or its head. Plans and runs use the same functions, which ask the method for assignments.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import DeviceState
from piecework.device_profiles.units import format_share
from piecework.models.cascade import Blueprint
from piecework.models.partition import AtomTooLargeError
from piecework.models.static_norms import mixes_examples
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Planner
from piecework.planning.cut import Cut
from piecework.planning.part import Part

Row = dict[str, Any]


@dataclass(frozen=True)
class Trainer:
    """A client for coverage: its state in the round in which it has the most memory, and its number of training examples."""

    state: DeviceState
    examples: int = 1


def part_names(blueprint: Blueprint) -> dict[str, str]:
    """Return the display names of the units that coverage counts, by unit."""
    return {f"atoms.{number}": atom.name for number, atom in enumerate(blueprint.atoms)} | {"head": "head"}


def richest(states: Iterable[DeviceState]) -> DeviceState:
    """Return the state with the most memory."""
    return max(states, key=lambda state: state.budget_bytes)


def slowest_of(states: Iterable[DeviceState]) -> float:
    """Return the smallest FLOP/s of these states, which bounds what a faster device may be given; 1 without any."""
    return min((state.flops_per_second for state in states), default=1.0)


def coverage(planner: Planner, trainers: Mapping[int, Trainer]) -> list[Row]:
    """Return for each part the device classes and the number of clients that can train it in any stage.

    `fraction` is these clients' fraction of all examples. `channels` is the largest fraction of a layer's channels that
    any of them trains in any round.
    """
    slowest = slowest_of(each.state for each in trainers.values())
    able = {state: abilities(planner, state, slowest) for state in {each.state for each in trainers.values()}}
    total, rows = sum(each.examples for each in trainers.values()), []
    for unit, name in part_names(planner.cut.blueprint).items():
        covering = [each for each in trainers.values() if unit in able[each.state]]
        rows.append(
            {
                "part": name,
                "devices": sorted({each.state.device for each in covering}),
                "clients": len(covering),
                "fraction": sum(each.examples for each in covering) / total if total else 0.0,
                "channels": max((able[each.state][unit] for each in covering), default=0.0),
            }
        )
    return rows


def abilities(planner: Planner, state: DeviceState, slowest: float) -> dict[str, float]:
    """Return the units that a device can train in any stage, each with the fraction of its channels.

    `slowest` is the smallest FLOP/s among the clients.
    """
    found: dict[str, float] = {}
    for stage in range(planner.cut.stage_count):
        for part in trainable(planner, stage, state, slowest):
            for unit in in_model(planner.cut, part):
                found[unit] = max(found.get(unit, 0.0), part.channels)
    return found


def in_model(cut: Cut, part: Part) -> list[str]:
    """Return the units of the run's own model, its atoms and its head, that training a part changes."""
    names = part_names(cut.blueprint)
    return [unit for unit in part.covered if unit in names]


def trainable(planner: Planner, stage: int, state: DeviceState, slowest: float) -> list[Part]:
    """Return the parts that a device can train in a stage: those of its assignment, or none if that raises."""
    try:
        return planner.parts(stage, state, slowest)
    except (MemoryBudgetExceededError, AtomTooLargeError):
        return []


def learned_names(cut: Cut, items: Sequence[WorkItem], seen: Sequence[int]) -> list[str]:
    """Return the names of the parts that a client trained: those of its work items with at least one example in `seen`."""
    trained = {unit for item, n in zip(items, seen, strict=True) if n for unit in in_model(cut, cut.part(item))}
    return [name for unit, name in part_names(cut.blueprint).items() if unit in trained]


def trained_rows(
    parts: Sequence[str],
    trained: Mapping[int, Collection[str]],
    examples: Mapping[int, int],
    *,
    distilled: bool = False,
) -> list[Row]:
    """Return for each part how many clients trained it, their fraction of all examples, and whether the server distilled it.

    `trained` maps clients to parts, and `examples` maps all clients to their numbers of training examples.
    """
    total = sum(examples.values())
    by_part = {part: [client for client, learned in trained.items() if part in learned] for part in parts}
    return [
        {
            "part": part,
            "clients": len(clients),
            "fraction": sum(examples.get(client, 0) for client in clients) / total if total else 0.0,
            "distilled": distilled,
        }
        for part, clients in by_part.items()
    ]


@dataclass(frozen=True)
class Finding:
    """A message about a coverage. Both fields are empty if all channels of every part are covered."""

    level: Literal["", "note", "warning", "error"] = ""
    message: str = ""


def judge_coverage(
    planner: Planner, rows: Sequence[Row], trainers: Mapping[int, Trainer], given: Collection[str] = ()
) -> Finding:
    """Judge a coverage: which parts no client can train, and how they end up. `given` are the pretrained parts."""
    if not trainers:
        return Finding(
            "error", "no client has two training examples or more: give clients more data, or lower `clients`"
        )
    missing = [row["part"] for row in rows if not row["clients"]]
    if len(missing) == len(rows) and not any_can_train(planner, trainers):
        maximum = richest(each.state for each in trainers.values()).budget_bytes
        minimum = planner.cut.min_budget()
        needed = f": at least {minimum:,} bytes are needed, and" if minimum else ":"
        return Finding("warning", f"no client can train anything{needed} the richest client has {maximum:,} bytes")
    if missing:
        said = f"no client can train {consecutive(missing, [row['part'] for row in rows])}"
        if planner.cut.can.untrained == "random":
            return judge_untrained(planner.cut, said, [part for part in missing if part not in given], trainers)
        meaning = {"distilled": "the server trains the whole model by distillation", "cut off": "the model ends there"}
        return Finding(
            "note" if planner.cut.can.untrained == "distilled" else "warning",
            f"{said}: {meaning[planner.cut.can.untrained]}",
        )
    if (widest := max(row["channels"] for row in rows)) < 1:
        rest = (
            "the others are 0 in the model that is evaluated and saved, which is a narrow network"
            if planner.cut.can.zeroed
            else "the model that is evaluated and saved has no others"
        )
        return Finding("warning", f"no client can train more than {widest:.4g} of the channels; {rest}")
    return of_micro_batches(planner, trainers)


def of_micro_batches(planner: Planner, trainers: Mapping[int, Trainer]) -> Finding:
    """Return the finding that batch norms see micro-batches only, if a client trains in these, else no finding."""
    if not planner.cut.settings.memory.ways or not mixes_examples(planner.cut.blueprint):
        return Finding()
    states = {each.state for each in trainers.values()}
    slowest = slowest_of(states)
    if not any(part.micro_batch for state in states for part in trainable(planner, 0, state, slowest)):
        return Finding()
    return Finding(
        "note",
        "batch norms take the statistics of a micro-batch, so its steps are not quite those of the whole batch; with "
        "memory.fit = recompute they are, on devices that it fits",
    )


def any_can_train(planner: Planner, trainers: Mapping[int, Trainer]) -> bool:
    """Return whether any client can train anything, even if that is no part of the run's own model."""
    states = {each.state for each in trainers.values()}
    slowest = slowest_of(states)
    return any(
        trainable(planner, stage, state, slowest) for state in states for stage in range(planner.cut.stage_count)
    )


def judge_untrained(cut: Cut, said: str, parts: Sequence[str], trainers: Mapping[int, Trainer]) -> Finding:
    """Return the finding for parts that no client can train. `parts` are those of them that are not pretrained."""
    if not parts:
        return Finding("note", f"{said}: these parts keep the weights of training.init-weights")
    said += f", so {'they keep' if len(parts) > 1 else 'it keeps'} random initial weights{needs(cut, parts, trainers)}"
    if cut.settings.faults.allow_untrained:
        return Finding("warning", f"{said} (faults.allow-untrained = true)")
    return Finding(
        "error",
        f"{said}. Give some clients more memory, lower training.batch-size or architecture.width, choose a system whose "
        "clients train every part (piecework plan --suggest), or accept this with faults.allow-untrained = true",
    )


def needs(cut: Cut, parts: Sequence[str], trainers: Mapping[int, Trainer]) -> str:
    """Return in words the bytes that the first part needs and the richest client has, or "" if it is never trained alone."""
    atom = next((n for n, atom in enumerate(cut.blueprint.atoms) if atom.name == parts[0]), None)
    if atom is None or not cut.can.single_atoms:
        return ""
    needed = cut.needed_bytes(cut.item((atom,)))
    maximum = richest(each.state for each in trainers.values()).budget_bytes
    return f": {parts[0]} needs {needed:,} bytes, and the richest client has {maximum:,}"


def consecutive(parts: Sequence[str], of: Sequence[str]) -> str:
    """Return some of the parts `of` the model as text: `conv1..conv3, head`."""
    places = {part: number for number, part in enumerate(of)}
    spans = groupby(enumerate(parts), key=lambda item: places[item[1]] - item[0])
    runs = [[part for _, part in span] for _, span in spans]
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}{'..' if len(run) > 2 else ', '}{run[-1]}" for run in runs)


def coverage_lines(rows: Sequence[Row], clients: int) -> list[tuple[str, str]]:
    """Return (parts, covered by) in words for each run of parts with equal coverage; `clients` is the number of all clients."""
    names = [row["part"] for row in rows]
    found = []
    for key, same in groupby(rows, key=lambda row: (row["clients"], round(row["fraction"], 9))):
        by = f"{key[0]} of {clients} clients, {format_share(key[1])} of the data" if key[0] else "no client"
        found.append((consecutive([row["part"] for row in same], names), "all clients" if key[0] == clients else by))
    return found


def coverage_sentence(rows: Sequence[Row], clients: int) -> str:
    """Return in one sentence by how many of the clients the parts of the model can be trained."""
    lines = coverage_lines(rows, clients)
    if not any(row["clients"] for row in rows):
        return "no part of the model can be trained by any client"
    if len(lines) == 1:
        return f"every part of the model can be trained by {lines[0][1]}"
    return "the parts of the model can be trained by: " + "; ".join(f"{parts} by {by}" for parts, by in lines)
