"""Each system's file says where its paper's algorithm is: what it names is there."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from piecework.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
PAPERS = ("fedepth", "fedprophet", "prism", "profl", "spafl")
PLACE = re.compile(r"([\w/]+\.py): ([\w., ]+)")


def docstring_of(name: str) -> str:
    module = import_module(STRATEGIES[name][0])
    return module.__doc__ or ""


def defined(path: Path) -> set[str]:
    """The names of a file's functions and classes, and of their methods as Class.method."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.ClassDef
    top = [node for node in tree.body if isinstance(node, kinds)]
    methods = {f"{c.name}.{m.name}" for c in top for m in getattr(c, "body", []) if isinstance(m, ast.FunctionDef)}
    return {node.name for node in top} | methods


@pytest.mark.parametrize("name", PAPERS)
def test_where_a_papers_algorithm_is(name: str) -> None:
    places = PLACE.findall(docstring_of(name))
    assert len(places) >= 5
    for file, names in places:
        (path,) = [*(ROOT / "strategies").glob(f"**/{file}")] or [ROOT / file]
        assert set(names.split(", ")) <= defined(path), f"{name}: {file}"


@pytest.mark.parametrize("name", [*STRATEGIES])
def test_papers_are_cited_with_a_link(name: str) -> None:
    """Baselines without a paper of their own say whose they are."""
    assert re.search(r"https://(arxiv\.org/abs|openreview\.net/forum)|baseline of|rival", docstring_of(name))
