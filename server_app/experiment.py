"""Carry out one run on a grid: hold its folder's lock, tell its callbacks, and write how it ended, however it ends."""

import logging
from contextlib import ExitStack

from flwr.serverapp import Grid

from piecework.client_app.disk import StorageError
from piecework.server_app.callbacks import Callbacks
from piecework.server_app.records import CheckpointError, RunDir
from piecework.server_app.rounds import OnRound, Run
from piecework.server_app.run_folder import COMPLETED, nothing_left, require_new
from piecework.server_app.run_lock import run_lock
from piecework.server_app.run_log import log_end, log_rounds, run_log
from piecework.server_app.summary import how_stopped, summarise
from piecework.training.settings import Settings

LOG = logging.getLogger("piecework")


def open_run(grid: Grid, settings: Settings, run_dir: RunDir) -> Run:
    """Return a run, new or resumed, that has written nothing yet.

    Raises ValueError for settings, and CheckpointError for a checkpoint that is sealed and yet not as Piecework writes it.
    """
    try:
        return Run(grid, settings, run_dir)
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        if not settings.resume_from:
            raise
        file = run_dir.checkpoint_paths()[-1] / "state.json"
        raise CheckpointError(
            f"{file} is not as this version of Piecework writes it ({type(error).__name__}: {error!s:.200}): the run cannot be "
            "resumed"
        ) from error


def run_experiment(grid: Grid, settings: Settings, run_dir: RunDir, on_round: OnRound = lambda _: None) -> None:
    """Run all rounds, and write `summary.json` however the run ends.

    A resumed run of which nothing is left stays as it is. Raises the error that ended the run, or RunLockedError if another
    process is writing this run, and ValueError if a new run's name is taken.
    """
    with ExitStack() as held:
        if settings.resume_from:
            held.enter_context(run_lock(run_dir.path))  # no other process may change the files that are read now
        run = open_run(grid, settings, run_dir)  # rejects settings before any file is written
        if not settings.resume_from:
            held.enter_context(run_lock(run_dir.path))
            require_new(run_dir)  # only now: a run of this name may have completed since the first look
        if settings.resume_from and nothing_left(run_dir, settings, run.recovery):
            return
        callbacks = Callbacks(settings, run.values, run_dir.path)
        run.prepare_run_dir()
        held.enter_context(run_log(run_dir.path, settings))
        callbacks.start()
        status, reason = "failed", ""
        try:
            status = run.run(callbacks.before(log_rounds(on_round, settings)))
        except (KeyboardInterrupt, SystemExit):
            status, reason = how_stopped(run_dir)
            raise
        except BaseException as error:
            reason = str(error) or type(error).__name__
            callbacks.error(error)
            raise
        finally:
            run.moments.end()
            summary = summarise(run_dir, status, reason, run.seconds())
            log_end(summary)
            try:
                run_dir.write_summary(summary)
            except StorageError as unwritten:
                if status == COMPLETED:
                    raise
                LOG.warning("%s", unwritten)  # what ended the run is told instead
            finally:
                callbacks.end(summary)
