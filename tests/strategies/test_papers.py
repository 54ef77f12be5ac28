"""Each system's file says where its paper's algorithm is: what it names is there."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from piecework.commands.settings_list import setting_rows
from piecework.training.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
PAPERS = ("cocofl", "fedepth", "fedprophet", "prism", "profl", "slt", "spafl")
EQUATIONS = re.compile(r"Eqs?\. (\d+(?:(?:, | and | to )\d+)*)")
# Read in the papers: (9) is the loss with strong convexity, (11) epsilon from the measured movement, (12) alpha's steps, (14)
# memory, (15) FLOPs; SpaFL's (13) moves the weights of a filter whose threshold changed.
OF_SETTINGS = {
    "fedprophet.convexity": "9",
    "fedprophet.aux-pool": "9",
    "fedprophet.apa": "11 and 12",
    "fedprophet.apa-bound": "12",
    "fedprophet.dma": "14 and 15",
    "spafl.importance-update": "13",
}
OF_ALGORITHMS = {
    "cocofl": {},
    "fedepth": {"ClientUpdate": "1"},
    "fedprophet": {
        "adjusts epsilon": "11, 12",
        "assigns M_k": "14, 15",
        "train {m .. M_k}": "9, 13",
        "aggregates": "16, 17",
    },
    "prism": {"I_c": "2", "LocalTrain": "6", "aggregate": "5"},
    "profl": {"Eq. 1": "1"},
    "slt": {},
    "spafl": {"move the weights": "13", "lines 8 to 10": "3 to 6, 9", "new thresholds": "7"},
}
PLACE = re.compile(r"([\w/]+\.py): ([\w., ]+)")


def docstring_of(name: str) -> str:
    module = import_module(METHODS[name].server.partition(":")[0])
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


def test_settings_name_the_papers_equations() -> None:
    named = {row["key"]: EQUATIONS.findall(row["meaning"]) for row in setting_rows()}
    assert {key: found for key, found in named.items() if found} == {key: [n] for key, n in OF_SETTINGS.items()}


@pytest.mark.parametrize("name", PAPERS)
def test_algorithms_name_the_papers_equations(name: str) -> None:
    table = docstring_of(name).split("\n\n")[2]
    assert EQUATIONS.findall(table) == [*OF_ALGORITHMS[name].values()]
    places = [table.index(words) for words in OF_ALGORITHMS[name]]
    assert places == sorted(places)


@pytest.mark.parametrize("name", [*METHODS])
def test_papers_are_cited_with_a_link(name: str) -> None:
    """Baselines without a paper of their own say whose they are."""
    assert re.search(r"https://(arxiv\.org/abs|openreview\.net/forum)|baseline of|rival", docstring_of(name))
