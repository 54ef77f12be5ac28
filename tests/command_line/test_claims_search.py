"""Which rates a search tries: the row's own, and further ones while the best is at an edge."""

from dataclasses import replace
from pathlib import Path

import pytest
from claims_harness import IN_ORDER, SMALL, Harness
from claims_helpers import a_claim, finish

from benchmarks.claims.collect import collect
from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import rates_of, reach_of, seed_job
from benchmarks.claims.reading import read
from benchmarks.claims.records import Records, SearchRecord
from benchmarks.claims.search import (
    best_rate,
    figures_of,
    figures_so_far,
    found_rate,
    is_current_search,
    search_hash,
    search_record,
    untried,
)
from benchmarks.claims.standings import current_searches
from benchmarks.claims.status import status_of
from benchmarks.claims.tables import rates

FEDEPTH = ("weak", "FeDepth")
FURTHER = SMALL.replace("[0.02, 0.05]\nfurther = 0", "[0.05, 0.02]\nfurther = 2")


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    return a_claim(tmp_path, FURTHER)


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    found = Harness(tmp_path, monkeypatch)
    found.claim = a_claim(tmp_path, FURTHER)
    return found


def peak_at(harness: Harness, best: float) -> None:
    """Let each run with a rate end with an accuracy that is the lower, the farther its rate is from `best`."""

    def leave(folder: Path, words: list[str]) -> None:
        rate = float(folder.name.split("-")[1]) if folder.name.startswith("rate") else best
        finish(folder, [1.0 - abs(rate - best)])

    harness.leave = leave


def test_further_rates_are_as_far_apart_as_their_neighbours(claim: Claim) -> None:
    """0.05 / 0.02 = 2.5, so 0.02 / 2.5 = 0.008 and 0.05 * 2.5 = 0.125."""
    row = claim.row("FeDepth")
    assert rates_of(claim, row) == [0.02, 0.05]
    assert reach_of(claim, row) == [0.0032, 0.008, 0.02, 0.05, 0.125, 0.3125]


@pytest.mark.parametrize(
    ("figures", "further"),
    [
        ({}, [0.02, 0.05]),
        ({0.05: 0.7}, [0.02]),
        ({0.02: 0.6, 0.05: 0.7}, [0.125]),
        ({0.02: 0.7, 0.05: 0.7}, [0.008]),  # the first of equals
        ({0.02: 0.6, 0.05: 0.7, 0.125: 0.65}, []),
        ({0.02: 0.6, 0.05: 0.7, 0.125: None}, []),
        ({0.02: 0.6, 0.05: 0.7, 0.125: 0.75}, [0.3125]),
        ({0.02: 0.6, 0.05: 0.7, 0.125: 0.75, 0.3125: 0.8}, []),  # as far as it may
        ({0.02: None, 0.05: None}, [0.008]),
        ({0.008: 0.3, 0.02: None, 0.05: None}, [0.0032]),
        ({0.0032: None, 0.008: None, 0.02: None, 0.05: None}, []),
    ],
)
def test_the_neighbours_of_the_best_rate_are_tried(
    claim: Claim, figures: dict[float, float | None], further: list[float]
) -> None:
    assert untried(claim, FEDEPTH, figures) == further


def test_a_rate_is_found_when_nothing_is_left_to_try(claim: Claim) -> None:
    assert found_rate(claim, FEDEPTH, {0.02: 0.6, 0.05: 0.7}) is None
    assert found_rate(claim, FEDEPTH, {0.02: 0.6, 0.05: 0.7, 0.125: 0.65}) == 0.05
    assert found_rate(claim, FEDEPTH, dict.fromkeys((0.0032, 0.008, 0.02, 0.05))) == 0.02


def test_the_harness_goes_on_while_the_best_rate_is_the_highest(harness: Harness, tmp_path: Path) -> None:
    peak_at(harness, 0.1)
    assert harness.run() == [
        *IN_ORDER[:2],
        *(f"tiny: weak: FeDepth: search, rate {rate}" for rate in (0.125, 0.3125)),
        *IN_ORDER[2:],
    ]
    (search,) = collect(harness.claim, harness.out, tmp_path / "docs", lambda _: None).searches
    assert (search.chosen, [*search.figures]) == (0.125, [0.02, 0.05, 0.125, 0.3125])


def test_a_recorded_search_goes_on_with_the_rates_that_it_lacks(claim: Claim, harness: Harness, tmp_path: Path) -> None:
    """It was run when no further rates were tried. Each run takes 2 s, and 3 s beside."""
    docs = tmp_path / "docs"
    peak_at(harness, 0.1)
    harness.claim = a_claim(tmp_path, SMALL)
    harness.run(only="FeDepth")
    old = collect(harness.claim, harness.out, docs, lambda _: None)
    assert (old.searches[0].chosen, old.searches[0].seconds) == (0.05, 2 * (2 + 3))

    harness.claim = a_claim(tmp_path, FURTHER)
    harness.out.rename(tmp_path / "moved")
    kept = Records.read("tiny", docs)
    assert current_searches(harness.claim, kept) == {FEDEPTH: kept.searches[0]}
    assert "| **95.0** | 0.05, the highest |" in rates(harness.claim, kept)
    fedepth = status_of(harness.claim, harness.out, docs).rows[0]
    assert (fedepth.counts["recorded"], fedepth.counts["missing"]) == (4, 1)

    assert harness.run(only="FeDepth", records=docs) == [
        *(f"tiny: weak: FeDepth: search, rate {rate}" for rate in (0.125, 0.3125)),
        *(label for label in IN_ORDER if "FeDepth: seed" in label),
    ]
    said = list[str]()
    found = collect(harness.claim, harness.out, docs, said.append)
    (search,) = found.searches
    assert (search.chosen, [*search.figures]) == (0.125, [0.02, 0.05, 0.125, 0.3125])
    assert search.seconds == 4 * (2 + 3)
    case, row = claim.case("weak"), claim.row("FeDepth")
    assert [run.hash for run in found.runs] == [seed_job(claim, case, row, seed, 0.125).hash for seed in (1, 2)]
    assert "removed   tiny: weak: FeDepth: seed 1: its rate is not the 0.125 that the search has found" in said
    assert collect(harness.claim, harness.out, docs, said.append).searches == found.searches
    assert "0.125 |" in rates(harness.claim, found)


def test_a_recorded_rate_stays_where_another_machine_finds_another_figure(harness: Harness, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    peak_at(harness, 0.06)
    harness.run(only="FeDepth")
    (found,) = collect(harness.claim, harness.out, docs, lambda _: None).searches
    harness.out = tmp_path / "again"
    peak_at(harness, 0.01)
    harness.run(only="FeDepth")
    (search,) = collect(harness.claim, harness.out, docs, lambda _: None).searches
    assert [*search.figures] == [0.0032, 0.008, 0.02, 0.05, 0.125]
    assert search.figures.items() >= found.figures.items()


def test_a_rate_that_is_out_of_reach_stays_in_the_records_and_does_not_count(claim: Claim, tmp_path: Path) -> None:
    figures = {0.02: 0.6, 0.05: 0.7, 0.125: 0.65, 0.5: 0.9}
    rates = {str(rate): figure for rate, figure in figures.items()}
    record = SearchRecord(*FEDEPTH, search_hash(claim, FEDEPTH, figures), "abc", "here", 2, rates, 0.5, 4.0)
    assert is_current_search(claim, FEDEPTH, record)
    assert figures_of(claim, FEDEPTH, record) == {0.02: 0.6, 0.05: 0.7, 0.125: 0.65}
    assert found_rate(claim, FEDEPTH, figures_of(claim, FEDEPTH, record)) == 0.05
    assert not is_current_search(claim, FEDEPTH, replace(record, rates={"0.02": 0.6}))


def test_a_recorded_figure_counts_and_a_recorded_failure_is_corrected(
    claim: Claim, harness: Harness, tmp_path: Path
) -> None:
    """A run here with a rate of r has 1 - r."""
    peak_at(harness, 0.0)
    harness.run(only="FeDepth")
    known = {0.02: 0.3, 0.05: None}
    assert figures_so_far(claim, FEDEPTH, harness.out, {0.02: 0.3, 0.05: 0.4, 0.125: 0.2}) == (
        {0.02: 0.3, 0.05: 0.4, 0.125: 0.2},
        "",
    )
    assert figures_so_far(claim, FEDEPTH, harness.out, known)[0] == {
        0.02: 0.3,
        0.05: 0.95,
        0.008: 0.992,
        0.0032: 0.9968,
    }
    rates = {str(rate): figure for rate, figure in known.items()}
    old = SearchRecord(*FEDEPTH, search_hash(claim, FEDEPTH, known), "x; abc", "here", 2, rates, 0.02, 4.0, 3.0)
    found = search_record(claim, FEDEPTH, harness.out, old)
    assert found is not None
    assert found.figures == {0.0032: 0.9968, 0.008: 0.992, 0.02: 0.3, 0.05: 0.95}
    assert (found.commit, found.seconds, found.core_seconds) == ("x; abc", 4 + 3 * (2 + 3), None)


def test_of_equal_rates_the_lowest_is_the_best() -> None:
    assert best_rate({0.125: 0.5, 0.05: 0.5, 0.02: None}) == 0.05


def test_the_rates_of_fedepth_are_those_that_budgets_has_found() -> None:
    found = {each.row: each.chosen for each in Records.read("budgets").searches if each.case == "activations, mixed"}
    for row in read("fedepth").rows:
        assert row.rate == found[row.name if row.name in found else "AllSmall"], row.name
