"""Run an experiment, and read what a run has written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecework.api.frames import choose_rows, make_frame
from piecework.api.keywords import Values, read_keywords, speak_of_keywords
from piecework.engines.cluster.address import RayCluster
from piecework.engines.processes import Connection
from piecework.training.settings import Scalar, Settings, SettingsError

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from piecework.api.scores import Scores
    from piecework.exports.formats import Exported
    from piecework.models.trained_model import TrainedModel
    from piecework.report.progress import ShowsRounds
    from piecework.server_app.records import RunDir

Record = dict[str, Any]
COUNTED = (
    "rounds",
    "clients_asked",
    "clients_answered",
    "clients_failed",
    "bytes_down",
    "bytes_up",
    "seconds",
    "simulated_seconds",
)
NO_RUN: Record = {
    "run_dir": None,
    "status": "failed",
    "accuracy": None,
    "max_peak_over_budget": None,
    **dict.fromkeys(COUNTED, 0),
}


class RunFailedError(RuntimeError):
    """A run did not complete; the message says why. `run` is what there is of it."""

    def __init__(self, reason: str, run: "Run") -> None:
        super().__init__(reason)
        self.run = run


class Run:
    """A run, from its folder: what it was asked for, how it ended, and its records."""

    def __init__(self, path: str | Path) -> None:
        """Open the folder of a run. Raises CheckpointError if it is none."""
        from piecework.server_app.records import RunDir

        self._folder = RunDir(Path(path))
        self.path = self._folder.path
        self.settings: Mapping[str, Scalar] = self._folder.settings()

    def __repr__(self) -> str:
        shown = "none" if self.accuracy is None else f"{self.accuracy:.2%}"
        return f"Run({str(self.path)!r}: {self.status}, {len(self.rounds)} rounds, accuracy {shown})"

    @property
    def summary(self) -> Record:
        """The object in `summary.json`, which `piecework run --json` prints; of a run that has not ended, its records' own."""
        found = self._folder.summary()
        if found is not None:
            return found
        from piecework.server_app.summary import summarise

        return summarise(self._folder, "running", "it has not ended", self._folder.seconds())

    @property
    def status(self) -> str:
        """`completed`, `failed`, `stopped` by a signal, or `running`."""
        return str(self.summary["status"])

    @property
    def accuracy(self) -> float | None:
        """The last accuracy on the test data, a fraction; None if the run never evaluated."""
        found: float | None = self.summary["accuracy"]
        return found

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy on the test data; it was chosen by looking at them."""
        found: float | None = self.summary["best_accuracy"]
        return found

    @property
    def max_peak_over_budget(self) -> float | None:
        """The largest measured peak of a client as a fraction of its budget; None if nothing was limited."""
        found: float | None = self.summary["max_peak_over_budget"]
        return found

    @property
    def rounds(self) -> list[Record]:
        """The records of the rounds (`rounds.jsonl`), each with its clients. Raises CheckpointError for a damaged one."""
        return self._folder.rounds()

    def to_pandas(self, what: str = "rounds") -> "pandas.DataFrame":
        """Return a frame with a line a round, or with `clients` a line a client and round.

        Raises ValueError for another name, and ImportError without pandas.
        """
        rounds = self.rounds
        clients = [{"round": record["round"], **client} for record in rounds for client in record["clients"]]
        plain = [{key: value for key, value in record.items() if not isinstance(value, list)} for record in rounds]
        return make_frame(choose_rows(what, {"rounds": plain, "clients": clients}))

    def load(self, *, normalise: bool = True) -> "TrainedModel":
        """Return the trained model, as `piecework.load` does."""
        from piecework.models.trained_model import load_model

        return load_model(self.path, normalise=normalise)

    def load_into(self, module: "nn.Module") -> "nn.Module":
        """Give a module of one's own, from which the run's model was made, the trained weights; see `piecework.load`."""
        from piecework.models.imported.own_names import fill_module

        return fill_module(module, self.path)

    def evaluate(self, dataset: str = "", *, batch_size: int = 256, client: int | None = None) -> "Scores":
        """Return what the trained model gets right, by class and by device class, as `piecework evaluate` shows it.

        That is on the test split of the run's data set, or of another `dataset` with the same kind of examples and classes.
        `client` is the number of a client whose own model is evaluated, on its own test examples.
        """
        from piecework.api.scores import score_run

        return score_run(self.path, dataset, batch_size, client)

    def export(self, format: str, to: str | Path | None = None, *, client: int | None = None) -> "Exported":
        """Write the run as `onnx`, `torchscript`, `executorch`, or in another format of `piecework export`.

        Returns what was written. `client` is the number of a client whose own model is written.
        `to` is the file or folder, by default in the run's. Raises ExportError if the format cannot have the model, and
        ImportError without the extra of the format.
        """
        from piecework.exports.formats import export_run

        return export_run(self.path, format, None if to is None else Path(to), client)

    def write_report(self, *, plotly: bool = True) -> Path:
        """Write one self-contained HTML page about the run, and return its file; without `plotly`, one without figures."""
        from piecework.report.run_page import write_report

        return write_report(self._folder, plotly=plotly)


@dataclass(frozen=True)
class Outcome:
    """How carrying out a run ended: its folder and summary, the error that ended it, or the signal (as an exception)."""

    run_dir: "RunDir"
    summary: Record
    error: Exception | None = None
    signal: BaseException | None = None

    @property
    def reason(self) -> str:
        """Why the run did not complete."""
        return str(self.error) if self.error else str(self.summary.get("reason", ""))


def carry_out(
    settings: Settings,
    progress: "ShowsRounds",
    restarts: int = 0,
    connection: Connection | RayCluster | None = None,
) -> Outcome:
    """Run to the end, or to the error or signal that ends it; what was written by then has a summary.

    Raises ValueError if the run cannot begin.
    """
    from piecework.client_app.disk import StorageError
    from piecework.engines.launch import SuperLinkLostError, launch
    from piecework.engines.processes import EngineError
    from piecework.federation.errors import RunAbortedError, TooFewNodesError
    from piecework.server_app.preflight import preflight
    from piecework.server_app.run_folder import STOPPED, resolve_run_dir
    from piecework.server_app.summary import summarise

    preflight(settings)
    run_dir = resolve_run_dir(settings)
    # a ServerApp elsewhere must find this very run, and not choose again
    chosen = {"resume-from": str(run_dir.path)} if settings.resume_from else {"run-name": run_dir.path.name}
    settings = settings.with_values(chosen)
    failed: Exception | None = None
    signal: BaseException | None = None
    summary: Record | None = None
    before = run_dir.summary_version()
    try:
        with progress:
            summary = launch(settings, run_dir, progress.update, restarts, connection)
    except (RunAbortedError, TooFewNodesError, EngineError, SuperLinkLostError, StorageError) as error:
        failed = error
    except (KeyboardInterrupt, SystemExit) as error:
        signal = error
    if run_dir.summary_version() != before:
        summary = run_dir.summary()
    if summary is None:
        status, why = STOPPED if signal else "failed", str(failed) if failed else "stopped by a signal"
        begun = run_dir.has_begun()
        nothing = NO_RUN | {"status": status, "reason": why}
        summary = summarise(run_dir, status, why, run_dir.seconds()) if begun else nothing
    return Outcome(run_dir, summary, failed, signal)


def run(
    settings: Values | None = None,
    /,
    *,
    preset: str | Path = "",
    restarts: int = 0,
    superlink: str = "",
    root_certificates: str | Path | None = None,
    insecure: bool = False,
    ray_address: str = "",
    progress: bool = True,
    **keywords: Any,
) -> Run:
    """Train, as `piecework run` does, and return the run.

    Settings are keywords (`num_rounds=5, training={"lr": 0.05}`) or a mapping from their keys
    (`{"training.lr": 0.05}`); `model` may be an `nn.Module`, whose weights are then the initial ones. `preset` is a file or the
    name of a shipped one. `restarts` is how often a crashed run is resumed. With `superlink` (HOST:PORT, and either
    `root_certificates` or `insecure`) the run uses the devices of a running SuperLink, and with `ray_address`
    (`auto` or HOST:PORT) and `engine="ray"` the machines of a Ray cluster. `progress` shows a line a round on stderr, in a
    terminal and in a notebook with a bar.

    On more than one core a script calls this under `if __name__ == "__main__":`, because workers import the script.

    Raises ValueError (most often SettingsError) if the run cannot begin, and RunFailedError if it does not complete.
    """
    from piecework.commands.options import connection_to, settings_from
    from piecework.report.notebook import choose_progress

    if not isinstance(restarts, int) or restarts < 0:
        raise SettingsError(f"restarts = {restarts!r}: expected a number of times, 0 or more")
    values = read_keywords(settings, keywords)
    certificate = None if root_certificates is None else Path(root_certificates)
    with speak_of_keywords():
        connection = connection_to(superlink, certificate, insecure, ray_address)
        chosen = settings_from(str(preset), [], named=values, connection=connection)
    outcome = carry_out(chosen, choose_progress(chosen.num_rounds, progress), restarts, connection)
    if outcome.signal is not None:
        if outcome.run_dir.has_begun():
            outcome.signal.add_note(f"resume it: piecework.run(resume_from={str(outcome.run_dir.path)!r})")
        raise outcome.signal
    if outcome.summary["status"] != "completed":
        if not outcome.run_dir.has_begun():
            raise outcome.error or RuntimeError(outcome.reason)
        raise RunFailedError(outcome.reason, Run(outcome.run_dir.path)) from outcome.error
    return Run(outcome.run_dir.path)
