"""Trackio: a run in the project `piecework` of TRACKIO_DIR, of TRACKIO_SERVER_URL, or of the Space of TRACKIO_SPACE_ID."""

import contextlib
import os
import sys
import uuid
from collections.abc import Collection, Iterator
from typing import Any

from piecework.server_app.trackers.base import Tracker
from piecework.server_app.trackers.scalars import Scalars
from piecework.training.settings import Scalar

PROJECT = "piecework"


class Trackio(Tracker):
    """Writes to a run of Trackio, whose name has some letters after the folder's, because its runs are found by name."""

    def __init__(self) -> None:
        with _told_on_stderr():
            import trackio

        super().__init__()
        self.trackio: Any = trackio

    def begin(self, settings: dict[str, Scalar]) -> Collection[int]:
        """Create or find the run. Its store on this machine says which rounds it has; a remote one does not."""
        local, known = not {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & os.environ.keys(), self.last
        self.id = self.id or f"{self.folder.name}-{uuid.uuid4().hex[:6]}"
        with _told_on_stderr():
            self.run = self.trackio.init(
                PROJECT,
                name=self.id,
                config=settings,
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        if not local:
            return range(1, known + 1)
        rows = self.trackio.SQLiteStorage.get_metric_values(PROJECT, self.run.name, "seconds", run_id=self.run.id)
        return {row["step"] for row in rows}

    def log(self, number: int, figures: Scalars) -> None:
        """Write the figures, at the round as the step. Trackio does so within a second, in a thread of its own."""
        self.run.log(figures, step=number)

    def finish(self, summary: dict[str, Any], figures: Scalars) -> None:
        """Write the summary, and wait until all is written."""
        self.run.log(figures, step=self.last)
        with _told_on_stderr():
            self.run.finish()
        if self.trackio.context_vars.current_run.get() is self.run:
            self.trackio.context_vars.current_run.set(None)  # else it is finished once more when this process ends


@contextlib.contextmanager
def _told_on_stderr() -> Iterator[None]:
    """Have what Trackio prints go to stderr: stdout may be JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
