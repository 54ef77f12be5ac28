"""Callbacks: code of a user's that the server tells of a run, such as a tracker of experiments.

A callback only listens. What it is given are copies, and an exception in it, or sys.exit(), ends it and not the run.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from piecework.device_profiles.plugins import load_plugin, refuse_exit
from piecework.training.methods import load
from piecework.training.settings import Scalar, Settings, SettingsError

LOG = logging.getLogger("piecework")


class Callback:
    """What a run tells. The class of one's own overrides what it needs; it is made without arguments."""

    def start(self, settings: Mapping[str, Scalar], folder: Path, resumed: bool) -> None:
        """The run begins, or goes on in a new process (`resumed`). `settings` are by key; `folder` is that of the run."""

    def round(self, number: int, record: dict[str, Any]) -> None:
        """A round has ended. `record` is its line of rounds.jsonl. A resumed run repeats the rounds after its checkpoint."""

    def end(self, summary: dict[str, Any]) -> None:
        """The run has ended: completed, failed or stopped. `summary` is summary.json, with `status` and `reason`."""


class Callbacks:
    """The callbacks of a run by name. Creating it imports them. Raises SettingsError."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.running = {name: _make(name, kind) for name, kind in find_callbacks(settings).items()}

    def start(self, folder: Path) -> None:
        """Tell that the run begins."""
        resumed, values = bool(self.settings.resume_from), self.settings.to_run_config()
        self._tell("start", lambda each: each.start(dict(values), folder, resumed))

    def before(self, on_round: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """Return a function that tells of a round's record, and then calls `on_round` with it."""

        def tell(record: dict[str, Any]) -> None:
            self._tell("round", lambda each: each.round(record["round"], copy.deepcopy(record)))
            on_round(record)

        return tell

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell how the run ended."""
        self._tell("end", lambda each: each.end(copy.deepcopy(dict(summary))))

    def _tell(self, call: str, tell: Callable[[Callback], None]) -> None:
        for name, callback in [*self.running.items()]:
            try:
                with refuse_exit():
                    tell(callback)
            except Exception as error:  # whatever a user's code raises
                del self.running[name]
                LOG.warning(
                    "the callback %r failed in %r and is told no more of this run, which goes on: %s: %s",
                    *(name, call, type(error).__name__, error),
                    exc_info=LOG.isEnabledFor(logging.DEBUG),
                )


def find_callbacks(settings: Settings) -> dict[str, Callable[[], Callback]]:
    """Import the callbacks of a run, and return what makes them, by name. Raises ValueError, which names what is missing."""
    names = [name.strip() for name in settings.callbacks.split(",") if name.strip()]
    return {name: load(name) if ":" in name else load_plugin("callbacks", name) for name in names}


def _make(name: str, kind: Callable[[], Callback]) -> Callback:
    try:
        with refuse_exit():
            callback = kind()
    except Exception as error:  # whatever a user's code raises
        raise SettingsError(f"callbacks: {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if missing := [call for call in ("start", "round", "end") if not callable(getattr(callback, call, None))]:
        raise SettingsError(
            f"callbacks: {name!r} made a {type(callback).__name__} without {', '.join(missing)}: derive it from "
            "piecework.server_app.callbacks.Callback"
        )
    return callback
