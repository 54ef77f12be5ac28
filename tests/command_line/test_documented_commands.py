"""Every command in README and docs/ is one that the command line takes, with settings that the chosen system uses."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from piecework.cli import app
from piecework.cli_base import SHORTHANDS
from piecework.options import Scalars, settings_from

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# What a reader puts in: a run, a folder, a number; a run's settings are known only where it lies.
PLACEHOLDER = re.compile(r"(resume-from=runs/NAME|[a-z.-]+=(NAME|KIND|W)|FLAGS|\.+)")
OURS = dict.fromkeys(("my-boards.toml", "mine.toml", "shelf.toml", "FILE"), "boards") | {
    "robust-fmnist-NAME": "robust-fmnist-heterofl",
    "strategy=fedprox": "strategy=fedavg",
    "fleet=mine.toml": "fleet=boards",
    "fleet=shelf.toml": "fleet=boards",
    "N": "1",
}


def found(page: Path, program: str) -> list[str]:
    """The arguments of a program in a page: in lines of code, where a comment may follow, and in quotes in sentences."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(rf"^ {{4,}}(?:docker-compose run --rm )?{program} *(?=\w)(.*)$", text, re.MULTILINE)
    quoted = re.findall(rf"`{program} *(?=\w)([^`]*)`", text)
    return [" ".join(re.split(r"\s#|[|>]\s", each)[0].split()) for each in (*lines, *quoted)]


def words_of(command: str) -> list[str]:
    """The words of a command, without those that stand for something of the reader's."""
    left = [OURS.get(word, word) for word in shlex.split(command) if not PLACEHOLDER.fullmatch(word)]
    return [word for at, word in enumerate(left) if not (word == "--set" and left[at + 1 : at + 2] in ([], ["--set"]))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_command_line_takes_it(page: Path) -> None:
    wrong = []
    for command in found(page, "piecework"):
        words = words_of(command)
        if words in ([name] for name in COMMANDS):
            continue  # named in a sentence
        try:
            require_valid(*words)
        except Exception as error:
            wrong.append(f"piecework {command}: {getattr(error, 'message', '') or error}")
    assert wrong == []


def require_valid(name: str, *words: str) -> None:
    """Parse the options, and resolve the settings that they make."""
    given = COMMANDS[name].make_context(name, list(words)).params
    if "preset" not in given:
        return
    named: Scalars = {key: given.get(f"{key.replace('-', '_')}_") for key in SHORTHANDS}
    named = {key: value for key, value in named.items() if value not in (None, "")}
    memory = given.get("memory_model")
    named |= {"memory.model": memory} if memory else {}
    settings_from(given["preset"], given["assignments"], named=named, there=bool(given.get("superlink")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_test_that_a_page_names_is_there(page: Path) -> None:
    sources = {path.name: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    everything = "".join(sources.values())
    named = set(re.findall(r"(?<![.\w])test_\w+(?:\.py)?", page.read_text("utf-8")))
    assert [name for name in named if name not in sources and f"def {name}(" not in everything] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_benchmark_is_there_and_knows_its_options(page: Path) -> None:
    for command in found(page, r"python -m benchmarks\.(?=\w)"):
        name, *words = shlex.split(command)
        file = ROOT / "benchmarks" / name
        source = (file / "__main__.py" if file.is_dir() else file.with_suffix(".py")).read_text("utf-8")
        for option in (word.split("=")[0] for word in words if word.startswith("--")):
            declared = rf'"{option}"|\b{option[2:].replace("-", "_")}: Annotated'  # argparse's, typer's
            assert re.search(declared, source), (command, option)
