"""Which parts of the model are trained, and by which clients: what a fleet allows, and what happened in rounds.

A part is an atom of the run's model, or its head. Plans and runs ask the same functions, and these the system's rule.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from piecework.device_profiles.profile import DeviceState
from piecework.models.cascade import Blueprint
from piecework.models.work_item import WorkItem
from piecework.planning.partition_policy import PartitionPolicy

Row = dict[str, Any]


@dataclass(frozen=True)
class Trainer:
    """A client, for coverage: the most that it has in any round that is looked at, and its training examples."""

    state: DeviceState
    examples: int = 1


def part_names(blueprint: Blueprint) -> dict[str, str]:
    """What a person calls the units that are counted."""
    return {f"atoms.{number}": atom.name for number, atom in enumerate(blueprint.atoms)} | {"head": "head"}


def richest(states: Iterable[DeviceState]) -> DeviceState:
    """Of the states of a client, that with most memory."""
    return max(states, key=lambda state: state.budget_bytes)


def coverage(policy: PartitionPolicy, trainers: Mapping[int, Trainer]) -> list[Row]:
    """For each part: the device classes and the number of clients that can train it in some stage, and their fraction of the
    data.

    `channels` is the largest fraction of a layer's channels that any of them ever trains.
    """
    slowest = min((each.state.flops_per_second for each in trainers.values()), default=1.0)
    able = {state: abilities(policy, state, slowest) for state in {each.state for each in trainers.values()}}
    total, rows = sum(each.examples for each in trainers.values()), []
    for unit, name in part_names(policy.blueprint).items():
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


def abilities(policy: PartitionPolicy, state: DeviceState, slowest: float) -> dict[str, float]:
    """The units that a device can train in any stage, and the fraction of their channels."""
    found: dict[str, float] = {}
    for stage in range(policy.stage_count):
        for part in policy.trainable(stage, state, slowest):
            for unit in policy.covered(part):
                found[unit] = max(found.get(unit, 0.0), policy.channels(part))
    return found


def learned_names(policy: PartitionPolicy, items: Sequence[WorkItem], seen: Sequence[int]) -> list[str]:
    """The parts that a client trained: its work items, each on so many examples."""
    trained = {unit for item, n in zip(items, seen, strict=True) if n for unit in policy.covered(policy.part(item))}
    return [name for unit, name in part_names(policy.blueprint).items() if unit in trained]


def trained_rows(
    parts: Sequence[str],
    trained: Mapping[int, Collection[str]],
    examples: Mapping[int, int],
    *,
    distilled: bool = False,
) -> list[Row]:
    """Return for each part how many clients trained it, and their fraction of all examples; whether the server distilled it."""
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
    """What there is to say of a coverage; nothing, in an empty sentence, where every part is covered."""

    level: Literal["", "note", "warning", "error"] = ""
    says: str = ""


def judged(
    policy: PartitionPolicy, rows: Sequence[Row], trainers: Mapping[int, Trainer], given: Collection[str] = ()
) -> Finding:
    """What parts that no client can train mean for the trained model. `given` names the parts that begin pretrained."""
    if not trainers:
        return Finding(
            "error", "no client has two training examples or more: give clients more data, or lower `clients`"
        )
    missing = [row["part"] for row in rows if not row["clients"]]
    if len(missing) == len(rows) and not anybody(policy, trainers):
        maximum = richest(each.state for each in trainers.values()).budget_bytes
        minimum = policy.min_budget()
        needed = f": at least {minimum:,} bytes are needed, and" if minimum else ":"
        return Finding("warning", f"no client can train anything{needed} the richest client has {maximum:,} bytes")
    if missing:
        said = f"no client can train {consecutive(missing, [row['part'] for row in rows])}"
        if policy.untrained == "random":
            return left_random(policy, said, [part for part in missing if part not in given], trainers)
        meaning = {"distilled": "the server trains the whole model by distillation", "cut off": "the model ends there"}
        return Finding("note" if policy.untrained == "distilled" else "warning", f"{said}: {meaning[policy.untrained]}")
    if (widest := max(row["channels"] for row in rows)) < 1:
        return Finding(
            "warning",
            f"no client can train more than {widest:.4g} of the channels, and the others keep random initial weights",
        )
    return Finding()


def anybody(policy: PartitionPolicy, trainers: Mapping[int, Trainer]) -> bool:
    """Whether a client can train anything, if it is not of the run's own model."""
    states = {each.state for each in trainers.values()}
    slowest = min((state.flops_per_second for state in states), default=1.0)
    return any(policy.trainable(stage, state, slowest) for state in states for stage in range(policy.stage_count))


def left_random(policy: PartitionPolicy, said: str, parts: Sequence[str], trainers: Mapping[int, Trainer]) -> Finding:
    """What it means that no client can train some parts, of which these are not pretrained either."""
    if not parts:
        return Finding("note", f"{said}: what no client trains stays as training.init-weights has it")
    said += (
        f", so {'they keep' if len(parts) > 1 else 'it keeps'} random initial weights{needs(policy, parts, trainers)}"
    )
    if policy.settings.faults.allow_untrained:
        return Finding("warning", f"{said} (faults.allow-untrained = true)")
    return Finding(
        "error",
        f"{said}. Give some clients more memory, lower training.batch-size or architecture.width, choose a system whose "
        "clients train every part (piecework plan --suggest), or accept this by faults.allow-untrained = true",
    )


def needs(policy: PartitionPolicy, parts: Sequence[str], trainers: Mapping[int, Trainer]) -> str:
    """What the first of these parts takes, where the system trains it alone, against what the richest client has."""
    atom = next((n for n, atom in enumerate(policy.blueprint.atoms) if atom.name == parts[0]), None)
    if atom is None or (needed := policy.alone(atom)) is None:
        return ""
    maximum = richest(each.state for each in trainers.values()).budget_bytes
    return f": {parts[0]} needs {needed:,} bytes, and the richest client has {maximum:,}"


def consecutive(parts: Sequence[str], of: Sequence[str]) -> str:
    """Some of the parts in order, for people: `conv1..conv3, head`."""
    places = {part: number for number, part in enumerate(of)}
    spans = groupby(enumerate(parts), key=lambda item: places[item[1]] - item[0])
    runs = [[part for _, part in span] for _, span in spans]
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}{'..' if len(run) > 2 else ', '}{run[-1]}" for run in runs)


def coverage_lines(rows: Sequence[Row], clients: int) -> list[tuple[str, str]]:
    """Parts that are covered alike, and by how many of so many clients."""
    names = [row["part"] for row in rows]
    found = []
    for key, same in groupby(rows, key=lambda row: (row["clients"], round(row["fraction"], 9))):
        by = f"{key[0]} of {clients} clients, {key[1]:.0%} of the data" if key[0] else "no client"
        found.append((consecutive([row["part"] for row in same], names), "all clients" if key[0] == clients else by))
    return found


def coverage_sentence(rows: Sequence[Row], clients: int) -> str:
    """The same in one sentence."""
    lines = coverage_lines(rows, clients)
    if not any(row["clients"] for row in rows):
        return "no part of the model can be trained by any client"
    if len(lines) == 1:
        return f"every part of the model can be trained by {lines[0][1]}"
    return "the parts of the model can be trained by: " + "; ".join(f"{parts} by {by}" for parts, by in lines)
