"""SpaFL ("Communication-Efficient Federated Learning with Sparse Models and Low Computational Overhead"), the server's side:
what a client holds and what travels.

Every client trains its own whole model with a threshold a filter; thresholds alone are sent, there and back (Algorithm 1).
Masked weights are not removed while training: a client holds all of them.
"""

from functools import cached_property

from device_profiles.profile import DeviceState
from models.anatomy import anatomy
from models.masked import masked
from strategies.pricing import Part, whole_model
from strategies.rules import Rule, Stage


class SpaFLRule(Rule):
    """One stage; the whole model with thresholds."""

    @cached_property
    def stages(self) -> list[Stage]:
        """The masked model. Raises ValueError where there is nothing to mask."""
        part = whole_model(masked(self.blueprint), "the whole model, masked")
        if not thresholds(part):
            raise ValueError(f"{self.blueprint.name} has neither convolutions nor linear layers without bias to mask")
        return [Stage("training", (part,))]

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """The masked model. Raises MemoryBudgetExceededError."""
        return [self.within(part, state) for part in self.stages[stage].parts]

    def wire(self, parts: list[Part]) -> tuple[int, int]:
        """Four bytes a threshold, down and up."""
        size = 4 * sum(thresholds(part) for part in parts)
        return size, size


def thresholds(part: Part) -> int:
    """The number of thresholds of a masked part."""
    layers = [layer for unit in part.units for layer in anatomy(part.blueprint, unit).layers]
    return sum(layer.weight[0] for layer in layers if layer.parametrized)
