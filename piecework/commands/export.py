"""The commands about a trained model: to evaluate it, and to write what a run left in the formats of others."""

import json
from pathlib import Path
from typing import Annotated

import typer

from piecework.commands.base import Json, err, listen, out, show_lines, user_errors
from piecework.commands.results import results
from piecework.exports.formats import FORMATS

HELP = "; ".join(f"{name}: {each.about}" for name, each in FORMATS.items())
Code = Annotated[
    str, typer.Option("--model", metavar="FILE.py:FUNCTION", help="the run's own model, whose code may be run again")
]

Client = Annotated[
    int | None, typer.Option(min=0, help="the number of a client, where each has a model of its own: from its store")
]


@results.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="the folder of a run")],
    format_: Annotated[str, typer.Option("--format", help=HELP)],
    to: Annotated[Path | None, typer.Option("--out", help="the file or folder to write; default: in the run's")] = None,
    client: Client = None,
    code: Code = "",
    as_json: Json = False,
) -> None:
    """Write the trained model for the runtimes of devices, run on test examples before it is kept; or the run's records."""
    from piecework.exports.formats import export_run
    from piecework.models.imported.trust import import_code
    from piecework.report.progress import show_waiting

    with user_errors(as_json, {}):
        import_code(run_dir, code)
        with show_waiting(err, f"exporting to {format_}"):
            found = export_run(run_dir, format_, to, client)
        if as_json:
            print(json.dumps({"format": format_, "path": str(found.path), **found.record}))
            return
        out.print(str(found.path), soft_wrap=True, highlight=False)
        for line in found.lines:
            out.print(line, soft_wrap=True, highlight=False)


@results.command()
def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="the folder of a run")],
    dataset: Annotated[str, typer.Option(help="other data than the run's: a data set, or npz:FILE and so on")] = "",
    batch_size: Annotated[int, typer.Option(min=1, help="examples that are computed at once")] = 256,
    client: Client = None,
    code: Code = "",
    as_json: Json = False,
) -> None:
    """Show what the trained model gets right on test examples, by class and by device class."""
    from piecework.api.scores import score_run
    from piecework.models.imported.trust import import_code
    from piecework.report.progress import show_waiting
    from piecework.report.scores_view import score_tables

    listen()
    with user_errors(as_json, {}):
        import_code(run_dir, code)
        with show_waiting(err, "evaluating"):
            found = score_run(run_dir, dataset, batch_size, client)
        print(json.dumps(found.record)) if as_json else show_lines(score_tables(found.record))
