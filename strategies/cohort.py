"""The choice of the clients of a round."""

from typing import TYPE_CHECKING

from flwr.serverapp import Grid

from piecework.federation.registry import sample_clients

if TYPE_CHECKING:
    from piecework.strategies.base import PieceStrategy


class Cohort:
    """Draws the clients of a round.

    `minimum` is the bytes below which a client gets no task; with 0, every client may get one and refuses what does not fit.
    `unasked` are further numbers of bytes with which a client gets no task.
    `excluded` are the clients that the last draw excluded because their processes died, with their crashes in a row.
    """

    def __init__(self, strategy: "PieceStrategy") -> None:
        self.strategy = strategy
        self.minimum = 0
        self.unasked = range(0)
        self.excluded: dict[int, int] = {}

    def sample(self, server_round: int, grid: Grid) -> list[int]:
        """Draw the clients of a round from those that are connected, idle and not excluded.

        The draw is a function of the seed, the round and these clients.
        """
        settings = self.strategy.settings
        excluded = self.strategy.state.crash_history.excluded_clients(server_round)
        present = [client for client in self.strategy.registry.present(grid) if self.may_be_asked(client, server_round)]
        chosen = [client for client in present if client not in excluded]
        if len(chosen) < max(1, settings.faults.min_clients):
            chosen = present  # excluded clients are better than too few
        self.excluded = {client: excluded[client] for client in present if client not in chosen}
        return sample_clients(chosen, settings.asked, settings.seed, server_round) if chosen else []

    def may_be_asked(self, client: int, server_round: int) -> bool:
        """Return whether a client has the memory to take part in a round."""
        if not self.minimum and not self.unasked:
            return True
        allowed = self.strategy.resources.state(client, server_round).allowed_bytes
        return self.minimum <= allowed and allowed not in self.unasked
