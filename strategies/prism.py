"""PriSM ("Overcoming Resource Constraints in Federated Learning: Large Models Can Be Trained with only Weak Clients"), the
server's side: sub-models and their memory.

A client trains ceil(c N) of the principal kernels of every factorised convolution, c its keep ratio (section 3.2.1); the
kernels, not the ratio, are drawn anew in every round. Which ratio a device gets is not said: here the largest of the
paper's four whose sub-model fits.
"""

from functools import cached_property

from client_app.training import Recipe
from device_profiles.profile import DeviceState
from models.anatomy import anatomy
from models.cascade import Blueprint
from models.low_rank import low_rank
from strategies.pricing import Part, whole_model
from strategies.rules import Rule, Stage

KEEP_RATIOS = (0.8, 0.6, 0.4, 0.2)


class PriSMRule(Rule):
    """One stage; each device the largest sub-model it can train."""

    @cached_property
    def stages(self) -> list[Stage]:
        """The sub-models of all keep ratios, the largest first."""
        parts = [whole_model(low_rank(self.blueprint, keep), f"sub-model {keep}") for keep in KEEP_RATIOS]
        return [Stage("training", tuple(parts))]

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """One sub-model. Raises MemoryBudgetExceededError where not even the smallest fits."""
        parts = self.stages[stage].parts
        allowed = self.settings.allowance(state.budget_bytes)
        fitting = [part for part in parts if self.pricing.bytes(part) <= allowed]
        return [max(fitting, key=lambda part: part.parameters) if fitting else self.within(parts[-1], state)]


def memory_bytes(part: Part, reference: Blueprint, recipe: Recipe) -> float:
    """Table 1's "Mem": outputs of the factorised convolutions and of their norms, of a batch; 4 bytes each.

    Conv_V, Conv_U and the norm count one map each, a whole convolution and its norm one each; neither the first atom, nor
    shortcuts, nor the head count: the only reading that gives the full ResNet-18's 31.5 M. The table's unit is elements; 4
    bytes each are ours.
    """
    elements = 0
    for atom in part.atoms:
        if atom == 0:
            continue
        for layer in anatomy(part.blueprint, f"atoms.{atom}").layers:
            if layer.kind in ("Conv2d", "BatchNorm2d") and not layer.on_shortcut:
                elements += layer.outputs
    if not elements:
        raise ValueError(
            f"memory-model prism counts convolutions behind the first atom: {part.blueprint.name} has none"
        )
    return 4 * part.copies * recipe.batch_size * elements
