"""What a strategy works on, what it remembers, and how far it is."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from piecework.federation.faults import CrashHistory
from piecework.federation.registry import ClientRegistry
from piecework.models.cascade import Blueprint
from piecework.training.settings import Settings


@dataclass
class StrategyState:
    """Everything a strategy remembers between rounds: plain values, so that a checkpoint is this and the arrays.

    `norms`: of the updates that were accepted, by unit.
    """

    norms: dict[str, list[float]] = field(default_factory=dict)
    crash_history: CrashHistory = field(default_factory=CrashHistory)

    def to_values(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Read what `to_values` gave. Raises ValueError for a field that is missing or not known."""
        known = {f.name for f in fields(cls)}
        if set(values) != known:
            raise ValueError(f"strategy state has the fields {sorted(values)}, expected {sorted(known)}")
        return cls(**values | {"crash_history": CrashHistory(**values["crash_history"])})


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    `stage`: its name, empty where a system has none; `finished`: whether there is nothing left to train; `measurable`: whether
    the model of the round can be evaluated.
    """

    stage: str = ""
    finished: bool = False
    measurable: bool = True


@dataclass(frozen=True)
class Experiment:
    """What a strategy works on. `blueprint` is the model of the run, `reference` the one at width 1."""

    settings: Settings
    blueprint: Blueprint
    reference: Blueprint
    registry: ClientRegistry
    experiment_id: str
    state_dir: str
