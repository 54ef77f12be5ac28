"""Advice: the simple baselines first, systems by an order that is said, figures of the documents with their settings."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import fleet_json, num_parameters
from model_helpers import mlp
from rich.console import Console
from settings_helpers import settings_with
from typer.testing import CliRunner

from piecework.cli import app
from piecework.models.zoo import MODELS, build_blueprint, usual_input
from piecework.plan import make_plan
from piecework.question import ask
from piecework.strategies import STRATEGIES
from piecework.suggest import ORDER, advise, cost_model_of, fedavg_verdict, kind_of, measurements, nearest, order, suits
from piecework.suggest import planned as plan_of
from piecework.suggest_view import advice_tables
from piecework.training.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
SOME = (
    "allsmall",
    "exclusivefl",
    "fedavg",
    "feddf",
    "fedepth",
    "fedprophet",
    "heterofl",
    "jfat",
    "prism",
    "profl",
    "spafl",
)
CALL = ["plan", "--model", "convnet", "--dataset", "digits", "--suggest"]


def advice(*options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*CALL, "--json", *options])
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["suggest"]
    return found


def told(*options: str) -> str:
    return " ".join(CliRunner().invoke(app, [*CALL, *options], env={"COLUMNS": "200"}).stdout.split())


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    """The demo's boards: none can hold a step of the whole model. Of the systems some of each sort."""
    settings = Settings(clients=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("piecework.suggest.STRATEGIES", {name: STRATEGIES[name] for name in SOME})
        return advise(settings, ask(settings))


# ---- FedAvg first


def test_where_every_device_fits_the_model_federated_averaging_is_the_advice() -> None:
    found = advice("--fleet", "reference-step")
    assert found["simple"]["fits"]
    assert (found["rivals"], found["rows"]) == ([], [])
    step = found["simple"]["step_bytes"]
    assert step == found["simple"]["poorest_bytes"]
    said = told("--fleet", "reference-step")
    assert said.startswith("Every device fits a step of the whole model: use FedAvg. A step at batch 16 takes 1 MB (")
    assert "For adversarial training ask with --set training.adversarial=true." in said


def test_a_smaller_batch_is_the_largest_that_fits() -> None:
    """Its cost is that of a plan at this batch."""
    needed = {}
    for size in (4, 8, 16):
        settings = settings_with(clients=2, training__batch_size=size, strategy="fedavg")
        needed[size] = make_plan(settings, ask(settings))["full_memory_bytes"]
    budget = (needed[4] + needed[8]) // 2
    settings = Settings(clients=2, fleet=fleet_json(board=budget))
    found = fedavg_verdict(settings, ask(settings))
    assert not found["fits"]
    assert found["smaller_batch"] == {"batch_size": 4, "step_bytes": needed[4]}
    assert "0% of the clients fit a step of the whole model" in found["text"]
    assert "At batch 4 it takes" in found["text"]
    assert "changes the optimisation and the statistics of batch norms" in found["text"]
    assert "ratios" not in found["text"]


def test_a_step_that_takes_less_memory_comes_before_a_smaller_batch() -> None:
    settings = settings_with(clients=2, strategy="fedavg")
    full = make_plan(settings, ask(settings))["full_memory_bytes"]
    settings = Settings(clients=2, fleet=fleet_json(board=full - 1))
    found = fedavg_verdict(settings, ask(settings))
    fitted = found["fitted"]
    assert (fitted["participation"], fitted["step"], fitted["batch_norms"]) == (1, "recomputes 1 atom", False)
    assert fitted["step_bytes"] < full
    assert 1 < fitted["flops"] < 1.2
    assert "But every device can train the whole model in a step that takes less memory" in found["text"]
    assert found["text"].index("try that first. The poorest recomputes 1 atom, in ") < found["text"].index(
        "At batch 8 it takes"
    )


def test_what_stands_in_the_way_is_said(demo: dict[str, Any]) -> None:
    """The demo's model has 37,594 parameters: with gradients and momentum 12 bytes for each."""
    fitted = demo["simple"]["fitted"]
    assert (fitted["participation"], fitted["held_bytes"]) == (0.5, 12 * 37_594)
    assert demo["simple"]["poorest_bytes"] < fitted["step_bytes"] < demo["simple"]["step_bytes"]
    said = "50% of the clients can train the whole model in a step that takes less memory"
    assert said in demo["simple"]["text"]
    assert "parameters, gradients and momentum alone are 451.1 kB" in demo["simple"]["text"]
    paper = Settings.from_run_config({"clients": 2, "memory.model": "fedepth", "fleet": "demo"})
    assert fedavg_verdict(paper, ask(paper))["fitted"] is None


def test_of_ratios_it_is_said_that_they_shrink_with_the_batch(demo: dict[str, Any]) -> None:
    assert demo["simple"]["ratios"]
    assert demo["simple"]["smaller_batch"] is None
    assert demo["simple"]["text"].endswith("No smaller batch fits every device, down to 2.")
    settings = Settings(clients=2, fleet=fleet_json(board=0.9))
    assert "The budgets of this fleet are ratios of a step" in fedavg_verdict(settings, ask(settings))["text"]


# ---- the others


def test_the_simple_rivals_stand_beside_the_systems_and_all_are_there(demo: dict[str, Any]) -> None:
    assert [row["strategy"] for row in demo["rivals"]] == ["allsmall"]
    refused = {row["strategy"]: row["reason"] for row in demo["refused"]}
    assert re.fullmatch(
        r"no device can: at least 1 MB are needed, the richest has 97\d(\.\d)? kB", refused["exclusivefl"]
    )
    assert refused["feddf"].startswith("feddf.family is empty: name smaller models")
    systems = {row["strategy"] for row in [*demo["rivals"], *demo["rows"], *demo["refused"]]}
    assert systems == set(SOME) - {"fedavg", "fedprophet", "jfat"}


def test_systems_are_in_the_order_that_is_printed(demo: dict[str, Any]) -> None:
    assert demo["order"] == ORDER
    rows = demo["rows"]
    assert [order(row) for row in rows] == sorted(order(row) for row in rows)
    assert [row["participation"] for row in rows] == sorted((row["participation"] for row in rows), reverse=True)
    assert rows[0]["strategy"] == "fedepth"  # all take part, and train all of the model


def test_the_order_by_hand() -> None:
    """Clients that only simulate swapping and measurements in another setting than the first do not count."""

    def row(name: str, part: float, covered: float, measured: Any = None, swapping: float = 0.0) -> dict[str, Any]:
        entries = {n: [{"accuracy": text}] for n, text in (measured or {}).items()}
        return {
            "strategy": name,
            "participation": part,
            "covered": covered,
            "measured": entries,
            "swapping": swapping,
        }

    rows = [
        row("pretends", 1.0, 1.0, {1: "99 %"}, swapping=0.9),
        row("elsewhere", 1.0, 0.5, {2: "95 %"}),
        row("second", 1.0, 0.5, {1: "70.5 ± 1.2 %"}),
        row("first", 1.0, 0.5, {1: "71.0 %"}),
        row("wide", 1.0, 0.9),
        row("few", 0.5, 1.0, {1: "98 %"}),
    ]
    assert [r["strategy"] for r in sorted(rows, key=order)] == [
        "wide",
        "first",
        "second",
        "elsewhere",
        "few",
        "pretends",
    ]


def test_figures_come_with_their_settings(demo: dict[str, Any]) -> None:
    console = Console(width=80, file=io.StringIO())  # which no name of a system may be lost on
    for line in advice_tables(demo):
        console.print(line)
    said = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "allsmall 100% 37% 37%" in said
    assert said.count("bytes time measured") == 2  # a heading of each table
    assert "bytes and time are those of a round" in said
    assert "[1] 79.7 %" in said
    assert "[1] measured on Fashion-MNIST with ResNet-18 of width 8" in said
    assert "not on your model and fleet (docs/profl.md: piecework run --preset heterofl-fmnist, profl-fmnist" in said
    assert (
        said.index("The simple baselines, clean training:") < said.index("Systems, clean training:") < said.index(ORDER)
    )


def test_clean_and_adversarial_systems_are_apart() -> None:
    clean, attacked = ({name for name in STRATEGIES if suits(name, asked)} for asked in (False, True))
    assert set(STRATEGIES) - clean == {"fedprophet", "jfat", "fedrbn"}
    assert {"fedprophet", "jfat", "fedrbn", "fedavg", "allsmall", "exclusivefl"} <= attacked
    assert not {"fedepth", "spafl", "profl"} & attacked
    settings = Settings(clients=2, strategy="fedprophet", fleet="unlimited")  # which always trains so
    found = advise(settings, ask(settings))
    assert found["adversarial"]
    assert found["simple"]["attack_steps"] == settings.attack.steps


def test_a_system_that_cannot_take_a_model_of_ones_own_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODELS, "mlp", mlp)
    settings = Settings(model="mlp", clients=4)
    question = ask(settings)
    cost_model = cost_model_of(settings, question, 0)
    rows = {n: plan_of(settings.changed({"strategy": n}), question, cost_model) for n in ("prism", "fedepth")}
    assert rows["prism"]["reason"].startswith("atom 'fc2' of mlp cannot be cut by rank: it is a chain of 0 (Linear)")
    assert rows["fedepth"]["participation"] > 0


def test_a_row_is_what_a_plan_of_that_system_alone_says(demo: dict[str, Any]) -> None:
    """Costs are shared among systems whose batch norms do alike, and only among those."""
    for name in ("heterofl", "fedepth"):
        (row,) = [row for row in demo["rows"] if row["strategy"] == name]
        settings = Settings(clients=20, strategy=name)
        plan = make_plan(settings, ask(settings))
        assert row["trains"] == plan["trained"]["devices"]
        assert row["round_seconds"] == plan["fleet"]["stages"][0]["round_seconds"]


# ---- what part of the model


def test_the_part_that_a_narrow_model_has() -> None:
    settings = settings_with(clients=2, strategy="heterofl", heterofl__width_ratios="0.5", fleet="unlimited")
    half = num_parameters(
        build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8), width=0.5, batch_norm="batch")
    )
    full = num_parameters(build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8), batch_norm="batch"))
    trained = make_plan(settings, ask(settings))["trained"]
    assert trained["devices"] == {"full": pytest.approx(half / full)}
    assert trained["together"] == trained["minimum"] == pytest.approx(half / full)


def test_the_part_that_no_client_trains_is_not_covered() -> None:
    """FeDepth's poorest leave out blocks 1 to 3 (its Table 1: 20.02 MB each, of a model of 116)."""
    fleet = fleet_json(poor=0.125, poorest=1e-6)
    settings = settings_with(
        clients=2, model="preresnet20", memory__model="fedepth", training__batch_size=32, fleet=fleet
    )
    found = make_plan(settings, ask(settings, input_shape="3x32x32", classes=10))
    row = next(row for row in found["devices"] if row["device"] == "poor")
    assert row["stages"][0]["trains"][0]["leaves_out"] == ["block1", "block2", "block3"]
    share = 1 - 3 * (2 * 16 * 16 * 9 + 2 * 2 * 16) / found["parameters"]
    assert found["trained"]["devices"] == {"poor": pytest.approx(share), "poorest": 0}
    assert (found["trained"]["minimum"], found["trained"]["together"]) == (0, pytest.approx(share))


def test_stages_are_trained_one_after_another() -> None:
    """Of a cascade a device trains its modules by turns, the heads that only help along the way count for nothing."""
    settings = settings_with(clients=2, strategy="fedprophet", fleet="unlimited", fedprophet__r_min="0.7x")
    found = make_plan(settings, ask(settings))
    assert len(found["fleet"]["stages"]) > 1
    assert found["trained"] == {
        "devices": {"full": pytest.approx(1)},
        "minimum": pytest.approx(1),
        "together": pytest.approx(1),
    }


# ---- what was measured


ROWS = [(setting, row) for setting in measurements() for row in setting["rows"]]


@pytest.mark.parametrize(
    ("setting", "row"), ROWS, ids=lambda value: value.get("id") or f"{value['system']}-{value['accuracy']}"
)
def test_each_figure_stands_in_the_page_that_it_names(setting: dict[str, Any], row: dict[str, Any]) -> None:
    assert row["system"] in STRATEGIES
    page = (ROOT / setting["source"]).read_text("utf-8").splitlines()
    (line,) = [line for line in page if line.startswith(row["stands"])]
    cells = [cell.strip().removesuffix(" %") for cell in line.split("|")]
    assert row["accuracy"].removesuffix(" %") in cells
    assert row.get("clean", row["accuracy"]).removesuffix(" %") in cells


def test_the_nearest_setting_is_of_such_a_model_and_such_training() -> None:
    def model(name: str) -> Any:
        shape, classes = usual_input(name)
        return build_blueprint(name, num_classes=classes, input_shape=shape)

    kinds = {name: kind_of(model(name)) for name in ("resnet18", "lenet5", "vit", "lstm-imdb")}
    assert kinds == {"resnet18": "convolutional", "lenet5": "convolutional", "vit": "transformer", "lstm-imdb": "text"}
    assert kind_of(mlp(10, (1, 8, 8))) == "other"
    assert nearest(mlp(10, (1, 8, 8)), False) == []
    assert [s["id"] for s in nearest(model("resnet18"), True)] == ["robust-fmnist", "fedprophet-fmnist"]
    assert nearest(model("resnet18"), False)[0]["id"] == "profl-fmnist"
    assert [s["id"] for s in nearest(model("vit"), False)] == ["vit-fmnist"]
