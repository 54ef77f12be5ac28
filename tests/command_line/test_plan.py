"""`piecework plan`: what it answers, that it agrees with a run, what it costs, what it says to bad input."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import fleet_json, run_local, tiny_settings
from typer.testing import CliRunner

from piecework.cli import app
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.profile import format_bytes
from piecework.federation.registry import sample_clients
from piecework.plans.plan import fleet_states, make_plan
from piecework.plans.plan_view import over_sampling, participation
from piecework.plans.question import ask, budget_bytes
from piecework.training.settings import Settings, SettingsError

ROOT = Path(__file__).resolve().parents[2]
FEDPROPHET = ["--strategy", "fedprophet", "--memory-model", "fedprophet"]


def plan(*options: str) -> dict:
    done = CliRunner().invoke(app, ["plan", "--json", *options])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)  # nothing else on stdout


def refused(*options: str) -> str:
    done = CliRunner().invoke(app, ["plan", *options])
    assert done.exit_code == 2
    assert done.stdout == ""
    return " ".join(done.stderr.split())


# ---- a plan and a run are of one mind


def test_a_plan_says_what_a_run_then_does(tmp_path: Path) -> None:
    settings = tiny_settings(num_rounds=1, clients=20, clients_per_round=10)
    found = make_plan(settings, ask(settings))
    record = run_local(tmp_path, **{k.replace("-", "_"): v for k, v in settings.to_run_config().items()}).rounds()[0]
    by_device = {row["device"]: row["stages"][0] for row in found["devices"]}
    assert len(record["clients"]) == 10
    for client in record["clients"]:
        row = by_device[client["device"]]
        assert client["simulated_seconds"] == pytest.approx(row["seconds"], rel=0.03)
        assert client["predicted_peak"] == client["measured_peak"]
    (stage,) = found["fleet"]["stages"]
    assert stage["round_seconds"] == pytest.approx(record["simulated_seconds"], rel=0.05)
    assert stage["peak_bytes"] == max(client["measured_peak"] for client in record["clients"])
    down, up = (sum(client[key] for client in record["clients"]) for key in ("bytes_down", "bytes_up"))
    # arrays have headers of 128 bytes, which tell with batch norms of 16 channels
    assert (stage["bytes_down"], stage["bytes_up"]) == (pytest.approx(down, rel=0.04), pytest.approx(up, rel=0.04))


def test_both_sides_draw_the_same_fleet() -> None:
    """The server reads a file, a client the JSON of its run configuration."""
    settings = Settings(clients=100, seed=7, fleet="fedprophet-cifar10-unbalanced-authors")
    fleet = load_fleet(settings.fleet)
    assert fleet_states(fleet, settings, 10**8) == fleet_states(load_fleet(fleet.to_json()), settings, 10**8)


# ---- the answer


def test_pieces_devices_and_fleet() -> None:
    found = plan("--model", "convnet", "--dataset", "digits", "--nodes", "8")
    assert (found["strategy"], found["model"], found["input_shape"], found["classes"]) == (
        "fedepth",
        "convnet",
        [1, 8, 8],
        10,
    )
    assert [module["atoms"] for module in found["modules"]] == [["conv1", "conv2"], ["conv3"], ["conv4"], ["conv5"]]
    assert found["parameters"] == 37_594
    first = found["modules"][0]
    # conv1 and conv2 with their norms, the head of 4 x 64 inputs
    assert first["parameters"] == 16 * 9 + 16 * 16 * 9 + 2 * 2 * 16 + 10 * 257
    # a batch of 16, 2 a multiply-accumulate
    assert first["forward_flops"] == 2 * 16 * (64 * 16 * 9 + 64 * 16 * 16 * 9 + 2560)
    assert first["macs"] is None
    assert found["budget_bytes"] == found["devices"][0]["budget_bytes"][0] == int(0.53 * found["full_memory_bytes"])
    assert all(module["memory_bytes"] <= found["budget_bytes"] for module in found["modules"])
    assert [row["clients"] for row in found["devices"]] == [2, 2, 2, 2]
    assert found["devices"][3]["stages"][0]["trains"] == [
        {"what": "conv1..conv4 | conv5", "fraction": 1.0, "leaves_out": []}
    ]
    assert found["fleet"]["participation"] == 1


def test_what_over_sampling_gains() -> None:
    """Half of the clients take 50 times as long; four answers are enough, with which the slow ones are not waited for."""
    devices = [
        {"name": name, "memory-ratio": 1.0, "flops": flops, "bandwidth": 1e9, "disk-bandwidth": 1e9}
        for name, flops in (("quick", 5e9), ("slow", 1e8))
    ]
    fleet = json.dumps({"name": "two", "assignment": "round-robin", "device": devices})
    options = "--model", "convnet", "--dataset", "digits", "--strategy", "fedavg", "--nodes", "8", "--fleet", fleet
    found = plan(*options, "--set", "clients-per-round=4", "--set", "faults.over-sample=4")["fleet"]
    quick, slow = (row["stages"][0]["seconds"] for row in plan(*options)["devices"])
    (stage,) = found["stages"]
    assert stage["awaited_seconds"] == slow > 40 * quick  # the draws of 20 rounds all have a slow one
    # Round 1 asks all and ends with the quick ones, which are then the only idle ones for more than 20 rounds.
    assert stage["round_seconds"] == pytest.approx(quick)
    (said,) = over_sampling(found)
    assert said.startswith("faults.over-sample = 4: a round asks 8 clients and ends with 4 answers. It takes ")
    assert over_sampling(plan(*options)["fleet"]) == []


def test_excluded_devices_and_the_memory_they_are_missing() -> None:
    found = plan("--model", "convnet", "--dataset", "digits", "--strategy", "fedavg")
    (stage,) = found["fleet"]["stages"]
    assert (stage["participation"], stage["excluded_clients"]) == (0, list(range(20)))
    poorest = found["devices"][0]["stages"][0]
    assert poorest["needed_bytes"] == found["full_memory_bytes"]
    assert poorest["missing_bytes"] == found["full_memory_bytes"] - int(0.53 * found["full_memory_bytes"])
    assert poorest["seconds"] is None
    options = ("--model", "convnet", "--dataset", "digits", "--strategy", "fedavg")
    poor, rich = (
        plan(*options, "--set", f"fleet={fleet_json(board=ratio)}")["devices"][0]["stages"][0] for ratio in (0.1, 2.0)
    )
    assert poor["swap_seconds"] > 1.1 * rich["seconds"]  # a board as fast, which has to go to its disk


def test_a_device_that_is_a_byte_short_is_not_shown_as_if_it_had_all() -> None:
    options = (
        "--model",
        "convnet",
        "--dataset",
        "digits",
        "--strategy",
        "fedavg",
        "--set",
        "architecture.batch-norm=batch",
    )
    needed = plan(*options)["full_memory_bytes"]
    done = CliRunner().invoke(app, ["plan", *options, "--set", f"fleet={fleet_json(only=needed - 1)}"])
    assert (needed, done.exit_code) == (1_029_248, 0)
    assert "a step of the whole model takes 1.029248 MB" in done.stdout
    assert "1.029247 MB" in done.stdout
    assert "needs 1.029248 MB, up to 1 B more than there is" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [("60MB", 60_000_000), ("57MiB", 57 * 2**20), ("0.2x", 200_000), ("1.5 GB", 1_500_000_000), ("1x", 1_000_000)],
)
def test_budgets(text, expected) -> None:
    assert budget_bytes(text, 10**6) == expected


@pytest.mark.parametrize("text", ["60", "x", "0x", "-1x", "0MB", "60 apples", "nanx", "infx"])
def test_bad_budgets_are_printed(text) -> None:
    with pytest.raises(
        SettingsError, match=r"expected bytes as 60MB or 57MiB, or a fraction of the full model as 0.2x"
    ) as caught:
        budget_bytes(text, 10**6)
    assert text in str(caught.value)


def test_a_model_without_a_data_set_reads_what_it_usually_reads() -> None:
    found = plan("--model", "lstm-imdb", "--strategy", "fedavg", "--fleet", "unlimited")
    assert (found["input_shape"], found["classes"], found["parameters"]) == ([500], 2, 920_385)


def test_the_fleet_says_how_many_clients_there_are() -> None:
    found = plan(
        "--model",
        "resnet18",
        "--strategy",
        "profl",
        "--fleet",
        "profl",
        "--memory-model",
        "profl",
        "--batch-size",
        "64",
    )
    assert found["fleet"]["clients"] == 100
    assert [stage["participation"] for stage in found["fleet"]["stages"]] == [0.43, 0.81, 0.99, 1.0]
    assert len(found["fleet"]["stages"][0]["excluded_clients"]) == 57
    assert found["fleet"]["excluded"] == "excluded"


def test_a_fleet_whose_poorest_device_fits_no_atom_is_still_planned() -> None:
    found = plan("--model", "cnn3", "--dataset", "cifar10", *FEDPROPHET, "--fleet", "fedprophet-cifar10-balanced")
    assert found["budget_bytes"] == max(module["memory_bytes"] for module in found["modules"])
    # by the paper's memory no client is held to a budget: clients without enough memory swap
    assert found["fleet"]["participation"] == 1
    fleet = fleet_json(rich=10**9, poor=10**6)
    found = plan("--model", "cnn3", "--dataset", "cifar10", "--strategy", "fedprophet", "--set", f"fleet={fleet}")
    assert found["budget_bytes"] >= max(module["memory_bytes"] for module in found["modules"])
    assert found["fleet"]["participation"] == 0.5


def test_bfloat16_and_attacks() -> None:
    small = ("--model", "convnet", "--dataset", "digits", "--strategy", "fedavg", "--fleet", "unlimited")
    plain, half, attacked = plan(*small), plan(*small, "--precision", "bfloat16"), plan(*small, "--attack-steps", "10")
    assert half["full_memory_bytes"] < 0.9 * plain["full_memory_bytes"]
    assert attacked["full_memory_bytes"] < 1.1 * plain["full_memory_bytes"]
    # training: forward, and backward less the first layer's input; a step of the attack: forward, and to the input only
    forward, first = plain["modules"][0]["forward_flops"], 2 * 16 * 64 * 16 * 9
    assert plain["modules"][0]["training_flops"] == 3 * forward - first
    assert attacked["modules"][0]["training_flops"] == 3 * forward - first + 10 * 2 * forward


def test_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    done = CliRunner().invoke(app, ["plan", "--model", "convnet", "--dataset", "digits", "--picture", str(picture)])
    assert done.exit_code == 0, done.stderr
    drawn = picture.read_text()
    assert "<svg" in drawn
    assert all(name in drawn for name in ("conv1+conv2", "the whole model", "fleet demo"))


def test_columns_say_what_they_count_and_of_what() -> None:
    call = ["plan", "--model", "cnn3", "--dataset", "digits32", "--strategy", "fedprophet", "--fleet", "unlimited"]
    done = CliRunner().invoke(app, call, env={"COLUMNS": "150"})
    pieces, devices = (
        line.split("  ") for line in done.stdout.splitlines() if line.startswith(("piece", "stage", "device"))
    )
    assert {"forward", "training"} <= {each.strip() for each in " ".join(pieces).split()}
    assert re.search(r"\d [kMG]FLOP +\d", done.stdout)
    assert "time a round" in " ".join(devices)
    last = done.stdout.splitlines()[-1]
    assert last == "to train in a published setting: piecework presets"
    assert "fedepth-fmnist-fair" not in done.stdout


def test_a_plan_with_simulated_swapping_names_the_memory_it_would_need() -> None:
    call = ["--model", "convnet", "--dataset", "digits", "--strategy", "jfat", "--nodes", "4"]
    found = plan(*call)
    whole = found["full_memory_bytes"]
    budgets = [device["budget_bytes"][0] for device in found["devices"]]
    assert found["swapping"] == {
        "fraction": 1.0,
        "needed_bytes": whole,
        "poorest_bytes": min(budgets),
        "whole_fits": 0.0,
    }
    said = " ".join(CliRunner().invoke(app, ["plan", *call]).stdout.split())
    assert "Swapping is only simulated: 100% of the clients train what does not fit their budgets." in said
    assert f"The whole model takes {format_bytes(whole)} for an attacked step, which 0% of the clients have." in said
    assert plan(*call[:-2], "--fleet", "unlimited")["swapping"] is None
    assert plan("--model", "convnet", "--dataset", "digits")["swapping"] is None


def test_a_module_is_timed_against_the_slowest_that_is_asked(tmp_path: Path) -> None:
    """Eq. 15: P_min is of the round's participants; here it is a hundred times as slow, and asked in some rounds only."""
    lines = 'name = "mine"\nassignment = "list"\nclients = ["fast", "fast", "fast", "slow"]\n'
    for name, speed in (("fast", 1e9), ("slow", 1e7)):
        lines += f'[[device]]\nname = "{name}"\nmemory = "1GB"\nflops = {speed}\ndisk-bandwidth = 1e9\n'
    (tmp_path / "mine.toml").write_text(lines)
    options = ("--model", "cnn3", "--dataset", "cifar10", *FEDPROPHET, "--budget", "9MB", "--batch-size", "16")
    found = plan(*options, "--fleet", str(tmp_path / "mine.toml"), "--set", "clients-per-round=2")
    trains = {row["what"]: row["fraction"] for row in found["devices"][0]["stages"][0]["trains"]}
    rounds = [sample_clients(range(4), 2, 1, number) for number in range(1, 21)]
    with_slow = sum(3 in asked for asked in rounds) / 20
    assert 0 < with_slow < 1
    assert trains == pytest.approx({"the whole model": with_slow, "conv1": 1 - with_slow})


# ---- what it costs

COST = """
import resource, sys
from piecework.planning.step_cost import piece_cost
from piecework.training.sgd import TrainingConfig
from piecework.models.zoo import build_blueprint
from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.training.settings import Settings
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
one = build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8))
piece_cost(one, (0,), "exits.0", TrainingConfig(0.1, 0.9, 0.0, 2, 1))
before = peak()
for strategy in ("fedepth",):
    settings = Settings.from_run_config({"model": "resnet18", "strategy": strategy, "training.batch-size": 32, "clients": 20})
    plan = make_plan(settings, ask(settings, input_shape="3x224x224", classes=256))
print(plan["parameters"], peak() - before, "sklearn" in sys.modules, "torchvision" in sys.modules)
"""


@pytest.mark.slow
def test_a_plan_allocates_no_weights() -> None:
    done = subprocess.run([sys.executable, "-c", COST], cwd=ROOT, capture_output=True, text=True, check=True)
    parameters, mebibytes, *others = done.stdout.split()
    assert parameters == "11307840"  # 45 MB, and a step of it takes 0.8 GB
    assert float(mebibytes) < 60
    assert others == ["False", "False"]


# ---- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategy", "guess"], "unknown strategy 'guess': known are allsmall"),
        (["--model", "guess"], "model = 'guess' is not known: use one of cnn3"),
        (["--fleet", "guess"], "unknown fleet 'guess'; there are"),
        (["--memory-model", "guess"], "setting memory.model = 'guess'"),
        (
            ["--input-shape", "3x32", "--classes", "10"],
            "--input-shape '3x32': expected channels, height and width as 3x224x224",
        ),
        (["--input-shape", "3x32x32"], "--input-shape 3x32x32 needs the number of classes beside it"),
        (["--classes", "5"], "--classes 5 belongs to --input-shape"),
        (["--precision", "int8"], "--precision int8: expected one of float32, bfloat16"),
        (["--precision", "bfloat16", "--memory-model", "prism"], "memory.model prism knows float32 only"),
        (["--input-shape", "3x32x32", "--classes", "10", "--dataset", "cifar10"], "give one of them"),
        (["--suggest", "--picture", "a.svg"], "--suggest makes several"),
        (["--suggest", "--device", "board-b"], "--device board-b: --suggest shows how the poorest device could"),
        (["--model", "deit-tiny", "--strategy", "fedavg", "--memory-model", "prism"], "memory.model prism counts conv"),
        (["--budget", "lots"], "--budget lots: expected bytes as 60MB"),
        (
            ["--model", "lstm-imdb", "--dataset", "cifar10"],
            "lstm-imdb reads tokens: expected an input shape of (length,)",
        ),
        (["--model", "lstm-imdb", "--attack-steps", "3"], "attacks change pixels of images"),
        (["--model", "vgg16", *FEDPROPHET, "--budget", "10MB"], "atom 'conv6' needs"),
        (["--set", "architecture.options=stem"], "'stem' is not NAME=VALUE"),
        (["--set", "architecture.options=width=2"], "width is no option of one model: it is architecture.width"),
        (["--set", "architecture.options=name=mine"], "name is no option of one model: it is model"),
        (["--set", "architecture.options=stem=cifar"], "convnet has no option 'stem'"),
        (
            ["--strategy", "fedprophet", "--set", "evaluation.mode=personal"],
            "evaluation.mode = 'personal': fedprophet contr",
        ),
        (["--picture", "plan.jpg"], "must end in .svg, .png or .pdf"),
        (["--picture", "no-folder/plan.svg"], "there is no folder no-folder"),
    ],
)
def test_bad_input_is_named(options, message) -> None:
    assert message in refused(*options)


def test_with_json_a_refusal_is_an_object() -> None:
    done = CliRunner().invoke(app, ["plan", "--json", "--budget", "lots"])
    assert done.exit_code == 2
    assert list(json.loads(done.stdout)) == ["reason"]


def test_one_client_of_many_that_cannot_train_is_not_rounded_away() -> None:
    assert participation([{"participation": 299 / 300}]) == ">99%"
    assert participation([{"participation": 1 / 300}, {"participation": 1.0}]) == "<1% 100%"
