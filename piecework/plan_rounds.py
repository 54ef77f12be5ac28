"""Who is asked in the rounds of a plan, and how long each round takes: as a run draws and times them."""

from collections.abc import Sequence

from piecework.device_profiles.clock import Stragglers, closing_seconds, round_seconds
from piecework.federation.registry import sampled
from piecework.training.settings import Settings

Seconds = Sequence[float | None]  # of each client's task in a round; None if the client cannot train


def timed_rounds(settings: Settings, rounds: Sequence[Seconds]) -> list[tuple[list[int], float]]:
    """Return for each round the clients that are asked, and its simulated seconds.

    With `faults.over-sample`, a round ends when `clients-per-round` clients have answered. Those that have not are still at
    work when the next one begins, and are not asked until they are done.
    """
    found, stragglers, few = [], Stragglers(), max(1, settings.faults.min_clients)
    for number, seconds in enumerate(rounds, start=1):
        waited = 0.0
        while len(seconds) - len(stragglers.clients) < few and (more := stragglers.until_next()):
            stragglers.wait(more)
            waited += more
        idle = [client for client in range(len(seconds)) if client not in stragglers.clients]
        chosen = sampled(idle, settings.asked, settings.seed, number)
        answers = {client: needs for client in chosen if (needs := seconds[client]) is not None}
        end = closing_seconds(answers.values(), settings.enough)
        stragglers.wait(end)
        for client, needs in answers.items():
            if needs > end:
                stragglers.add(client, number, needs - end)
        found.append((chosen, waited + end))
    return found


def awaited_seconds(settings: Settings, rounds: Sequence[Seconds]) -> list[float]:
    """Return the simulated seconds of each round if it asked only `clients-per-round` clients and waited for all of them."""
    return [
        round_seconds(
            seconds[client] or 0.0
            for client in sampled(range(len(seconds)), settings.clients_per_round, settings.seed, number)
        )
        for number, seconds in enumerate(rounds, start=1)
    ]
