"""The choice of the clients of a round."""

from typing import TYPE_CHECKING

from flwr.serverapp import Grid

from piecework.federation.registry import sample_clients

if TYPE_CHECKING:
    from piecework.strategies.server import MethodServer


class Cohort:
    """Draws the clients of a round.

    `excluded` are the clients that the last draw excluded because their processes died, with their crashes in a row.
    """

    def __init__(self, server: "MethodServer") -> None:
        self.server = server
        self.excluded: dict[int, int] = {}

    def sample(self, server_round: int, grid: Grid) -> list[int]:
        """Draw the clients of a round from those that are connected, idle and not excluded.

        The draw is a function of the seed, the round and these clients.
        """
        settings = self.server.settings
        excluded = self.server.method.state.crash_history.excluded_clients(server_round)
        present = [
            client for client in self.server.registry.present(grid) if self.server.may_be_asked(client, server_round)
        ]
        chosen = [client for client in present if client not in excluded]
        if len(chosen) < max(1, settings.faults.min_clients):
            chosen = present  # excluded clients are better than too few
        self.excluded = {client: excluded[client] for client in present if client not in chosen}
        return sample_clients(chosen, settings.asked, settings.seed, server_round) if chosen else []
