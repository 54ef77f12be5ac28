"""Paired differences between groups of runs, computed by hand."""

from pathlib import Path

import pytest
from report_helpers import make_run, text_of, two_rounds

from piecework.report.compare import Group, group_runs
from piecework.report.paired import (
    Pair,
    explain,
    pair_groups,
    paired_rows,
    paired_section,
    paired_tables,
    unequal_rounds,
)
from piecework.server_app.records import RunDir

ENDS = {"fedavg": {1: 0.50, 2: 0.60, 3: 0.70, 4: 0.80}, "heterofl": {1: 0.53, 2: 0.62, 3: 0.71}}


def groups_of(folder: Path, ends: dict[str, dict[int, float]]) -> list[Group]:
    """A run for each strategy and seed, in which the last of two rounds has this accuracy."""
    return group_runs(
        make_run(folder / f"{strategy}-{seed}", two_rounds(0.1, end), strategy=strategy, seed=seed)
        for strategy, by_seed in ends.items()
        for seed, end in by_seed.items()
    )


def test_differences_by_seed(tmp_path: Path) -> None:
    """0.03, 0.02 and 0.01 ahead: 0.02 in the mean, with a deviation of 0.01; equals are as far apart in 2 of 8 cases."""
    (pair,) = pair_groups(groups_of(tmp_path, ENDS))
    assert (pair.group, pair.against, pair.label, pair.measure) == ("B", "A", "strategy=heterofl", "accuracy")
    assert pair.differences == {1: pytest.approx(0.03), 2: pytest.approx(0.02), 3: pytest.approx(0.01)}
    assert (pair.mean, pair.spread) == (pytest.approx(0.02), pytest.approx(0.01))
    assert (pair.ahead, pair.behind, pair.chance) == (3, 0, 0.25)
    assert paired_rows([pair]) == [
        {
            "": "B against A",
            "accuracy": "at the end",
            "mean difference": "+2.00 ± 1.00 points",
            "seeds": "3",
            "ahead": "in 3",
            "by chance": "25.0%",
        }
    ]


def test_seeds_that_one_of_both_does_not_have_are_left_out(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, {"fedavg": {1: 0.5, 2: 0.6}, "heterofl": {2: 0.55, 3: 0.9}, "fedprox": {4: 0.5}})
    (pair,) = pair_groups(groups)
    assert pair.differences == {2: pytest.approx(-0.05)}
    assert (pair.spread, pair.ahead, pair.behind, pair.chance) == (None, 0, 1, None)
    assert paired_rows([pair])[0]["mean difference"] == "-5.00 points"


def test_only_completed_runs_count_and_no_repetitions(tmp_path: Path) -> None:
    groups_of(tmp_path, {"fedavg": {2: 0.6, 3: 0.7}, "heterofl": {1: 0.5, 2: 0.6, 3: 0.7}})
    make_run(tmp_path / "failed", two_rounds(0.1, 0.2), "failed", strategy="fedavg", seed=1)
    make_run(tmp_path / "again", two_rounds(0.1, 0.2), strategy="heterofl", seed=2)
    make_run(tmp_path / "tried", two_rounds(0.1), "failed", strategy="fedavg", seed=3)  # and 3 was run again
    found = group_runs(RunDir(path.parent) for path in sorted(tmp_path.glob("*/settings.toml")))
    (pair,) = pair_groups(found)
    assert set(pair.differences) == {3}
    assert unequal_rounds([pair], found) == []  # that which failed after one round is not compared


@pytest.mark.parametrize(
    ("differences", "chance"),
    [
        ([0.1] * 5, 2 / 32),
        ([0.1] * 5 + [-0.1], 2 * (1 + 6) / 64),
        ([0.1, 0.1, -0.1, -0.1], 1.0),  # twice 11 of 16, at most 1
        ([0.1, 0.1, 0.0], 2 / 4),  # the seed without a difference says nothing
        ([0.0] * 3, None),
        ([0.1, 0.1], None),
    ],
)
def test_chance_is_that_of_a_sign_test(differences: list[float], chance: float | None) -> None:
    assert Pair("accuracy", "B", "A", "b", dict(enumerate(differences))).chance == chance


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "One seed says little: with other seeds the order may be another one."),
        (2, "2 seeds say little: with other seeds the order may be another one."),
        (3, "With 3 seeds that is 25.0% at best, so that no order is certain."),
        (6, "With 6 seeds that is 3.1% at best."),
    ],
)
def test_what_so_many_seeds_can_say(count: int, said: str) -> None:
    assert explain([Pair("accuracy", "B", "A", "b", dict.fromkeys(range(count), 0.1))]).endswith(said)


def test_tables_and_the_section_of_a_page(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ENDS)
    shown = text_of(*paired_tables(groups))
    assert "B against A  at the end  +2.00 ± 1.00 points      3   in 3      25.0%" in shown
    section = paired_section(groups)
    assert section is not None
    assert "<td>+2.00 ± 1.00 points</td>" in section.below
    assert "a difference may come from that" not in shown
    assert (paired_tables(groups[:1]), paired_section(groups[:1])) == ([], None)


def test_unequal_rounds_are_told(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", two_rounds(0.5, 0.6), strategy="fedavg"),
        make_run(tmp_path / "b", two_rounds(0.5), strategy="heterofl"),
        make_run(tmp_path / "c", two_rounds(0.5, 0.5), strategy="fedprox"),
        make_run(tmp_path / "d", two_rounds(0.5), "stopped", strategy="fedrolex"),  # is in no pair
    ]
    said = "A ran 2 rounds, and B ran 1: a difference may come from that."
    assert text_of(*paired_tables(group_runs(runs))).rstrip().endswith(said)
    section = paired_section(group_runs(runs))
    assert section is not None
    assert section.caption.endswith(said)
