"""The page of a claim and its verdicts, by hand-made records."""

import re
from dataclasses import replace
from typing import Any

import pytest
from claim_helpers import claim_in, records_of, run_of

from benchmarks.claims.__main__ import do_collect, do_run, do_status, do_table, parser
from benchmarks.claims.definition import Claim
from benchmarks.claims.pages import document, leader, of_longer, pictures
from benchmarks.claims.records import Records, RunRecord
from benchmarks.claims.standings import Standing, current, deadlines, reason_of, standings
from benchmarks.claims.tables import accuracies
from benchmarks.claims.verdicts import decide, judge


@pytest.fixture(scope="module")
def claim(tmp_path_factory: pytest.TempPathFactory) -> Claim:
    return claim_in(tmp_path_factory.mktemp("claim"))


@pytest.fixture(scope="module")
def records(claim: Claim) -> Records:
    return records_of(claim)


@pytest.fixture(scope="module")
def text(claim: Claim, records: Records) -> str:
    """The page."""
    return document(claim, records, standings(claim, current(claim, records)))


def table_below(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a line, without those of the line under its head."""
    lines = text[text.index(heading) :].splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("| "))
    last = next((at for at, line in enumerate(lines) if at > first and not line.startswith("| ")), len(lines))
    rows = [[each.strip() for each in line[1:-1].split(" | ")] for line in lines[first:last]]
    return [rows[0], *rows[2:]]


def test_accuracies_by_hand(text: str) -> None:
    head, *rows = table_below(text, "## Weak")
    assert head == ["row", "accuracy", "paper", "last", "best", "seeds", "rate", "participation"]
    assert rows == [
        ["*Whole* (bound)", "75.0", "-", "80.0", "80.0", "1 of 1", "0.2, given", "90.0"],
        ["Slow", "70.0", "-", "75.0", "75.0", "1 of 1", "0.1, as Pieces", "90.0"],
        ["Pieces", "62.0 ± 2.0", "71.2", "67.0", "67.0", "3 of 3", "0.1", "90.0"],  # 60, 62, 64
        ["Narrow", "60.0 ± 1.0", "-", "65.0", "65.0", "3 of 3", "0.1", "90.0"],  # 59, 60, 61
        ["Alone", "cannot train", "-", "-", "-", "0 of 1", "-", "-"],
    ]
    assert "- Alone, seed 1: no client trained in round 1\n" in text
    assert table_below(text, "## Mixed")[1:] == [
        ["Pieces", "60.0", "65.0", "65.0", "1 of 3", "0.1, in weak", "90.0"],
        ["Narrow", "missing", "-", "-", "0 of 3", "-", "-"],
    ]
    assert (
        "Missing: Pieces (seeds 1, 3); Narrow (seeds 1, 2, 3). "
        'Run by `python -m benchmarks.claims run pieces --case "mixed" --data-dir FOLDER` '
        "(with `--only ROW` those of one row).\n"
    ) in text


def test_columns_that_only_some_claims_have(claim: Claim) -> None:
    attacked = claim.model_copy(update={"measure": "adversarial_accuracy"})
    known = {"accuracy": 0.8, "adversarial": 0.55, "autoattack": 0.5, "models": {"mean": 0.45, "worst": 0.3}}
    known |= {"density": 0.625}
    runs = [run_of(claim, ("weak", "Pieces", 1), 0.6, 300, **known), run_of(claim, ("weak", "Narrow", 1), 0.5, 300)]
    text = accuracies(attacked, claim.case("weak"), standings(attacked, runs)["weak"])
    head, pieces, narrow, *_ = table_below(text, "")
    assert head == [
        *("row", "accuracy", "paper", "last", "best", "clean", "PGD", "AutoAttack"),
        *("models: mean", "models: worst", "density", "seeds", "rate", "participation"),
    ]
    assert pieces[1:11] == ["55.0", "71.2", "60.0", "60.0", "80.0", "55.0", "50.0", "45.0", "30.0", "62.5"]
    assert narrow[1:11] == ["45.0", "-", "50.0", "50.0", "50.0", "-", "-", "-", "-", "-"]


def test_costs_and_equal_time_by_hand(text: str) -> None:
    head, *rows = table_below(text, "What it costs:")
    assert head[1:4] == ["peak / budget", "MB down + up", "TFLOPs"]
    assert [row[:7] for row in rows] == [
        ["*Whole* (bound)", "-", "20 + 10", "1.5", "30", "6", "3"],
        ["Slow", "0.98", "20 + 10", "1.5", "900", "180", "90"],
        ["Pieces", "0.98", "20 + 10", "1.5", "300", "60", "30"],
        ["Narrow", "0.5", "20 + 10", "1.5", "90", "18", "9"],
    ]
    # Narrow is through at 90 s, two of the three candidates at 300 s. By 90 s Pieces has had no evaluation; by 300 s Slow has
    # had its first one, 20 points below its end.
    head, *rows = table_below(text, "Accuracy at equal simulated time:")
    assert head == ["row", *("SD, 90 s", "SD, 300 s"), *("eMMC, 18 s", "eMMC, 60 s"), *("NVMe, 9 s", "NVMe, 30 s")]
    assert rows == [
        ["*Whole* (bound)", *["80.0"] * 6],
        ["Slow", *["-", "55.0"] * 3],
        ["Pieces", *["-", "**67.0**"] * 3],
        ["Narrow", *["**65.0**", "65.0"] * 3],
    ]


def test_the_rest_of_the_page_by_hand(text: str) -> None:
    head, *rows = table_below(text, "## The claimed orders")
    narrow = "Narrow +2.0 ± 1.0, 3 seeds: ahead"  # 1, 2, 3
    assert head == ["claimed", "case", "verdict", "points ahead of"]
    assert rows == [
        ["Pieces is ahead", "weak", "**holds**", f"{narrow}; Alone: ahead, no client can train Alone"],
        ["Pieces is ahead of Narrow", "weak", "**holds**", narrow],
        ["Pieces is ahead of Narrow", "mixed", "**undecided**", "Narrow: undecided, Narrow has no run yet"],
    ]
    assert table_below(text, "## The rates") == [
        ["row", "case", "0.05", "0.1", "chosen", "rounds"],
        ["Pieces", "weak", "31.0", "**42.0**", "0.1, the highest", "1"],
        ["Alone", "weak", "failed", "failed", "-", "1"],
    ]
    for line in (
        "- weak: **Slow** has the highest accuracy, 70.0 %; Pieces is next, 10.0 points behind with the seeds that both have "
        "(ahead by the rule for orders).",
        "- mixed: **Pieces** has the highest accuracy, 60.0 %, and no other candidate has trained.",
        "- Claimed orders, counted in each of their cases, that hold: 2, do not hold: 0, undecided: 1.",
        "- 5 of 15 runs are missing.",
        "- 9 runs at 0f3c9a1 on a machine, 2 cores",
        "1 recorded run of other settings than the definition's left out.",
        "1 of 3 searches is missing.",
        "- 3 rounds, not 500",
        "All runs: `num-rounds=3`, `faults.allow-untrained=true`.",
        "| Slow | `strategy=profl` |",
    ):
        assert line in text.splitlines(), line
    commands = re.findall(r"^    python -m benchmarks.claims ([^#\n]*)", text, re.MULTILINE)
    assert [parser().parse_args(command.split()).do for command in commands] == [
        do_run,
        do_status,
        do_collect,
        do_table,
    ]


def test_a_case_without_a_record_is_named_and_nothing_more(claim: Claim, records: Records) -> None:
    weak = replace(records, runs=[run for run in records.runs if run.case == "weak"])
    text = document(claim, weak, standings(claim, current(claim, weak)))
    command = 'python -m benchmarks.claims run pieces --case "mixed" --data-dir FOLDER'
    begin = f"None of its 2 rows is recorded yet. They are run by `{command}`."
    assert text.partition("## Mixed\n")[2].partition("\n## ")[0].split("\n\n")[1].strip() == begin
    assert [row[1] for row in table_below(text, "## The claimed orders")[1:]] == ["weak", "weak"]
    assert "Not judged before there is a record: mixed.\n" in text
    assert "- mixed: no run yet.\n" in text
    assert "that hold: 2, do not hold: 0, undecided: 0, without a run: 1.\n" in text


def test_an_experiment_does_not_compete_and_shows_why_an_order_does_not_hold(claim: Claim) -> None:
    rows = [row.model_copy(update={"role": "experiment"}) if row.name == "Slow" else row for row in claim.rows]
    orders = [order.model_copy(update={"cause": "Slow has more rounds."}) for order in claim.orders[1:]]
    claim = claim.model_copy(update={"rows": tuple(rows), "orders": tuple(orders)})
    ends = {"Slow": 0.75, "Pieces": 0.6, "Narrow": 0.65}
    runs = [run_of(claim, ("weak", row, 1), end, 30) for row, end in ends.items()]
    found = standings(claim, runs)
    text = document(claim, Records("pieces", runs, []), found)
    assert table_below(text, "## Weak")[1][:2] == ["*Slow* (experiment)", "70.0"]
    assert "- weak: **Narrow** has the highest accuracy" in text
    assert "**Why not.** Slow has more rounds.\n" in text
    shown = {line.name for picture in pictures(claim, found) for panel in picture.panels for line in panel.lines}
    assert shown == {"Pieces", "Narrow", "Alone", "Whole"}
    held = document(claim, Records("pieces", runs[:2], []), standings(claim, runs[:2]))
    assert "Why not" not in held


@pytest.mark.parametrize(
    ("changes", "ends", "said"),
    [
        ({}, {1: 0.75}, " With more rounds *Slow* is ahead of it, 70.0 %."),
        ({}, {1: 0.67}, " With more rounds *Slow* is within 2 points of it, 62.0 %."),
        ({}, {1: 0.651, 2: 0.669, 3: 0.69}, " With more rounds *Slow* is level with it, 62.0 %."),
        ({}, {1: 0.60}, ""),  # behind
        ({}, {4: 0.75}, ""),  # no seed in common
        ({"num-rounds": 3}, {1: 0.75}, ""),
        ({"memory.enforce": False}, {1: 0.75}, ""),
    ],
    ids=["ahead", "within two points", "level", "behind", "no seed in common", "no more rounds", "without budgets"],
)
def test_a_row_that_is_not_behind_with_more_rounds(
    claim: Claim, changes: dict[str, Any], ends: dict[int, float], said: str
) -> None:
    """Pieces ends at 65, 67 and 69 %; both figures are five points lower, as the last two evaluations count."""
    longer = {"num-rounds": 9} | changes
    rows = tuple(
        row.model_copy(update={"role": "experiment", "settings": row.settings | longer}) if row.name == "Slow" else row
        for row in claim.rows
    )
    claim = claim.model_copy(update={"rows": rows})
    runs = [run_of(claim, ("weak", "Pieces", seed), 0.63 + 0.02 * seed, 300) for seed in (1, 2, 3)]
    runs += [run_of(claim, ("weak", "Slow", seed), end, 900) for seed, end in ends.items()]
    there = standings(claim, runs)["weak"]
    assert of_longer(claim, claim.case("weak"), there) == said
    assert of_longer(claim, claim.case("weak"), [each for each in there if each.row.name == "Slow"]) == ""


def test_the_next_row_may_be_ahead_with_the_seeds_that_both_have(claim: Claim) -> None:
    """Narrow has 59 % with seed 1, and Pieces 60, but 57.5 over two seeds."""
    runs = [run_of(claim, ("weak", "Pieces", seed), end, 300) for seed, end in ((1, 0.65), (2, 0.60))]
    there = standings(claim, [*runs, run_of(claim, ("weak", "Narrow", 1), 0.64, 90)])["weak"]
    first = "**Narrow** has the highest accuracy, 59.0 %; Pieces is next, "
    assert leader(there) == f"{first}1.0 points ahead with the seeds that both have (undecided by the rule for orders)."


@pytest.mark.parametrize(
    ("points", "spread", "seeds", "verdict"),
    [
        (2.1, None, 1, "ahead"),
        (2.0, None, 1, "undecided"),
        (-2.1, 5.0, 2, "behind"),
        (1.9, 0.1, 2, "undecided"),
        (0.3, 0.2, 3, "ahead"),
        (-0.3, 0.2, 3, "behind"),
        (4.0, 4.0, 3, "level"),
        (0.0, 0.0, 3, "level"),
    ],
)
def test_one_rule_decides(points: float, spread: float | None, seeds: int, verdict: str) -> None:
    assert decide(points, spread, seeds) == verdict


def judged(claim: Claim, runs: list[RunRecord], number: int = 0) -> tuple[str, list[str]]:
    found = judge(claim, claim.orders[number], "weak", standings(claim, runs)["weak"])
    assert found is not None
    return found.verdict, [each.verdict for each in found.differences]


def test_an_order_holds_only_if_the_row_is_ahead_of_all(claim: Claim, records: Records) -> None:
    runs = current(claim, records)
    assert judged(claim, runs) == ("holds", ["ahead", "ahead"])
    crashed = [replace(run, reason="killed") if run.row == "Alone" else run for run in runs]
    assert judged(claim, crashed) == ("undecided", ["ahead", "undecided"])
    behind = [run_of(claim, ("weak", "Narrow", 1), 0.9, 90)]
    assert judged(claim, [*behind, *(run for run in crashed if run.row != "Narrow")]) == (
        "does not hold",
        ["behind", "undecided"],
    )
    one = [run for run in runs if run.seed == 1]  # one point ahead
    assert judged(claim, one, 1) == ("undecided", ["undecided"])
    nobody = [
        replace(run, status="failed", reason="no client can take part", ok=0) for run in runs if run.row == "Pieces"
    ]
    assert judged(claim, [*nobody, *(run for run in runs if run.row == "Narrow")], 1) == ("does not hold", ["behind"])


def test_an_order_of_a_number_of_points(claim: Claim, records: Records) -> None:
    # With seed 1 alone, Pieces is one point ahead of Narrow: 1.0 is reached, 1.1 is not, whatever the margin of the rule.
    one = [run for run in current(claim, records) if run.seed == 1]
    for points, verdict in ((1.0, "holds"), (1.1, "does not hold")):
        order = claim.orders[1].model_copy(update={"by": points})
        found = judge(claim, order, "weak", standings(claim, one)["weak"])
        assert found is not None
        assert found.verdict == verdict
        assert found.differences[0].points == pytest.approx(1.0)


def test_times_are_those_of_candidates_that_have_trained(claim: Claim, records: Records) -> None:
    there = standings(claim, current(claim, records))["weak"]
    assert deadlines(there, "sd") == [90, 300]
    idle = standings(claim, [replace(run, ok=0) for run in current(claim, records)])["weak"]
    assert deadlines(idle, "sd") == []
    assert all(each.untrainable and each.mean is None for each in idle)
    assert {reason_of(run) for each in idle for run in each.failed} == {
        "no client could train",
        "no client trained in round 1",
    }
    later = [run_of(claim, ("weak", "Pieces", seed), 0.6, 300 + seed) for seed in (1, 2)]
    assert deadlines([Standing(claim.row("Pieces"), tuple(later), (), ())], "emmc") == [60.4]  # with all seeds
