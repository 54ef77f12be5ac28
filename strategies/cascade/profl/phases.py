"""The phases of a run of ProFL, in order (sections 2.2 and 2.3): growing trains the steps of shrinking in reverse order."""

from collections.abc import Collection
from dataclasses import dataclass


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
