"""Others' text on the terminal: no markup, no control sequences, whoever wrote it."""

import ast
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import TINY, few_digits
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands import base
from piecework.commands.console import PlainConsole

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "a[/b] [red]c :bug: \x1b]0;title\x07\x9b2J\udcff"
SHOWN = "a[/b] [red]c :bug: ]0;title2J?"
WORDS = [f"--set={key}={value}" for key, value in TINY.items() if key not in ("fleet", "run-name", "clients")]


def printed(show: Callable[[PlainConsole], object]) -> str:
    file = io.StringIO()
    show(PlainConsole(file=file, width=80, force_terminal=True, color_system=None))
    return file.getvalue()


def test_text_is_shown_as_it_stands() -> None:
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    assert printed(lambda console: console.print(HOSTILE)) == f"{SHOWN}\n"
    assert printed(lambda console: console.print(Text(HOSTILE), HOSTILE, soft_wrap=True)) == f"{SHOWN} {SHOWN}\n"
    assert printed(lambda console: console.print(table)).count(SHOWN) == 4
    assert SHOWN in printed(lambda console: console.print(console.status(HOSTILE)._spinner.text))


def test_no_other_console_and_no_markup() -> None:
    wrong = []
    for path in (path for folder in ROOT.iterdir() if folder.is_dir() for path in sources(folder)):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)) if "rich" in source or "status" in source else ():
            if found := markup_in(node):
                wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {found}")
    assert wrong == ["piecework/commands/console.py:12: rich.console.Console"]


def sources(folder: Path) -> list[Path]:
    skipped = {"tests", ".venv", ".git"}
    return [] if folder.name in skipped else [path for path in folder.rglob("*.py") if not path.parent.is_symlink()]


def markup_in(node: ast.AST) -> str:
    """What in a piece of code would read markup: another console, a column of a progress bar, a status that is a string."""
    if isinstance(node, ast.ImportFrom):
        names = {f"{node.module}.{each.name}" for each in node.names}
        return ", ".join(names & {"rich.console.Console", "rich.markup.escape", "rich.print", "rich.markup.render"})
    if not isinstance(node, ast.Call):
        return ""
    name = ast.unparse(node.func)
    words = {each.arg: ast.unparse(each.value) for each in node.keywords}
    if name.endswith("from_markup") or words.get("markup", "False") != "False":
        return ast.unparse(node)
    if name == "TextColumn" and words.get("markup") != "False":
        return ast.unparse(node)
    return ast.unparse(node) if name == "status.update" and not ast.unparse(node.args[0]).startswith("Text(") else ""


def said(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


def test_commands_show_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base.out, "_width", 300)  # or long paths, as of parallel tests, are broken within the table
    monkeypatch.setattr("piecework.plans.plan_view.draw", lambda plan, path: None)
    monkeypatch.setattr("piecework.report.run_page.write_report", lambda run_dir, plotly: run_dir.path / "report.html")
    speeds = '"memory-ratio": 3.0, "flops": 1e9, "bandwidth": 1e6, "disk-bandwidth": 1e7'
    fleet = f'{{"name": "f[/a]", "assignment": "round-robin", "device": [{{"name": "d[/a][red]", {speeds}}}]}}'
    data = f"--dataset=npz:{few_digits()}"
    plan = said("plan", "--set", f"fleet={fleet}", "--picture", "p[red].svg", data)
    assert "fleet f[/a]: " in plan
    assert "d[/a][red] " in plan
    assert plan.endswith("picture: p[red].svg\n")
    run = said("run", "--set", f"fleet={fleet}", "--set", "run-name=exp[red]", "--nodes=3", data, *WORDS)
    assert "d[/a][red] " in run
    assert f"run folder: {tmp_path / 'runs' / 'exp[red]'}\n" in run
    assert said("report", "runs/exp[red]").endswith("exp[red]/report.html\n")
    assert "exp[red]" in said("compare", "runs/exp[red]")
    assert "o[/a][red]/node-0 " in said("export-data", "--out", "o[/a][red]", "--nodes=1", data)
    assert said("run", "--preset", "n[/a]\x1b[red]").startswith("error: preset n[/a][red]: no such file")
