"""What can be done with the folders of runs: remove what is not needed any more."""

import re
import shutil
from pathlib import Path


def stores(output_dir: Path) -> list[Path]:
    """What emulated clients left in the ended runs of a folder: nothing but folders named by an experiment-id."""
    ended = [path.parent for path in output_dir.glob("*/summary.json") if (path.parent / "settings.toml").is_file()]
    return sorted(
        path for run in ended for path in (run / "clients").glob("*") if re.fullmatch("[0-9a-f]{32}", path.name)
    )


def converted(cache: Path) -> list[Path]:
    """The converted data sets in a cache."""
    return sorted(path.parent for path in cache.glob("*/meta.json"))


def remove(paths: list[Path]) -> int:
    """Remove folders; returns how many bytes that freed."""
    freed = 0
    for path in paths:
        freed += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
    return freed
