"""The compose files that are generated: what each container may see and use, and that the committed ones are these; torch."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import fleet_json
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.options import settings_from
from piecework.device_profiles.fleet import load_fleet
from piecework.planning.costs import cost_model_for
from piecework.training.setup import blueprint_for, open_dataset

ROOT = Path(__file__).resolve().parents[2]
MB = 10**6


def generated(*options: str) -> str:
    result = CliRunner().invoke(app, ["compose", *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def services(*options: str) -> dict[str, Any]:
    return dict(yaml.safe_load(generated(*options))["services"])


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.tls.yml"])
def test_the_committed_files_are_generated(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if "piecework compose" in line).removeprefix("#")
    assert text == generated(*shlex.split(command)[2:])


def test_a_command_of_several_lines_stays_in_its_comment() -> None:
    """A line feed, and the other line ends of YAML; a control character, which no YAML file may contain."""
    fleet = fleet_json(small=200_000_000).replace(", ", ",\n")
    hostile = "--data", "x\nservices: {evil: {image: evil}}\x85networks: {}\u2028secrets: {}\x1b"
    for tls in ([], ["--tls"]):
        text = generated("--fleet", fleet, "--nodes", "2", *hostile, *tls)
        assert {"services"} <= yaml.safe_load(text).keys() <= {"services", "volumes", "networks", "x-piecework"}
        assert set(yaml.safe_load(text)["services"]) >= {"client-1", "server"}
        head = text[: text.index("\n\n")].splitlines()
        assert all(line.startswith("#") for line in head)
        assert "#   services: {evil: {image: evil}}" in head
        assert any(line.startswith(r"#   secrets: {}\x1b'") for line in head)


def test_a_client_has_its_device_and_nothing_more() -> None:
    found = services("--preset", "fedepth-containers", "--nodes", "6", "--floor", "300MB", "--data", "/exported")
    fleet = {device.name: device for device in load_fleet("containers").devices}
    for i, name in enumerate(["small", "medium", "large"] * 2):
        client, node = found[f"client-{i}"], found[f"node-{i}"]
        assert client["mem_limit"] == client["memswap_limit"] == (fleet[name].memory_bytes or 0) + 300 * MB
        assert client["cpus"] == fleet[name].cpus
        assert f'partition-id={i} num-partitions=6 device="{name}"' in shlex.split(node["command"])[-1]
        assert shlex.split(client["command"])[-1] == f"node-{i}:9094"
        folders = [volume["source"] for volume in client["volumes"] if isinstance(volume, dict)]
        assert folders == [f"${{PIECEWORK_EXPORT:-/exported}}/node-{i}"]
        assert "volumes" not in node
    for service in found.values():
        for volume in service.get("volumes", []):
            assert isinstance(volume, str) or volume["read_only"]


def test_a_client_measures_what_its_container_leaves() -> None:
    found = services("--preset", "fedepth-containers", "--nodes", "2", "--limit", "512MB")
    for i in range(2):
        client = found[f"client-{i}"]
        assert client["mem_limit"] == client["memswap_limit"] == 512 * MB
        assert client["cpus"] == 1
        config = 'num-partitions=2 device="auto" data-dir="/data" state-dir="/store"'
        assert shlex.split(found[f"node-{i}"]["command"])[-1] == f"partition-id={i} {config}"


def test_every_container_is_locked_down() -> None:
    for name, service in services("--preset", "fedepth-containers", "--nodes", "6").items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == ("no" if name == "piecework" else "unless-stopped")
        assert service["user"] == "${PIECEWORK_UID:-10001}:0"
        assert ("ports" in service) == (name == "superlink")
        assert ("healthcheck" in service) == (name == "superlink" or name.startswith("node-"))
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_only_the_server_and_the_command_line_are_where_runs_are_started() -> None:
    """Nodes share no network with them but the SuperLink's other one, where it answers the Fleet API alone."""
    found = services("--preset", "fedepth-containers", "--nodes", "2")
    assert found["superlink"]["networks"] == {"control": {"aliases": ["control.superlink"]}, "fleet": {}}
    for name, service in found.items():
        if name != "superlink":
            assert service["networks"] == ["control" if name in ("server", "piecework") else "fleet"], name
    for options in ([], ["--tls"]):
        link = services("--preset", "fedepth-containers", "--nodes", "2", *options)["superlink"]
        assert shlex.split(link["command"])[:3] == ["piecework-superlink", "--control", "network-of:control.superlink"]


def test_a_ratio_is_of_the_reference_step() -> None:
    found = services("--nodes", "2", "--floor", "100MB", "--fleet", "demo")
    settings = settings_from("", [], nodes=2, named={"fleet": "demo"})
    blueprint = blueprint_for(settings, open_dataset(settings.dataset, settings.data_dir))
    reference = cost_model_for(settings, blueprint).reference_bytes
    ratios = [device.memory_ratio for device in load_fleet("demo").devices]
    limits = [found[f"client-{i}"]["mem_limit"] - 100 * MB for i in range(2)]
    assert all(limit in {int((ratio or 0) * reference) for ratio in ratios} for limit in limits)


def test_clients_with_memories_of_their_own_are_not_named() -> None:
    """The name of such a fleet's one device stands for its largest memory."""
    rows = [{"name": "one", "flops": 1e9, "bandwidth": 1e6, "disk-bandwidth": 1e7}]
    fleet = {
        "name": "own",
        "description": "x",
        "assignment": "memories",
        "memories": [64 * MB, 96 * MB],
        "device": rows,
    }
    found = services("--nodes", "2", "--floor", "1MB", "--fleet", json.dumps(fleet))
    assert [found[f"client-{i}"]["mem_limit"] for i in range(2)] == [65 * MB, 97 * MB]
    assert "device" not in found["node-0"]["command"]
    assert 'device="one"' in found["node-1"]["command"]


def test_the_overlay_changes_only_what_security_needs() -> None:
    """Every service is one of the base; insecure mode is nowhere left; secrets go where they are needed and nowhere else."""
    base, tls = (services("--preset", "fedepth-containers", "--nodes", "3", *more) for more in ([], ["--tls"]))
    assert tls.keys() == base.keys()
    assert "--insecure" not in json.dumps(tls)
    for name, service in tls.items():
        files = {volume["target"].rsplit("/", 1)[-1] for volume in service["volumes"]}
        used = set(re.findall(r"/certs/([\w.-]+)", service.get("command", "")))
        public = {file for file in files if file.endswith(".pub")}
        assert files - public == used | {"ca.crt"}
        assert not public or name == "piecework"
        assert "ca.key" not in files
        for i in range(3):
            assert name.endswith(f"-{i}") or not any(file.startswith(f"node-{i}.") for file in files - public)
    config = {name: shlex.split(found["node-0"]["command"])[-1] for name, found in (("base", base), ("tls", tls))}
    assert config["base"] == config["tls"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "memory.model=fedepth"], "memory.model = 'fedepth'"),
        (["--floor", "much"], "--floor much"),
        (["--limit", "much"], "--limit much"),
        (["--limit", "320MB"], "--limit 320 MB"),
        (["--limit", "1GB", "--floor", "1MB"], "--floor 1MB --limit 1GB: give one of them"),
        (["--limit", "1GB", "--set", "memory.model=fedepth"], "memory.model = 'fedepth'"),
        (["--fleet", "nowhere"], "nowhere"),
        (["--fleet", fleet_json(**{"a'b": 64 * MB})], "a'b"),
    ],
)
def test_mistakes_are_reported(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["compose", "--nodes", "2", *options])
    assert result.exit_code == 2
    assert said in result.output


def test_a_dollar_in_a_path_is_not_a_variable() -> None:
    found = services("--preset", "fedepth-containers", "--nodes", "6", "--data", "/a$b")
    assert found["server"]["volumes"][1]["source"] == "${PIECEWORK_EXPORT:-/a$$b}/server"


# ---- the image's torch


def torch_step() -> str:
    """The shell command of the Dockerfile that installs torch, up to where its build is checked."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    (step,) = re.findall(r"^RUN (if .*?; +fi) +&& /opt/piecework/bin/python -c", text, re.MULTILINE)
    return str(step)


def test_uv_knows_where_the_cpu_build_is(tmp_path: Path) -> None:
    """The Dockerfile's command as uv reads it, without a network: its log names the index it would ask."""
    (found,) = re.findall(r"/opt/uv/bin/uv (pip install .*?);", torch_step())
    words = shlex.split(
        found.replace("/opt/piecework/bin/python", sys.executable).replace("${PIECEWORK_TORCH}", "torch>=2.11")
    )
    call = [sys.executable, "-m", "uv", *words, "--reinstall", "--dry-run", "--offline", "--verbose"]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr  # 2: uv does not know these options
    assert re.search(r"\S+/whl/cpu/torch/", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("options", "uv_ends_with", "called"),
    [
        ("", 0, ["pip install --quiet --target /opt/uv uv", "uv"]),
        ("", 1, ["pip install --quiet --target /opt/uv uv", "uv", "pip --python PYTHON install --no-deps torch>=2.11"]),
        ("--index-url URL", 0, ["pip --python PYTHON install --index-url URL --no-deps torch>=2.11"]),
    ],
)
def test_who_installs_torch(tmp_path: Path, options: str, uv_ends_with: int, called: list[str]) -> None:
    """By stand-ins for pip and uv: uv where nothing is said of wheels, pip where it is, or where uv finds no index."""
    for name, status in (("pip", 0), ("uv", uv_ends_with)):
        words = "uv" if name == "uv" else 'pip "$*"'
        (tmp_path / name).write_text(f"#!/bin/sh\necho {words} >> {tmp_path}/called\nexit {status}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    step = torch_step().replace("/opt/uv/bin/uv", str(tmp_path / "uv")).replace("/opt/piecework/bin/python", "PYTHON")
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PIECEWORK_TORCH": "torch>=2.11",
        "PIP_OPTIONS": options,
    }
    subprocess.run(["sh", "-c", step], check=True, env=environment)
    assert (tmp_path / "called").read_text(encoding="utf-8").splitlines() == called


def test_the_nodes_of_a_ray_cluster_share_nothing() -> None:
    """No folder or volume is in two of them, and none starts without a token."""
    found = yaml.safe_load((ROOT / "docker-compose.cluster.yml").read_text("utf-8"))["services"]
    head, worker = found["head"], found["worker"]
    assert worker["volumes"] == ["/store"]  # of each container's own
    assert worker["scale"] == "${PIECEWORK_WORKERS:-2}"
    for node in (head, worker):
        assert node["mem_limit"] == node["memswap_limit"] == "${PIECEWORK_NODE_MEMORY:-2gb}"
        assert node["environment"]["RAY_AUTH_MODE"] == "token"
        assert node["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
        assert node["read_only"]
