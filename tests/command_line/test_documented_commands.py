"""Every command in the documents is one that the command line takes, with settings that the chosen system uses."""

import ast
import importlib
import re
import shlex
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
import typer
from document_helpers import pages

from piecework.cli import app
from piecework.commands.base import SHORTHANDS
from piecework.commands.options import Scalars, connection_to, settings_from
from piecework.engines.processes import Connection

ROOT = Path(__file__).resolve().parents[2]
PAGES = pages()
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# What a reader puts in: a run, a folder, a number; a run's settings are known only where it lies.
PLACEHOLDER = re.compile(r"(resume-from=runs/NAME|[a-z.-]+=(NAME|KIND|W)|FLAGS|\.+)")
OURS = dict.fromkeys(("my-boards.toml", "mine.toml", "boards.toml", "sixty.toml", "shelf.toml", "FILE"), "boards") | {
    "robust-fmnist-NAME": "robust-fmnist-heterofl",
    "strategy=my_prox:Prox": "strategy=fedprox",
    "prox.mu=0.01": "fedprox.mu=0.01",
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
    connection = connection_to("", None, insecure=False, ray_address=given.get("ray_address", ""))
    if superlink := given.get("superlink"):
        connection = Connection(superlink, given.get("root_certificates"))
    engine = given.get("engine", "")
    settings_from(given["preset"], given["assignments"], engine=engine, named=named, connection=connection)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_test_that_a_page_names_is_there(page: Path) -> None:
    sources = {path.name: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    everything = "".join(sources.values())
    named = set(re.findall(r"(?<![.\w])test_\w+(?:\.py)?", page.read_text("utf-8")))
    assert [name for name in named if name not in sources and f"def {name}(" not in everything] == []


class Parsed(Exception):
    """The words of a command were understood."""


def parse_and_stop(parser: ArgumentParser) -> None:
    """Parse as `parse_args` does, and go no further."""
    if unknown := parser.parse_known_args()[1]:
        parser.error(f"unrecognized arguments: {unknown}")
    raise Parsed


def benchmark_commands(text: str) -> list[tuple[str, str]]:
    """The modules that a text runs, and their words."""
    found = re.findall(r"python (?:-m |)(benchmarks[./]\w+(?:\.py)?)\b([^`#\n]*)", text.replace("\\\n", " "))
    return [(name.removesuffix(".py").replace("/", "."), words) for name, words in found]


def usage(source: str) -> str:
    """A module's docstring with each command in one line and with all that is in brackets because it may be left out."""
    text = re.sub(r"\s+\n? {9,}", " ", ast.get_docstring(ast.parse(source)) or "")
    return re.sub(r"\[(?=-|PRESET)([^]]*)\]", r"\1", text)


BENCHMARKS = {
    f"benchmarks.{path.parent.name if path.stem == '__main__' else path.stem}": path
    for path in (ROOT / "benchmarks").rglob("*.py")
    if 'if __name__ == "__main__":' in path.read_text("utf-8")
}


@pytest.mark.parametrize("source", [*PAGES, *BENCHMARKS.values()], ids=lambda path: path.stem)
def test_a_benchmark_takes_the_words(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArgumentParser, "parse_args", parse_and_stop)
    own, text = source.suffix == ".py", source.read_text("utf-8")
    commands = benchmark_commands(usage(text) if own else text)
    assert not own or {BENCHMARKS[name] for name, _ in commands} == {source}, "a benchmark shows how it is run"
    for name, words in commands:
        if "ArgumentParser" not in BENCHMARKS[name].read_text("utf-8"):
            assert words.strip() == "", name
            continue
        monkeypatch.setattr(sys, "argv", [name, *shlex.split(words)])
        module = importlib.import_module(f"{name}.__main__" if BENCHMARKS[name].stem == "__main__" else name)
        with pytest.raises(Parsed):
            module.main()
