"""The log file of a run, `run.log` in its folder: what the server said, each round in a line, and who failed and why.

A resumed run appends to it.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from piecework.server_app.round_line import round_line
from piecework.training.settings import Settings

FILE = "run.log"
LOG = logging.getLogger("piecework")
ROUNDS = logging.getLogger("piecework.rounds")
ROUNDS.propagate = False  # whoever follows the run is shown its rounds already
ROUNDS.setLevel(logging.INFO)
OnRound = Callable[[dict[str, Any]], None]


class RunLog(logging.FileHandler):
    """Writes the log of a run. A disk that cannot be written ends the log, not the run."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Write no more, and say so once."""
        detach(self)
        LOG.warning(
            "%s cannot be written (%s): it ends here, and the run goes on", self.baseFilename, sys.exc_info()[1]
        )


def detach(handler: logging.Handler) -> None:
    """Have a handler hear no more of the run."""
    for log in (LOG, ROUNDS):
        log.removeHandler(handler)


@contextmanager
def run_log(folder: Path, settings: Settings) -> Iterator[None]:
    """Write what is logged in the body to the log file of the run in a folder; without a file if it cannot be opened."""
    try:
        handler = RunLog(folder / FILE, encoding="utf-8")
    except OSError as error:
        LOG.warning("%s cannot be written (%s): the run goes on without it", folder / FILE, error)
        yield
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    for log in (LOG, ROUNDS):
        log.addHandler(handler)
    try:
        begins = "goes on" if settings.resume_from else "begins"
        ROUNDS.info("the run %s: %s, %s, %s", begins, settings.strategy, settings.model, settings.dataset)
        yield
    finally:
        detach(handler)
        try:
            handler.close()
        except OSError as error:  # of a full disk, which the run's own files have told already
            LOG.debug("%s cannot be closed: %s", handler.baseFilename, error)


def log_rounds(on_round: OnRound, settings: Settings) -> OnRound:
    """Return a function that writes a round's record to the log file, and then calls `on_round` with it."""

    def log(record: dict[str, Any]) -> None:
        ROUNDS.info("%s  %.1f s", round_line(record, settings.num_rounds), record["seconds"])
        for client in record["clients"]:
            if client["status"] != "ok":
                ROUNDS.warning(
                    "client %s (%s): %s: %s", *(client[key] for key in ("client", "device", "status", "reason"))
                )
        on_round(record)

    return log


def log_end(summary: dict[str, Any]) -> None:
    """Write how the run ended to the log file."""
    reason = f": {summary['reason']}" if summary["reason"] else ""
    level = logging.INFO if summary["status"] == "completed" else logging.ERROR
    ROUNDS.log(level, "%s after %s rounds%s", summary["status"], summary["rounds"], reason)
