"""The table `run`: where its clients are, and what is done with its records while it goes on."""

from typing import Self

from pydantic import model_validator

from piecework.device_profiles.names import did_you_mean
from piecework.training.settings.table import Table, setting

TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")


class RunSettings(Table):
    """Whose nodes a run has, and what follows it."""

    track: str = setting(
        "",
        "trackers of experiments that the server tells of each round, with commas: tensorboard, mlflow, wandb, trackio; each "
        "needs the extra of its name, and writes to this machine unless its own configuration says otherwise; empty = none",
    )

    superlink: str = setting(
        "",
        "the SuperLink whose nodes are the clients, which --superlink sets; empty = the clients are started with the run",
    )

    @model_validator(mode="after")
    def _require_known_trackers(self) -> Self:
        """Raise ValueError for an unknown or repeated tracker."""
        for name in self.trackers:
            if name not in TRACKERS:
                raise ValueError(
                    f"run.track = {self.track!r}: there is no tracker {name!r}, but {', '.join(TRACKERS)}"
                    f"{did_you_mean(name, TRACKERS)}"
                )
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"run.track = {self.track!r}: name each tracker once")
        return self

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `track`."""
        return tuple(name.strip() for name in self.track.split(",") if name.strip())
