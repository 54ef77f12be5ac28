"""A Ray cluster of three containers: the same model as in one process, with a worker killed and data on the head alone.

python -m pytest -m docker tests/engines/test_docker_cluster.py

Needs what test_docker.py needs.
"""

import json
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docker_fleet import ROOT, Containers, docker, missing, wait_for

pytestmark = [pytest.mark.docker, pytest.mark.skipif(bool(missing()), reason=missing())]
RUN = ("piecework", "run", "--dataset", "npz:few.npz", "--strategy", "spafl", "--fleet", "unlimited", "--nodes", "6")
SAME = """
import sys
from safetensors.numpy import load_file
one, other = (load_file(f"/runs/{name}/model.safetensors") for name in sys.argv[1:])
assert one.keys() == other.keys()
assert all((one[key] == other[key]).all() for key in one)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Containers]:
    """A head and two workers; the head alone has the data."""
    draw = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="piecework-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        parts = {"train": 200, "test": 40}
        images = {f"x_{name}": draw.integers(0, 255, (size, 8, 8, 1), np.uint8) for name, size in parts.items()}
        labels = {f"y_{name}": np.arange(size) % 4 for name, size in parts.items()}
        np.savez(Path(folder) / "few.npz", **images, **labels)
        own = {"PIECEWORK_CLUSTER_IMAGE": "piecework-cluster:tests", "PIECEWORK_HEAD_DATA": folder}
        own["RAY_AUTH_TOKEN"] = uuid.uuid4().hex * 2
        files = [ROOT / "docker-compose.cluster.yml"]
        containers = Containers(f"piecework{uuid.uuid4().hex[:8]}", files, os.environ | own, 0)
        containers.call("build", "head")
        try:
            containers.call("up", "-d")
            wait_for("three nodes", lambda: nodes(containers) == 3)
            yield containers
        finally:
            containers.call("down", "--volumes", "--timeout", "5")


def nodes(cluster: Containers) -> int:
    done = subprocess.run(
        ["docker", "exec", cluster.id("head"), "ray", "status"], capture_output=True, text=True, check=False
    )
    return done.stdout.split("Pending:")[0].count(" node_")


def trained(cluster: Containers, name: str, *options: str) -> None:
    docker("exec", cluster.id("head"), *RUN, *options, f"--set=run-name={name}")


def records(cluster: Containers, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in cluster.read(f"/runs/{name}/rounds.jsonl", "head").splitlines()]


def test_states_and_data_travel_and_the_model_is_the_same(cluster: Containers) -> None:
    trained(cluster, "one", "--rounds=3")
    trained(cluster, "three", "--rounds=3", "--engine=ray", "--ray-address=auto")
    docker("exec", cluster.id("head"), "python", "-c", SAME, "one", "three")


def test_a_node_is_lost_in_mid_round(cluster: Containers) -> None:
    command = ["docker", "exec", cluster.id("head"), *RUN, "--engine=ray", "--ray-address=auto"]
    command += ["--rounds=4", "--set=run-name=lost"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        wait_for("round 1", lambda: run.poll() is not None or records(cluster, "lost"))
        docker("kill", cluster.call("ps", "-q", "worker").splitlines()[-1])
        output, _ = run.communicate()
    assert run.returncode == 0, output
    found = records(cluster, "lost")
    assert [record["round"] for record in found] == [1, 2, 3, 4]
    assert all(record["answered"] == len(record["clients"]) for record in found)
