"""What reports, tables, comparisons and `load` make of adversarial training and of cascades."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TRIO, fleet_json, run_local
from report_helpers import assert_self_contained, client, make_run, round_record, text_of, two_rounds
from safetensors import safe_open

import piecework
from piecework.cli import over_seeds
from piecework.commands.console import PlainConsole
from piecework.models.model_file import ModelFileError
from piecework.report.compare import compare_json, group_runs
from piecework.report.compare_view import compare_tables, write_curves
from piecework.report.display import memory_rows, summary_table
from piecework.report.draw_panels import section
from piecework.report.page import ReportError
from piecework.report.progress import RoundProgress
from piecework.report.run_page import write_report
from piecework.report.under_attack import robust_curves
from piecework.server_app.records import RunDir
from piecework.server_app.summary import peak_over_budget
from piecework.strategies.cascade.fedprophet.panels import depth_rows, panels, stage_rows
from piecework.training.examples import normalise
from piecework.training.setup import open_dataset

pytest.importorskip("plotly")

SETTINGS = {"evaluation.attack-steps": 20, "evaluation.attack-examples": 500, "fedprophet.feature-norm": "l2"}
FINAL = {"loss": 1.0, "accuracy": 0.7, "adversarial_accuracy": 0.4, "attacked": 100, "attack_steps": 20}
AUTOATTACK = {
    "images": 40,
    "clean_accuracy": 0.75,
    "accuracy": 0.3,
    "after": {"apgd-ce": 0.375, "apgd-t": 0.35, "fab-t": 0.35, "square": 0.3},
    "seconds": 1.0,
    "warnings": ["Square broke 2 of 40 images: gradients may be <masked>."],
}
HEADINGS = (
    "The trained model under attack",
    "Adaptive perturbation",
    "Modules trained",
    "Accuracy, clean and under attack",
)


def robust_round(number: int, module: int, clients: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A round of FedProphet in module `module` of 2; evaluated centrally in even rounds."""
    even, first = number % 2 == 0, module == 1
    record = {
        "stage": f"module {module}",
        "modules": 2,
        "epsilon": 0.03 if first else 0.5,
        "alpha": 1.0 if first else 0.25,
        "distance": None if first else 2.0,
        "clean_round": False,
        "fixed_accuracy": None if first else 0.625,
        "fixed_adversarial_accuracy": None if first else 0.5,
        "adversarial_accuracy": 0.25 if even else None,
        "client_accuracy": 0.5,
        "client_adversarial_accuracy": 0.375,
        "accuracy_by_device": {},
        "bytes_query": 1000,
    }
    return round_record(number, 0.5 if even else None, clients, **record | changes)


def cascade_rounds() -> list[dict[str, Any]]:
    """Two rounds of either module; the rich client trains both modules from the start, and one update is refused."""
    poor, rich = client(0, pieces=[[0, 1]]), client(1, pieces=[[0, 1, 2, 3]], device="big")
    late = client(0, pieces=[[2, 3]]), client(1, pieces=[[2, 3]], device="big")
    return [
        robust_round(1, 1, [poor, rich], clean_round=True),
        robust_round(2, 1, [poor, client(2, pieces=[[0, 1]]), rich, client(3, status="rejected", pieces=[[0, 1]])]),
        robust_round(3, 2, list(late)),
        robust_round(4, 2, list(late), epsilon=0.6, alpha=0.3),
    ]


def robust_run(path: Path, final: dict[str, Any], seed: int = 1, **settings: Any) -> RunDir:
    run_dir = make_run(path, cascade_rounds(), strategy="fedprophet", seed=seed, num_rounds=4, **settings)
    run_dir.write_final(final)
    return run_dir


def page_of(run_dir: RunDir) -> str:
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert_self_contained(page)
    return page


def series(figure: Any) -> list[tuple[str, list[float], list[float | None]]]:
    return [(trace.name, list(trace.x), list(trace.y)) for trace in figure.data]


def test_curves_clean_and_under_attack() -> None:
    accuracy, loss = robust_curves(cascade_rounds(), SETTINGS)
    assert series(accuracy.drawn) == [
        ("clean", [2, 4], [0.5, 0.5]),
        ("under PGD-20", [2, 4], [0.25, 0.25]),
        ("clean", [1, 2, 3, 4], [0.5] * 4),
        ("under PGD-20", [1, 2, 3, 4], [0.375] * 4),
    ]
    assert [note.text for note in accuracy.drawn.layout.annotations] == [
        "on the test data",
        "on the clients' validation data",
    ]
    # a dashed line in either panel, between rounds 2 and 3
    assert [(shape.x0, shape.line.dash) for shape in accuracy.drawn.layout.shapes] == [(2.5, "dash")] * 2
    assert [(shape.x0, shape.line.dash) for shape in loss.drawn.layout.shapes] == [(2.5, "dash")]
    assert "of adversarial examples (clean ones in warm-up rounds)." in loss.caption


def test_losses_of_plain_clients_are_said_to_be_clean() -> None:
    _, loss = robust_curves([record | {"adversarial_clients": [0]} for record in cascade_rounds()], SETTINGS)
    assert "(clean ones in warm-up rounds, and of clients without memory for an attack)." in loss.caption


def test_the_perturbation_is_shown_where_there_was_an_attack() -> None:
    perturbation, _ = panels(cascade_rounds(), SETTINGS)
    assert series(section(perturbation, cascade_rounds()).drawn) == [
        ("epsilon, features (L2)", [2.5, 3, 4, 4.5], [None, 0.5, 0.6, None]),
        ("epsilon, images (L-infinity)", [2, 2.5, 4.5], [0.03, None, None]),
        ("alpha", [2.5, 3, 4, 4.5], [None, 0.25, 0.3, None]),
    ]
    assert stage_rows(cascade_rounds()) == [
        ("module 1", "1 to 2", "2", "images", "-", "0.03", "-"),
        ("module 2", "3 to 4", "3", "2", "0.25 to 0.3", "0.5 to 0.6", "62.5%, attacked 50.0%"),
    ]
    only_clean = [robust_round(1, 1, [], clean_round=True)]
    assert stage_rows(only_clean) == [("module 1", "1", "-", "images", "-", "-", "-")]


def test_who_trained_which_part() -> None:
    _, depths = panels(cascade_rounds(), SETTINGS)
    (heatmap,) = section(depths, cascade_rounds()).drawn.data
    assert list(heatmap.x) == ["module 1", "module 2"]
    assert [list(row) for row in heatmap.z] == [
        [pytest.approx(1), None],
        [pytest.approx(1), None],
        [pytest.approx(0.4), pytest.approx(1)],  # of five accepted updates, two had all
        [pytest.approx(0.4), pytest.approx(1)],
    ]
    assert depth_rows(cascade_rounds()) == [
        ("module 1", "atoms 0 to 1", "3", "60.0%", "2", "small"),
        ("module 1", "atoms 0 to 3", "2", "40.0%", "1", "big"),
        ("module 2", "atoms 2 to 3", "4", "100.0%", "2", "big, small"),
    ]
    nobody = [robust_round(1, 1, [client(0, status="memory", pieces=[])])]
    assert depth_rows(nobody) == []
    assert section(panels(nobody, SETTINGS)[1], nobody).drawn.data[0].z is not None


def test_page_with_the_final_evaluation(tmp_path: Path) -> None:
    page = page_of(robust_run(tmp_path / "a", FINAL | {"autoattack": AUTOATTACK}))
    for heading in HEADINGS:
        assert f"<h2>{heading}</h2>" in page
    for row in (
        "<td>none</td><td>all test images</td><td>70.00%</td>",
        "<td>PGD-20</td><td>100</td><td>40.00%</td>",
        "<td>none, the images of AutoAttack</td><td>40</td><td>75.00%</td>",
        "<td>APGD-CE</td><td>40</td><td>37.50%</td>",
        "<td>AutoAttack: APGD-CE + APGD-T + FAB-T + Square</td><td>40</td><td>30.00%</td>",
        "<th>Accuracy</th><td>trained model 70.00%, best 70.00%, 40.00% under attack, at the end</td>",
        "<th>Under PGD-20</th><td>40.00% of 100 images</td>",
        "<th>Under AutoAttack</th><td>30.00% of 40 images</td>",
        "<th>Bytes before stages</th><td>4 kB</td>",
        "<li>Square broke 2 of 40 images: gradients may be &lt;masked&gt;.</li>",
    ):
        assert row in page
    assert "8/255" in page
    assert "No client reported a validation accuracy" not in page
    assert "in the middle of the cascade" not in page


def test_page_without_warnings_and_without_attacks_at_the_end(tmp_path: Path) -> None:
    page = page_of(robust_run(tmp_path / "a", FINAL | {"autoattack": AUTOATTACK | {"warnings": []}}))
    assert "checks found nothing" in page
    assert "AutoAttack warns" not in page
    page = page_of(robust_run(tmp_path / "b", FINAL | {"adversarial_accuracy": None, "attacked": 0}))
    body = page[page.index("<body>") : page.index("<h2>Accuracy, clean")]
    assert "70.00%" in body
    assert "PGD" not in body
    assert "AutoAttack" not in body


def test_one_module_has_no_sections_of_a_cascade(tmp_path: Path) -> None:
    rounds = [robust_round(n, 1, [client(0, pieces=[[0, 1]])], modules=1, stage="training") for n in (1, 2)]
    page = page_of(make_run(tmp_path / "a", rounds, strategy="jfat"))
    assert "<h2>Accuracy, clean and under attack</h2>" in page
    for heading in ("The trained model under attack", "Adaptive perturbation", "Modules trained"):
        assert heading not in page
    assert "dashed" not in page[page.index("<body>") : page.index("Plotly.newPlot(")]


def test_other_runs_have_no_empty_sections(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "old", two_rounds(0.25, 0.75)))  # records of before there were attacks
    now = [r | {"adversarial_accuracy": None, "client_adversarial_accuracy": None} for r in two_rounds(0.25, 0.75)]
    for text in (page, page_of(make_run(tmp_path / "new", now))):
        assert "<h2>Accuracy and loss</h2>" in text
        for heading in (*HEADINGS, "Under PGD", "AutoAttack", "Bytes before stages"):
            assert heading not in text[text.index("<body>") : text.index("<h2>Settings</h2>")]
    groups = group_runs([RunDir(tmp_path / "old"), RunDir(tmp_path / "new")])
    assert "under PGD" not in text_of(*compare_tables(groups))
    assert "evaluating" not in text_of(*compare_tables(groups))


def test_a_long_cascade_on_one_page(tmp_path: Path) -> None:
    def rounds(count: int) -> list[dict[str, Any]]:
        clients = [client(c, pieces=[[0, 1, 2]], device=f"device {c % 12}") for c in range(10)]
        return [robust_round(n, 1 + n // 20, clients, modules=20) for n in range(1, count + 1)]

    small = len(page_of(make_run(tmp_path / "a", rounds(2))))
    assert len(page_of(make_run(tmp_path / "b", rounds(400)))) < small + 200_000


def test_plotly_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = robust_run(tmp_path / "a", FINAL)
    for name in ("plotly", "plotly.graph_objects", "plotly.subplots"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ReportError, match=r"pip install 'piecework\[report\]'"):
        write_report(run_dir)


def test_progress_line_under_attack() -> None:
    console = PlainConsole(file=io.StringIO(), width=40)
    with RoundProgress(9, console) as progress:
        for record in cascade_rounds()[:2]:
            progress.update(record)
        progress.update(robust_round(9, 2, [client(0)], client_accuracy=None, adversarial_accuracy=None, modules=1))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "round 1/9  module 1 of 2  accuracy on the clients 50.0%, under attack 37.5%  2/2 clients ok  peak 90.0% of budget"
        "  2.0 s/round  16 s left",
        "round 2/9  module 1 of 2  accuracy 50.0%, under attack 25.0%  loss 0.500  3/4 clients ok  peak 90.0% of budget"
        "  2.0 s/round  14 s left",
        "round 9/9  1/1 clients ok  peak 90.0% of budget  2.0 s/round",
    ]


def test_summary_table_under_attack() -> None:
    rounds, summary = cascade_rounds(), {"status": "completed", "rounds": 4}
    shown = text_of(summary_table(summary, rounds, FINAL | {"accuracy": 0.45, "autoattack": AUTOATTACK}))
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "accuracy 45.00% (best 50.00%, 25.00% under attack, in round 2)" in lines
    assert "under PGD-20 40.00% of 100 images" in lines
    assert "under AutoAttack 30.00% of 40 images" in lines
    assert "under PGD" not in text_of(summary_table(summary, rounds))


def test_peaks_in_evaluation_count() -> None:
    rounds = [round_record(1, 0.5, [client(0, evaluation_peak=950), client(1, evaluation_peak=100)])]
    assert peak_over_budget(rounds) == 0.95
    assert memory_rows(rounds) == [("small", "2", "1 kB", "900 B", "950 B", "95.0%", "2", "2", "0")]


def test_compare_under_attack(tmp_path: Path) -> None:
    runs = [
        robust_run(tmp_path / "a1", FINAL | {"autoattack": AUTOATTACK}, seed=1),
        robust_run(
            tmp_path / "a2",
            FINAL | {"accuracy": 0.5, "adversarial_accuracy": 0.2, "autoattack": AUTOATTACK | {"accuracy": 0.1}},
            seed=2,
        ),
        make_run(tmp_path / "b", [record | {"evaluation_peak": 7} for record in two_rounds(0.9, 0.9)], num_rounds=4),
    ]
    groups = group_runs(runs)
    several, single = compare_json(groups)["groups"]
    assert several["accuracy_mean"] == pytest.approx(0.6)  # the models', not the rounds'
    assert several["adversarial_accuracy_mean"] == pytest.approx(0.3)
    assert several["adversarial_accuracy_std"] == pytest.approx(0.02**0.5)  # sqrt(0.1**2 + 0.1**2)
    assert several["autoattack_accuracy_mean"] == pytest.approx(0.2)
    assert [run["autoattack_accuracy"] for run in several["runs"]] == [0.3, 0.1]
    assert single["adversarial_accuracy_mean"] is None
    rows = text_of(*compare_tables(groups), width=120).splitlines()
    heads = [i for i, row in enumerate(rows) if "under PGD-20, 100 images  under AutoAttack, 40 images" in row]
    assert len(heads) == 1
    *_, mean, single = (rows[heads[0] + i].split() for i in (1, 2, 3, 4))
    assert " ".join(mean) == "A mean of 2 runs 30.00% ± 14.14% 20.00% ± 14.14%"
    assert single == ["B", "b", "-", "-"]
    page = write_curves(groups, tmp_path / "curves.html").read_text(encoding="utf-8")
    assert_self_contained(page)
    assert "<h2>Accuracy under attack over rounds</h2>" in page
    page = write_curves(groups[1:], tmp_path / "curves.html").read_text(encoding="utf-8")
    assert "under attack" not in page[page.index("<body>") :]


def test_compare_attacks_of_several_strengths(tmp_path: Path) -> None:
    runs = [
        robust_run(tmp_path / "a", FINAL),
        robust_run(tmp_path / "b", FINAL | {"attack_steps": 5}, evaluation__attack_steps=5),
    ]
    rows = text_of(*compare_tables(group_runs(runs)), width=120).splitlines()
    assert [row.split() for row in rows[:2]] == [
        ["A:", "evaluation.attack-steps=20"],
        ["B:", "evaluation.attack-steps=5"],
    ]
    assert sum(row.rstrip().endswith("under PGD") for row in rows) == 1


def test_json_over_seeds() -> None:
    base: dict[str, Any] = {"run_dir": "r", "status": "completed", "max_peak_over_budget": None}
    runs = [base | {"accuracy": 0.5, "adversarial_accuracy": 0.2, "autoattack_accuracy": None}]
    runs.append(base | {"accuracy": 0.7, "adversarial_accuracy": 0.4, "autoattack_accuracy": None})
    found = over_seeds(runs)
    assert found["accuracy"] == pytest.approx(0.6)
    assert found["adversarial_accuracy"] == pytest.approx(0.3)
    assert [found["accuracy_std"], found["adversarial_accuracy_std"]] == pytest.approx([0.02**0.5] * 2)
    assert "autoattack_accuracy" not in found
    assert over_seeds([base | {"accuracy": None}])["accuracy"] is None


@pytest.fixture(scope="module")
def in_the_middle(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of FedProphet that ends in its second module of three."""
    quick: dict[str, Any] = {
        "training__local_iterations": 4,
        "attack__steps": 1,
        "evaluation__attack_steps": 1,
        "evaluation__attack_examples": 20,
    }
    cascade = {
        "fedprophet__stage_rounds": 2,
        "fedprophet__r_min": "0.55x",
        "fleet": fleet_json(rich=1.2, poor=0.6),
        "architecture__batch_norm": "running",
    }
    folder = tmp_path_factory.mktemp("cascade")
    return run_local(
        folder, strategy="fedprophet", num_rounds=3, data__validation_fraction=0.3, **{**TRIO, **quick, **cascade}
    )


def test_a_model_of_the_first_modules(in_the_middle: RunDir) -> None:
    with safe_open(in_the_middle.path / "model.safetensors", "pt") as file:
        described = json.loads(file.metadata()["piecework"])
        head = file.get_tensor(f"{described['head']}.fc.weight")
    assert described["head"].startswith("aux.")
    model = piecework.load(in_the_middle.path, normalise=False)
    assert len(model.network.atoms) == len(described["atoms"])
    assert torch.equal(model.network.head.fc.weight, head)  # type: ignore[union-attr, arg-type]
    data = open_dataset(str(in_the_middle.settings()["dataset"]), "")
    with torch.no_grad():
        right = (model(normalise(data.test_inputs, data)).argmax(1) == torch.tensor(data.test_labels)).sum()
    final = in_the_middle.final()
    assert final is not None
    assert int(right) / len(data.test_labels) == final["accuracy"]


def test_report_of_a_real_cascade(in_the_middle: RunDir) -> None:
    page = page_of(in_the_middle)
    for heading in HEADINGS:
        assert f"<h2>{heading}</h2>" in page
    assert "The run ended in the middle of the cascade: the model is atoms 0 to" in page
    rounds = in_the_middle.rounds()
    assert [row[:2] for row in stage_rows(rounds)] == [("module 1", "1 to 2"), ("module 2", "3")]
    assert sum(int(row[2]) for row in depth_rows(rounds)) == 9  # three clients, three rounds


def test_a_damaged_model_is_named(tmp_path: Path, in_the_middle: RunDir) -> None:
    shutil.copytree(in_the_middle.path, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ModelFileError, match=r"model.safetensors cannot be read"):
        write_report(RunDir(tmp_path / "cut"))
