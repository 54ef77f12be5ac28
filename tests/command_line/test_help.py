"""What `--help` shows is what was written: rich takes words in brackets for styles and leaves them out."""

import click
import pytest
import typer
from typer.testing import CliRunner

from piecework.cli import app

COMMANDS: dict[str, click.Command] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_the_start_page_names_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert {"run", "plan", "profile"} <= COMMANDS.keys()
    assert all(f" {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_word_of_a_help_text_is_lost(name: str) -> None:
    done = CliRunner(env={"COLUMNS": "1000"}).invoke(app, [name, "--help"])
    assert done.exit_code == 0
    shown = " ".join(done.stdout.split())
    texts = [COMMANDS[name].help, *(getattr(parameter, "help", None) for parameter in COMMANDS[name].params)]
    for text in texts:
        assert " ".join((text or "").replace(r"\[", "[").split()) in shown
        assert "\\" not in shown


def test_a_mistyped_command_is_answered_with_one_suggestion() -> None:
    done = CliRunner(env={"COLUMNS": "1000"}).invoke(app, ["preset"])
    assert done.exit_code == 2
    assert done.stderr.count("presets") == 1
