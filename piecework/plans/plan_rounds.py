"""Who is asked in the rounds of a plan, and how long each round takes: as a run draws and times them."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from piecework.device_profiles.clock import Closing, Stragglers, closing, round_seconds
from piecework.federation.pace import Done, Load, Pace, before_deadlines
from piecework.federation.registry import sample_clients
from piecework.training.settings import Settings


class Timed(NamedTuple):
    """A client's task in a round: the name of its device, and what it takes."""

    device: str
    done: Done


class TimedRound(NamedTuple):
    """A round: the clients that are asked, its simulated seconds, and how many clients are late."""

    asked: list[int]
    seconds: float
    late: int


Tasks = Sequence[Timed | None]  # of each client in a round; None if the client cannot train


def time_rounds(settings: Settings, rounds: Sequence[Tasks]) -> list[TimedRound]:
    """Return how a run would time these rounds.

    A round ends when `clients-per-round` clients have answered if `faults.over-sample` is set, and awaits no client beyond its
    deadline if `faults.deadline-factor` is. Late clients are still at work when the next round begins, and are not asked until
    they are done.
    """
    found, stragglers = [], Stragglers()
    pace = Pace(settings.faults.deadline_factor, settings.faults.deadline_floor, math.inf)
    for number, tasks in enumerate(rounds, start=1):
        waited = wait_for_enough(stragglers, len(tasks), settings.least)
        for late in stragglers.take_answered():
            pace.note(late["client"], str(late["done"][0]), Done(*late["done"][1:]))
        idle = [client for client in range(len(tasks)) if client not in stragglers.clients]
        chosen = sample_clients(idle, settings.asked, settings.seed, number)
        answers = {client: task for client in chosen if (task := tasks[client]) is not None}
        counted, seconds = close(settings, pace, answers)
        stragglers.wait(seconds)
        for client, task in answers.items():
            if client in counted:
                pace.note(client, *task)
            else:
                stragglers.add(client, number, task.done.total - seconds, (task.device, *task.done))
        found.append(TimedRound(chosen, waited + seconds, len(answers) - len(counted)))
    return found


def wait_for_enough(stragglers: Stragglers, clients: int, least: int) -> float:
    """Let the seconds pass, and return them, until `least` of so many clients are idle."""
    waited = 0.0
    while clients - len(stragglers.clients) < least and (more := stragglers.until_next()):
        stragglers.wait(more)
        waited += more
    return waited


def close(settings: Settings, pace: Pace, answers: Mapping[int, Timed]) -> Closing:
    """Return how a round with these tasks ends."""
    seconds = {client: task.done.total for client, task in answers.items()}
    loads = {client: Load(task.done.work, task.done.bytes) for client, task in answers.items()}
    deadlines = {client: pace.deadline(client, task.device, loads[client]) for client, task in answers.items()}
    return closing(seconds, deadlines, settings.enough, before_deadlines(len(seconds), settings.least))


def awaited_seconds(settings: Settings, rounds: Sequence[Tasks]) -> list[float]:
    """Return the simulated seconds of each round if it asked only `clients-per-round` clients and waited for all of them."""
    return [
        round_seconds(
            task.done.total
            for client in sample_clients(range(len(tasks)), settings.clients_per_round, settings.seed, number)
            if (task := tasks[client]) is not None
        )
        for number, tasks in enumerate(rounds, start=1)
    ]
