"""What a run leaves behind: the model that is evaluated and saved, and the models that devices of each class deploy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord

from piecework.device_profiles.profile import DeviceState
from piecework.models.partition import Piece
from piecework.models.variant import Variant
from piecework.planning.coverage import richest

if TYPE_CHECKING:
    from piecework.strategies.resources import ClientResources


@dataclass(frozen=True)
class DeviceModel:
    """A model that `clients` devices deploy, because it is the largest that they can train.

    `variant` is that of the run's model, and `arrays` makes its arrays of the trained ones. `part` are its atoms and its head;
    None = those of the served model.
    """

    name: str
    clients: int
    variant: Variant
    arrays: Callable[[ArrayRecord], ArrayRecord]
    part: tuple[Piece, str] | None = None


class Serving:
    """Makes the served model of a strategy's trained one, by default the trained model itself."""

    def __init__(self, method: Any, resources: "ClientResources") -> None:
        self.method, self.resources = method, resources

    @property
    def variant(self) -> Variant:
        """The variant of the run's model that is evaluated and saved."""
        found: Variant = self.method.cut.variant
        return found

    def arrays(self, trained: ArrayRecord) -> ArrayRecord:
        """Return the served arrays of a trained model."""
        return trained

    def device_models(self, server_round: int) -> list[DeviceModel]:
        """Return the models that devices deploy after this round, the largest first; none if all deploy the served one."""
        return []

    def device_states(self) -> list[DeviceState]:
        """Return each client's device state with the most memory in the first rounds."""
        return [richest(self.resources.states_of(client)) for client in self.resources.registry.members]
