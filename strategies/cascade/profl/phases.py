"""The phases of a run of ProFL, in order (sections 2.2 and 2.3): growing trains the steps of shrinking in reverse order."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from piecework.strategies.cascade.profl.freezing import rounds_by_parameters
from piecework.strategies.cascade.profl.settings import ProFLSettings


@dataclass(frozen=True)
class Phase:
    """A phase of a run: `shrinking` or `growing` in step t, `map` of block t, or `statistics` of the blocks before t."""

    kind: str
    t: int

    @property
    def is_step(self) -> bool:
        """Whether block t is trained."""
        return self.kind in ("shrinking", "growing")

    def __str__(self) -> str:
        """Return the name: `statistics`, `shrinking, step 4`, `map, block 4`, .. `growing, step 1`, .."""
        if self.kind == "statistics":
            return self.kind
        return f"map, block {self.t}" if self.kind == "map" else f"{self.kind}, step {self.t}"


def phases_of(count: int, *, shrinking: bool, maps: Collection[int], statistics: bool = False) -> list[Phase]:
    """Return the phases of a run with `count` blocks, in order. `maps` are the blocks that are integrated into basic layers.

    `statistics`: the blocks that are random in shrinking need batch-norm statistics.
    """
    phases = [Phase("statistics", count)] if statistics and shrinking and count > 1 else []
    for t in range(count, 1, -1) if shrinking else ():
        phases += [Phase("shrinking", t), *([Phase("map", t)] if t in maps else [])]
    return phases + [Phase("growing", t) for t in range(1, count + 1)]


def least_rounds(phases: Sequence[Phase], own: ProFLSettings) -> int:
    """Return the rounds of the shortest run, with one for each step."""
    return sum(own.distil_rounds if phase.kind == "map" else 1 for phase in phases)


def allot_rounds(
    phases: Sequence[Phase], own: ProFLSettings, num_rounds: int, parameters: Callable[[int], int]
) -> list[int]:
    """Return the most rounds of each phase. `parameters` returns those of block t. Raises ValueError for too few rounds."""
    steps, maps = [phase for phase in phases if phase.is_step], sum(phase.kind == "map" for phase in phases)
    statistics = len(phases) - len(steps) - maps
    left = num_rounds - own.distil_rounds * maps - statistics
    by_parameters = own.freezing == "parameters"
    if own.stage_rounds and not by_parameters:
        allotted = [own.stage_rounds] * len(steps)
    elif left < len(steps):
        raise ValueError(
            f"num-rounds = {num_rounds} is too few: {len(steps)} steps, and {maps} maps of profl.distil-rounds = "
            f"{own.distil_rounds}, need {least_rounds(phases, own)}"
            + (", one of them for statistics" if statistics else "")
        )
    else:
        allotted = rounds_by_parameters([parameters(phase.t) if by_parameters else 1 for phase in steps], left)
    rounds = iter(allotted)
    fixed = {"map": own.distil_rounds, "statistics": 1}
    return [next(rounds) if phase.is_step else fixed[phase.kind] for phase in phases]
