"""The commands that list what there is: devices, presets, settings, strategies."""

import json
from typing import Annotated

import typer

from piecework.commands.base import Json, out, user_errors

lists = typer.Typer()


@lists.command()
def devices(
    fleet: Annotated[
        str, typer.Argument(help="a shipped fleet or pool, or a fleet's .toml file; empty lists all")
    ] = "",
    measure: Annotated[bool, typer.Option(help="measure this machine, as device = auto does")] = False,
    as_json: Json = False,
) -> None:
    """Show the shipped fleets and pools, the devices of one of them, or the figures of this machine."""
    from piecework.commands.devices import fleet_rows, fleet_tables, measured_here

    with user_errors(as_json):
        rows = measured_here() if measure else fleet_rows(fleet)
        if as_json:
            print(json.dumps(rows))
        else:
            out.print(fleet_tables(rows))


@lists.command()
def presets(
    word: Annotated[str, typer.Argument(help="only presets that mention this: a strategy, a data set, any word")] = "",
    as_json: Json = False,
) -> None:
    """List the shipped presets, which run published settings and our own comparisons, and the purpose of each."""
    from piecework.commands.presets import preset_rows, preset_table

    with user_errors(as_json):
        rows = preset_rows(word)
        if as_json:
            print(json.dumps(rows))
        else:
            out.print(preset_table(rows))
            out.print("run one: piecework run --preset NAME", soft_wrap=True)


@lists.command()
def settings(
    word: Annotated[str, typer.Argument(help="a strategy's own settings, or those about a word; empty lists all")] = "",
    as_json: Json = False,
) -> None:
    """List the settings of a run: the meaning, default, allowed values and strategies of each."""
    from piecework.commands.settings_list import setting_rows, setting_table

    with user_errors(as_json):
        rows = setting_rows(word)
        if as_json:
            print(json.dumps(rows))
        else:
            out.print(setting_table(rows))
            out.print("change one: piecework run --set KEY=VALUE", soft_wrap=True)


@lists.command()
def strategies(as_json: Json = False) -> None:
    """List the systems that can train: the method, paper and requirements of each."""
    from piecework.commands.strategies_list import strategy_rows, strategy_table

    with user_errors(as_json):
        rows = strategy_rows()
        if as_json:
            print(json.dumps(rows))
        else:
            out.print(strategy_table(rows))
            out.print("run one: piecework run --strategy NAME", soft_wrap=True)
