"""What `--help` shows is what was written: rich takes words in brackets for styles and leaves them out."""

import click
import pytest
import typer
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.base import setting_among

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory.fit", "auto"], "No such option '--memory.fit': write --set memory.fit=auto"),
        (["memory.fit=auto"], "Got unexpected extra argument (memory.fit=auto): write --set memory.fit=auto"),
        (["--rounds", "2", "--lr=0.1"], "No such option '--lr': write --set training.lr=0.1"),
    ],
)
def test_a_setting_that_is_written_as_an_option_is_told_how_to_be_given(words: list[str], said: str) -> None:
    done = CliRunner(env={"COLUMNS": "1000"}).invoke(app, ["run", *words])
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--epsilon", "--json"], "--set attack.epsilon=VALUE or --set privacy.epsilon=VALUE"),
        (["--set", "training.lr=0.1", "--sweep", "training.lr=1,2"], ""),
        (["--clients"], "--set clients=VALUE"),
        (["--seed", "3", "other=1", "alone", "--unknown"], ""),
    ],
)
def test_a_setting_among_words_is_found(words: list[str], wanted: str) -> None:
    assert setting_among(words, {"--seed", "--set", "--sweep", "--json"}) == wanted
