"""Units and docs/howto/boards.md: what they must say, and that Flower, our command line and systemd take them."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from flwr.common.config import parse_config_args

from piecework.cli import app

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
NAMES = ("piecework-supernode", "piecework-superlink", "piecework-superexec")


def unit(name: str) -> configparser.ConfigParser:
    """A unit; of a directive that is there several times, the last."""
    parsed = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=", comment_prefixes="#")
    parsed.optionxform = str  # type: ignore[assignment]
    parsed.read_string((UNITS / f"{name}.service").read_text(encoding="utf-8"))
    return parsed


def example() -> dict[str, str]:
    """The environment file, quotes removed as systemd does."""
    text = (UNITS / "piecework.env.example").read_text(encoding="utf-8")
    return {key: "".join(shlex.split(value)) for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)}


def command(name: str) -> list[str]:
    """What the unit starts with the example's environment: ${X} is one argument, whatever is in it."""
    line = unit(name)["Service"]["ExecStart"].replace("\\\n", " ")
    return [re.sub(r"\$\{(\w+)\}", lambda found: example()[found[1]], word) for word in line.split()]


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_restarts_what_ends_and_may_write_its_state_only(name: str) -> None:
    parsed, text = unit(name), (UNITS / f"{name}.service").read_text(encoding="utf-8")
    service = parsed["Service"]
    assert (service["Restart"], service["KillMode"], parsed["Unit"]["StartLimitIntervalSec"]) == (
        "always", "control-group", "0"
    )  # fmt: skip
    assert service["User"] == service["Group"] == service["StateDirectory"] == "piecework"
    assert service["EnvironmentFile"] == "/etc/piecework/piecework.env"
    assert (service["ProtectSystem"], service["ReadWritePaths"]) == ("strict", "/var/lib/piecework")
    for directive in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictSUIDSGID"):
        assert service[directive] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    assert "\nMemoryDenyWriteExecute" not in text  # torch compiles kernels
    for variable in ("TELEMETRY_ENABLED=0", "DISABLE_UPDATE_CHECK=1", "DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"):
        assert f"FLWR_{variable}" in text
    assert parsed["Install"]["WantedBy"] == "multi-user.target"


def test_the_device_has_a_hard_limit_and_waits_for_its_clock() -> None:
    parsed = unit("piecework-supernode")
    service = parsed["Service"]
    assert (service["MemoryMax"], service["MemorySwapMax"], service["OOMPolicy"]) == ("85%", "0", "continue")
    assert {"network-online.target", "time-sync.target"} <= set(parsed["Unit"]["After"].split())
    assert {"network-online.target", "time-sync.target"} <= set(parsed["Unit"]["Wants"].split())


def test_a_run_outlives_a_restart_of_the_superlink() -> None:
    executor = unit("piecework-superexec")["Unit"]
    assert executor["After"] == "piecework-superlink.service"
    assert not {"Requires", "BindsTo", "PartOf"} & set(executor)
    assert "piecework-superexec.service" in unit("piecework-superlink")["Unit"]["Wants"].split()
    words = command("piecework-superlink")
    assert words[words.index("--isolation") + 1] == "process"
    assert words[words.index("--database") + 1].startswith("/var/lib/piecework/")


def taken_by_flower(name: str, module: str, parser: str) -> Any:
    """The unit's command line as the installed Flower reads it; an option it does not know ends the test."""
    words = command(name)
    program = module.rpartition(".")[2].replace("_", "-")
    if name == "piecework-superlink":
        assert words[:3] == [f"/opt/piecework/bin/{name}", "--control", ""]  # of this machine alone
        words[:3] = [f"/opt/piecework/bin/{program}"]
    if name == "piecework-supernode":  # whose words are Flower's own
        words[0] = words[0].replace(name, program)
    assert words[0] == f"/opt/piecework/bin/{program}"
    return getattr(import_module(module), parser)().parse_args(words[1:])


def test_flower_takes_the_options() -> None:
    node = taken_by_flower("piecework-supernode", "flwr.supernode.cli.flower_supernode", "_parse_args_run_supernode")
    assert (node.isolation, node.superlink) == ("subprocess", "server.example.org:8000")
    assert (node.root_certificates, node.auth_supernode_private_key) == (
        "/etc/piecework/certs/ca.crt", "/etc/piecework/certs/node.key"
    )  # fmt: skip
    config = parse_config_args([node.node_config])
    assert set(config) == {"partition-id", "num-partitions", "device", "data-dir", "state-dir"}
    link = taken_by_flower("piecework-superlink", "flwr.superlink.cli.flower_superlink", "_parse_args_run_superlink")
    assert link.enable_supernode_auth
    executor = taken_by_flower("piecework-superexec", "flwr.supercore.cli.flower_superexec", "_parse_args")
    assert (executor.runtime_api_address, executor.root_certificates) == ("127.0.0.1:8000", link.ssl_ca_certfile)
    assert executor.superexec_auth_secret_file == link.superexec_auth_secret_file
    assert not any(arguments.insecure for arguments in (node, link, executor))


def test_the_commands_of_the_page_are_taken() -> None:
    text = (ROOT / "docs" / "howto" / "boards.md").read_text(encoding="utf-8").replace("\\\n", " ")
    # in blocks and, with options, in sentences
    lines = re.findall(r"^    .*?\bpiecework ([a-z].*)$", text, re.MULTILINE) + re.findall(
        r"`piecework ([^`]* --[^`]*)`", text
    )
    commands = typer.main.get_command(app)
    assert isinstance(commands, click.Group)
    taken = set()
    for line in lines:
        name, *options = shlex.split(line, comments=True)
        if name in commands.commands:
            commands.commands[name].make_context(name, list(options))  # an unknown option ends the test
            taken.add(name)
    assert taken == {"profile", "export-data", "own-data", "certs", "register", "run", "plan", "export"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_files(tmp_path: Path) -> None:
    installed = {
        "piecework-superlink": f"{Path(sys.executable).parent}/piecework",
        "piecework-supernode": f"{Path(sys.executable).parent}/piecework",
        "flower-": f"{Path(sys.executable).parent}/flower-",
        "piecework-health": f"{ROOT}/deploy/piecework-health",
    }
    files = [str(tmp_path / file.name) for file in UNITS.iterdir() if file.suffix in (".service", ".timer")]
    assert len(files) == len(NAMES) + 4
    for file in files:
        text = (UNITS / Path(file).name).read_text(encoding="utf-8")
        for program, here in installed.items():
            text = text.replace(f"/opt/piecework/bin/{program}", here)
        Path(file).write_text(text, encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if "piecework" in line]
    assert (done.returncode, told) == (0, [])
