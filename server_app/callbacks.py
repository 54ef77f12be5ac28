"""Callbacks: code that the server tells of a run: of a user's, and the trackers of experiments that `run.track` names.

A callback only listens. What it is given are copies, and an exception in it, or sys.exit(), ends it and not the run.
"""

import copy
import json
import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from piecework.client_app.disk import write_atomically
from piecework.device_profiles.documents import read_json
from piecework.device_profiles.plugins import load_plugin, refuse_exit
from piecework.server_app.records import STATES
from piecework.training.methods import load
from piecework.training.settings import Scalar, Settings, SettingsError

LOG = logging.getLogger("piecework")
# Trackers by name: what has them, and the library that each needs, which the extra of the same name installs.
TRACKERS = {
    "tensorboard": ("piecework.server_app.trackers.tensorboard:TensorBoard", "tensorboard"),
    "mlflow": ("piecework.server_app.trackers.mlflow:MLflow", "mlflow"),
    "wandb": ("piecework.server_app.trackers.wandb:WandB", "wandb"),
    "trackio": ("piecework.server_app.trackers.trackio:Trackio", "trackio"),
}
LONGEST = 300  # characters of an error in a warning


class Callback:
    """What a run tells. The class of one's own overrides what it needs; it is made without arguments.

    What `state` returns is saved with each checkpoint, so that a resumed run's callback goes on from there: `restore` gets the
    state of the checkpoint, before `start`.
    """

    def restore(self, state: dict[str, Any]) -> None:
        """The run is resumed, and `state` is what `state` returned after the last round that it does not repeat."""

    def start(self, settings: Mapping[str, Scalar], folder: Path, resumed: bool) -> None:
        """The run begins, or goes on in a new process (`resumed`). `settings` are by key; `folder` is that of the run."""

    def round(self, number: int, record: dict[str, Any]) -> None:
        """A round has ended. `record` is its line of rounds.jsonl. A resumed run repeats the rounds after its checkpoint."""

    def state(self) -> Mapping[str, Any]:
        """Return what `restore` shall get, as JSON values. Called after `start`, and after each round."""
        return {}

    def error(self, error: BaseException) -> None:
        """The run has failed. `end` follows."""

    def end(self, summary: dict[str, Any]) -> None:
        """The run has ended: completed, failed or stopped. `summary` is summary.json, with `status` and `reason`."""


class Callbacks:
    """The callbacks of a run by name. Creating it imports them. Raises SettingsError.

    `values` are those of the run's checkpoints. They have the states of callbacks, also of those that failed, or that another
    process of the run had: they go on from there if they are named again.
    """

    def __init__(self, settings: Settings, values: dict[str, Any], folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.running = {name: _make(name, kind) for name, kind in find_callbacks(settings).items()}
        begun = _read_states(folder) if settings.resume_from else {}  # of a run that has no checkpoint yet
        self.states: dict[str, Any] = values.setdefault("callbacks", begun)

    def start(self) -> None:
        """Tell that the run begins."""
        resumed, values = bool(self.settings.resume_from), self.settings.to_run_config()
        if resumed and self.states:
            self._tell("restore", self._restore)
        self._tell("start", lambda name, each: each.start(dict(values), self.folder, resumed))
        self._tell("state", self._note_state)
        if self.states:
            write_atomically(self.folder / STATES, json.dumps(self.states).encode())

    def before(self, on_round: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """Return a function that tells of a round's record, and then calls `on_round` with it."""

        def tell(record: dict[str, Any]) -> None:
            self._tell("round", lambda name, each: each.round(record["round"], copy.deepcopy(record)))
            self._tell("state", self._note_state)
            on_round(record)

        return tell

    def error(self, error: BaseException) -> None:
        """Tell what the run failed by."""
        self._tell("error", lambda name, each: _optional(each, "error")(error))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell how the run ended."""
        self._tell("end", lambda name, each: each.end(copy.deepcopy(dict(summary))))

    def _restore(self, name: str, callback: Callback) -> None:
        if name in self.states:
            _optional(callback, "restore")(copy.deepcopy(self.states[name]))

    def _note_state(self, name: str, callback: Callback) -> None:
        """Take the callback's state, if it has any, into those of the checkpoint. Raises what a wrong state raises."""
        if state := _optional(callback, "state")():
            if not isinstance(state, Mapping):
                raise TypeError(f"its state is a {type(state).__name__}, and not a dict")
            self.states[name] = read_json(json.dumps(dict(state)))

    def _tell(self, call: str, tell: Callable[[str, Callback], None]) -> None:
        for name, callback in [*self.running.items()]:
            try:
                with refuse_exit():
                    tell(name, callback)
            except Exception as error:  # whatever a user's code raises
                del self.running[name]
                LOG.warning(
                    "the callback %r failed in %r and is told no more of this run, which goes on: %s: %s",
                    *(name, call, type(error).__name__, _in_a_line(error)),
                    exc_info=LOG.isEnabledFor(logging.DEBUG),
                )


def find_callbacks(settings: Settings) -> dict[str, Callable[[], Callback]]:
    """Import the callbacks and trackers of a run, and return what makes them, by name.

    Raises ValueError, which names what is missing.
    """
    names = [name.strip() for name in settings.callbacks.split(",") if name.strip()]
    found = {name: load(name) if ":" in name else load_plugin("callbacks", name) for name in names}
    return found | {f"run.track={name}": _find_tracker(name) for name in settings.run.trackers}


def _find_tracker(name: str) -> Callable[[], Callback]:
    """Import a tracker, which imports its library when it is made. Raises SettingsError if that is not installed."""
    path, library = TRACKERS[name]
    if find_spec(library) is None:
        raise SettingsError(f"run.track = {name!r}: it is not installed: pip install 'piecework[{name}]'")
    found: Callable[[], Callback] = load(path)
    return found


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


def _in_a_line(error: BaseException) -> str:
    """Return what an error says, shortened: a database tells the values that it could not write."""
    said = " ".join(str(error).split())
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"


def _optional(callback: Any, call: str) -> Callable[..., Any]:
    """Return a method of a callback, or what does nothing if it has none: it may be older than the method."""
    found = getattr(callback, call, None)
    return found if callable(found) else lambda *_: None


def _read_states(folder: Path) -> dict[str, Any]:
    """Return the states in a run's folder; none if it has no file of them, or a damaged one."""
    try:
        states = read_json((folder / STATES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return states if isinstance(states, dict) else {}
