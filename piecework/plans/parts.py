"""Compute which parts of a model the clients of a plan train, and which clients only pretend to have the memory."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Protocol

from piecework.device_profiles.profile import DeviceState
from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.part import Part

Fractions = Mapping[str, float]  # fractions of a unit's parameters, by unit


class Trains(Protocol):
    """A client's task in a round: the parts that it trains, and the bytes that takes."""

    @property
    def client(self) -> int:
        """The client's number."""

    @property
    def state(self) -> DeviceState:
        """What the client has in the round."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts; empty if the client is excluded."""

    @property
    def needed(self) -> int:
        """The bytes of training."""


def trained_fractions(full: Blueprint, tasks: list[list[list[Any]]], *, rotates: bool = False) -> dict[str, Any]:
    """Return the fraction (0 to 1) of the full model's parameters that clients train in a round, over all stages.

    The result has the mean by device, the minimum, and the fraction that the fleet trains together. `tasks` are by stage, round
    and client. What a client draws anew for each round counts as far as it reaches (`Part.covered`), and with sub-models that
    move (`rotates`), clients reach all of a unit in time. Stand-in parameters, as of ProFL's output modules, do not belong to
    the model.
    """
    sizes = {unit: layer_statistics(full, unit).parameters for unit in full.units()}
    by_device: dict[str, list[float]] = {}
    everyone: list[Fractions] = []
    for number in range(len(tasks[0])):
        for client in range(len(tasks[0][number])):
            own: list[Trains] = [stage[number][client] for stage in tasks]
            trained = union(fractions(full, task.parts) for task in own)
            by_device.setdefault(own[0].state.device, []).append(weigh(trained, sizes))
            everyone.append(trained)
    together = union(everyone)
    return {
        "devices": {name: sum(found) / len(found) for name, found in by_device.items()},
        "minimum": min(min(found) for found in by_device.values()),
        "together": weigh(dict.fromkeys(together, 1.0) if rotates else together, sizes),
    }


@cache
def fractions(full: Blueprint, parts: tuple[Part, ...]) -> Fractions:
    """Return, for each unit of the full model, the fraction of its parameters that these parts train, at most 1."""
    sizes = {unit: layer_statistics(full, unit).parameters for unit in full.units()}
    return union(
        {u: min(1.0, layer_statistics(part.blueprint, u).parameters / sizes[u]) for u in part.covered if sizes.get(u)}
        for part in parts
    )


def union(found: Iterable[Fractions]) -> Fractions:
    """Return the largest fraction of each unit."""
    total: dict[str, float] = {}
    for each in found:
        for unit, fraction in each.items():
            total[unit] = max(total.get(unit, 0.0), fraction)
    return total


def weigh(trained: Fractions, sizes: Mapping[str, int]) -> float:
    """Return the fraction of all parameters."""
    return sum(fraction * sizes[unit] for unit, fraction in trained.items()) / sum(sizes.values())


def simulated_swapping(full_bytes: int, tasks: list[list[list[Any]]]) -> dict[str, Any] | None:
    """Return who trains what does not fit its budget; None if no client does. `full_bytes` is a step of the whole model."""
    everyone: list[Trains] = [task for rounds in tasks for of_round in rounds for task in of_round]
    beyond = [task for task in everyone if task.parts and task.needed > task.state.budget_bytes]
    if not beyond:
        return None
    return {
        "fraction": len(beyond) / len(everyone),
        "needed_bytes": max(task.needed for task in beyond),
        "poorest_bytes": min(task.state.budget_bytes for task in everyone),
        "whole_fits": sum(task.state.budget_bytes >= full_bytes for task in everyone) / len(everyone),
    }
