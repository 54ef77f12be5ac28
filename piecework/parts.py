"""What part of a model the clients of a plan train, each and all together, and who of them only pretends to have the memory."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Protocol

from piecework.device_profiles.profile import DeviceState
from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.part import Part

Fractions = Mapping[str, float]  # of a unit's parameters, by unit


class Trains(Protocol):
    """What a client does in a round: the parts that it trains, and the bytes that takes."""

    @property
    def client(self) -> int:
        """Its number."""

    @property
    def state(self) -> DeviceState:
        """What it has."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """None: it is excluded."""

    @property
    def needed(self) -> int:
        """Bytes."""


def trained_shares(full: Blueprint, tasks: list[list[list[Any]]], *, moving: bool = False) -> dict[str, Any]:
    """The share (0 to 1) of the full model's parameters that a client trains in a round, over all stages: the mean by device,
    the least, and the share that the fleet trains together. `tasks` are by stage, round and client.

    Where sub-models are `moving`, clients come to all of a unit in time. Parameters that only stand in for others, as ProFL's
    output modules do, are none of the model's.
    """
    sizes = {unit: layer_statistics(full, unit).parameters for unit in full.units()}
    by_device: dict[str, list[float]] = {}
    everyone: list[Fractions] = []
    for number in range(len(tasks[0])):
        for client in range(len(tasks[0][number])):
            own: list[Trains] = [stage[number][client] for stage in tasks]
            trained = union(fractions(full, task.parts) for task in own)
            by_device.setdefault(own[0].state.device, []).append(weighed(trained, sizes))
            everyone.append(trained)
    together = union(everyone)
    return {
        "devices": {name: sum(found) / len(found) for name, found in by_device.items()},
        "least": min(min(found) for found in by_device.values()),
        "together": weighed(dict.fromkeys(together, 1.0) if moving else together, sizes),
    }


@cache
def fractions(full: Blueprint, parts: tuple[Part, ...]) -> Fractions:
    """Of each unit of the full model, the share of its parameters that parts have; 1 at most."""
    sizes = {unit: layer_statistics(full, unit).parameters for unit in full.units()}
    return union(
        {u: min(1.0, layer_statistics(part.blueprint, u).parameters / sizes[u]) for u in part.units if sizes.get(u)}
        for part in parts
    )


def union(found: Iterable[Fractions]) -> Fractions:
    """The largest share of each unit."""
    total: dict[str, float] = {}
    for each in found:
        for unit, share in each.items():
            total[unit] = max(total.get(unit, 0.0), share)
    return total


def weighed(trained: Fractions, sizes: Mapping[str, int]) -> float:
    """The share of all parameters."""
    return sum(share * sizes[unit] for unit, share in trained.items()) / sum(sizes.values())


def pretence(full_bytes: int, tasks: list[list[list[Any]]]) -> dict[str, Any] | None:
    """Who trains what does not fit its budget; None where no client does. `full_bytes` is a step of the whole model."""
    everyone: list[Trains] = [task for rounds in tasks for of_round in rounds for task in of_round]
    beyond = [task for task in everyone if task.parts and task.needed > task.state.budget_bytes]
    if not beyond:
        return None
    return {
        "share": len(beyond) / len(everyone),
        "needed_bytes": max(task.needed for task in beyond),
        "poorest_bytes": min(task.state.budget_bytes for task in everyone),
        "whole_fits": sum(task.state.budget_bytes >= full_bytes for task in everyone) / len(everyone),
    }
