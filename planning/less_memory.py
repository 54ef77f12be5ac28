"""What `memory.fit` would make of a step that devices cannot hold: who could take it, and at what cost.

Plans that give advice and refusals that name remedies use the same answer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from piecework.planning.costs import CostModel
from piecework.planning.page_plan import Speed
from piecework.planning.part import Part
from piecework.training.settings.shared import WAYS

FIT = "auto"


@dataclass(frozen=True)
class LessMemory:
    """The smallest step of a part (`least`, bytes), and the step of the poorest device that can hold one, or the smallest.

    `plain` and `bytes` are those of the plain step and of this one, and `flops` is a multiple of the plain step's.
    """

    part: Part
    least: int
    plain: int
    bytes: int
    flops: float


def in_less_memory(cost_model: CostModel, part: Part, devices: Iterable[tuple[int, Speed]]) -> LessMemory | None:
    """Return how far `memory.fit` helps devices, of which each may use so many bytes; None if the part has no other step."""
    costs = cost_model.having(ways=(FIT, *WAYS))
    if costs.memory_model is not None or not part.ways:
        return None
    least = costs.bytes(costs.fit_part(part, 0))
    able = [device for device in devices if device[0] >= least]
    fitted = costs.fit_part(part, *min(able, key=lambda device: device[0])) if able else costs.fit_part(part, 0)
    flops = costs.trace(fitted).flops / costs.trace(part).flops
    return LessMemory(fitted, least, costs.bytes(part), costs.bytes(fitted), flops)
