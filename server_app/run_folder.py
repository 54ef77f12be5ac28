"""The folder that a run writes to: a new one with a unique name, or that of the run to resume."""

import time
import uuid
from pathlib import Path

from piecework.server_app.records import RunDir, newest_run
from piecework.training.settings import Settings


def resolve_run_dir(settings: Settings) -> RunDir:
    """Return the folder of this run. Raises ValueError if there is no run to resume, or a new run's name is taken."""
    output_dir = Path(settings.output_dir)
    if settings.resume_from == "auto":
        found = newest_run(output_dir, settings.hash())
        if found is None:
            raise ValueError(f"resume-from = 'auto': no run with these settings in {output_dir.resolve()}")
        return RunDir(found)
    if settings.resume_from:
        if not (Path(settings.resume_from) / "settings.toml").is_file():
            raise ValueError(f"resume-from = {settings.resume_from!r}: not the folder of a run")
        return RunDir(Path(settings.resume_from))
    if settings.run_name:
        if (output_dir / settings.run_name / "settings.toml").exists():
            raise ValueError(
                f"run-name = {settings.run_name!r}: {output_dir.resolve()} has this run already; choose a new name or continue "
                "it with resume-from"
            )
        return RunDir(output_dir / settings.run_name)
    now = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    return RunDir(output_dir / f"{settings.strategy}-{short_name(settings.dataset)}-seed{settings.seed}-{now}")


def short_name(dataset: str) -> str:
    """Return a data set's name for use in a folder name; for the user's own data, that of the file or folder."""
    _, colon, source = dataset.partition(":")
    name = Path(source).name.removesuffix(".npz") if colon else dataset
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
