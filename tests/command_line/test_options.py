"""Options that stand for settings, contradictions between them, misspelt names, and the version."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import piecework
from piecework.cli import app
from piecework.commands.base import SHORTHANDS, with_shorthands
from piecework.commands.options import OPTIONS, connection_to, settings_from
from piecework.device_profiles.names import did_you_mean
from piecework.engines.processes import Connection
from piecework.server_app.records import RunDir
from piecework.training.settings import SettingsError

GIVEN = {
    "strategy": "fedavg",
    "model": "lenet5",
    "dataset": "digits32",
    "fleet": "unlimited",
    "num-rounds": 7,
    "seed": 0,
}


def said(*words: str) -> str:
    """What a command says on stderr, which it has to refuse."""
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 2, done.output
    return " ".join(done.stderr.split())


def test_an_option_is_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(sys.modules["piecework.cli"], "settings_from", lambda *_, named, **__: asked.update(named))
    words = [word for key, value in GIVEN.items() for word in (OPTIONS[key], str(value))]
    CliRunner().invoke(app, ["run", *words])
    assert asked == GIVEN
    assert list(SHORTHANDS) == list(GIVEN)
    named = settings_from("", [], named=GIVEN)
    assert named == settings_from("", [f"{key}={value}" for key, value in GIVEN.items()])
    assert (named.strategy, named.num_rounds, named.seed) == ("fedavg", 7, 0)


@pytest.mark.parametrize("command", ["run", "plan", "compose", "export-data"])
def test_the_commands_with_settings_have_all_of_them(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"]).stdout
    assert all(f" {OPTIONS[key]} " in shown for key in SHORTHANDS)


def test_options_come_where_the_command_has_named() -> None:
    got = {}

    @with_shorthands
    def command(first: str = "", named: dict[str, object] = {}, last: str = "") -> None:  # noqa: B006
        got.update(named)

    command(first="a", last="b", **{f"{key.replace('-', '_')}_": None for key in SHORTHANDS} | {"seed_": 0})
    assert got == {"seed": 0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "fedavg", "--set", "strategy=profl"], "--strategy fedavg contradicts --set strategy=profl"),
        (["--rounds", "3", "--set", "num-rounds=4"], "--rounds 3 contradicts --set num-rounds=4: give one of them"),
        (["--nodes", "3", "--set", "clients=4"], "--nodes 3 contradicts --set clients=4: give one of them"),
        (["--engine", "ray", "--set", "engine=local"], "--engine ray contradicts --set engine=local"),
        (["--seed", "0", "--seeds", "1,2"], "--seeds 1,2 contradicts --seed 0: give one of them"),
        (["--set", "seed=3", "--seeds", "1,2"], "--seeds 1,2 contradicts --set seed=3: give one of them"),
        (
            ["--set", "engine=ray", "--superlink", "host:1", "--insecure"],
            "engine = ray with --superlink: a SuperLink's nodes are real processes",
        ),
    ],
)
def test_contradictions_are_refused(words: list[str], message: str) -> None:
    assert message in said("run", *words)


def test_what_is_said_twice_is_no_contradiction() -> None:
    assert settings_from("", ["seed=4", "strategy=profl"], named={"strategy": "profl", "seed": 4}).seed == 4


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["run", "--strategy", "fedepht"], "fedepth"),
        (["run", "--strategy", "FedAvg"], "fedavg"),
        (["plan", "--model", "resnet-18"], "resnet18"),
        (["run", "--dataset", "cifar-10"], "cifar10"),
        (["run", "--fleet", "bords"], "boards"),
        (["run", "--preset", "fedepth-fmnist-fiar"], "fedepth-fmnist-fair"),
        (["run", "--set", "trainig.lr=0.1"], "training.lr"),
        (["presets", "spalf-digits"], "spafl-digits"),
        (["settings", "fedprohpet"], "fedprophet"),
        (["devices", "containres"], "containers"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(words: list[str], meant: str) -> None:
    assert f"did you mean '{meant}'?" in said(*words)


def test_a_strategy_is_missed_before_its_settings_are() -> None:
    assert "unknown strategy 'fedprophett'" in said("run", "--strategy=fedprophett", "--set=fedprophet.dma=false")


def test_names_that_are_alike() -> None:
    assert did_you_mean("fed_avg", ["fedavg", "fedet"]) == "; did you mean 'fedavg'?"
    assert did_you_mean("guess", ["fedavg", "fedet"]) == ""
    assert did_you_mean("", []) == ""


def test_the_module_is_the_command_and_has_a_version(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"piecework {piecework.__version__}\n"
    call = [sys.executable, "-m", "piecework", "--version"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"piecework {piecework.__version__}\n"


@pytest.mark.parametrize("address", ["host", "host:", ":9093", "host:0", "host:65536", "host:x"])
def test_a_superlink_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(SettingsError, match=f"^--superlink {address}: expected HOST:PORT, with a port from 1 to 65535"):
        connection_to(address, None, insecure=True)


def test_a_run_on_a_superlink_is_resumed_on_one(tmp_path: Path) -> None:
    """Without it, emulated clients with the server's data would go on with a run of boards that have their own."""
    there = settings_from("", [], nodes=2, connection=Connection("host:9093", None))
    assert (there.engine, there.run.superlink) == ("deployment", "host:9093")
    RunDir(tmp_path).create(there)
    resuming = [f"resume-from={tmp_path}"]
    with pytest.raises(SettingsError, match=r"that run had the clients of a SuperLink.* by --superlink host:9093, and"):
        settings_from("", resuming)
    with pytest.raises(SettingsError, match=r"that run had the clients of a SuperLink.* by --superlink host:9093, and"):
        settings_from("", [*resuming, "run.superlink="])  # no way around it
    moved = settings_from("", resuming, connection=Connection("other:9093", None))
    assert moved.run.superlink == "other:9093"
    with pytest.raises(SettingsError, match=r"run\.superlink = 'host:9093': --superlink sets it"):
        settings_from("", ["run.superlink=host:9093"])
    with pytest.raises(SettingsError, match=r"--superlink other:9093 contradicts --set run\.superlink=host:9093"):
        settings_from("", ["run.superlink=host:9093"], connection=Connection("other:9093", None))
    here = settings_from("", [])
    assert here.run.superlink == ""
    RunDir(tmp_path / "here").create(here)
    with pytest.raises(SettingsError, match=r"run\.superlink = 'host:9093': --superlink sets it"):  # it had none
        settings_from("", [f"resume-from={tmp_path / 'here'}", "run.superlink=host:9093"])
