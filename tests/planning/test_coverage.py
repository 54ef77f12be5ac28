"""Which parts of the model a fleet can train and a run has trained, in systems for which that means different things."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import FEW, a_training_config, clients_of, few_digits, fleet_json, run_local, tiny_settings
from safetensors.torch import save_file
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.console import PlainConsole
from piecework.commands.options import settings_from
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.profile import DeviceState
from piecework.models.cascade import initial_state
from piecework.models.zoo import build_blueprint
from piecework.planning.costs import CostModel
from piecework.planning.coverage import (
    Trainer,
    consecutive,
    coverage,
    coverage_sentence,
    in_model,
    judge_coverage,
    slowest_of,
    trained_rows,
)
from piecework.plans.plan import planner_for, trainers
from piecework.plans.question import ask
from piecework.report.display import summary_table
from piecework.report.run_page import write_report
from piecework.server_app.start import describe_coverage
from piecework.strategies import find_method
from piecework.strategies.width.heterofl.server import HeteroFLCut
from piecework.training.settings import SettingsError, check_resume

# One step of conv2 alone takes 869,120 bytes with batches of 32, the dearest of all; conv5 takes 802,688.
SMALL, LARGE = 810_000, 870_000
CONV = {"training__batch_size": 32, "architecture__batch_norm": "batch"}


def found_for(fleet: str, **changes: Any) -> dict[str, Any]:
    """What a plan says."""
    settings = tiny_settings(**{"clients": 4, "fleet": fleet} | CONV | changes)
    planner, states = planner_for(load_fleet(settings.fleet), settings, ask(settings))
    return describe_coverage(planner, trainers(states, settings))


def by_part(found: dict[str, Any]) -> dict[str, int]:
    return {row["part"]: row["clients"] for row in found["parts"]}


# ---- who can train what


def test_coverage_by_hand() -> None:
    settings = tiny_settings(clients=4, fleet=fleet_json(large=LARGE, small=SMALL), **CONV)
    planner, states = planner_for(load_fleet(settings.fleet), settings, ask(settings))
    (of_clients,) = states[:1]
    rows = coverage(planner, {n: Trainer(state, 10 * (n + 1)) for n, state in enumerate(of_clients)})
    everyone = {"devices": ["large", "small"], "clients": 4, "fraction": 1.0, "channels": 1.0}
    large = {"devices": ["large"], "clients": 2, "fraction": (10 + 30) / 100, "channels": 1.0}
    assert rows == [
        {"part": part} | (large if part == "conv2" else everyone)
        for part in ("conv1", "conv2", "conv3", "conv4", "conv5", "head")
    ]
    assert coverage_sentence(rows, 4) == (
        "the parts of the model can be trained by: conv1 by all clients; conv2 by 2 of 4 clients, 40% of the data; "
        "conv3..head by all clients"
    )


NOBODY = (
    "no client can train conv2, so it keeps random initial weights: conv2 needs 869,120 bytes, and the richest client has "
    "810,000"
)


@pytest.mark.parametrize("changes", [{}, {"fedepth__partial_training": "dilute"}], ids=["leave-out", "dilute"])
def test_a_part_that_no_client_can_train(changes) -> None:
    found = found_for(fleet_json(small=SMALL), **changes)
    assert by_part(found) == {"conv1": 4, "conv2": 0, "conv3": 4, "conv4": 4, "conv5": 4, "head": 4}
    assert found["level"] == "error"
    assert found["says"].startswith(f"{NOBODY}. Give some clients more memory")
    allowed = found_for(fleet_json(small=SMALL), faults__allow_untrained=True, **changes)
    assert (allowed["level"], allowed["says"]) == ("warning", f"{NOBODY} (faults.allow-untrained = true)")


def test_a_pretrained_part_is_no_error(tmp_path: Path) -> None:
    blueprint = build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8), batch_norm="batch")
    arrays = dict(initial_state(blueprint, 7))
    save_file(arrays, tmp_path / "all.safetensors")
    save_file({n: v for n, v in arrays.items() if "atoms.1" not in n}, tmp_path / "rest.safetensors")
    fleet = fleet_json(small=SMALL)
    found = found_for(fleet, training__init_weights=str(tmp_path / "all.safetensors"))
    assert (found["level"], found["says"]) == (
        "note",
        "no client can train conv2: these parts keep the weights of training.init-weights",
    )
    assert found_for(fleet, training__init_weights=str(tmp_path / "rest.safetensors"))["level"] == "error"


def test_that_no_client_can_train_anything_is_a_warning() -> None:
    """The first round of a run then ends it, and says what is missing."""
    for strategy in ("fedavg", "fedepth"):
        found = found_for(fleet_json(tiny=1000), strategy=strategy)
        assert set(by_part(found).values()) == {0}
        assert found["level"] == "warning"
        assert found["says"].startswith("no client can train anything: ")
        assert found["says"].endswith(" the richest client has 1,000 bytes")
        assert coverage_sentence(found["parts"], 4) == "no part of the model can be trained by any client"


def test_clients_without_two_examples_are_an_error() -> None:
    settings = tiny_settings(clients=4, fleet=fleet_json(large=2.2))
    planner, _ = planner_for(load_fleet(settings.fleet), settings, ask(settings))
    found = describe_coverage(planner, {})
    assert (found["level"], found["says"]) == (
        "error",
        "no client has two training examples or more: give clients more data, or lower `clients`",
    )


def test_a_network_sub_problem_trains_its_block_the_first_atom_and_the_head() -> None:
    settings = tiny_settings(clients=4, fleet=fleet_json(large=2.2), fedepth__sub_problem="network")
    planner, _ = planner_for(load_fleet(settings.fleet), settings, ask(settings))
    cut = planner.cut
    piece = cut.part(cut.item((2, 3)))
    assert piece.whole
    assert in_model(cut, piece) == ["atoms.0", "atoms.2", "atoms.3", "head"]
    assert cut.find_excluded([piece]) == ["conv2", "conv5"]


def test_stages_of_fedprophet_and_profl() -> None:
    found = found_for(fleet_json(large=2.2, small=0.7), strategy="fedprophet")
    assert (set(by_part(found).values()), found["level"]) == ({4}, "")
    found = found_for(fleet_json(large=2.2, small=0.5), strategy="profl")
    counts = by_part(found)
    assert counts["conv1"] == counts["conv2"] == 2  # step 1
    assert counts["head"] == 4  # who cannot afford a step trains the output layer alone
    assert found["level"] == ""


@pytest.mark.slow
def test_widths() -> None:
    fleet = fleet_json(small=0.6)
    found = found_for(fleet, strategy="heterofl")
    assert (set(by_part(found).values()), {row["channels"] for row in found["parts"]}) == ({4}, {0.5})
    assert found["level"] == "warning"
    assert found["says"] == (
        "no client can train more than 0.5 of the channels; the model that is evaluated and saved has no others"
    )
    for strategy in ("fedrolex", "splitmix", "allsmall"):  # all channels in turn, or there are no more
        found = found_for(fleet, strategy=strategy)
        assert (found["level"], {row["channels"] for row in found["parts"]}) == ("", {1.0})


@pytest.mark.parametrize(
    ("strategy", "changes", "channels"),
    [
        ("fjord", {"heterofl__width_ratios": "1,0.4"}, 0.4),
        ("origdrop", {}, 0.4),
        ("prism", {}, 0.4),  # against Remark 3.2 of its paper
        ("prism", {"prism__output_channels": "random"}, 1.0),
        ("prism", {"prism__output_channels": "all"}, 1.0),
        ("orthdrop", {}, 1.0),
    ],
)
def test_who_trains_the_first_channels_makes_a_narrow_network(
    strategy: str, changes: dict[str, Any], channels: float
) -> None:
    model = build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8), batch_norm="batch")
    settings = tiny_settings(strategy=strategy, prism__keep_ratios="1,0.4", **changes)
    cut = find_method(strategy).make_cut(model, CostModel(a_training_config(32), None, model), settings)
    assert isinstance(cut, HeteroFLCut)
    found = cut.part(cut.sub_model(1)).channels
    assert found == pytest.approx(channels)
    rows = [{"part": "conv1", "devices": ["small"], "clients": 4, "fraction": 1.0, "channels": found}]
    says = judge_coverage(cut.method(cut), rows, {0: Trainer(DeviceState("small", 1, 1.0, 1.0, 1.0), 10)}).message
    narrow = "the model that is evaluated and saved has no others"
    if strategy == "prism":
        narrow = "the others are 0 in the model that is evaluated and saved, which is a narrow network"
    assert says == (f"no client can train more than 0.4 of the channels; {narrow}" if channels < 1 else "")


def test_a_model_that_ends_where_training_does() -> None:
    found = found_for(fleet_json(small=1.6), strategy="depthfl")
    assert by_part(found) == {"conv1": 4, "conv2": 4, "conv3": 4, "conv4": 4, "conv5": 0, "head": 0}
    assert (found["level"], found["says"]) == ("warning", "no client can train conv5, head: the model ends there")


@pytest.mark.parametrize(("ratio", "clients", "level"), [(0.001, 0, "warning"), (0.6, 0, "note"), (1.0, 4, "")])
def test_a_server_that_distils(ratio: float, clients: int, level: str) -> None:
    model = {"model": "conv4", "feddf__family": "convnet", "dataset": "digits32", "data__public_fraction": 0.1}
    found = found_for(fleet_json(small=ratio), strategy="feddf", **model)
    assert (set(by_part(found).values()), found["level"]) == ({clients}, level)


def test_who_trains_nothing_of_the_servers_model_is_a_note() -> None:
    settings = settings_from("robust-fmnist-fedet", [])
    planner, states = planner_for(load_fleet(settings.fleet), settings, ask(settings))
    found = describe_coverage(planner, trainers(states, settings))
    assert (found["level"], found["says"]) == (
        "note",
        "no client can train conv1..conv13: the server trains the whole model by distillation",
    )
    assert by_part(found)["head"] == 20


@pytest.mark.parametrize("preset", ["fedepth-cifar10-authors", "fedepth-cifar10-fair"])
def test_presets_train_every_part(preset: str) -> None:
    settings = settings_from(preset, [])
    planner, states = planner_for(load_fleet(settings.fleet), settings, ask(settings))
    found = describe_coverage(planner, trainers(states, settings))
    assert found["level"] == ""
    assert all(row["clients"] == found["clients"] for row in found["parts"])


# ---- words


def test_runs_of_parts() -> None:
    parts = ["stem", "block1", "block2", "block3", "head"]
    assert consecutive(["stem", "block1", "block3", "head"], parts) == "stem, block1, block3, head"
    assert consecutive(["stem", "block1", "block2", "head"], parts) == "stem..block2, head"


def test_the_plan_says_so_in_bold() -> None:
    options = ("plan", "--set", f"fleet={fleet_json(small=SMALL)}", "--set", "training.batch-size=32", "--nodes", "4")
    options += ("--set", "architecture.batch-norm=batch")
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0
    assert f"error: {NOBODY}. Give" in done.stdout
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in ("conv1 all clients", "conv2 no client", "conv3..head all clients"):
        assert line in lines
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)["coverage"]
    assert found == found_for(fleet_json(small=SMALL))


def test_rows_of_a_round() -> None:
    trained = {0: ["a", "head"], 2: ["a", "b", "head"]}
    rows = trained_rows(["a", "b", "c", "head"], trained, {0: 10, 1: 20, 2: 50})
    assert [(row["part"], row["clients"], row["fraction"]) for row in rows] == [
        ("a", 2, 60 / 80),
        ("b", 1, 50 / 80),
        ("c", 0, 0.0),
        ("head", 2, 60 / 80),
    ]


# ---- runs


def refused(folder: Path, **changes: Any) -> str:
    with pytest.raises(ValueError, match="no client can train") as caught:
        run_local(folder, clients=4, fleet=fleet_json(small=SMALL), **CONV | changes)
    return str(caught.value)


def test_a_run_that_would_leave_a_part_random_does_not_begin(tmp_path: Path) -> None:
    plan = found_for(fleet_json(small=SMALL))["says"]
    assert refused(tmp_path) == plan
    assert not list(tmp_path.glob("run/rounds.jsonl"))
    one = tiny_settings()
    check_resume(one.to_run_config(), tiny_settings(faults__allow_untrained=True))  # it decides no number
    with pytest.raises(SettingsError, match=r"fedepth\.partial-training"):
        check_resume(one.to_run_config(), tiny_settings(fedepth__partial_training="dilute"))


def test_a_run_says_at_its_start_in_its_records_and_at_its_end_who_trained_what(tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO", "piecework")
    fleet = fleet_json(small=SMALL, smaller=SMALL - 1, large=LARGE)
    changes = {"clients": 6, "clients_per_round": 2, "num_rounds": 2, "fleet": fleet, **CONV}
    run = run_local(tmp_path, dataset=FEW, **changes)
    start = run.coverage()
    assert start is not None
    planned = found_for(**changes | {"dataset": f"npz:{few_digits()}"})
    keys = ("part", "devices", "clients", "channels")  # examples differ by one between clients
    assert [[row[key] for key in keys] for row in start["parts"]] == [
        [row[key] for key in keys] for row in planned["parts"]
    ]
    assert by_part(start)["conv2"] == 2
    assert "conv2 by 2 of 6 clients, 33% of the data" in caplog.text
    rounds, held = run.rounds(), {}
    for record in rounds:
        clients = clients_of(run, record["round"])
        rows = {row["part"]: row for row in record["trained"]}
        assert [*rows] == ["conv1", "conv2", "conv3", "conv4", "conv5", "head"]
        able = [c for c in clients if c["device"] == "large"]
        assert rows["conv2"]["clients"] == len(able)
        assert rows["conv2"]["fraction"] == pytest.approx(sum(c["examples"] for c in able) / record["examples"])
        assert rows["conv1"]["clients"] == 2
        held |= {c["client"]: c for c in clients}
    summary = {row["part"]: row for row in (run.summary() or {})["trained"]}
    assert summary["head"]["clients"] == len(held)
    large = [c for c in held.values() if c["device"] == "large"]
    assert summary["conv2"]["clients"] == len(large)
    assert summary["conv1"]["rounds"] == 2


def test_what_was_never_trained_is_in_the_table_and_the_page(tmp_path: Path, caplog) -> None:
    fleet = fleet_json(small=SMALL)
    changes = {
        "clients": 2,
        "clients_per_round": 0,
        "dataset": FEW,
        "fleet": fleet,
        "faults__allow_untrained": True,
        **CONV,
    }
    run = run_local(tmp_path, **changes)
    assert f"{NOBODY} (faults.allow-untrained = true)" in caplog.text
    summary = run.summary()
    assert summary is not None
    console = PlainConsole(width=100, record=True)
    console.print(summary_table(summary, run.rounds()))
    assert "never trained: conv2" in console.export_text()
    page = write_report(run).read_text(encoding="utf-8")
    assert "<strong>Never trained in this run: conv2.</strong>" in page
    assert f"<strong>At the start: {NOBODY} (faults.allow-untrained = true).</strong>" in page
    assert "<td>conv2</td><td>0</td><td>0%</td><td>never trained</td>" in page


def test_the_slowest_device_bounds_the_others() -> None:
    states = [DeviceState(f"{flops}", 1, flops, 1.0, 1.0) for flops in (3e9, 2e9, 5e9)]
    assert (slowest_of(states), slowest_of([])) == (2e9, 1.0)


@pytest.mark.parametrize(("memory", "level"), [(0.9, ""), (0.6, "note")])
def test_micro_batches_are_those_of_parts_that_a_device_has_time_for(memory: float, level: str) -> None:
    """The second module takes longer than the slowest device allows. Only with it 0.9 of the memory are too little."""
    changes = {"strategy": "fedprophet", "fedprophet__r_min": "0.4x", "memory__fit": "micro-batch"}
    assert found_for(fleet_json(board=memory), **changes)["level"] == level
