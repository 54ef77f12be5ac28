"""Several runs as one study: run what is missing of it, and read what came out."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecework.api.comparisons import Comparison
from piecework.api.frames import choose_rows, make_frame
from piecework.api.keywords import Values, read_keywords, speak_of_keywords
from piecework.api.plans import show_text
from piecework.api.runs import Record, Run
from piecework.training.settings import Scalar, SettingsError

if TYPE_CHECKING:
    import pandas
    from rich.table import Table
    from rich.text import Text

    from piecework.report.page import Section
    from piecework.studies.status import StudyStatus

PAGE = "compare.html"


class Study:
    """A study, from its folder: how far it is, its runs, and these compared."""

    def __init__(self, path: str | Path) -> None:
        """Open the folder of a study. Raises SettingsError if it is none."""
        from piecework.studies.study import Study as Definition

        self.path = Path(path).resolve()
        self.definition = Definition.read(self.path)

    def __repr__(self) -> str:
        return f"Study({str(self.path)!r}: {self.status})"

    @property
    def status(self) -> "StudyStatus":
        """What is done and what is missing, and how many hours it will take; as text a sentence."""
        from piecework.studies.status import status_of

        return status_of(self.definition, self.path)

    @property
    def runs(self) -> list[Run]:
        """The completed runs, row by row."""
        done = [run for run in self.status.runs if run.state == "done"]
        rows = self.definition.rows
        return [Run(run.folder) for run in sorted(done, key=lambda run: rows.index(run.job.row))]

    @property
    def failed(self) -> dict[str, str]:
        """Why runs failed, by their names in words."""
        return {run.job.label: run.reason for run in self.status.failed}

    @property
    def comparison(self) -> Comparison:
        """The completed runs compared, in the order of the rows."""
        from piecework.report.compare import group_runs
        from piecework.server_app.records import RunDir
        from piecework.studies.study import FREE

        return Comparison(group_runs((RunDir(run.path) for run in self.runs), FREE))

    @property
    def pairs(self) -> list[Record]:
        """Each row's differences from the first one, between runs with the same seed, as fractions."""
        return self.comparison.pairs

    @property
    def record(self) -> Record:
        """The object that `piecework study --json` prints."""
        return {"study": str(self.path), **self.status.to_values(), **self.comparison.record}

    def to_pandas(self, what: str = "groups") -> "pandas.DataFrame":
        """Return a frame with a line a row; with `runs` a line a run, with `pairs` one a row that is compared with the first.

        Raises ValueError for another name, and ImportError without pandas.
        """
        if what == "pairs":
            return make_frame(self.pairs)
        choose_rows(what, {"groups": [], "runs": [], "pairs": []})
        return self.comparison.to_pandas(what)

    def tables(self) -> "list[Table | Text]":
        """Return what terminals show of it: how far it is, which runs failed or were interrupted, and the others compared."""
        from rich.text import Text

        from piecework.report.compare_view import compare_tables
        from piecework.report.paired import paired_tables

        status, groups = self.status, self.comparison.groups
        lines = [
            Text(f"{self.path.name}: {status}"),
            *(
                Text(f"{run.job.label} {run.shown}: {run.why}")
                for run in status.without_result
                if run.state != "missing"
            ),
        ]
        return [*lines, *compare_tables(groups), *paired_tables(groups)] if groups else [*lines]

    def write_page(self, *, plotly: bool = True) -> Path:
        """Write a page into the study's folder and return it: completed runs compared, and why others have no result.

        Without `plotly` it has tables alone. Raises ReportError if plotly is wanted and missing.
        """
        from piecework.client_app.disk import write_atomically
        from piecework.report.compare_view import curves_html

        status = self.status
        others = without_result(status)
        content = curves_html(
            self.comparison.groups, heading=f"Study {self.path.name}", says=f"{status}.", others=others, plotly=plotly
        )
        write_atomically(self.path / PAGE, content.encode())
        return self.path / PAGE

    def __str__(self) -> str:
        return show_text(self.tables())

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def without_result(status: "StudyStatus") -> "list[Section]":
    """Return the section of a page with the runs of a study that have no result, each with the reason; none without any."""
    from piecework.report.page import Section, table

    if not (runs := status.without_result):
        return []
    logs = [f" ({run.log.name})" if run.log.is_file() else "" for run in runs]
    rows = [(run.shown, run.job.label, f"{run.why}{log}") for run, log in zip(runs, logs, strict=True)]
    caption = "What is compared is without these. In brackets: the file in the study's folder with what a run printed."
    return [Section("Runs without a result", caption, below=table(rows, ("state", "run", "why")))]


def study(
    settings: Values | None = None,
    /,
    *,
    name: str = "",
    strategies: Sequence[str] = (),
    seeds: Sequence[int] = (),
    sweep: Mapping[str, Sequence[Any]] | None = None,
    preset: str | Path = "",
    progress: bool = True,
    **keywords: Any,
) -> Study:
    """Run a study, as `piecework run --study` does, and return it.

    `strategies` are systems, `sweep` other settings by key with their values; each combination is run with each of the `seeds`.
    `name` is a folder below `output_dir`. A study of that name goes on: what is completed is not repeated, and what was
    interrupted is resumed. Other settings are as in `piecework.run`. A run that fails does not end the study; see `failed`.

    Raises ValueError (most often SettingsError) if the study cannot begin, or contradicts the one of that name.
    """
    from piecework.commands.console import PlainConsole
    from piecework.studies.ask import find_study, read_sweep
    from piecework.studies.go_on import command_of, go_on

    values: dict[str, Scalar] = read_keywords(settings, keywords)
    numbers = check_seeds(seeds)
    with speak_of_keywords():
        folder, found = find_study(name, values, str(preset), read_sweep(strategies, sweep or {}), numbers)
        try:
            go_on(folder, found, PlainConsole(stderr=True) if progress else None, given=values)
        except (KeyboardInterrupt, SystemExit) as error:
            error.add_note(f"go on: piecework.study(name={str(folder)!r}), or {command_of(folder)}")
            raise
    return Study(folder)


def check_seeds(seeds: Sequence[int]) -> list[int]:
    """Return seeds. Raises SettingsError where one is none, or stands twice."""
    found = list(seeds)
    if len(set(found)) < len(found) or not all(type(seed) is int and 0 <= seed < 2**63 for seed in found):
        raise SettingsError(f"seeds = {seeds!r:.100}: expected different whole numbers from 0")
    return found
