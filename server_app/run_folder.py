"""Which folder a run writes to: a new one with a name of its own, or that of the run to resume."""

import time
import uuid
from pathlib import Path

from piecework.server_app.records import RunDir, newest_run
from piecework.training.settings import Settings


def resolve_run_dir(settings: Settings) -> RunDir:
    """The folder of this run: a new one, or that of the run to resume. Raises ValueError where there is none."""
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
                f"run-name = {settings.run_name!r}: {output_dir.resolve()} has a run of this name; choose another name, or go "
                "on with it by resume-from"
            )
        return RunDir(output_dir / settings.run_name)
    now = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    return RunDir(output_dir / f"{settings.strategy}-{short_name(settings.dataset)}-seed{settings.seed}-{now}")


def short_name(dataset: str) -> str:
    """A data set's name as part of a folder's: of one's own data what the file or folder is called."""
    _, colon, source = dataset.partition(":")
    name = Path(source).name.removesuffix(".npz") if colon else dataset
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
