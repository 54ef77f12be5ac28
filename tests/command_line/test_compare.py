"""Runs below each other with their names, fleets by name, repeated seeds, and pages that a telephone can show."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from report_helpers import client, make_run, refused, round_record, text_of, two_rounds

from piecework.device_profiles.fleet import load_fleet
from piecework.report.compare import RunResult, compare_json, figures, fleet_names, group_runs
from piecework.report.compare_pictures import pictures
from piecework.report.compare_view import compare_tables, curve_name, marks, write_curves
from piecework.report.display import disk_rows
from piecework.report.in_words import in_words
from piecework.report.page import LAYOUT, Section, escape_label, fold, height, line, sections_html, subplots, table
from piecework.report.run_page import write_report
from piecework.server_app.records import CheckpointError, RunDir
from piecework.server_app.summary import disk_use_of_rounds

DEMO, BOARDS = (load_fleet(name).to_json() for name in ("demo", "boards"))
LONG = "fedepth-fashion-mnist-seed1-20261124-210828-ab12"


def shown(*runs: object, width: int = 80) -> list[str]:
    return [row.rstrip() for row in text_of(*compare_tables(group_runs(runs)), width=width).splitlines()]  # type: ignore[arg-type]


def run_dir(run: RunResult) -> RunDir:
    return RunDir(run.path)


def test_each_run_is_a_row_with_its_name_and_a_group_has_a_mean(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / LONG, two_rounds(0.5, 0.6), seed=1),
        make_run(tmp_path / "two", two_rounds(0.9, 0.8), seed=2),
        make_run(tmp_path / "other", two_rounds(0.4), "stopped", strategy="fedavg", seed=2),
    ]
    rows = shown(*runs)
    assert rows[:2] == ["A: strategy=fedepth", "B: strategy=fedavg"]
    assert max(map(len, rows)) <= 80
    words = [row.split() for row in rows]
    assert ["A", "two", "2", "2", "80.00%", "90.00%", "(1)"] in words
    assert ["B", "other", "2", "1,", "stopped", "40.00%", "40.00%", "(1)"] in words
    mean = next(row for row in rows if "mean of 2 runs" in row)
    assert mean.split()[5:] == ["2", "70.00%", "±", "14.14%", "75.00%", "±", "21.21%"]
    first = next(i for i, row in enumerate(rows) if "60.00%" in row)
    assert rows[first].split()[1] + rows[first + 1].strip() == LONG  # folded, not cut
    assert [len([row for row in words if row[1:2] == ["two"]]), len([row for row in words if "mean" in row])] == [4, 4]


def test_fleets_have_their_names(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, two_rounds(0.5), fleet=fleet) for name, fleet in (("a", DEMO), ("b", BOARDS))]
    assert [row for row in shown(*runs) if "fleet" in row] == ["A: fleet=demo", "B: fleet=boards"]
    assert [group["differs"] for group in compare_json(group_runs(runs))["groups"]] == [
        {"fleet": "demo"},
        {"fleet": "boards"},
    ]
    page = write_curves(group_runs(runs), tmp_path / "curves.html").read_text("utf-8")
    assert "fleet=boards" in page
    assert "assignment" not in page[page.rindex("Plotly.newPlot(") :]
    assert "<th>Fleet</th><td>boards</td>" in write_report(runs[1]).read_text("utf-8")


def test_two_fleets_of_one_name_are_told_apart() -> None:
    other = json.dumps(json.loads(DEMO) | {"description": "another"})
    names = fleet_names([DEMO, BOARDS, other, "demo.toml"])
    assert names[BOARDS] == "boards"
    assert names["demo.toml"] == "demo.toml"
    assert re.fullmatch("demo#[0-9a-f]{7}", names[DEMO])
    assert names[DEMO] != names[other]


def test_runs_of_the_same_seed_are_said_to_be(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, two_rounds(a), seed=seed) for name, a, seed in (("a", 0.4, 1), ("b", 0.6, 1))]
    rows = shown(*runs)
    assert rows[0] == "A: strategy=fedepth (2 runs have seed 1, so they are repetitions)"
    assert [row.split()[:3] for row in rows if re.match("A  [ab] ", row)][:2] == [["A", "a", "1"], ["A", "b", "1"]]
    assert compare_json(group_runs(runs))["groups"][0]["repeated_seeds"] == [1]
    (group,) = group_runs([*runs, make_run(tmp_path / "c", two_rounds(0.5), seed=2)])
    assert group.repeated == {1: 2}


def test_a_run_that_failed_is_no_repetition_of_the_one_that_was_run_again(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / status, two_rounds(0.4), status, seed=1) for status in ("failed", "completed")]
    assert shown(*runs)[0] == "A: strategy=fedepth (1 of 2 runs failed)"
    assert compare_json(group_runs(runs))["groups"][0]["repeated_seeds"] == []


def test_means_are_those_of_the_runs_that_have_completed(tmp_path: Path) -> None:
    """A run that failed after its first round says nothing of the accuracy at the end; where none has completed, all count."""
    failed = [make_run(tmp_path / "f", two_rounds(0.1), "failed", seed=3)]
    (group,) = group_runs([make_run(tmp_path / "a", two_rounds(0.5, 0.6), seed=1), *failed])
    found = figures(group)
    assert (found["accuracy_mean"], found["accuracy_std"], found["best_accuracy_mean"]) == (0.6, None, 0.6)
    assert (found["counted"], found["bytes_down_mean"], found["rounds"]) == (1, 40, [2, 1])
    (group,) = group_runs([make_run(tmp_path / "b", two_rounds(0.5, 0.8), seed=2), *(run_dir(r) for r in group.runs)])
    assert figures(group)["accuracy_mean"] == pytest.approx(0.7)
    mean = next(row for row in shown(*(run_dir(run) for run in group.runs)) if "mean of" in row)
    assert mean.split()[1:7] == ["mean", "of", "2", "of", "3", "runs"]
    (group,) = group_runs([*failed, make_run(tmp_path / "c", two_rounds(0.3), "failed", seed=4)])
    assert (figures(group)["accuracy_mean"], figures(group)["counted"]) == (pytest.approx(0.2), 2)


def test_runs_of_one_seed_have_no_spread_where_another_seed_s_run_has_no_accuracy(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, two_rounds(a), seed=1) for name, a in (("a", 0.5), ("b", 0.7))]
    (group,) = group_runs([*runs, make_run(tmp_path / "c", two_rounds(None), seed=2)])
    assert (figures(group)["accuracy_mean"], figures(group)["accuracy_std"]) == (0.6, None)


def test_marks_of_many_groups_differ(tmp_path: Path) -> None:
    group = group_runs([make_run(tmp_path / "a", two_rounds(0.5))])
    found = marks(group * 60)
    assert (found[0], found[25], found[26], found[59]) == ("A", "Z", "AA", "HHH")
    assert len(set(found)) == 60


def test_names_in_figures_are_escaped_once() -> None:
    assert escape_label("a \"b\" <i> & 'c'") == "a \"b\" &lt;i&gt; &amp; 'c'"
    assert line([(1, 0.5)], 'a "b"', 0).name == 'a "b"'


@pytest.mark.parametrize("kind", ["report", "compare"])
def test_pages_fit_a_telephone(tmp_path: Path, kind: str) -> None:
    """In Chromium at 390 pixels nothing of such pages overflows: wide tables scroll, and legends are below the plots."""
    rounds = [round_record(1, 0.5, [refused(0, "x" * 200)]), *two_rounds(0.5, 0.6)[1:]]
    run = make_run(tmp_path / LONG, rounds, fleet=BOARDS)
    path = write_report(run) if kind == "report" else write_curves(group_runs([run]), tmp_path / "curves.html")
    page = path.read_text("utf-8")
    assert page.count("<table>") == page.count('<div class="scroll"><table>') > 0
    style = page[page.index("<style>") : page.index("</style>")]
    assert ".scroll { overflow-x: auto; }" in style
    assert all(f"{tag} {{" in style for tag in ("h1", "p", "pre", "td"))
    assert style.count("overflow-wrap: anywhere") >= 4
    body = page[page.index("<body>") :]
    assert body.count('"responsive": true') == body.count('class="plotly-graph-div"') > 0
    plots = re.findall(r'Plotly\.newPlot\(.*?"showlegend":true', body, re.DOTALL)
    assert not any(re.search(r'"width":\d{3}', plot.split('"layout"')[-1]) for plot in plots)
    assert LAYOUT["legend"]["orientation"] == "h"


def test_panels_have_the_whole_width_and_the_legend_room_below() -> None:
    pytest.importorskip("plotly")
    figure = subplots(2)
    assert [axis.domain for axis in figure.select_xaxes()] == [(0.0, 1.0)] * 2
    alone = height(figure)
    for number, name in enumerate(("short", "x" * 100)):
        figure.add_trace(line([(1, 0.5)], name, number), row=1, col=1)
    assert height(figure) == alone + 20 + 3 * 20  # 700 pixels of letters take three lines of a telephone
    html = sections_html([Section("a", "b", lambda: figure)])
    assert f'"height":{height(figure)}' in html


def test_names_are_folded_once_and_stay_escaped() -> None:
    name = escape_label(f"A: strategy=fedprophet num-rounds=6 {'x' * 40} <b> & c")
    folded = fold(name)
    assert folded == f"A: strategy=fedprophet num-rounds=6<br>{'x' * 36}<br>xxxx &lt;b&gt; &amp; c"
    assert fold(folded) == folded
    assert fold("short") == "short"


def test_excluded_classes_stand_at_the_top(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [round_record(1, None, [refused(0), refused(1)])])
    page = write_report(run).read_text("utf-8")
    says = "<strong>no client of small ever trained: all 2 requests failed</strong>"
    assert page.count(says) == 1
    assert page.index("</h1>") < page.index(says) < page.index("<table>")


def test_a_table_scrolls_by_itself() -> None:
    assert table([("a", "b")]) == (
        '<div class="scroll"><table><tbody><tr><th>a</th><td>b</td></tr></tbody></table></div>'
    )


def paging(*moved: tuple[int, int]) -> list[dict[str, Any]]:
    """Two rounds with a client for each pair of megabytes read and written in the first, and half of these in the second."""
    return [
        round_record(
            n, 0.5, [client(i, disk_read=r * 10**6 // n, disk_written=w * 10**6 // n) for i, (r, w) in enumerate(moved)]
        )
        for n in (1, 2)
    ]


def test_what_paged_steps_move_is_told_where_steps_page(tmp_path: Path) -> None:
    """Sums are means over rounds: of 10 and 5 MB read, 6 and 3 written. One client read 8 at most, and one wrote 4."""
    plain = make_run(tmp_path / "plain", two_rounds(0.5), seed=1)
    paged = make_run(tmp_path / "paged", paging((8, 2), (2, 4)), strategy="fedavg", seed=1)
    assert disk_use_of_rounds(paged.rounds()) == {
        "read": 7.5e6,
        "written": 4.5e6,
        "most_read": 8_000_000,
        "most_written": 4_000_000,
    }
    words = [row.split() for row in shown(plain, paged)]
    assert ["A", "plain", "-", "-", "-"] in words
    assert ["B", "paged", "7.5", "MB", "4.5", "MB", "8", "MB", "/", "4", "MB"] in words
    assert not any("disk" in row for row in shown(plain))
    found, other = compare_json(group_runs([plain, paged]))["groups"]
    assert (found["disk_read_mean"], found["disk_most_written"]) == (None, None)
    assert (other["disk_read_mean"], other["disk_most_written"]) == (7.5e6, 4_000_000)
    assert disk_rows(paged.rounds()) == [
        ("disk read", "7.5 MB a round, by one client at most 8 MB"),
        ("disk written", "4.5 MB a round, by one client at most 4 MB"),
    ]
    assert disk_rows(plain.rounds()) == []
    pages = [write_report(run).read_text("utf-8") for run in (paged, plain)]
    assert ["Bytes on disks per round" in page for page in pages] == [True, False]
    assert "<th>Disk written</th><td>4.5 MB a round, by one client at most 4 MB</td>" in pages[0]


def test_pictures_of_what_accuracy_costs(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    runs = [
        make_run(tmp_path / "a", two_rounds(0.25, 0.5)),
        make_run(tmp_path / "b", two_rounds(0.5, 0.75, measured_peak=950), training__lr=0.2),
        make_run(tmp_path / "none", two_rounds(None), training__lr=0.3),
    ]
    memory, time = pictures(group_runs(runs), ["A", "B", "C"])
    assert (memory.heading, time.heading) == ("Accuracy against memory", "Accuracy against simulated time")
    points = [[(trace.name, *trace.x, *trace.y, *trace.text) for trace in each.drawn.data] for each in (memory, time)]
    assert points == [
        [("A", 900, 0.5, "a"), ("B", 950, 0.75, "b")],
        [("A", 6.0, 0.5, "a"), ("B", 6.0, 0.75, "b")],  # two rounds of 3 s
    ]
    assert in_words(memory.drawn, memory.heading) == (
        "Accuracy against memory: A 50.0% (largest measured peak 900 B); B 75.0% (largest measured peak 950 B)."
    )
    assert "under attack" not in memory.caption


def test_long_settings_are_cut_in_the_legend_of_a_figure(tmp_path: Path) -> None:
    (group,) = group_runs([make_run(tmp_path / "a", two_rounds(0.5))])
    many = replace(group, label=" ".join(f"key{n}=value" for n in range(20)))
    assert curve_name("A", many) == f"A: {' '.join(f'key{n}=value' for n in range(5))} … (a)"


def test_the_size_of_the_trained_model_stands_beside_its_accuracy(tmp_path: Path) -> None:
    """2 x 3 + 4 parameters, without a running mean. A file of thresholds is no model, and one run has saved none."""
    named = {"a": "fedavg", "b": "spafl", "c": "prism"}
    runs = [make_run(tmp_path / name, two_rounds(0.5), strategy=strategy) for name, strategy in named.items()]
    shapes = {"a.weight": (2, 3), "a.bias": (4,), "a.running_mean": (4,)}
    arrays = ArrayRecord({name: Array(np.ones(shape)) for name, shape in shapes.items()})
    runs[0].save_model(arrays, {"format": 3})
    runs[1].save_model(arrays, {"format": 3, "personal": "thresholds"})
    groups = group_runs(runs)
    assert [run.parameters for group in groups for run in group.runs] == [10, None, None]
    assert [group["parameters_mean"] for group in compare_json(groups)["groups"]] == [10, None, None]
    words = [row.split() for row in shown(*runs)]
    assert ["A", "a", "10", "90.0%", "900", "B"] in words
    assert ["B", "b", "-", "90.0%", "900", "B"] in words
    assert ", width 1.0; trained: 10 parameters</td>" in write_report(runs[0]).read_text("utf-8")
    (runs[2].path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        group_runs(runs)
