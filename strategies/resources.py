"""What the clients of a run have: memory, speed and examples, as far as that is known before the first round."""

from dataclasses import replace
from typing import TYPE_CHECKING

from piecework.device_profiles.profile import DeviceState
from piecework.federation.registry import MIN_EXAMPLES
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.coverage import Trainer, richest

if TYPE_CHECKING:
    from piecework.strategies.base import PieceStrategy

LOOKED_AT = 20  # rounds of a fleet, for its budgets
FREE = 0.75  # of what a device measured as free: later it may be less


class ClientResources:
    """What the clients have to train a strategy's model with."""

    def __init__(self, strategy: "PieceStrategy") -> None:
        self.strategy, self.settings, self.registry = strategy, strategy.settings, strategy.registry

    @property
    def reference_bytes(self) -> int:
        """One reference step: the model at width 1, a FedAvg step; ratio budgets are fractions of it."""
        return self.strategy.policy.cost_model.reference_bytes

    @property
    def message_bytes(self) -> int:
        """Of a message with the whole model."""
        blueprint = self.strategy.blueprint
        return sum(layer_statistics(blueprint, unit).state_bytes for unit in blueprint.units())

    def budgets(self) -> list[int]:
        """Bytes that the clients have to train with, of each in each of the first rounds."""
        return [state.budget_bytes for state in self.states()]

    @property
    def richest(self) -> DeviceState:
        """The client with the most memory in one of the first rounds."""
        return richest(self.states())

    def states(self) -> list[DeviceState]:
        """What the clients have, each in each of the first rounds."""
        return [state for client in self.registry.members for state in self.states_of(client)]

    def states_of(self, client: int) -> list[DeviceState]:
        """What a client has in each of the first rounds; of memory that a device measured, what is sure to last."""
        message, fraction = self.message_bytes, FREE if client in self.registry.auto else 1
        rounds = range(1, min(self.settings.num_rounds, LOOKED_AT) + 1)
        states = [self.registry.state(client, n, self.reference_bytes, message) for n in rounds]
        return [replace(state, budget_bytes=int(fraction * state.budget_bytes)) for state in states]

    def state(self, client: int, server_round: int) -> DeviceState:
        """What a client has in a round beside a message with the whole model."""
        return self.registry.state(client, server_round, self.reference_bytes, self.message_bytes)

    def trainers(self) -> dict[int, Trainer]:
        """The clients that have something to learn from."""
        members = {c: m for c, m in sorted(self.registry.members.items()) if m.examples >= MIN_EXAMPLES}
        return {c: Trainer(richest(self.states_of(c)), member.examples) for c, member in members.items()}

    def affords(self, client: int, server_round: int, needed: int) -> bool:
        """Whether a client has so many bytes in a round."""
        return needed <= self.state(client, server_round).allowed_bytes

    def require_emulated(self) -> None:
        """Raises ValueError where clients pretend to swap, and one has a memory of its own."""
        if self.strategy.policy.swaps and self.registry.auto:
            raise ValueError(
                f"{self.strategy.name} only pretends to swap here, and client {self.registry.auto[0]} has device = 'auto', a "
                "memory of its own: give it the name of a device of the fleet, or train by strategy = fedprophet with "
                "memory.model = traced"
            )

    def require_somebody(self, needed: int, doing: str) -> None:
        """Raises ValueError where no client will have so many bytes, in any of the first rounds."""
        richest = self.richest
        if needed > richest.allowed_bytes:
            raise ValueError(
                f"{self.strategy.name}: NA. {doing} needs {needed:,} bytes, and the richest client has "
                f"{richest.budget_bytes:,}: no client can take part; lower training.batch-size or architecture.width, or "
                "give clients more memory"
            )
