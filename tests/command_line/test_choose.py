"""docs/choose.md says what the pages that it names say."""

import re

import pytest
from document_helpers import ROOT

PAGE = ROOT / "docs" / "choose.md"
SECTIONS = [each for each in PAGE.read_text("utf-8").split("\n## ")[1:] if "](" in each]
FIGURE = re.compile(r"(?<![\w/.x-])\d+\.\d+(?![\w/.])|(?<![\w/.-])\d+(?= (?:simulated seconds|points|MB))")


@pytest.mark.parametrize("section", SECTIONS, ids=[each.splitlines()[0] for each in SECTIONS])
def test_a_figure_stands_in_a_page_that_its_section_names(section: str) -> None:
    prose = "\n".join(line for line in section.splitlines() if not line.startswith("    "))
    linked = [PAGE.parent / target for target in re.findall(r"\]\(([^)#]+)", prose)]
    text = "".join(path.read_text("utf-8") for path in linked)
    figures = set(FIGURE.findall(re.sub(r"\]\([^)]+\)", "]", prose)))
    assert figures
    assert not {each for each in figures if not re.search(rf"(?<![\d.]){re.escape(each)}(?![\d]|\.\d)", text)}
