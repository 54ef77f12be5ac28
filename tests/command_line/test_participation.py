"""Who took part in runs, counted by hand, and what comparisons say where clients were left out, or nobody trained."""

from pathlib import Path
from typing import Any

import pytest
from report_helpers import client, make_run, refused, round_record, text_of, two_rounds

from piecework.report.compare import Group, compare_json, group_runs
from piecework.report.compare_legend import legend
from piecework.report.compare_pictures import pictures
from piecework.report.compare_view import compare_tables, curve_name, curves_html
from piecework.report.display import summary_table
from piecework.report.paired import pair_groups
from piecework.report.participation import Participation, Record, clients_text, participation
from piecework.report.run_page import write_report

FLEET = {"devices": {"small": 3, "pi": 2}, "examples": 50}
NO_PI = "no client of pi ever trained: none was asked to"


def partly(**changes: Any) -> list[Record]:
    """Two rounds of five clients with 50 examples: clients 0 and 1 train, with 10 and 15 of them; 2 refuses."""
    clients = [client(0, examples=10), client(1, examples=15), refused(2)]
    return [round_record(n, a, clients, **FLEET | changes) for n, a in ((1, 0.25), (2, 0.5))]


def nobody(accuracy: float | None = 0.1) -> list[Record]:
    return [round_record(1, accuracy, [refused(0), refused(1)], **FLEET)]


def shown(groups: list[Group]) -> list[str]:
    return [row.rstrip() for row in text_of(*compare_tables(groups)).splitlines()]


def test_clients_whose_updates_entered_the_model_are_counted_once() -> None:
    assert participation(partly()) == Participation(2, 3, 5, 0.5, {"pi": NO_PI})
    late = partly(late_used=[{"client": 4, "device": "pi", "examples": 5, "trained": []}])
    assert participation(late) == Participation(3, 4, 5, 0.6, {})
    assert participation(late).partial
    assert participation(partly(aggregated=False)).trained == 0, "no new model came of them"
    everyone = [
        round_record(1, 0.5, [client(0, examples=20), client(1, examples=30)], devices={"small": 2}, examples=50)
    ]
    assert participation(everyone) == Participation(2, 2, 2, 1.0, {})
    assert not participation(everyone).partial


def test_records_that_do_not_say_it_claim_nothing() -> None:
    assert participation(two_rounds(0.5)) == Participation(2, 2, None, None, {})
    assert not participation(two_rounds(0.5)).partial
    assert participation([]) == Participation()


@pytest.mark.parametrize(
    ("trained", "of", "text"),
    [
        ([12], [20], "12 of 20"),
        ([12, 14, 13], [20, 20, 20], "12 to 14 of 20"),
        ([2], [None], "2"),
        ([2, 3], [4, 5], "2 to 3 of 4 to 5"),
        ([], [], "-"),
    ],
)
def test_counts_of_several_runs(trained: list[int], of: list[int | None], text: str) -> None:
    assert clients_text(trained, of) == text


def test_tables_say_who_was_left_out(tmp_path: Path) -> None:
    all_five = [client(n, examples=10, device="pi" if n > 2 else "small") for n in range(5)]
    runs = [
        make_run(tmp_path / "some1", partly(), seed=1, strategy="exclusivefl"),
        make_run(tmp_path / "some2", partly()[:1], seed=2, strategy="exclusivefl"),
        make_run(tmp_path / "all", [round_record(1, 0.5, all_five, **FLEET)]),
        make_run(tmp_path / "none", [], "failed", "no nodes", strategy="fedprox"),
    ]
    groups = group_runs(runs)
    rows = shown(groups)
    assert legend(groups) == [
        "A: strategy=exclusivefl (2 of 5 clients trained, 2 were never asked; no client of pi ever trained)",
        "B: strategy=fedepth",
        "C: strategy=fedprox (it failed: no nodes)",
    ]
    words = [row.split() for row in rows]
    assert ["A", "some1", "3", "2", "of", "5", "50.0%", "2", "of", "6"] in words
    assert ["A", "mean", "of", "2", "runs", "3", "2", "of", "5", "50.0%", "3", "of", "9"] in words
    assert ["B", "all", "5", "5", "of", "5", "100.0%", "0", "of", "5"] in words
    assert ["C", "none", "-", "-", "-", "-"] in words
    some, everyone, _ = compare_json(groups)["groups"]
    assert (some["clients_trained"], some["clients_of_fleet"], some["data_trained_mean"]) == ([2, 2], [5, 5], 0.5)
    assert (some["excluded_classes"], everyone["excluded_classes"]) == ({"pi": 2}, {})
    assert some["runs"][0]["excluded_classes"] == {"pi": NO_PI}
    assert (some["runs"][0]["clients_trained"], everyone["runs"][0]["data_trained"]) == (2, 1.0)


def test_a_class_that_some_runs_left_out(tmp_path: Path) -> None:
    late = partly(late_used=[{"client": 4, "device": "pi", "examples": 5, "trained": []}])
    groups = group_runs([make_run(tmp_path / "a", partly(), seed=1), make_run(tmp_path / "b", late, seed=2)])
    assert legend(groups) == [
        "A: strategy=fedepth (2 to 3 of 5 clients trained, 1 to 2 were never asked; no client of pi ever trained in 1 of 2 "
        "runs)"
    ]


def test_a_model_that_nobody_trained_is_no_result(tmp_path: Path) -> None:
    """Its 10 % are told as what they are, and are in no mean, best, curve, picture or difference."""
    idle = [make_run(tmp_path / f"idle{n}", nobody(), strategy="fedavg", seed=n) for n in (1, 2)]
    good = [make_run(tmp_path / f"good{n}", two_rounds(0.5, 0.75), seed=n) for n in (1, 2)]
    groups = group_runs([*good, *idle])
    why = "nobody trained: the untrained model gets 10.00% right, which is no result"
    told = f"B: strategy=fedavg ({why})"
    assert legend(groups)[1] == told
    words = [row.split() for row in shown(groups)]
    assert ["B", "idle1", "1", "1", "untrained", "-"] in words
    assert ["B", "mean", "of", "2", "runs", "1", "-", "-"] in words
    found = compare_json(groups)["groups"][1]
    assert (found["accuracy_mean"], found["best_accuracy_mean"], found["untrained_runs"]) == (None, None, 2)
    assert [(run["accuracy"], run["untrained_accuracy"]) for run in found["runs"]] == [(None, 0.1), (None, 0.1)]
    assert [run["untrained_accuracy"] for run in compare_json(groups)["groups"][0]["runs"]] == [None, None]
    assert pair_groups(groups) == []
    assert all(run.curves["accuracy"] == [] for run in groups[1].runs)
    pytest.importorskip("plotly")
    assert [[trace.name for trace in each.drawn.data] for each in pictures(groups, ["A", "B"])] == [["A"], ["A"]]
    assert told in curves_html(groups)
    assert "No round of these runs was evaluated after clients had trained." in curves_html(groups[1:], plotly=False)


def test_runs_of_a_group_of_which_one_trained_nobody(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", two_rounds(0.5), seed=1), make_run(tmp_path / "b", nobody(), seed=2)]
    groups = group_runs(runs)
    assert legend(groups)[0].endswith(
        "nobody trained in 1 of 2 runs: the untrained model gets 10.00% right, which is no result)"
    )
    (found,) = compare_json(groups)["groups"]
    assert (found["accuracy_mean"], found["untrained_runs"]) == (0.5, 1)
    assert legend(group_runs([make_run(tmp_path / "c", nobody(None))])) == ["A: strategy=fedepth (nobody trained)"]


def test_pictures_say_who_was_left_out(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    runs = [make_run(tmp_path / "some", partly()), make_run(tmp_path / "all", two_rounds(0.5), strategy="fedavg")]
    groups = group_runs(runs)
    names = [curve_name(mark, group) for mark, group in zip("AB", groups, strict=True)]
    assert names == ["A: strategy=fedepth, 2 of 5 clients (some)", "B: strategy=fedavg (all)"]
    for section in pictures(groups, names):
        assert [list(trace.text) for trace in section.drawn.data] == [["some (2 of 5 clients trained)"], ["all"]]
        assert "Where not all clients trained, the name says how many did" in section.caption
    assert not any("not all clients" in section.caption for section in pictures(groups[1:], names[1:]))


def test_failures_have_their_reasons(tmp_path: Path) -> None:
    def told(*ends: tuple[str, str]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        runs = [make_run(folder / str(n), [], status, why, seed=n) for n, (status, why) in enumerate(ends)]
        assert [run["reason"] for run in compare_json(group_runs(runs))["groups"][0]["runs"]] == [
            why.partition("\n")[0] for _, why in ends
        ]
        return legend(group_runs(runs))[0].removeprefix("A: strategy=fedepth")

    assert told(("failed", "no nodes\ntry: more nodes")) == " (it failed: no nodes)"
    assert told(("failed", "x"), ("failed", "x")) == " (all 2 runs failed: x)"
    assert told(("failed", "x"), ("completed", ""), ("failed", "y")) == " (2 of 3 runs failed: x, y)"
    assert told(*(("failed", why) for why in "wxyz")) == " (all 4 runs failed: w, x, and 2 more reasons)"
    assert told(("failed", "")) == " (it failed)"
    assert told(("completed", "")) == ""


def test_an_untrained_model_has_no_best_round(tmp_path: Path) -> None:
    rounds = nobody()
    told = text_of(summary_table({"status": "failed", "rounds": 1}, rounds))
    assert "10.00% (of the untrained model)" in told
    assert "best" not in told
    page = write_report(make_run(tmp_path / "a", rounds, "failed")).read_text("utf-8")
    assert "<td>last 10.00%, of the untrained model</td>" in page
