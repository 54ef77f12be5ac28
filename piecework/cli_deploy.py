"""The commands of a federation outside the simulator."""

import typer

commands = typer.Typer()
