"""The tables of CONTRIBUTING.md say where things are; this holds them to the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()
    if line.startswith("| ")
]
PLACE = re.compile(r"`([\w.]+)` in \[`([\w/.]+)`\]\(([\w/.]+)\)")
QUESTIONS = [row for row in ROWS if row[0].endswith("?")]
FOLDERS = {row[0].strip("`/"): row[1] for row in ROWS if re.fullmatch(r"`\w+/`", row[0])}


def definition(name: str, file: str) -> ast.AST:
    """The function, class or variable of this name, or `Class.method`, that a file defines."""
    body = ast.parse((ROOT / file).read_text("utf-8")).body
    for part in name.split(".")[:-1]:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part)
    last = name.rpartition(".")[2]
    for node in body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if last in (getattr(node, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))):
            return node
    raise AssertionError(f"{file} does not define {name}")


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: row[0])
def test_a_question_is_answered_by_what_is_called_there(row: list[str]) -> None:
    _, answer, caller = row
    ((name, file, link),) = PLACE.findall(answer)
    ((calling, of, other),) = PLACE.findall(caller)
    assert (file, of) == (link, other)
    definition(name, file)
    used = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(definition(calling, of))}
    assert name.rpartition(".")[2] in used


def test_there_are_questions() -> None:
    assert len(QUESTIONS) >= 8


def test_every_folder_has_a_row_and_what_the_row_names_is_there() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages | {"conf", "benchmarks", "deploy", "tests"} == FOLDERS.keys()
    for folder, contents in FOLDERS.items():
        named = re.findall(r"`(\w+\.py|\w+/)`", contents)
        elsewhere = {"docs/", "piecework/"}
        missing = [name for name in named if name not in elsewhere and not (ROOT / folder / name).exists()]
        assert not missing, (folder, missing)
    families = {path.parent.name for path in (ROOT / "strategies").glob("*/__init__.py")}
    assert families == set(re.findall(r"`(\w+)/`", FOLDERS["strategies"]))
