"""Compare runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecework.api.frames import choose_rows, make_frame
from piecework.api.plans import show_text
from piecework.api.runs import Run

if TYPE_CHECKING:
    import pandas

    from piecework.report.compare import Group

Record = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Runs below each other. Those that differ only in the seed are one group, with mean and sample standard deviation."""

    groups: Sequence["Group"]

    @property
    def record(self) -> Record:
        """The object that `piecework compare --json` prints."""
        from piecework.report.compare import compare_json

        return {**compare_json(self.groups), "paired": self.pairs}

    @property
    def pairs(self) -> list[Record]:
        """Each group's differences from the first one, between runs with the same seed, as fractions."""
        from piecework.report.paired import pair_groups

        return [pair.to_values() for pair in pair_groups(self.groups)]

    def to_pandas(self, what: str = "groups") -> "pandas.DataFrame":
        """Return a frame with a line a group, or with `runs` a line a run.

        Raises ValueError for another name, and ImportError without pandas.
        """
        groups = self.record["groups"]
        alone = [{key: value for key, value in group.items() if key != "runs"} for group in groups]
        runs = [{"label": group["label"], **run} for group in groups for run in group["runs"]]
        return make_frame(choose_rows(what, {"groups": alone, "runs": runs}))

    def draw_curves(self, file: str | Path, *, plotly: bool = True) -> Path:
        """Write tables, curves and pictures to an .html file, and return it; without `plotly`, the tables alone.

        Raises ReportError for a file of another kind.
        """
        from piecework.report.compare_view import write_curves

        return write_curves(self.groups, Path(file), plotly=plotly)

    def __str__(self) -> str:
        from piecework.report.compare_view import compare_tables
        from piecework.report.paired import paired_tables

        return show_text([*compare_tables(self.groups), *paired_tables(self.groups)])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def compare(*runs: Run | str | Path) -> Comparison:
    """Compare runs, as `piecework compare` does: runs, folders of runs, or folders in or below which runs are (those
    of a study, too). Each run counts once.

    Raises CheckpointError for a folder that is none of these, or a run of another version, and ValueError without runs.
    """
    from piecework.report.compare import group_runs
    from piecework.report.run_folders import runs_at

    if not runs:
        raise ValueError(
            "piecework.compare() was given no runs: give runs, their folders, or a folder in which they are"
        )
    if wrong := [run for run in runs if not isinstance(run, Run | str | Path)]:
        raise ValueError(f"piecework.compare({wrong[0]!r:.100}): expected runs, or their folders, one after another")
    paths = [run.path if isinstance(run, Run) else Path(run) for run in runs]
    return Comparison(group_runs(chain.from_iterable(map(runs_at, paths))))
