"""The choice of the clients of a round."""

from collections.abc import Mapping, Sequence

from piecework.federation.registry import sample_clients
from piecework.training.settings import Settings


def draw_clients(
    able: Sequence[int], crashes: Mapping[int, int], settings: Settings, server_round: int
) -> tuple[list[int], dict[int, int]]:
    """Draw the clients of a round from those that can take part. Returns them, and those that were excluded.

    The draw is a function of the seed, the round and these clients. `crashes` are the clients that are to be excluded because
    their processes died, with their crashes in a row; they are better than too few.
    """
    chosen = [client for client in able if client not in crashes]
    if len(chosen) < settings.least:
        chosen = [*able]
    excluded = {client: crashes[client] for client in crashes.keys() & set(able) - set(chosen)}
    return sample_clients(chosen, settings.asked, settings.seed, server_round) if chosen else [], excluded
