"""docs/choose.md says what the pages that it names say, and README what it says."""

import re

import pytest
from document_helpers import ROOT

PAGE = ROOT / "docs" / "choose.md"
SECTIONS = [each for each in PAGE.read_text("utf-8").split("\n## ")[1:] if "](" in each]
FIGURE = re.compile(r"(?<![\w/.x-])\d+\.\d+(?![\w/.])|(?<![\w/.-])\d+(?= (?:simulated seconds|seconds|s|points|MB)\b)")


@pytest.mark.parametrize("section", SECTIONS, ids=[each.splitlines()[0] for each in SECTIONS])
def test_a_figure_stands_in_a_page_that_its_section_names(section: str) -> None:
    prose = "\n".join(line for line in section.splitlines() if not line.startswith("    "))
    linked = [PAGE.parent / target for target in re.findall(r"\]\(([^)#]+)", prose)]
    assert figures_of(prose)
    assert absent(figures_of(prose), "".join(path.read_text("utf-8") for path in linked)) == set()


def test_the_readme_says_what_the_page_says() -> None:
    said = (ROOT / "README.md").read_text("utf-8").partition("**Which way is best")[2].partition("\n## ")[0]
    assert len(figures_of(said)) >= 12
    assert absent(figures_of(said), PAGE.read_text("utf-8")) == set()


def figures_of(text: str) -> set[str]:
    """The figures of a text but for those in its links, and estimates."""
    return {*FIGURE.findall(re.sub(r"\]\([^)]+\)|about [\d,]+", "]", text))}


def absent(figures: set[str], text: str) -> set[str]:
    """The figures that do not stand in a text."""
    return {each for each in figures if not re.search(rf"(?<![\d.]){re.escape(each)}(?![\d]|\.\d)", text)}
