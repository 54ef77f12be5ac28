"""docs/choose.md says what the pages that it names say, and README what it says."""

import re
from functools import cache
from pathlib import Path

import pytest
from document_helpers import ROOT, cards

from benchmarks.claims.jobs import load
from benchmarks.claims.reading import names
from benchmarks.claims.records import Records
from benchmarks.claims.standings import current, standings
from benchmarks.claims.tables import measured, number

PAGE = ROOT / "docs" / "choose.md"
SECTIONS = [each for each in PAGE.read_text("utf-8").split("\n## ")[1:] if "](" in each]
ELSEWHERE = [
    ("67.9", "562"),
    ("64.9", "3,217"),
    ("60.2", "237"),
    ("66.4", "339"),
]  # transformers, in results/accuracy.md
FIGURE = re.compile(r"(?<![\w/.x-])\d+\.\d+(?![\w/.])|(?<![\w/.-])\d+(?= (?:simulated seconds|seconds|s|points|MB)\b)")


@pytest.mark.parametrize("section", SECTIONS, ids=[each.splitlines()[0] for each in SECTIONS])
def test_a_figure_stands_in_a_page_that_its_section_names(section: str) -> None:
    prose = "\n".join(line for line in section.splitlines() if not line.startswith("    "))
    linked = [PAGE.parent / target for target in re.findall(r"\]\(([^)#]+)", prose)]
    assert figures_of(prose)
    assert absent(figures_of(prose), "".join(path.read_text("utf-8") for path in linked)) == set()


RESULTS = [path for path in sorted(PAGE.parent.glob("results/*.md")) if "](../claims/" in path.read_text("utf-8")]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_that_name_a_claim_say_what_it_says(path: Path) -> None:
    found = 0
    for block in path.read_text("utf-8").split("\n\n"):
        linked = re.findall(r"\]\((\.\./claims/[^)#]+)", block)
        figures = {each for each in figures_of(block) if "." in each} if linked else set()
        assert absent(figures, "".join((path.parent / each).read_text("utf-8") for each in linked)) == set()
        found += len(figures)
    assert found or path.stem == "index"


def test_the_readme_says_what_the_page_says() -> None:
    said = (ROOT / "README.md").read_text("utf-8").partition("**Which way is best")[2].partition("\n## ")[0]
    assert len(figures_of(said)) >= 12
    assert absent(figures_of(said), PAGE.read_text("utf-8")) == set()


@pytest.mark.parametrize("path", [ROOT / "README.md", PAGE, *cards()], ids=lambda path: path.name)
def test_an_accuracy_and_the_time_beside_it_are_of_one_row_of_a_claim(path: Path) -> None:
    """A table's cells say `45.4 ± 0.2 %, 49.7 s`, or are beside each other; README has no deviations."""
    text = path.read_text("utf-8").replace("**", "")
    pairs = re.findall(r"(\d+\.\d(?: ± \d+\.\d)?) %(?:,| \|| in) (\d[\d,.]*) s\b", text)
    assert [pair for pair in pairs if pair not in rows_of_claims() and pair not in ELSEWHERE] == []
    assert pairs or path not in (PAGE, ROOT / "README.md")


@cache
def rows_of_claims() -> set[tuple[str, str]]:
    """The accuracies, with and without deviations, and simulated seconds with SD cards of all rows that have run."""
    found = set()
    for claim in map(load, names()):
        by_case = standings(claim, current(claim, Records.read(claim.name)))
        for row in (each for there in by_case.values() for each in there if each.runs):
            seconds = number(row.average(lambda run: run.simulated["sd"]))
            found |= {(measured(row), seconds), (f"{row.mean:.1f}", seconds)}
    return found


def figures_of(text: str) -> set[str]:
    """The figures of a text but for those in its links, and estimates."""
    return {*FIGURE.findall(re.sub(r"\]\([^)]+\)|about [\d,]+", "]", text))}


def absent(figures: set[str], text: str) -> set[str]:
    """The figures that do not stand in a text."""
    return {each for each in figures if not re.search(rf"(?<![\d.]){re.escape(each)}(?![\d]|\.\d)", text)}
