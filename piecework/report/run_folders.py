"""Find the folders of runs in a folder: single ones, and those of studies."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from piecework.server_app.records import CheckpointError, RunDir

LOG = logging.getLogger("piecework")
DEEPEST = 6  # folders below each other in which runs are looked for


def runs_at(path: Path) -> list[RunDir]:
    """Return the run at a path, or all runs in and below that folder, ordered by their paths.

    What lies in a run's folder is that run's. Hidden folders are left out, and a link is followed only to the folder of a run.
    Raises CheckpointError where there is no run.
    """
    if not (found := sorted(find_runs(path, DEEPEST))):
        raise CheckpointError(
            f"{path} is not the folder of a run (it has no settings.toml), and no folder in it or below is one"
        )
    return [RunDir(folder) for folder in found]


def find_runs(folder: Path, depth: int) -> Iterator[Path]:
    """Yield a folder if it is a run's, else the runs at most so many folders below; what cannot be read is warned about."""
    try:
        if RunDir(folder).has_begun():
            yield folder
            return
        inner = [each for each in os.scandir(folder) if each.is_dir() and not each.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        LOG.warning("%s is left out, because it cannot be read: %s", folder, error.strerror)
        return
    for each in inner if depth else []:
        yield from find_runs(Path(each.path), 0 if each.is_symlink() else depth - 1)
