"""What all trackers share: which rounds one has already, so that each is sent once, and no round is left out."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from piecework.server_app.callbacks import Callback
from piecework.server_app.records import RunDir
from piecework.server_app.trackers.scalars import Scalars, parameters, round_scalars, summary_scalars
from piecework.training.settings import Scalar


class Tracker(Callback, ABC):
    """Sends the figures of a run to a tracker of experiments, each round once.

    A resumed run goes on in the tracker's run, whose `id` is in the state. Rounds of earlier processes that the tracker does
    not have are sent at the start: those before it was first asked for, or while it could not be reached.
    """

    id = ""  # of the tracker's own run
    last = 0  # round that it was sent

    def __init__(self) -> None:
        self.sent: Collection[int] = ()

    def restore(self, state: dict[str, Any]) -> None:
        """Take the state of the run's checkpoint."""
        self.id, self.last = str(state["id"]), int(state["round"])

    def state(self) -> dict[str, Any]:
        """Return the id of the tracker's run and the last round that it was sent."""
        return {"id": self.id, "round": self.last}

    def start(self, settings: Mapping[str, Scalar], folder: Path, resumed: bool) -> None:
        """Begin a run of the tracker, or go on with that of the state, and send the rounds that it lacks."""
        self.folder = folder
        self.sent = self.begin(parameters(settings))
        for record in RunDir(folder).rounds():
            self.round(record["round"], record)

    def round(self, number: int, record: dict[str, Any]) -> None:
        """Send the figures of a round, unless the tracker has them."""
        if number not in self.sent:
            self.log(number, round_scalars(record))
        self.last = number

    def end(self, summary: dict[str, Any]) -> None:
        """Send the figures of the whole run, and how it ended."""
        self.finish(summary, summary_scalars(summary))

    @abstractmethod
    def begin(self, settings: dict[str, Scalar]) -> Collection[int]:
        """Begin a run, or go on with that of `id` if it is there; set `id`. Returns the rounds that it has."""

    @abstractmethod
    def log(self, number: int, figures: Scalars) -> None:
        """Send the figures of a round by their names. What is lost when this process is killed, `begin` must not count."""

    @abstractmethod
    def finish(self, summary: dict[str, Any], figures: Scalars) -> None:
        """Send how the run ended, and its figures by their names."""
