"""TensorBoard: event files in the folder `tensorboard` of the run, which `tensorboard --logdir RUNS` shows."""

import itertools
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from piecework.server_app.trackers.base import Tracker
from piecework.server_app.trackers.scalars import Scalars
from piecework.training.settings import Scalar

OPENED = itertools.count()  # files of this process
COMPARED = ("accuracy", "loss")  # beside the settings, in the table of runs


class TensorBoard(Tracker):
    """Writes a file of events for each process of the run. A file says from which round on the ones before it are void."""

    def __init__(self, path: Path | None = None) -> None:
        from torch.utils.tensorboard import summary

        super().__init__()
        self.path = path  # another folder than that of the run
        self.summary: Any = summary

    def begin(self, settings: dict[str, Scalar]) -> range:
        """Open a file. The rounds up to that of the state are in those before."""
        self.id = "tensorboard"
        path = self.path or self.folder / self.id
        if not path.exists():
            self.last = 0
        self.file = EventFile(path, self.last + 1)
        if not self.last:  # and so the settings are those of the run's first start
            for part in self.summary.hparams(settings, dict.fromkeys(COMPARED, 0.0)):
                self.file.add(summary=part)
        self.file.flush()
        return range(1, self.last + 1)

    def log(self, number: int, figures: Scalars) -> None:
        """Write the figures, at the round as the step."""
        for name, figure in figures.items():
            self.file.add(step=number, summary=self.summary.scalar(name, figure))
        self.file.flush()

    def finish(self, summary: dict[str, Any], figures: Scalars) -> None:
        """Write the summary as a text, because its figures are no curves."""
        text = f"```json\n{json.dumps(summary, indent=2)}\n```"
        self.file.add(step=self.last, summary=self.summary.text("summary", text))
        self.file.close()


class EventFile:
    """A file of events, written by the thread that calls.

    TensorBoard's own writer has a thread, which prints a traceback if the disk is full.
    """

    def __init__(self, folder: Path, first: int) -> None:
        """Open a file whose first step is `first`: what earlier files have from there on is void."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.make: Any = Event
        folder.mkdir(parents=True, exist_ok=True)
        _await_a_later_name(folder)
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{next(OPENED)}"
        self.records: Any = RecordWriter((folder / name).open("xb"))
        self.add(file_version="brain.Event:2")
        self.add(step=first, session_log=SessionLog(status=SessionLog.START))

    def add(self, **values: Any) -> None:
        """Add an event. Raises OSError."""
        self.records.write(self.make(wall_time=time.time(), **values).SerializeToString())

    def flush(self) -> None:
        """Have all events in the file. Raises OSError."""
        self.records.flush()

    def close(self) -> None:
        """Close the file. Raises OSError."""
        self.records.close()


def _await_a_later_name(path: Path) -> None:
    """Wait for the next second if a file of this one is there: files are read in the order of the seconds in their names."""
    while any(path.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)
