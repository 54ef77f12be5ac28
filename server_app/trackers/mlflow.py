"""MLflow: a run in the store of MLFLOW_TRACKING_URI; else in mlflow.db beside the folders of the runs."""

import logging
import os
import time
from typing import Any

from piecework.server_app.run_folder import COMPLETED, STOPPED
from piecework.server_app.trackers.base import Tracker
from piecework.server_app.trackers.scalars import Scalars
from piecework.training.settings import Scalar

AT_ONCE = 100  # parameters in a request, by MLflow's limit
STATUS = {COMPLETED: "FINISHED", STOPPED: "KILLED"}
LONGEST = 6000  # characters of a parameter


class MLflow(Tracker):
    """Writes to a run of the experiment `piecework`, or of MLFLOW_EXPERIMENT_NAME. A resumed run goes on in the same."""

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
        import mlflow
        from mlflow.entities import Metric, Param

        super().__init__()
        for name in ("mlflow", "alembic"):  # which tell of each table of a new store
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # has a traceback of what is raised too
        self.mlflow: Any = mlflow
        self.Metric, self.Param = Metric, Param

    def begin(self, settings: dict[str, Scalar]) -> set[int]:
        """Create or find the run. The store says which rounds it has."""
        local = f"sqlite:///{self.folder.parent / 'mlflow.db'}"
        chosen = self.mlflow.is_tracking_uri_set()
        self.client = self.mlflow.MlflowClient(self.mlflow.get_tracking_uri() if chosen else local)
        if self.id and self._is_there():
            self.client.update_run(self.id, status="RUNNING")
            return {each.step for each in self.client.get_metric_history(self.id, "seconds")}
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "piecework")
        found = self.client.get_experiment_by_name(name)
        files = None if chosen else (self.folder.parent / "mlflow-artifacts").as_uri()
        experiment = found.experiment_id if found else self.client.create_experiment(name, files)
        self.id = self.client.create_run(experiment, run_name=self.folder.name).info.run_id
        self.client.set_tag(self.id, "piecework.folder", str(self.folder))
        params = [self.Param(key, str(value)[:LONGEST]) for key, value in settings.items()]
        for first in range(0, len(params), AT_ONCE):
            self.client.log_batch(self.id, params=params[first : first + AT_ONCE])
        return set()

    def _is_there(self) -> bool:
        """Return whether the store has the run: it may be another store than before."""
        try:
            self.client.get_run(self.id)
        except self.mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return True

    def log(self, number: int, figures: Scalars) -> None:
        """Write the figures in one transaction, at the round as the step."""
        now = int(time.time() * 1000)
        self.client.log_batch(self.id, [self.Metric(key, value, now, number) for key, value in figures.items()])

    def finish(self, summary: dict[str, Any], figures: Scalars) -> None:
        """Write the summary, and the status."""
        self.log(self.last, figures)
        self.client.set_tag(self.id, "mlflow.note.content", summary["reason"])
        self.client.set_terminated(self.id, STATUS.get(summary["status"], "FAILED"))
