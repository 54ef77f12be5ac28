"""Remove what is no longer needed from the folders of runs."""

import re
import shutil
from pathlib import Path


def stores(output_dir: Path) -> list[Path]:
    """List the stores of emulated clients in the ended runs of a folder, and of the studies in it.

    They are only folders named by an experiment-id.
    """
    summaries = [*output_dir.glob("*/summary.json"), *output_dir.glob("*/*/summary.json")]
    ended = [path.parent for path in summaries if (path.parent / "settings.toml").is_file()]
    return sorted(
        path for run in ended for path in (run / "clients").glob("*") if re.fullmatch("[0-9a-f]{32}", path.name)
    )


def find_cached(cache: Path) -> list[Path]:
    """List the folders of a cache: its converted data sets, and its kept traces."""
    made = *cache.glob("*/meta.json"), *cache.glob("traces/traces.sqlite")
    return sorted(path.parent for path in made)


def remove(paths: list[Path]) -> int:
    """Remove folders; return the number of freed bytes."""
    freed = 0
    for path in paths:
        freed += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
    return freed
