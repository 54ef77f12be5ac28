"""Advice: one recommendation with its command, what one would try first, the others without an order, and who cannot."""

import io
from typing import Any

import pytest
from helpers import fleet_json, num_parameters
from model_helpers import mlp
from settings_helpers import settings_with
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands import base
from piecework.commands.console import PlainConsole
from piecework.models.zoo import MODELS, build_blueprint
from piecework.planning import costs
from piecework.plans.ladder import climb
from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.plans.suggest import (
    advise,
    cost_model_of,
    fedavg_verdict,
    fitted_names,
    plain_settings,
    plan_system,
    suits,
    wider,
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


def test_a_narrow_model_is_planned_with_less_memory_unless_all_are_asked_to() -> None:
    names = ["allsmall", "fedepth"]
    assert fitted_names(Settings(), names) == ["allsmall"]
    assert fitted_names(settings_with(memory__fit="auto"), names) == []


def test_steps_in_less_memory_count_where_they_make_a_model_wider() -> None:
    fitted = [{"strategy": name, "covered": 0.5} for name in ("equal", "refused", "narrower")] + [{"strategy": "none"}]
    rows: dict[str, Any] = {"equal": {"covered": 0.5}, "refused": {}, "narrower": {"covered": 0.3}, "none": {}}
    assert [row["strategy"] for row in wider(fitted, rows)] == ["refused", "narrower"]


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


@pytest.mark.parametrize(
    ("asked", "adds"), [({"evaluation.mode": "personal"}, True), ({"strategy": "spafl"}, True), ({}, False)]
)
@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_who_wants_a_model_for_each_device_hears_of_those_systems(
    asked: dict[str, Any], adds: bool, partition: str
) -> None:
    """Where data differ, one model for all is fine-tuned, as in what was measured."""
    settings = Settings(clients=2, fleet="unlimited").with_values({"data.partition": partition, **asked})
    found = advise(settings, ask(settings))
    own = ["local", "spafl"] if adds else []
    assert [each["strategy"] for each in found["first"]] == ["fedavg", *own]
    assert (found["others"], found["measured"] is not None) == ([], adds)
    mode = {"evaluation.mode": "personal"} if adds else {}
    mode |= {"fedavg.fine-tuning-epochs": 2} if adds and partition == "dirichlet" else {}
    assert found["recommended"]["settings"] == {"strategy": "fedavg"} | mode


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
    assert [each["strategy"] for each in demo["first"]] == ["fedavg", "fedavg", "fedepth", "allsmall", "allsmall"]
    assert [each["fit"] for each in demo["first"]] == ["", "auto", "", "", "recompute"]
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
    assert " there after as many rounds: " in said
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


def test_a_ladder_says_what_a_devices_pieces_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of pieces that are not the whole model's would promise what the device cannot do."""
    monkeypatch.setattr("piecework.plans.ladder.cutting", lambda _: ["fedepth", "profl"])
    monkeypatch.setattr("piecework.plans.ladder.RUNGS", {"plain step": ()})
    fleet = fleet_json(rich=0.12, poor=0.05, poorest=0.03)
    settings = settings_with(
        clients=3, model="preresnet20", architecture__width=0.25, training__batch_size=32, fleet=fleet
    )
    question = ask(settings, input_shape="3x16x16", classes=10)
    ladders = {device: climb(settings, question, device)["rungs"] for device in ("rich", "poor", "poorest")}
    found = {device: {each["name"]: each["how"] for each in rungs}["fedepth"] for device, rungs in ladders.items()}
    assert found == {
        "rich": "3 pieces a round",
        "poor": "4 pieces a round, without block1..block3",
        "poorest": "3 pieces a round, without stem..block6",
    }
    staged = [each["how"] for each in ladders["rich"] if each["model"].startswith("pieces, in")]
    assert staged
    assert not [how for how in staged if "without" in how]


def test_the_flops_of_pieces_are_those_of_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many batches a client trains in a round: so many passes over its data, or `training.local-iterations`."""
    monkeypatch.setattr("piecework.plans.ladder.cutting", lambda _: ["fedepth"])
    monkeypatch.setattr("piecework.plans.ladder.RUNGS", {})
    monkeypatch.setattr(
        "piecework.planning.timing.pairwise", lambda _: []
    )  # features are made once, however many batches
    asked = [settings_with(clients=4, **given) for given in ({}, {"training__local_iterations": 3})]
    found = [climb(settings, ask(settings, examples=100))["rungs"] for settings in asked]
    (passes,), (iterations,) = found
    assert iterations["flops"] == pytest.approx(passes["flops"])
    assert iterations["seconds"] < passes["seconds"]


def test_plans_and_ladders_count_the_features_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of the demo's boards seemed to take 0.76 of the whole model's FLOPs, less time, and nothing of the disk."""
    monkeypatch.setattr("piecework.plans.ladder.cutting", lambda _: ["fedepth"])
    monkeypatch.setattr("piecework.plans.ladder.RUNGS", {})
    settings = settings_with(clients=4)
    (pieces,) = climb(settings, ask(settings))["rungs"]
    planned = make_plan(settings, ask(settings))
    (device,) = [row for row in planned["devices"] if row["device"] == "board-a"]
    assert pieces["seconds"] == pytest.approx(device["stages"][0]["seconds"])
    assert pieces["disk_bytes"] > 0
    (whole,) = make_plan(plain_settings(settings), ask(settings))["modules"]
    assert pieces["flops"] > sum(row["training_flops"] for row in planned["modules"]) / whole["training_flops"]


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
