"""The resources of a run's clients (memory, speed and examples), as far as they are known before the first round."""

from dataclasses import replace
from typing import TYPE_CHECKING

from piecework.device_profiles.profile import DeviceState
from piecework.federation.registry import MIN_EXAMPLES, ClientRegistry
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.coverage import Trainer, richest
from piecework.training.methods import in_pieces

if TYPE_CHECKING:
    from piecework.strategies.method import Method

LOOKED_AT = 20  # number of first rounds whose budgets are considered
FREE = 0.75  # the fraction of measured free memory that is assumed, since less may be free later


class ClientResources:
    """The resources with which clients train a method's model."""

    def __init__(self, method: "Method", registry: ClientRegistry) -> None:
        self.method, self.settings, self.registry = method, method.settings, registry

    @property
    def reference_bytes(self) -> int:
        """Bytes of the reference step, a FedAvg step of the model at width 1; ratio budgets are fractions of it."""
        found: int = self.method.cut.cost_model.reference_bytes
        return found

    @property
    def message_bytes(self) -> int:
        """Bytes of a message with all units of the model."""
        blueprint = self.method.cut.model
        return sum(layer_statistics(blueprint, unit).state_bytes for unit in blueprint.units())

    def budgets(self) -> list[int]:
        """Return the budgets (bytes) of each client in each of the first rounds."""
        return [state.budget_bytes for state in self.states()]

    @property
    def richest(self) -> DeviceState:
        """The device state with the most memory among all clients and first rounds."""
        return richest(self.states())

    def states(self) -> list[DeviceState]:
        """Return the device states of each client in each of the first rounds."""
        return [state for client in self.registry.members for state in self.states_of(client)]

    def states_of(self, client: int) -> list[DeviceState]:
        """Return a client's device state in each of the first rounds, with the fraction FREE of memory that it measured."""
        message, fraction = self.message_bytes, FREE if client in self.registry.auto else 1
        rounds = range(1, min(self.settings.num_rounds, LOOKED_AT) + 1)
        states = [self.registry.state(client, n, self.reference_bytes, message) for n in rounds]
        return [replace(state, budget_bytes=int(fraction * state.budget_bytes)) for state in states]

    def state(self, client: int, server_round: int) -> DeviceState:
        """Return a client's device state in a round, which leaves memory for a message with all units of the model."""
        return self.registry.state(client, server_round, self.reference_bytes, self.message_bytes)

    @property
    def able(self) -> list[int]:
        """The clients with at least MIN_EXAMPLES training examples; in a private run all, because that would tell of them."""
        members = sorted(self.registry.members.items())
        return [c for c, member in members if self.settings.privacy.on or member.examples >= MIN_EXAMPLES]

    def trainers(self) -> dict[int, Trainer]:
        """Return the `able` clients."""
        return {c: Trainer(richest(self.states_of(c)), self.registry.members[c].examples) for c in self.able}

    def affords(self, client: int, server_round: int, needed: int) -> bool:
        """Return whether a client may use `needed` bytes in a round."""
        return needed <= self.state(client, server_round).allowed_bytes

    def require_emulated(self) -> None:
        """Raise ValueError if devices swap, which is only simulated, and a client measures its own memory."""
        if self.method.cut.swaps and self.registry.auto:
            raise ValueError(
                f"{self.method.name} only simulates swapping, and client {min(self.registry.auto)} has device = 'auto', "
                f"so its memory is real: give it the name of a device of the fleet, or use strategy = {in_pieces(True)} with "
                "memory.model = traced"
            )

    def require_capable_client(self, needed: int, doing: str) -> None:
        """Raise ValueError if no client may use `needed` bytes in any of the first rounds. `doing` begins the message."""
        richest = self.richest
        if needed > richest.allowed_bytes:
            raise ValueError(
                f"{self.method.name}: {doing} needs {needed:,} bytes, and the richest client has "
                f"{richest.budget_bytes:,}: no client can take part; lower training.batch-size or architecture.width, or "
                "give clients more memory"
            )
