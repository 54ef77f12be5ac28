"""Weights & Biases: a run in the project of WANDB_PROJECT; offline in the run's folder, unless WANDB_MODE says otherwise."""

import os
import shutil
from pathlib import Path
from typing import Any

from piecework.server_app.run_folder import COMPLETED
from piecework.server_app.trackers.base import Tracker
from piecework.server_app.trackers.scalars import Scalars
from piecework.training.settings import Scalar


class WandB(Tracker):
    """Writes to a run of W&B. Offline that is one folder for `wandb sync`, which a resumed run writes anew, with the same id.

    W&B cannot go on with a run offline, and what its own process has not written yet is lost if ours is killed.
    """

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when it is imported
        import wandb

        super().__init__()
        self.wandb: Any = wandb

    def begin(self, settings: dict[str, Scalar]) -> range:
        """Create or find the run. W&B's server says which rounds it has."""
        mode, folder = os.environ.get("WANDB_MODE", "offline"), os.environ.get("WANDB_DIR", str(self.folder))
        offline = mode == "offline"
        if offline and self.id:
            for earlier in Path(folder, "wandb").glob(f"offline-run-*-{self.id}"):
                shutil.rmtree(earlier)
        self.run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "piecework"),
            dir=folder,
            id=self.id or None,
            resume="allow" if self.id and not offline else None,
            name=self.folder.name,
            mode=mode,
            config=settings,
            reinit="create_new",  # beside one that the caller of this process may have
            # What a machine measures is no part of a run that emulates others, and would ask the network where it is.
            settings=self.wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_machine_info=True),
        )
        self.id = str(self.run.id)
        return range(1, 1 if offline else self.run.starting_step)

    def log(self, number: int, figures: Scalars) -> None:
        """Write the figures, at the round as the step."""
        self.run.log(figures, step=number, commit=True)

    def finish(self, summary: dict[str, Any], figures: Scalars) -> None:
        """Write the summary, and whether the run completed."""
        self.run.summary.update(figures | {"summary/status": summary["status"], "summary/reason": summary["reason"]})
        self.run.finish(exit_code=0 if summary["status"] == COMPLETED else 1)
