"""The inputs of a strategy, its state between rounds, and its progress."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from piecework.device_profiles.documents import abbreviate
from piecework.federation.faults import CrashHistory
from piecework.federation.registry import ClientRegistry
from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece
from piecework.training.settings import Settings

NORMS_KEPT = 200  # the latest norms that are stored of each unit


@dataclass
class StrategyState:
    """The state of a strategy between rounds, in plain values: a checkpoint consists of these and of arrays.

    `norms` are those of accepted updates (root mean squares), by unit.
    """

    norms: dict[str, list[float]] = field(default_factory=dict)
    crash_history: CrashHistory = field(default_factory=CrashHistory)

    def note_norms(self, found: dict[str, list[float]]) -> None:
        """Add the norms of a round's accepted updates, of which the latest are kept."""
        self.norms = self.norms | {unit: [*self.norms.get(unit, []), *new][-NORMS_KEPT:] for unit, new in found.items()}

    def to_values(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Return the state of `to_values`. Raises ValueError for a missing or unknown field."""
        known = {f.name for f in fields(cls)}
        if set(values) != known:
            found = abbreviate(sorted(values))
            raise ValueError(f"the strategy's state in the checkpoint has the fields {found}, expected {sorted(known)}")
        return cls(**values | {"crash_history": CrashHistory(**values["crash_history"])})


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    `stage` is the name of the stage, or empty for a strategy without stages. `finished`: nothing is left to train.
    `measurable`: the model of the round can be evaluated. `key` is that of the stage in the
    method's cut. `model` are the atoms and the head that are trained so far; None = all.
    """

    stage: str = ""
    finished: bool = False
    measurable: bool = True
    key: Any = 0
    model: tuple[Piece, str] | None = None


@dataclass(frozen=True)
class Experiment:
    """The inputs of a strategy. `blueprint` is the model of the run, and `reference` the same model at width 1.

    `state_dir` is the folder for the stores of emulated clients. `privacy` is what a checkpoint kept of a private run.
    """

    settings: Settings
    blueprint: Blueprint
    reference: Blueprint
    registry: ClientRegistry
    experiment_id: str
    state_dir: str
    privacy: Mapping[str, Any] = field(default_factory=dict)
