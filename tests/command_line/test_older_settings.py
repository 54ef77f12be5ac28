"""Results tables in the documents say of which settings they are, and a mark stands above those that are not the defaults."""

import itertools
import re
from pathlib import Path

import pytest

from benchmarks.docs import pages
from piecework.training.settings.run import fields

PAGES = [page for page in pages() if page.stem != "choose"]  # test_choose.py compares its tables with today's records
RESULTS = re.compile(r"accuracy|clean|seed 1|round 4|`auto`|\| served \|")  # in the first row of a table
MARK = "efaults have changed since"


def tables(page: str) -> list[tuple[str, dict[str, str] | None, str]]:
    """Return the first row of each table of results, the settings that it names, and the paragraph above it."""
    found = []
    blocks = [block.strip() for block in re.split(r"\n\s*\n", page)]
    settings: dict[str, str] | None = None
    for before, block in itertools.pairwise(blocks):
        if block.startswith("#"):
            settings = None
        if named := re.fullmatch(r"<!-- settings: (.*) -->", block):
            settings = dict(each.split("=") for each in named[1].split() if each != "defaults")
        first = block.splitlines()[0]
        if block.startswith("|") and RESULTS.search(first):
            found.append((first, settings, " ".join(before.split())))
            settings = None
    return found


def changed(settings: dict[str, str]) -> list[str]:
    """Return the settings whose values are not today's defaults."""
    defaults = {key: str(field.default).lower() for key, field in fields().items()}
    return [key for key, value in settings.items() if defaults[key] != value.lower()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_figures_of_settings_that_are_no_defaults_are_marked(path: Path) -> None:
    for first, settings, before in tables(path.read_text("utf-8")):
        assert settings is not None, f"{path}: no `<!-- settings: .. -->` above {first}"
        if old := changed(settings):
            assert MARK in before, f"{path}: {first} is of {', '.join(old)}, and no paragraph above it says so"


def test_a_table_without_a_mark_is_found() -> None:
    page = "# A\n\n<!-- settings: profl.cohort=all -->\n\nText.\n\n| | accuracy |\n|---|---|\n\n| | accuracy |\n"
    (first, settings, before), (_, unnamed, _) = tables(page)
    assert (first, before, unnamed) == ("| | accuracy |", "Text.", None)
    assert settings is not None
    assert changed(settings) == ["profl.cohort"]
    assert changed({"profl.cohort": "eligible"}) == []
    assert len([row for page in PAGES for row in tables(page.read_text("utf-8"))]) >= 5
