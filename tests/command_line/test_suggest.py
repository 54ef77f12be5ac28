"""Advice: one recommendation with its command, what one would try first, the others without an order, and who cannot."""

import io
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import fleet_json, num_parameters
from model_helpers import mlp
from settings_helpers import settings_with
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands import base
from piecework.commands.console import PlainConsole
from piecework.commands.options import run_command
from piecework.models.zoo import MODELS, build_blueprint
from piecework.planning import costs
from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.plans.recommend import recommend
from piecework.plans.suggest import (
    advise,
    cost_model_of,
    fedavg_verdict,
    plain_settings,
    plan_system,
    suits,
)
from piecework.training.methods import METHODS
from piecework.training.settings import Settings

SOME = ("allsmall", "exclusivefl", "fedavg", "fedepth", "feddf", "heterofl", "jfat", "profl", "spafl")


def only(patch: pytest.MonkeyPatch, *names: str) -> None:
    patch.setattr("piecework.plans.suggest.METHODS", {name: METHODS[name] for name in names})


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    """The demo's boards: none can hold a step of the whole model. Of the systems some of each sort."""
    settings = Settings(clients=20)
    with pytest.MonkeyPatch.context() as patch:
        only(patch, *SOME)
        return advise(settings, ask(settings))


# ---- the recommendation


def row(name: str, part: float, covered: float = 1.0, swapping: float = 0.0, fit: str = "") -> dict[str, Any]:
    figures: dict[str, Any] = {"participation": part, "covered": covered, "swapping": swapping, "min_fraction": covered}
    figures |= {"round_seconds": 60.0 if fit else 40.0, "stages": 1}
    return {"strategy": name, "fit": fit} | figures


FITTED = {"participation": 0.5, "step": "recomputes 3 atoms", "step_bytes": 60_000_000, "plain_bytes": 90_000_000}
FITTED |= {"flops": 1.25, "batch_norms": False, "disk_bytes": 5_000_000}
SIMPLE = {"fits": False, "participation": 0.0, "fitted": FITTED}


@pytest.mark.parametrize(
    ("rows", "settings", "says"),
    [
        (
            [row("fedavg", 0.2), row("fedavg", 1.0, fit="auto"), row("fedepth", 1.0)],
            {"strategy": "fedavg", "memory.fit": "auto"},
            "60 MB instead of 90 MB for a step (recomputes 3 atoms), and 1.25 times the FLOPs, and so that much more time to "
            "compute. A step moves 5 MB to and from the disk. A round takes 1 min 0 s; with fedepth, which trains the model in "
            "pieces, 40 s.",
        ),
        (
            [row("fedavg", 0.2), row("fedavg", 0.5, fit="auto"), row("fedepth", 1.0), row("allsmall", 1.0, 0.3)],
            {"strategy": "fedepth"},
            "whole model in pieces that fit it. Federated averaging of the whole model reaches 50% of the clients, and leaves "
            "out the others' data.",
        ),
        (
            [row("fedavg", 0.2), row("fedavg", 0.5, fit="auto"), row("fedepth", 0.9), row("allsmall", 1.0, 0.3)],
            {"strategy": "allsmall"},
            "a narrower model, 30% of the parameters",
        ),
        (
            [row("fedavg", 0.2), row("fedavg", 0.5, fit="auto"), row("jfat", 1.0, swapping=0.9)],
            {"strategy": "fedavg", "memory.fit": "auto"},
            "50% of the clients can train the whole model",
        ),
        (
            [row("fedavg", 0.0), row("fedepth", 0.5), row("allsmall", 1.0, 0.004)],
            {"strategy": "fedepth"},
            "50% of the clients train the whole model in pieces that fit it.",
        ),
    ],
    ids=[
        "whole, in less memory",
        "in pieces",
        "narrower",
        "as many as can, without pretending",
        "not a model of a channel",
    ],
)
def test_the_whole_model_comes_first_by_what_every_device_can(rows: Any, settings: Any, says: str) -> None:
    found = recommend(SIMPLE, rows, attacked=False)
    assert found is not None
    assert found["settings"] == settings
    assert says in found["text"]


def test_what_was_ahead_in_the_nearest_case_is_recommended_if_every_device_can_do_it() -> None:
    """The whole model stays first before what is level with it, was not run, or cannot be trained by some."""
    rows = [row("fedavg", 0.2), row("fedavg", 1.0, fit="auto"), row("fedepth", 1.0), row("allsmall", 1.0, 0.3)]

    def found(rows: Any, ahead: tuple[str, ...], **accuracies: float) -> Any:
        fits, leader = {"fedavg": "auto"}, max(accuracies, key=lambda name: accuracies[name])
        ran = [
            {"name": name, "strategy": name, "fit": fits.get(name, ""), "accuracy": each, "seeds": 1}
            | {"ahead_of": ahead if name == leader else ()}
            for name, each in accuracies.items()
        ]
        case: Any = SimpleNamespace(rows=ran)
        advice = recommend(SIMPLE, rows, attacked=False, case=case)
        assert advice is not None
        return advice

    pieces = found(rows, ("fedavg",), fedepth=44.0, fedavg=42.0, allsmall=30.0)
    assert pieces["settings"] == {"strategy": "fedepth"}
    assert pieces["text"] == (
        "Every device trains the whole model in pieces that fit it. Every device could do fedavg with memory.fit too, but in "
        "what was measured nearest that was 2.0 points of accuracy behind after as many rounds (one seed). A round takes 40 s "
        "here, and 1 min 0 s by fedavg with memory.fit."
    )
    narrow = found(rows, ("fedavg", "fedepth"), fedepth=44.0, fedavg=42.0, allsmall=47.0)
    assert narrow["settings"] == {"strategy": "allsmall"}
    assert narrow["text"].startswith(
        "Every device can train a narrower model, 30% of the parameters. Every device could do"
    )
    whole = {"strategy": "fedavg", "memory.fit": "auto"}
    assert found(rows, (), fedepth=44.0, fedavg=42.1)["settings"] == whole
    assert found(rows, ("fedavg",), fedepth=44.0)["settings"] == whole
    assert found(rows, ("fedepth",), fedepth=44.0, fedavg=47.0)["settings"] == whole
    some = [*rows[:2], row("fedepth", 0.9)]
    assert found(some, ("fedavg",), fedepth=44.0, fedavg=30.0)["settings"] == whole
    other_ways = [*rows[:2], row("fedepth", 1.0, fit="recompute")]
    assert found(other_ways, ("fedavg",), fedepth=44.0, fedavg=30.0)["settings"] == whole


def test_nothing_is_recommended_where_nothing_can_train_and_attacks_are_asked_for() -> None:
    assert recommend(SIMPLE, [row("fedavg", 0.0)], attacked=False) is None
    assert recommend(SIMPLE, [row("allsmall", 1.0, 0.004)], attacked=False) is None
    attacked = recommend(SIMPLE, [row("allsmall", 1.0, 0.3)], attacked=True)
    always = recommend(SIMPLE, [row("fedprophet", 1.0)], attacked=True)
    assert attacked is not None
    assert always is not None
    assert attacked["settings"] == {"strategy": "allsmall", "training.adversarial": True}
    assert always["settings"] == {"strategy": "fedprophet"}


def test_the_command_of_a_recommendation_has_what_has_an_effect() -> None:
    options = {"model": "convnet", "training.batch-size": 8, "strategy": "fedavg", "training.adversarial": True}
    assigned = ["strategy=prism", "data-dir=my data", "prism.kappa=4"]
    command = run_command("spafl-digits", assigned, options | {"dataset": "DATASET"}, nodes=4)
    assert shlex.split(command) == [
        *("piecework", "run", "--preset", "spafl-digits", "--strategy", "fedavg", "--set", "data-dir=my data"),
        *(
            "--model",
            "convnet",
            "--set",
            "training.batch-size=8",
            "--set",
            "training.adversarial=true",
            "--dataset",
            "DATASET",
        ),
        *("--nodes", "4"),
    ]


@pytest.mark.slow
def test_helpers_find_what_one_process_finds(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, *SOME)
    settings = Settings(clients=20)
    assert advise(settings, ask(settings), helpers=2) == demo


# ---- FedAvg first


def verdict_of(settings: Settings) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """FedAvg's verdict, with the plan that it begins with."""
    return fedavg_verdict(settings, ask(settings), make_plan(plain_settings(settings), ask(settings)))


def test_where_every_device_fits_the_model_federated_averaging_is_the_advice() -> None:
    settings = Settings(clients=2, fleet="reference-step")
    found = advise(settings, ask(settings))
    assert found["simple"]["fits"]
    assert found["recommended"]["settings"] == {"strategy": "fedavg"}
    assert [each["strategy"] for each in found["first"]] == ["fedavg"]
    assert (found["others"], found["refused"]) == ([], [])
    assert found["simple"]["step_bytes"] == found["simple"]["poorest_bytes"]


@pytest.mark.slow
def test_a_smaller_batch_is_the_largest_that_fits() -> None:
    """Its cost is that of a plan at this batch."""
    needed = {}
    for size in (4, 8, 16):
        settings = settings_with(clients=2, training__batch_size=size, strategy="fedavg")
        needed[size] = make_plan(settings, ask(settings))["full_memory_bytes"]
    budget = (needed[4] + needed[8]) // 2
    settings = Settings(clients=2, fleet=fleet_json(board=budget))
    found, _ = verdict_of(settings)
    assert not found["fits"]
    assert found["smaller_batch"] == {"batch_size": 4, "step_bytes": needed[4]}
    assert "0% of the clients fit a step of the whole model" in found["text"]
    assert "changes the optimisation and the statistics of batch norms" in found["text"]
    assert "ratios" not in found["text"]


@pytest.mark.slow
def test_where_every_device_can_with_less_memory_that_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "fedavg", "fedepth")
    settings = settings_with(clients=2, strategy="fedavg")
    full = make_plan(settings, ask(settings))["full_memory_bytes"]
    settings = Settings(clients=2, fleet=fleet_json(board=full - 1))
    found = advise(settings, ask(settings))
    fitted = found["simple"]["fitted"]
    assert (fitted["participation"], fitted["step"], fitted["batch_norms"]) == (1, "steps in the backward pass", False)
    assert fitted["step_bytes"] < full
    assert fitted["flops"] == 1
    assert found["recommended"]["settings"] == {"strategy": "fedavg", "memory.fit": "auto"}
    assert "and no more FLOPs" in found["recommended"]["text"]
    assert [(each["strategy"], each["fit"], each["participation"]) for each in found["first"]] == [
        ("fedavg", "", 0),
        ("fedavg", "auto", 1),
        ("fedepth", "", 1),
    ]


def test_what_less_memory_costs_is_said(demo: dict[str, Any]) -> None:
    """All boards can train the whole model, the poorest by paging; for the poorest, its ladder has every step and what cuts."""
    fitted, ladder = demo["simple"]["fitted"], demo["ladder"]
    assert (fitted["participation"], fitted["batch_norms"]) == (1, False)
    assert fitted["least_bytes"] <= fitted["step_bytes"] <= demo["simple"]["poorest_bytes"]
    assert fitted["disk_bytes"] > 0
    assert (ladder["device"], ladder["budget_bytes"]) == ("board-a", demo["simple"]["poorest_bytes"])
    rungs = {each["name"]: each for each in ladder["rungs"]}
    assert {name for name, each in rungs.items() if each["fits"]} >= {"page", "auto", "fedepth"}
    auto = rungs["auto"]  # the sentence and the ladder tell of one step
    assert (fitted["step"], fitted["step_bytes"], fitted["flops"]) == (auto["how"], auto["bytes"], auto["flops"])
    assert not rungs["plain step"]["fits"]
    assert rungs["recompute"]["bytes"] < rungs["plain step"]["bytes"]
    assert rungs["micro-batch"]["model"] == "another: norms see micro-batches"
    assert rungs["page"]["model"] == rungs["plain step"]["model"] == "the same, bit for bit"
    assert rungs["page"]["seconds"] > rungs["recompute"]["seconds"] > rungs["plain step"]["seconds"]
    assert demo["simple"]["ratios"]
    assert demo["simple"]["text"].endswith("No smaller batch fits every device, down to 2.")
    paper = Settings.from_run_config({"clients": 2, "memory.model": "fedepth", "fleet": "demo"})
    assert verdict_of(paper)[0]["fitted"] is None


# ---- the tables


def test_what_to_try_first_and_the_others_by_name(demo: dict[str, Any]) -> None:
    assert [each["strategy"] for each in demo["first"]] == ["fedavg", "fedavg", "fedepth", "allsmall"]
    assert [each["fit"] for each in demo["first"]] == ["", "auto", "", ""]
    others = [each["strategy"] for each in demo["others"]]
    assert others == sorted(others) == ["heterofl", "profl"]
    refused = {each["strategy"]: each["reason"] for each in demo["refused"]}
    assert refused["feddf"].startswith("feddf.family is empty: name smaller models")
    assert {*refused, *others, *(each["strategy"] for each in demo["first"])} == set(SOME) - {"jfat"}
    assert demo["recommended"]["settings"] == {"strategy": "fedavg", "memory.fit": "auto"}


def test_a_row_is_what_a_plan_of_that_system_alone_says(demo: dict[str, Any]) -> None:
    for name in ("heterofl", "fedepth"):
        (found,) = [each for each in [*demo["first"], *demo["others"]] if each["strategy"] == name]
        settings = Settings(clients=20, strategy=name)
        plan = make_plan(settings, ask(settings))
        assert found["trains"] == plan["trained"]["devices"]
        assert found["round_seconds"] == plan["fleet"]["stages"][0]["round_seconds"]


def test_the_reason_of_a_refusal_does_not_contradict_itself() -> None:
    """FeDepth needs its largest piece, although smaller ones would fit."""
    settings = settings_with(clients=2, strategy="fedepth", fleet=fleet_json(board=0.4, large=0.42))
    plan = make_plan(settings, ask(settings))
    needed, budget = plan["fleet"]["stages"][0]["closest"]
    smallest = min(piece["memory_bytes"] for piece in plan["modules"])
    assert plan["fleet"]["participation"] == 0
    assert smallest < budget == int(0.42 * plan["full_memory_bytes"]) < needed
    assert plan_system(settings, ask(settings), 0)["reason"].startswith("no device can: the one that is closest needs ")


@pytest.mark.slow
def test_the_advice_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "allsmall", "exclusivefl", "fedavg", "fedepth", "profl")
    call = ["plan", "--model", "convnet", "--dataset", "digits", "--suggest"]
    done = CliRunner().invoke(app, call, env={"COLUMNS": "80"})
    assert done.stderr == ""  # neither progress, without a terminal, nor what ProFL logs of a run
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Use fedavg with memory.fit. Every device can train the whole model")
    command = "    piecework run --model convnet --dataset digits --strategy fedavg --set memory.fit=auto"
    assert command in lines
    assert all(len(line) <= 80 for line in lines if line != command)
    said = " ".join(done.stdout.split())
    assert "fedavg +fit 100%" in said
    assert "The other systems, clean training, by name: the order claims nothing." in said
    assert "exclusivefl: no device can: the one that is closest needs 1 MB and has 979 kB" in said
    assert "Ahead there after as many rounds:" in said
    assert any(line.split()[:1] == ["AllSmall"] for line in lines)  # what was measured of it


def test_progress_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, silent in ((True, False), (True, True), (False, False)):
        console = PlainConsole(file=io.StringIO(), force_terminal=terminal)
        monkeypatch.setattr(base, "err", console)
        with base.tell_steps("planning", silent=silent) as tell:
            tell("fedepth")
        assert ("planning fedepth" in console.file.getvalue()) == (terminal and not silent)  # type: ignore[attr-defined]


def test_a_part_that_two_systems_train_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    original = costs.piece_cost
    monkeypatch.setattr(costs, "piece_cost", lambda *a, **k: traced.append(a) or original(*a, **k))
    settings = settings_with(clients=2, training__batch_size=13)
    for strategy in ("fedavg", "exclusivefl"):
        own = settings.with_values({"strategy": strategy})
        assert cost_model_of(own, ask(own), 0).reference_bytes
    assert len(traced) == 1


def test_clean_and_adversarial_systems_are_apart() -> None:
    clean, attacked = ({name for name in METHODS if suits(name, asked)} for asked in (False, True))
    assert set(METHODS) - clean == {"fedprophet", "jfat", "fedrbn"}
    assert {"fedprophet", "jfat", "fedrbn", "fedavg", "allsmall", "exclusivefl"} <= attacked
    assert not {"fedepth", "spafl", "profl"} & attacked
    settings = Settings(clients=2, strategy="fedprophet", fleet="unlimited")  # which always trains so
    found = advise(settings, ask(settings))
    assert found["adversarial"]
    assert found["simple"]["attack_steps"] == settings.attack.steps
    assert found["recommended"]["settings"] == {"strategy": "fedavg", "training.adversarial": True}


def test_a_system_that_cannot_take_a_model_of_ones_own_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODELS, "own-mlp", mlp)
    settings = Settings(model="own-mlp", clients=4)
    question = ask(settings)
    rows = {n: plan_system(settings.with_values({"strategy": n}), question, 0) for n in ("prism", "fedepth")}
    assert rows["prism"]["reason"].startswith(
        "atom 'fc2' of own-mlp cannot be cut by rank: it is a chain of 0 (Linear)"
    )
    assert rows["fedepth"]["participation"] > 0


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
