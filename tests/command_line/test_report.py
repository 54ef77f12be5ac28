"""The report page, the comparison and the terminal's tables, on small run folders written by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from report_helpers import (
    assert_self_contained,
    client,
    make_run,
    refused,
    round_record,
    text_of,
    two_rounds,
)

from piecework.device_profiles.profile import format_percent
from piecework.report.compare import compare_json, group_runs
from piecework.report.compare_view import compare_tables, write_curves
from piecework.report.display import memory_rows, memory_table, reasons, summary_table
from piecework.report.page import ReportError
from piecework.report.run_page import write_report
from piecework.server_app.records import CheckpointError, RunDir
from piecework.server_app.summary import best_round, summarise


def test_page_of_a_completed_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", two_rounds(0.25, 0.75, val_accuracy=1.0))
    path = write_report(run_dir)
    assert path == run_dir.path / "report.html"
    page = path.read_text(encoding="utf-8")
    assert_self_contained(page)
    assert "last 75.00%, best 75.00%" in page
    assert "4 clients asked, 4 answered, 0 failed" in page
    assert "40 B / 20 B" in page
    assert "<td>90.00%</td>" in page
    assert "<th>Simulated time</th><td>6.0 s</td>" in page  # two rounds of 3 s
    assert "No client failed." in page
    assert page.count('class="plotly-graph-div"') == 5


def test_page_of_a_run_that_failed_in_its_first_round(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    clients = [refused(0), refused(1), refused(2, script)]
    run_dir = make_run(
        tmp_path / "<b>", [round_record(1, None, clients)], "failed", f"no client: {script}", dataset=f"npz:{script}"
    )
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert_self_contained(page)
    assert script not in page
    assert "no client: &lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<b>" not in page[page.index("<body>") :][:300]
    assert '<small class="failed">failed</small>' in page
    assert "No client reported a validation accuracy." in page


def test_page_without_rounds(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "a", [], status="")).read_text(encoding="utf-8")
    assert "No round was finished." in page
    assert "unfinished" in page
    assert len(page) < 20_000


def test_page_of_a_run_that_asked_nobody(tmp_path: Path) -> None:
    """As where no coin of a private round fell so, or no connected client has the resources that a round needs."""
    run_dir = make_run(tmp_path / "a", [round_record(1, None, [])], "failed", "no client trained in round 1: 0 asked")
    assert "No client was asked in any round." in write_report(run_dir).read_text(encoding="utf-8")


def test_budgets_not_enforced(tmp_path: Path) -> None:
    rounds = [round_record(1, 0.5, [client(0, measured_peak=5000)], enforced=False)]
    run_dir = make_run(tmp_path / "a", rounds, memory__model="fedepth")
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "500.00%" not in page[page.index("<body>") : page.index("<section>")]
    assert page.count("<td>not enforced</td>") == 2
    assert compare_json(group_runs([run_dir]))["groups"][0]["max_peak_over_budget"] is None


def test_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    rounds = [round_record(n, n / 301, [client(c, reason="x" * 400) for c in range(100)]) for n in range(1, 301)]
    small = write_report(make_run(tmp_path / "a", rounds[:2])).stat().st_size
    assert write_report(make_run(tmp_path / "b", rounds)).stat().st_size < small + 100_000


def test_runs_from_before_there_were_simulated_seconds(tmp_path: Path) -> None:
    rounds = two_rounds(0.25, 0.75)
    for record in rounds:
        del record["simulated_seconds"]
    run_dir = make_run(tmp_path / "a", rounds)
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "<th>Simulated time</th><td>-</td>" in page
    assert "No simulated times were recorded." in page
    groups = group_runs([run_dir])
    assert compare_json(groups)["groups"][0]["simulated_seconds_mean"] is None
    shown = text_of(*compare_tables(groups), summary_table({"status": "completed", "rounds": 2}, rounds)).splitlines()
    assert shown[[line.rstrip().endswith("simulated time") for line in shown].index(True) + 1].rstrip().endswith(" -")
    assert any(line.startswith("simulated time") and line.rstrip().endswith(" -") for line in shown)
    assert summarise(run_dir, "completed", "", 1.0)["simulated_seconds"] == 0


def test_report_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        write_report(RunDir(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ReportError, match=r"pip install 'piecework\[report\]'"):
        write_report(make_run(tmp_path / "a", two_rounds(0.5)))


def test_reasons_are_grouped_by_what_is_not_a_number() -> None:
    rounds = [
        round_record(1, None, [refused(0), refused(1), client(2, status="failed", reason="no answer")]),
        round_record(2, None, [refused(3), client(4)]),
    ]
    assert reasons(rounds) == [
        ("memory", "3", "needs 2,000 bytes, the budget allows 1,000 (client 0, round 1)"),
        ("failed", "1", "no answer (client 2, round 1)"),
    ]


def test_seeds_are_one_group_and_other_settings_are_not(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a1", two_rounds(0.9, 0.6), seed=1, workers=3),
        make_run(
            tmp_path / "wide",
            two_rounds(0.2, 0.3, measured_peak=950),
            seed=1,
            architecture__width=0.33,
            strategy="fedavg",
        ),
        make_run(tmp_path / "a2", two_rounds(0.7, 0.8), seed=2),
        make_run(tmp_path / "a3", two_rounds(0.1, 0.7), seed=3),
    ]
    groups = group_runs([*runs, runs[0]])
    assert [group.label for group in groups] == [
        "strategy=fedepth architecture.width=1.0",
        "strategy=fedavg architecture.width=0.33",
    ]
    several, single = compare_json(groups)["groups"]
    assert several["seeds"] == [1, 2, 3]
    assert several["accuracy_mean"] == pytest.approx(0.7)
    assert several["accuracy_std"] == pytest.approx(0.1)  # sqrt((0.01 + 0.01 + 0) / 2)
    assert several["best_accuracy_mean"] == pytest.approx(0.8)  # (0.9 + 0.8 + 0.7) / 3
    assert several["best_accuracy_std"] == pytest.approx(0.1)
    assert several["best_rounds"] == [1, 2, 2]
    assert [(run["best_accuracy"], run["best_round"]) for run in several["runs"]] == [(0.9, 1), (0.8, 2), (0.7, 2)]
    assert several["bytes_down_mean"] == 40
    assert several["bytes_up_mean"] == 20
    assert several["max_peak_over_budget"] == 0.9
    assert several["seconds_mean"] == 10.0
    assert several["simulated_seconds_mean"] == 6.0
    assert several["status"] == {"completed": 3}
    assert single["accuracy_mean"] == 0.3
    assert single["accuracy_std"] is None
    assert single["largest_measured_peak"] == 950
    assert single["differs"] == {"strategy": "fedavg", "architecture.width": 0.33}
    shown = text_of(*compare_tables(groups))
    assert ["70.00% ± 10.00%" in shown, "80.00% ± 10.00%" in shown, "80.00% (2)" in shown] == [True] * 3
    assert "30.00% ±" not in shown
    json.dumps(compare_json(groups))


def test_the_best_round_is_the_first_of_the_highest_or_the_trained_model() -> None:
    rounds = [{"round": n, "accuracy": a} for n, a in ((1, None), (2, 0.5), (3, 0.7), (4, 0.7), (5, 0.6))]
    assert best_round(rounds) == {"round": 3, "accuracy": 0.7, "adversarial_accuracy": None}
    chosen = {"accuracy": 0.8, "adversarial_accuracy": 0.4, "attacked": 100}
    assert best_round(rounds, chosen) == {"round": None, "accuracy": 0.8, "adversarial_accuracy": 0.4}
    assert best_round(rounds, chosen | {"accuracy": 0.7}) == best_round(rounds)
    assert best_round(rounds[:1]) is None


def test_number_of_rounds_parts_groups(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", two_rounds(0.5, 0.5)),
        make_run(tmp_path / "b", two_rounds(0.9), seed=2, num_rounds=1),
    ]
    assert [group.label for group in group_runs(runs)] == ["num-rounds=2", "num-rounds=1"]


def test_repeating_a_seed_gives_no_spread(tmp_path: Path) -> None:
    groups = group_runs([make_run(tmp_path / name, two_rounds(a)) for name, a in (("a", 0.4), ("b", 0.6))])
    (group,) = compare_json(groups)["groups"]
    assert (group["label"], group["seeds"], group["accuracy_mean"]) == ("strategy=fedepth", [1, 1], 0.5)
    assert group["accuracy_std"] is None


def test_compare_without_finished_rounds(tmp_path: Path) -> None:
    groups = group_runs(
        [make_run(tmp_path / "a", [], "failed", "no nodes"), make_run(tmp_path / "b", [], "", training__lr=0.2)]
    )
    first = compare_json(groups)["groups"][0]
    assert (first["accuracy_mean"], first["rounds"], first["status"]) == (None, [0], {"failed": 1})
    assert first["bytes_down_mean"] is None
    shown = [line.split() for line in text_of(*compare_tables(groups)).splitlines()]
    assert ["A", "a", "1", "0,", "failed", "-", "-"] in shown
    assert ["B", "b", "1", "0,", "unfinished", "-", "-"] in shown
    page = write_curves(groups, tmp_path / "curves.html").read_text(encoding="utf-8")
    assert "No round of these runs was evaluated." in page
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        group_runs([RunDir(tmp_path / "none")])


def test_curves(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"s{seed}", two_rounds(0.2 * seed, None, 0.3 * seed), seed=seed) for seed in (1, 2)]
    page = write_curves(group_runs(runs), tmp_path / "curves.html").read_text(encoding="utf-8")
    assert_self_contained(page)
    data = page[page.index("<h2>Accuracy over bytes</h2>") :]
    assert '"x":[30.0,90.0]' in data  # a round moves 2 * 10 bytes down and 2 * 5 up
    means = json.loads(
        data[data.index('"y":[', data.index('"y":[', data.index('"y":[') + 1) + 1) + 4 :].split("]")[0] + "]"
    )
    assert means == pytest.approx([0.3, 0.45])


def test_tables_at_the_end_of_a_run() -> None:
    rounds = [
        round_record(1, 0.5, [client(0), client(1, measured_peak=800)]),
        round_record(2, 0.25, [client(0, budget=2000), refused(2), client(3, device="[big]", budget=64_300_000)]),
    ]
    assert memory_rows(rounds) == [
        ("[big]", "1", "64.3 MB", "900 B", "900 B", "0.0%", "1", "1", "0"),
        ("small", "3", "1 kB to 2 kB", "900 B", "900 B", "90.0%", "4", "3", "1"),
    ]
    assert "[big]" in text_of(memory_table(rounds), width=120)
    counts = {"clients_asked": 5, "clients_answered": 4, "clients_failed": 1, "bytes_down": 50, "bytes_up": 64_300_000}
    shown = text_of(summary_table({"status": "completed", "rounds": 2, "seconds": 200.0, **counts}, rounds))
    for part in ("25.00% (best 50.00% in round 1)", "asked 5, answered 4, failed 1", "64.3 MB", "3 min 20 s", "6.0 s"):
        assert part in shown
    assert "failed" in text_of(summary_table({"status": "failed", "rounds": 0}, []))


def test_a_peak_just_over_its_budget_is_not_shown_as_the_same() -> None:
    rounds = [round_record(1, 0.5, [client(0, budget=9_000_000, predicted_peak=9_000_000, measured_peak=9_014_480)])]
    assert memory_rows(rounds)[0][2:5] == ("9 MB", "9 MB", "9.01 MB")


def test_only_a_full_budget_is_shown_as_full() -> None:
    assert [format_percent(share, 1) for share in (None, 0.98765, 0.99999, 1.0, 1.00001)] == [
        "-",
        "98.8%",
        "99.9%",
        "100.0%",
        "100.1%",
    ]


def test_panels_of_methods_are_light_and_a_method_without_any_has_none() -> None:
    """Each method's module of panels, and nothing that trains."""
    code = (
        "import sys; from piecework.training.methods import METHODS; from piecework.strategies.panels import panels_of;"
        "found = [name for name in METHODS if panels_of(name, [{}], {})]; assert not found;"
        "assert panels_of('a method of one\\'s own', [{}], {}) == [];"
        "print(sorted(name.split('.')[3] for name in sys.modules if name.endswith(('_panels', '.panels'))"
        " and name.count('.') > 2),"
        "{'torch', 'flwr', 'plotly', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ("['fedprophet', 'orthdrop_panels', 'prism', 'profl', 'spafl'] set()")
