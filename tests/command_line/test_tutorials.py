"""Each tutorial is typed in from start to end, in an empty folder: its files, its commands, and what they are said to print."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.base import out
from piecework.server_app.records import RunDir

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
STEP = re.compile(
    r"^```(?:python|toml)\n# (?P<file>[\w.]+)\n(?P<code>.*?)^```$|^```text\n(?P<shown>.*?)^```$|^ {4}(?P<command>\S[^\n]*)$",
    re.DOTALL | re.MULTILINE,
)
ELSEWHERE = ("docker-compose ", "export RAY_", "ray start ")  # and what a SuperLink or a cluster must answer
FEW = "--rounds=1", "--set=training.local-iterations=2"  # so that a run takes seconds
EXACT = ("plan", "export-data", "evaluate")  # what these print has no times, and no accuracy of a longer run


def type_in(page: str, folder: Path, *more: str) -> Iterator[str]:
    """Do what a page says, with more words for each `piecework run`, and yield each command that was carried out."""
    command, printed = "", ""
    for step in STEP.finditer((TUTORIALS / f"{page}.md").read_text("utf-8")):
        if step["file"]:
            (folder / step["file"]).write_text(f"# {step['file']}\n{step['code']}", encoding="utf-8")
        elif step["shown"]:
            require_printed(
                step["shown"], printed, exact=command.startswith(tuple(f"piecework {each}" for each in EXACT))
            )
        elif step["command"].startswith(ELSEWHERE) or re.search(r"--superlink|--engine ray", step["command"]):
            command, printed = "", ""
        else:
            command = step["command"]
            printed = carry_out(command, folder, more)
            yield command


def carry_out(command: str, folder: Path, more: tuple[str, ...]) -> str:
    """What a command prints, which must succeed."""
    line, _, file = command.partition(" > ")
    program, *words = shlex.split(line)
    if program == "python":
        return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert program == "piecework"
    done = CliRunner().invoke(app, [*words, *(more if words[0] == "run" else ())])
    assert done.exit_code == 0, (command, done.output)
    if file:
        (folder / file).write_text(done.stdout, encoding="utf-8")
    return done.output.replace(str(folder), "...")


def require_printed(shown: str, printed: str, exact: bool) -> None:
    """Each line that a page shows was printed; `...` stands for others, or for the rest of a line."""
    there = [plain(line, exact) for line in printed.splitlines()]
    for line in shown.splitlines():
        start = plain(line.removesuffix("..."), exact)
        assert any(each == start or (line.endswith("...") and each.startswith(start)) for each in there), (
            line,
            printed,
        )


def plain(line: str, exact: bool) -> str:
    """A line with single spaces, and unless it is exact with 0 for each number and its k, M or G."""
    return " ".join((line if exact else re.sub(r"\d[\d.,]*(?: [kMGT](?=B|FLOP))?", "0", line)).split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder in which a reader types."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(out, "width", 200)  # which it has from the first test that prints
    monkeypatch.delenv("PIECEWORK_DATA", raising=False)
    return tmp_path


def runs_in(folder: Path) -> list[RunDir]:
    """The runs of a page, in the order of their beginning."""
    return [
        RunDir(path)
        for path in sorted((folder / "runs").iterdir(), key=lambda path: (path / "settings.toml").stat().st_mtime_ns)
    ]


def require_within_budgets(run: RunDir) -> None:
    (record,) = run.rounds()
    for client in record["clients"]:
        assert client["status"] == "ok"
        assert client["measured_peak"] <= client["predicted_peak"] <= client["budget"]


@pytest.mark.slow
def test_a_model_of_ones_own(folder: Path) -> None:
    assert [command.split()[1] for command in type_in("model", folder, *FEW, "--set=workers=1")] == [
        "plan",
        "run",
        "use_net.py",
    ]
    (run,) = runs_in(folder)
    require_within_budgets(run)
    assert any(name.startswith("atoms.0.stem.") for name in load_file(run.path / "model.safetensors"))


@pytest.mark.slow
def test_data_of_ones_own(folder: Path) -> None:
    commands = list(type_in("data", folder, "--set=workers=1"))
    assert sum(command.startswith("piecework run") for command in commands) == len(runs_in(folder)) == 5
    plain_npz, cameras, flower, table, pictures = runs_in(folder)
    assert [run.settings()["data.partition"] for run in (plain_npz, cameras, flower)] == [
        "dirichlet", "natural", "flwr:DirichletPartitioner"
    ]  # fmt: skip
    assert table.settings()["dataset"].startswith("table:")
    assert pictures.settings()["dataset"].startswith("folder:")


@pytest.mark.slow
def test_devices_of_ones_own(folder: Path) -> None:
    commands = list(type_in("devices", folder, *FEW, "--set=workers=1"))
    assert [command.split()[1] for command in commands] == ["devices", "plan", "plan", "plan", "run"]
    (run,) = runs_in(folder)
    require_within_budgets(run)
    assert [client["device"] for client in run.rounds()[0]["clients"]] == ["kitchen", "shed"] * 2


@pytest.mark.slow
@pytest.mark.processes
def test_the_same_run_on_one_engine_after_another(folder: Path) -> None:
    """As far as one machine goes; containers, boards and Ray have tests of their own (tests/engines)."""
    commands = list(type_in("deploy", folder, *FEW))
    assert [command.split()[1] for command in commands] == ["run", "run", "export-data", "compose", "certs"]
    alone, flower = (load_file(folder / "runs" / name / "model.safetensors") for name in ("laptop", "flower"))
    assert alone.keys() == flower.keys()
    assert all(torch.equal(alone[name], flower[name]) for name in alone)
    assert (folder / "data" / "node-1" / "train-images.npy").is_file()
    assert "client-1:" in (folder / "docker-compose.mine.yml").read_text("utf-8")
    assert (folder / "certs" / "nodes" / "node-1.key").stat().st_mode & 0o077 == 0


def test_the_menu_names_every_tutorial() -> None:
    menu = (TUTORIALS / "index.md").read_text("utf-8")
    pages = {path.stem for path in TUTORIALS.glob("*.md")} - {"index"}
    assert set(re.findall(r"\((\w+)\.md\)", menu)) == set(re.findall(r"^(\w+)$", menu, re.MULTILINE)) == pages
