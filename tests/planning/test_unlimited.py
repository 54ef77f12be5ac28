"""A fleet without limits of memory: what fits on it, what records and tables say of it."""

import json
from pathlib import Path

import pytest
from helpers import TRIO, clients_of, fleet_json, model_of, run_local, same
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.options import settings_from
from piecework.deploy.compose import places
from piecework.device_profiles.fleet import device_state, load_fleet
from piecework.device_profiles.fleet_file import FleetError
from piecework.device_profiles.profile import UNLIMITED, format_bytes, is_limit, is_unlimited
from piecework.report import display
from piecework.report.run_page import memory_figure
from piecework.server_app.records import RunDir
from piecework.training.settings import SettingsError


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """ExclusiveFL on adversarial examples: a step takes more than a plain one."""
    return run_local(
        tmp_path_factory.mktemp("run"),
        **TRIO | {"strategy": "exclusivefl", "training__adversarial": True, "attack__steps": 1, "fleet": "unlimited"},
        training__local_iterations=1,
        evaluation__attack_steps=1,
        evaluation__attack_examples=10,
    )


def test_unlimited_memory_is_an_integer_that_loses_nothing() -> None:
    fleet = load_fleet("unlimited")
    again = load_fleet(fleet.to_json())
    assert again == fleet
    assert '"memory":"unlimited"' in fleet.to_json()
    state = device_state(fleet, 0, 1, 1, 1, 10**6)
    assert state.budget_bytes == UNLIMITED == int(float(UNLIMITED)) < 2**63 // 2  # twice as much is still an int64
    assert fleet.devices[0].budget(0, loss=0.5) == UNLIMITED


def test_what_is_unlimited_and_what_is_a_limit() -> None:
    assert format_bytes(UNLIMITED) == "unlimited"
    assert is_unlimited(int(0.75**6 * UNLIMITED))  # what a client has left whose process died six times
    assert not is_unlimited(10**15)  # a petabyte
    assert [is_limit(budget) for budget in (0, 1, 10**15, UNLIMITED)] == [False, True, True, False]
    wrong = {"name": "odd", "memory": "endless", "flops": 1e9, "disk-bandwidth": 1e7}
    with pytest.raises(FleetError, match=r'memory = .endless.: not an amount of memory; .*, or "unlimited"'):
        load_fleet(json.dumps({"name": "odd", "assignment": "blocks", "device": [wrong]}))


@pytest.mark.parametrize("options", [["spafl"], ["fedpm"], ["exclusivefl", "--set", "training.adversarial=true"]])
def test_everything_fits(options: list[str]) -> None:
    call = ["plan", "--model", "convnet", "--dataset", "digits", "--nodes", "2", "--strategy", *options, "--fleet"]
    found = {}
    for fleet in ("unlimited", "reference-step"):
        done = CliRunner().invoke(app, [*call, fleet, "--json"])
        assert done.exit_code == 0, done.stderr
        found[fleet] = json.loads(done.stdout)
    wide, narrow = found["unlimited"], found["reference-step"]
    assert (wide["fleet"]["participation"], wide["budget_bytes"]) == (1, UNLIMITED)
    assert narrow["fleet"]["participation"] == 0
    done = CliRunner().invoke(app, [*call, "unlimited"])
    assert "unlimited" in next(line for line in done.stdout.splitlines() if line.startswith("full "))


def test_a_run_has_no_peak_over_an_unlimited_budget(attacked: RunDir) -> None:
    assert [client["status"] for client in clients_of(attacked)] == ["ok"] * 3
    assert {client["budget"] for client in clients_of(attacked)} == {UNLIMITED}
    summary = attacked.summary()
    assert summary is not None
    assert summary["max_peak_over_budget"] is None
    (row,) = display.memory_rows(attacked.rounds())
    assert dict(zip(display.MEMORY_COLUMNS, row, strict=True))["budget"] == "unlimited"
    assert dict(zip(display.MEMORY_COLUMNS, row, strict=True))["of budget"] == "-"


def test_the_picture_of_a_run_is_not_stretched_to_an_unlimited_budget(attacked: RunDir) -> None:
    drawn = [value for trace in memory_figure(attacked.rounds()).data for value in trace.y]
    assert drawn
    assert max(drawn) < 10**9


def test_a_plan_draws_its_pieces(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    call = ["plan", "--model", "convnet", "--dataset", "digits", "--fleet", "unlimited", "--picture", str(picture)]
    assert CliRunner().invoke(app, call).exit_code == 0
    assert "fleet unlimited" in picture.read_text()


def test_federated_averaging_is_as_where_a_step_just_fits(tmp_path: Path) -> None:
    """To the bit, so figures in the documents that were made when `unlimited` meant one step stay."""
    runs = [
        run_local(tmp_path / name, **TRIO | {"strategy": "fedavg", "fleet": name})
        for name in ("unlimited", "reference-step")
    ]
    assert same(*map(model_of, runs))
    assert runs[0].rounds()[0]["accuracy"] == runs[1].rounds()[0]["accuracy"]


def test_a_container_needs_a_limit() -> None:
    settings = settings_from("", ["fleet=unlimited"], nodes=2)
    with pytest.raises(SettingsError, match="the memory of device 'full' is unlimited, and a container is held to"):
        places(settings, 0)


def test_budgets_of_a_mixed_fleet(tmp_path: Path) -> None:
    """The peak over the budget is that of the devices that have a limit."""
    mixed = json.loads(fleet_json(server=10**9, board=10**9))
    mixed["device"][0]["memory"] = "unlimited"
    run = run_local(tmp_path, **TRIO | {"strategy": "fedavg", "fleet": json.dumps(mixed)}, training__local_iterations=1)
    (board,) = [client for client in clients_of(run) if client["device"] == "board"]
    summary = run.summary()
    assert summary is not None
    assert summary["max_peak_over_budget"] == board["measured_peak"] / 10**9
