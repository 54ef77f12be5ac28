"""The commands that list what there is: devices, presets, settings, strategies."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from piecework.commands.base import Json, out, user_errors

lists = typer.Typer()
Rows = list[dict[str, Any]]


def show(find: Callable[[], Rows], table: Callable[[Rows], RenderableType], hint: str, *, as_json: bool) -> None:
    """Print what `find` returns as JSON, or as a table with a `hint` what to do with it."""
    with user_errors(as_json):
        rows = find()
        if as_json:
            print(json.dumps(rows))
            return
        out.print(table(rows))
        if hint:
            out.print(hint, soft_wrap=True)


@lists.command()
def devices(
    fleet: Annotated[
        str, typer.Argument(help="a shipped fleet or pool, or a fleet's .toml file; empty lists all")
    ] = "",
    measure: Annotated[bool, typer.Option(help="measure this machine, as device = auto does")] = False,
    as_json: Json = False,
) -> None:
    """Show the shipped fleets and pools, the devices of one of them, or the figures of this machine."""
    from piecework.commands.devices import fleet_rows, fleet_tables, measure_here

    show(lambda: measure_here() if measure else fleet_rows(fleet), fleet_tables, "", as_json=as_json)


@lists.command()
def presets(
    word: Annotated[str, typer.Argument(help="only presets that mention this: a strategy, a data set, any word")] = "",
    paper: Annotated[
        str, typer.Option(help="a paper's result tables and figures instead, with the preset that runs each row")
    ] = "",
    as_json: Json = False,
) -> None:
    """List the shipped presets, which run published settings and our own comparisons, and the purpose of each."""
    from piecework.commands.papers import paper_list, paper_rows
    from piecework.commands.presets import preset_rows, preset_table

    if paper:
        if word:
            raise typer.BadParameter(f"--paper {paper} lists all of its rows: leave {word!r} out", param_hint="WORD")
        hint = "run a row: piecework run --preset NAME --set .."
        show(lambda: paper_rows(paper), paper_list, hint, as_json=as_json)
        return
    show(lambda: preset_rows(word), preset_table, "run one: piecework run --preset NAME", as_json=as_json)


@lists.command()
def settings(
    word: Annotated[str, typer.Argument(help="a strategy's own settings, or those about a word; empty lists all")] = "",
    as_json: Json = False,
) -> None:
    """List the settings of a run: the meaning, default, allowed values and strategies of each."""
    from piecework.commands.settings_list import setting_rows, setting_table

    show(lambda: setting_rows(word), setting_table, "change one: piecework run --set KEY=VALUE", as_json=as_json)


@lists.command()
def strategies(
    name: Annotated[str, typer.Argument(help="a system, to print its card; empty lists all")] = "",
    as_json: Json = False,
) -> None:
    """List the systems that can train: the method, paper and requirements of each. With a name, print the card of one."""
    from rich.markdown import Markdown

    from piecework.commands.card import write_card
    from piecework.commands.strategies_list import strategy_rows, strategy_table

    if name:
        with user_errors(as_json):
            card = write_card(name)
            print(json.dumps({"strategy": name, "card": card})) if as_json else out.print(Markdown(card))
        return
    show(
        strategy_rows,
        strategy_table,
        "one in detail: piecework strategies NAME; run it: piecework run --strategy NAME",
        as_json=as_json,
    )
