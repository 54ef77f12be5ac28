"""The commands about runs that have ended: a report, a comparison, and freeing what they left on disk."""

import json
from pathlib import Path
from typing import Annotated

import typer

from piecework.commands.base import Json, out, show_lines, user_errors

results = typer.Typer()


@results.command()
def report(
    run_dir: Path,
    without_plotly: Annotated[
        bool, typer.Option("--without-plotly", help="tables and the picture of pieces only: 30 kB instead of 5 MB")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about a run."""
    from piecework.report.run_page import write_report
    from piecework.server_app.records import RunDir

    with user_errors(as_json):
        path = write_report(RunDir(run_dir), plotly=not without_plotly)
        if as_json:
            print(json.dumps({"report": str(path)}))
        else:
            out.print(str(path), soft_wrap=True, highlight=False)


@results.command()
def compare(
    run_dirs: Annotated[list[Path], typer.Argument(help="folders of runs, or folders in or below which runs are")],
    curves: Annotated[
        str, typer.Option(help="also write a page with tables, curves and pictures to this .html file")
    ] = "",
    without_plotly: Annotated[
        bool, typer.Option("--without-plotly", help="only the tables on that page: 20 kB instead of 5 MB")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show runs below each other; those that differ only in the seed have a mean and its spread too."""
    from piecework.api.comparisons import compare as compare_runs
    from piecework.report.compare_view import compare_tables, page_file
    from piecework.report.page import ReportError
    from piecework.report.paired import paired_tables

    with user_errors(as_json):
        if without_plotly and not curves:
            raise ReportError("--without-plotly is about the page: give --curves FILE.html too, or leave it out")
        page = page_file(Path(curves)) if curves else None  # before minutes of reading
        found = compare_runs(*run_dirs)
        if page is not None:
            found.draw_curves(page, plotly=not without_plotly)
        if as_json:
            print(json.dumps(found.record))
        else:
            show_lines([*compare_tables(found.groups), *paired_tables(found.groups)])


@results.command()
def clean(
    output_dir: Annotated[Path, typer.Option(help="where runs are written")] = Path("runs"),
    cache: Annotated[bool, typer.Option(help="also remove converted data sets and kept traces")] = False,
    as_json: Json = False,
) -> None:
    """Remove the stores of emulated clients. A run cleaned this way cannot resume clients that keep state."""
    from piecework.commands.runs import find_cached, remove, stores
    from piecework.device_profiles.user_cache import default_cache

    with user_errors(as_json):
        paths = stores(output_dir) + (find_cached(default_cache()) if cache else [])
        freed = remove(paths)
        print(
            json.dumps({"removed": [str(path) for path in paths], "bytes": freed})
            if as_json
            else f"freed {freed:,} bytes"
        )
