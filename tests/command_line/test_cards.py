"""The systems' cards: each says what a reader asks, and the command line and the site have the same text."""

import json
import re

import pytest
from document_helpers import ROOT, cards
from typer.testing import CliRunner

from benchmarks.site import system_page
from piecework.cli import app
from piecework.commands.card import DIFFERS, differences, find_card, paragraphs, write_card
from piecework.commands.strategies_list import EXPECT, strategy_rows, verdict_in
from piecework.training.methods import METHODS
from piecework.training.settings import SettingsError

BASELINES = ("allsmall", "exclusivefl", "fedavg", "origdrop")  # their docstrings state no differences from a paper
SECTIONS = ("Equations", "Settings to begin with", "What to expect")


def test_every_card_belongs_to_a_system() -> None:
    assert {find_card(name) for name in METHODS} == {ROOT / "piecework" / path.relative_to(ROOT) for path in cards()}


def test_a_system_without_a_card_is_listed_and_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "new", METHODS["fedavg"])
    (row,) = [row for row in strategy_rows() if row["strategy"] == "new"]
    assert row["verdict"] == ""
    with pytest.raises(SettingsError, match=r"new has no card yet: write .*whole/fedavg/new\.md"):
        write_card("new")


@pytest.mark.parametrize("name", METHODS)
def test_a_card_says_what_a_reader_asks(name: str) -> None:
    card = write_card(name)
    assert re.match(r"# \S", card)
    assert [title for title in re.findall(r"^## (.*)$", card, re.MULTILINE) if title in SECTIONS] == list(SECTIONS)
    assert f"--strategy {name}" in card or "--preset" in card
    assert not re.search("^%", card, re.MULTILINE)  # a comment on the site
    assert 100 <= len(find_card(name).read_text("utf-8").split()) <= 1000
    assert name in BASELINES or "## Where it differs from the paper" in card


@pytest.mark.parametrize("name", METHODS)
def test_an_accuracy_that_a_card_expects_stands_in_a_page_that_it_names(name: str) -> None:
    """Its verdict is then mended when records of claims replace a figure. A paper's own figures are said to be."""
    card = find_card(name).resolve()
    expected = card.read_text("utf-8").partition(EXPECT)[2].partition("\n## ")[0]
    text = "".join((card.parent / target).read_text("utf-8") for target in re.findall(r"\]\(([^)#]+)", expected))
    figures = set(
        re.findall(r"(?<![\w.])\d+\.\d+(?= %| and \d+\.\d+ %|,? \d+\.\d+ %)(?! % in (?:its|the) paper)", expected)
    )
    assert not {each for each in figures if not re.search(rf"(?<![\d.]){re.escape(each)}(?!\d|\.\d)", text)}


def test_lists_have_the_verdict_in_two_sentences() -> None:
    card = "# A\n\n## What to expect\n\nIt has **45.6 %** with\n[one budget](a.md), `fit` 51 % ([of](b.md)). One\nseed. On.\n"
    assert verdict_in(card) == "It has 45.6 % with one budget, fit 51 %. One seed."
    verdicts = {row["strategy"]: row["verdict"] for row in strategy_rows() if row["family"] != "plugin"}
    assert [name for name, verdict in verdicts.items() if not 10 < len(verdict.split()) < 80] == []
    said = " ".join(CliRunner().invoke(app, ["strategies"]).stdout.split())
    assert f"what to expect: {verdicts['slt']}" in said


def test_differences_are_those_of_the_docstring() -> None:
    (first,) = (text for text in paragraphs("fedrolex") if text.startswith(DIFFERS))
    assert differences("fedrolex") == f"## Where it differs from the paper\n\nE{first.removeprefix(DIFFERS)[1:]}"


def test_the_command_prints_the_card() -> None:
    done = CliRunner().invoke(app, ["strategies", "heterofl", "--json"])
    assert json.loads(done.stdout) == {"strategy": "heterofl", "card": write_card("heterofl")}
    done = CliRunner().invoke(app, ["strategies", "heterofl"])
    assert "logit_c ← 0 for classes c that client k does not have" in done.stdout
    assert "heterofl.width-ratios" in done.stdout
    done = CliRunner().invoke(app, ["strategies", "heterof"])
    assert done.exit_code == 2
    assert "'heterof' is no system of this project" in done.stderr
    assert "did you mean 'heterofl'?" in done.stderr


def test_a_page_has_the_picture_and_links_from_where_it_lies() -> None:
    page = system_page("fedepth", ROOT / "docs")
    assert "](../pictures/systems/fedepth.svg)\n\n## Equations" in page
    assert "](../claims/budgets.md)" in page
    assert "docs/" not in re.sub(r"docs/howto\S*`", "", page)
