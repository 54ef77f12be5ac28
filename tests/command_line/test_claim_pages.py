"""The pages and pictures of the claims: by hand-made records whose figures are computed by hand, and the committed ones."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.claims import definition
from benchmarks.claims.__main__ import do_collect, do_run, do_status, do_table, parser
from benchmarks.claims.drawing import draw, short, ticks
from benchmarks.claims.jobs import search_jobs, seed_job
from benchmarks.claims.pages import document, pictures, write_pages
from benchmarks.claims.pictures import Picture, above_the_mean, apart, overview
from benchmarks.claims.records import DOCS, Records, RunRecord, SearchRecord
from benchmarks.claims.results import search_hash
from benchmarks.claims.standings import Standing, current, deadlines, reason_of, standings
from benchmarks.claims.tables import accuracies
from benchmarks.claims.verdicts import decide, judge

SVG = "{http://www.w3.org/2000/svg}"
CLAIM = """
title = "Pieces against narrow models"
question = "Is Pieces ahead?"
paper = "The paper has Pieces ahead of Narrow."
gap = "- 3 rounds, not 500"
seeds = [1, 2, 3]
last = 2
[search]
rates = [0.05, 0.1]
[settings]
"num-rounds" = 3
"faults.allow-untrained" = true
[[case]]
name = "weak"
settings = { model = "convnet", fleet = "demo" }
[[case]]
name = "mixed"
settings = { model = "cnn3", fleet = "demo" }
rates-from = "weak"
[[row]]
name = "Pieces"
settings = { strategy = "fedepth" }
paper = { weak = 71.25 }
[[row]]
name = "Narrow"
settings = { strategy = "allsmall" }
[[row]]
name = "Slow"
settings = { strategy = "profl" }
seeds = [1]
cases = ["weak"]
rates-from = "Pieces"
[[row]]
name = "Alone"
settings = { strategy = "exclusivefl" }
seeds = [1]
cases = ["weak"]
[[row]]
name = "Whole"
role = "bound"
settings = { strategy = "fedavg" }
seeds = [1]
cases = ["weak"]
rate = 0.2
[[order]]
text = "Pieces is ahead"
ahead = "Pieces"
behind = ["Narrow", "Alone"]
[[order]]
text = "Pieces is ahead of Narrow"
ahead = "Pieces"
behind = ["Narrow"]
"""
MACHINE = "a machine, 2 cores"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A definition, `pieces.toml`."""
    made = tmp_path_factory.mktemp("claim")
    (made / "pieces.toml").write_text(CLAIM, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def claim(folder: Path) -> definition.Claim:
    return definition.read("pieces", folder)


def run_of(
    claim: definition.Claim, place: tuple[str, str, int], accuracy: float, sd: float, **changed: Any
) -> RunRecord:
    """A completed run of three rounds that lasts `sd` seconds on SD, a fifth of it on eMMC, a tenth on NVMe."""
    case, row, seed = place
    rate = changed.pop("rate", 0.1)
    job = seed_job(claim, claim.case(case), claim.row(row), seed, rate)
    curve = [
        [n, n * 10, sd * n / 3, sd * n / 15, sd * n / 30, accuracy - 0.1 * (3 - n)] for n in (1, 2, 3)
    ]  # 0.2 below, 0.1 below, at the end
    record = RunRecord(
        **{
            "case": case,
            "row": row,
            "seed": seed,
            "rate": rate,
            "hash": job.hash,
            "commit": "0f3c9a1",
            "machine": MACHINE,
        },
        **{"status": "completed", "reason": "", "rounds": 3, "last": accuracy, "best": accuracy, "best_round": 3},
        **{"mean_last": accuracy - 0.05, "accuracy": accuracy, "adversarial": None, "autoattack": None},
        **{"asked": 30, "ok": 27, "participation": 0.9, "peak_over_budget": 0.98, "bytes_down": 20_000_000},
        **{"bytes_up": 10_000_000, "flops": 1.5e12, "seconds": 600.0, "models": None, "curve": curve},
        simulated={"sd": sd, "emmc": sd / 5, "nvme": sd / 10},
    )
    return replace(record, **changed)


@pytest.fixture(scope="module")
def records(claim: definition.Claim) -> Records:
    """The case weak is through but for a run that cannot train; of mixed there is one seed of Pieces, and old ones."""
    nobody = {
        "status": "failed",
        "reason": "no client trained in round 1\ntry: more",
        "ok": 0,
        "mean_last": None,
        "curve": [],
    }
    runs = [
        run_of(claim, ("weak", "Slow", 1), 0.75, 900),
        *(run_of(claim, ("weak", "Pieces", seed), 0.63 + 0.02 * seed, 300) for seed in (1, 2, 3)),
        *(run_of(claim, ("weak", "Narrow", seed), 0.63 + 0.01 * seed, 90, peak_over_budget=0.5) for seed in (1, 2, 3)),
        run_of(claim, ("weak", "Alone", 1), 0.0, 0.0, **nobody),
        run_of(claim, ("weak", "Whole", 1), 0.8, 30, rate=0.2, peak_over_budget=None),
        run_of(claim, ("mixed", "Pieces", 2), 0.65, 300),
        run_of(claim, ("mixed", "Narrow", 1), 0.9, 300, hash="00000000"),
    ]
    searched = {
        row: search_hash([job.hash for job in search_jobs(claim, ("weak", row))]) for row in ("Pieces", "Alone")
    }
    searches = [
        SearchRecord("weak", "Narrow", "00000000", "0f3c9a1", MACHINE, 1, {"0.05": 0.31, "0.1": 0.42}, 0.1, 200.0),
        SearchRecord(
            "weak", "Pieces", searched["Pieces"], "0f3c9a1", MACHINE, 1, {"0.05": 0.31, "0.1": 0.42}, 0.1, 200.0
        ),
        SearchRecord(
            "weak", "Alone", searched["Alone"], "0f3c9a1", MACHINE, 1, {"0.05": None, "0.1": None}, None, 20.0
        ),
    ]
    return Records("pieces", runs, searches)


@pytest.fixture(scope="module")
def text(claim: definition.Claim, records: Records) -> str:
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
        "Run by `python -m benchmarks.claims run pieces` (with `--only ROW` those of one row).\n"
    ) in text


def test_columns_that_only_some_claims_have(claim: definition.Claim) -> None:
    attacked = claim.model_copy(update={"measure": "adversarial_accuracy"})
    known = {"accuracy": 0.8, "adversarial": 0.55, "autoattack": 0.5, "models": {"mean": 0.45, "worst": 0.3}}
    runs = [run_of(claim, ("weak", "Pieces", 1), 0.6, 300, **known), run_of(claim, ("weak", "Narrow", 1), 0.5, 300)]
    text = accuracies(attacked, claim.case("weak"), standings(attacked, runs)["weak"])
    head, pieces, narrow, *_ = table_below(text, "")
    assert head == [
        *("row", "accuracy", "paper", "last", "best", "clean", "PGD", "AutoAttack"),
        *("models: mean", "models: worst", "seeds", "rate", "participation"),
    ]
    assert pieces[1:10] == ["55.0", "71.2", "60.0", "60.0", "80.0", "55.0", "50.0", "45.0", "30.0"]
    assert narrow[1:10] == ["45.0", "-", "50.0", "50.0", "50.0", "-", "-", "-", "-"]


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
        ["Narrow", "weak", "missing", "missing", "-", "-"],
        ["Alone", "weak", "failed", "failed", "-", "1"],
    ]
    for line in (
        "- weak: **Slow** has the highest accuracy, 70.0 %; Pieces is next, 10.0 points behind with the seeds that both have "
        "(ahead by the rule for orders).",
        "- mixed: **Pieces** has the highest accuracy, 60.0 %, and no other candidate has a run yet.",
        "- Claimed orders, counted in each of their cases, that hold: 2, do not hold: 0, undecided: 1.",
        "- 5 of 15 runs are missing.",
        "- 9 runs at 0f3c9a1 on a machine, 2 cores",
        "1 recorded run of other settings than the definition's left out.",
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


def judged(claim: definition.Claim, runs: list[RunRecord], number: int = 0) -> tuple[str, list[str]]:
    found = judge(claim, claim.orders[number], "weak", standings(claim, runs)["weak"])
    assert found is not None
    return found.verdict, [each.verdict for each in found.differences]


def test_an_order_holds_only_if_the_row_is_ahead_of_all(claim: definition.Claim, records: Records) -> None:
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


def test_times_are_those_of_candidates_that_have_trained(claim: definition.Claim, records: Records) -> None:
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


def test_rows_are_sorted_by_what_they_are_above_the_mean_of_their_cases(claim: definition.Claim) -> None:
    """Else a row that is in an easy case alone would be first."""
    accuracies = {("weak", "Pieces"): 0.45, ("weak", "Narrow"): 0.35, ("mixed", "Pieces"): 0.75, ("weak", "Slow"): 0.47}
    runs = [run_of(claim, (*place, 1), accuracy, 30) for place, accuracy in accuracies.items()]
    (picture,) = overview(claim, standings(claim, runs))  # 40, 30, 42 in weak, whose mean is 37 1/3; 70 alone in mixed
    assert above_the_mean(standings(claim, runs)) == pytest.approx({"Pieces": 4 / 3, "Narrow": -22 / 3, "Slow": 14 / 3})
    assert [line.name for line in picture.panels[0].lines] == ["Slow", "Pieces", "Narrow", "Alone", "Whole"]


def test_labels_and_ticks() -> None:
    assert apart([0.5, 0.1, 0.5], 0.2, 1.0) == pytest.approx([0.5, 0.1, 0.7])
    assert apart([0.9, 1.0, 0.95], 0.1, 1.0) == pytest.approx([0.8, 1.0, 0.9])
    assert ticks(90, 450) == [100, 200]
    assert ticks(90, 9000) == [100, 300, 1000, 3000]
    assert ticks(9, 90_000) == [10, 100, 1000, 10_000]
    assert short('d="M 1.23456 2.0001 \nL 3 4.005 \n"\n  <g') == 'd="M 1.23 2 L 3 4 "\n<g'


# ---- pictures: whatever the version of matplotlib, each point lies where it belongs in its axes


def drawn(path: Path) -> tuple[dict[str, list[tuple[float, float]]], str]:
    """Where points lie in their axes, 0 to 1 to the right and upwards, by the ids of panels and rows; and all words."""
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    groups = {group.get("id", ""): group for group in root.iter(f"{SVG}g")}
    found = {}
    for name, group in groups.items():
        if (panel := re.match(r"panel-\d+(?=-)", name)) is None:
            continue
        (left, right), (top, bottom) = ((min(each), max(each)) for each in zip(*path_of(groups[panel[0]]), strict=True))
        points = path_of(group) or [(float(use.attrib["x"]), float(use.attrib["y"])) for use in group.iter(f"{SVG}use")]
        found[name] = [((x - left) / (right - left), (bottom - y) / (bottom - top)) for x, y in points]
    return found, " ".join(root.itertext())


def path_of(group: ElementTree.Element) -> list[tuple[float, float]]:
    """The corners of a group's own path, not of its marks."""
    paths = [path.get("d", "") for path in group.findall(f"{SVG}path")]
    return [(float(x), float(y)) for path in paths for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]


def require_drawn(picture: Picture, path: Path) -> None:
    """Compare a file with what it should show."""
    found, words = drawn(path)
    expected = {
        f"panel-{number}-{line.id}": [panel.place(point) for point in line.points]
        for number, panel in enumerate(picture.panels)
        for line in panel.lines
        if line.points
    } | {
        f"panel-{number}-{line.id}-paper": [panel.place((line.paper, line.height))]
        for number, panel in enumerate(picture.panels)
        for line in panel.lines
        if line.paper is not None
    }
    assert found.keys() == expected.keys(), path
    for name, points in expected.items():
        assert [value for point in found[name] for value in point] == pytest.approx(
            [value for point in points for value in point], abs=1e-3
        ), (path, name)
    for text in (
        picture.title,
        picture.y_label,
        *(word for panel in picture.panels for word in (panel.title, panel.label)),
    ):
        assert text in words, path
    assert all(line.name in words and line.note in words for panel in picture.panels for line in panel.lines), path
    assert path.stat().st_size < 60_000, path


def test_pictures_show_the_records(claim: definition.Claim, records: Records, folder: Path) -> None:
    weak = replace(records, runs=[run for run in records.runs if run.case == "weak"])
    weak.write(claim, folder)
    files = write_pages(claim, folder)
    drawn_pictures = pictures(claim, standings(claim, current(claim, weak)))
    assert [path.name for path in files] == [
        *("pieces.md", "pieces-cases.svg", "pieces-weak-time.svg", "pieces-weak-bytes.svg"),
    ]
    for picture in drawn_pictures:
        require_drawn(picture, folder / picture.file)
    draw(drawn_pictures[-1], folder / "again.svg")
    assert (folder / "again.svg").read_bytes() == files[-1].read_bytes()
    # by hand: accuracies from 40 to 80 %, and Pieces' second evaluation of 57 % at 200 s, between 10 s and 900 s
    found, _ = drawn(folder / "pieces-weak-time.svg")
    x, y = found["panel-0-pieces"][1]
    assert y == pytest.approx((57 - 40) / 40, abs=1e-3)
    margin = 90**0.03 * 1.01
    assert x == pytest.approx(math.log(200 / (10 / margin)) / math.log(90 * margin**2), abs=1e-3)
    words = drawn(folder / "pieces-cases.svg")[1]
    assert "cannot train" in words and "not run yet" in words


# ---- what is committed

COMMITTED = sorted(path.stem for path in DOCS.glob("*.json"))


@pytest.mark.parametrize("name", COMMITTED or [pytest.param("", marks=pytest.mark.skip("no claim has records yet"))])
def test_a_committed_page_is_what_its_records_give(name: str) -> None:
    claim, kept = definition.read(name), Records.read(name)
    found, write_it = standings(claim, current(claim, kept)), f"run python -m benchmarks.claims table {name}"
    assert kept.claim == name
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == document(claim, kept, found), write_it
    for picture in pictures(claim, found):
        assert (DOCS / picture.file).is_file(), write_it
        require_drawn(picture, DOCS / picture.file)


def test_no_other_file_lies_beside_the_committed_pages() -> None:
    """Such as a picture of a case that has another name today."""
    expected = {f"{name}.{ending}" for name in COMMITTED for ending in ("json", "md")}
    for name in COMMITTED:
        expected |= set(re.findall(r"\((.*\.svg)\)", (DOCS / f"{name}.md").read_text(encoding="utf-8")))
    assert {path.name for path in DOCS.glob("*")} == expected
