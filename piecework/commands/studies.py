"""The commands about several runs as one: `run --study`, and `study`, which shows how far one is."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piecework.commands import complete
from piecework.commands.base import FAILED, Json, err, out, show_lines, user_errors
from piecework.commands.console import PlainConsole
from piecework.commands.options import Scalars, parse_seeds, words_of
from piecework.engines.cluster.address import RayCluster
from piecework.engines.processes import Connection
from piecework.training.settings import SettingsError

if TYPE_CHECKING:
    from piecework.api.studies import Study

studies = typer.Typer()
Strategies = Annotated[
    str,
    typer.Option(
        "--strategies",
        help="a study of several systems, separated by commas",
        autocompletion=complete.several_strategies,
    ),
]
Sweep = Annotated[
    list[str],
    typer.Option(
        "--sweep",
        metavar="KEY=V1,V2",
        help="a study of all these values; may be repeated",
        autocompletion=complete.assignment,
    ),
]


@studies.command()
def study(
    name: Annotated[
        str, typer.Argument(help="the folder of a study, or its name if it is in runs/ or the app's output-dir")
    ],
    as_json: Json = False,
) -> None:
    """Show what is done and what is missing of a study, how long that takes, and what came out so far; it starts nothing."""
    from piecework.api.studies import Study
    from piecework.studies.ask import folder_of, output_dir_of, settings_below
    from piecework.studies.study import FILE

    with user_errors(as_json, {}):
        folder = Path(name)
        if not (folder / FILE).is_file():
            folder = folder_of(name, output_dir_of(settings_below("", {})))
        found = Study(folder)
        print(json.dumps(found.record)) if as_json else show_lines(found.tables())


def run_study(
    name: str,
    preset: str,
    asked: Scalars,
    compared: tuple[str, list[str], str],
    options: tuple[str, ...],
    fail_on_excluded_class: bool,
    as_json: bool,
) -> None:
    """Run what is missing of a study, with progress on stderr and its results on stdout; exit code 1 if a run failed.

    `asked` are the settings of all runs, `compared` the values of --strategies, --sweep and --seeds, and `options` further
    words of each run's command line. Raises SettingsError.
    """
    from piecework.api.studies import Study
    from piecework.studies.ask import find_study, parse_sweep
    from piecework.studies.go_on import command_of, go_on

    strategies, sweep, seeds = compared
    if seeds and "seed" in asked:
        raise SettingsError(f"--seeds {seeds} contradicts seed = {asked['seed']}: give one of them")
    numbers = parse_seeds(seeds or str(asked.pop("seed"))) if seeds or "seed" in asked else []
    folder, definition = find_study(name, asked, preset, parse_sweep(strategies, sweep), numbers)
    try:
        go_on(folder, definition, err, given=asked, options=options)
    except (KeyboardInterrupt, SystemExit):
        err.print(f"go on with the study: {command_of(folder, options)}", highlight=False, soft_wrap=True)
        raise
    found = Study(folder)
    print(json.dumps(found.record)) if as_json else show_lines(found.tables())
    told = err if as_json else out
    show_page(found, told)
    excluded = [text for run in found.runs for text in run.summary.get("excluded_classes", {}).values()]
    if fail_on_excluded_class and excluded:
        err.print(f"--fail-on-excluded-class: {'; '.join(dict.fromkeys(excluded))}", soft_wrap=True)
    if (fail_on_excluded_class and excluded) or len(found.runs) < len(definition.jobs()):
        raise typer.Exit(FAILED)


def options_of_runs(restarts: int, connection: Connection | RayCluster | None, no_cache: bool) -> tuple[str, ...]:
    """Return the options of `run` that are no settings, as each run of a study is given them."""
    words = ["--restarts", str(restarts)] if restarts else []
    words += ["--no-cache"] if no_cache else []
    return (*words, *words_of(connection))


def show_page(found: "Study", told: PlainConsole) -> None:
    """Write the page of a study, without figures where plotly is missing, and say where it is and where the runs are."""
    from piecework.report.page import ReportError

    try:
        page = found.write_page()
    except ReportError as error:
        err.print(f"the page has no figures: {error}", highlight=False, soft_wrap=True)
        page = found.write_page(plotly=False)
    told.print(f"page: {page}", highlight=False, soft_wrap=True)
    told.print(f"study folder: {found.path}", highlight=False, soft_wrap=True)
