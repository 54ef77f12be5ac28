"""TensorBoard: event files in the folder `tensorboard` of the run, which `tensorboard --logdir RUNS` shows."""

import json
import time
from pathlib import Path
from typing import Any

from piecework.server_app.trackers.base import Tracker
from piecework.server_app.trackers.scalars import Scalars
from piecework.training.settings import Scalar

COMPARED = ("accuracy", "loss")  # beside the settings, in the table of runs


class TensorBoard(Tracker):
    """Writes a file of events for each process of the run. A file says from which round on the ones before it are void."""

    def __init__(self, path: Path | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        super().__init__()
        self.path = path  # another folder than that of the run
        self.make: Any = SummaryWriter
        self.hparams: Any = hparams

    def begin(self, settings: dict[str, Scalar]) -> range:
        """Open a file. The rounds up to that of the state are in those before."""
        self.id = "tensorboard"
        path = self.path or self.folder / self.id
        if not path.exists():
            self.last = 0
        _await_a_later_name(path)
        self.writer = self.make(str(path), purge_step=self.last + 1)
        if not self.last:  # and so the settings are those of the run's first start
            for part in self.hparams(settings, dict.fromkeys(COMPARED, 0.0)):
                self.writer.file_writer.add_summary(part)
        return range(1, self.last + 1)

    def log(self, number: int, figures: Scalars) -> None:
        """Write the figures, at the round as the step."""
        for name, figure in figures.items():
            self.writer.add_scalar(name, figure, number)
        self.writer.flush()

    def finish(self, summary: dict[str, Any], figures: Scalars) -> None:
        """Write the summary as a text, because its figures are no curves."""
        self.writer.add_text("summary", f"```json\n{json.dumps(summary, indent=2)}\n```", self.last)
        self.writer.close()


def _await_a_later_name(path: Path) -> None:
    """Wait for the next second if a file of this one is there: files are read in the order of the seconds in their names."""
    while any(path.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)
