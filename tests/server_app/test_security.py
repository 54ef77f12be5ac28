"""Who is refused: real SuperNodes and executors that a SuperLink must not serve, and an update that must not get in."""

import json
import re
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.date import now
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode import node_auth_http_interceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from helpers import TRIO, clients_of, model_of, run_local
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.options import settings_from
from piecework.deploy import certs, registration
from piecework.engines.launch import launch
from piecework.engines.processes import Connection, FlowerHome, flower_home, free_ports, stop
from piecework.federation.errors import RunAbortedError
from piecework.server_app.records import RunDir

DEADLINE = 60.0
ASKED = [
    "strategy=fedavg",
    "fleet=unlimited",
    "training.local-iterations=2",
    "training.lr-rounds=2",
    "run-name=run",
    "workers=1",
]


@dataclass
class Federation:
    """A SuperLink with TLS that lets in registered nodes only; `port_of` gives the Runtime API of the good node."""

    home: FlowerHome
    keys: Path
    strangers: Path
    port: int
    node_port: int

    @property
    def connection(self) -> Connection:
        return Connection(f"localhost:{self.port}", self.keys / "ca.crt")

    def node(self, name: str, *options: str, port: int = 0) -> None:
        """Start a SuperNode as a user would."""
        config = "partition-id=0 num-partitions=1"
        served = ["--host", "127.0.0.1", "--port", str(port or free_ports(1)[0]), "--isolation", "process"]
        call = ["flower-supernode", "--superlink", self.connection.address, "--node-config", config]
        self.home.start(name, [*call, *served, *options])

    def executor(self, name: str, port: int, *options: str) -> None:
        self.home.start(name, ["flower-superexec", "--runtime-api-address", f"localhost:{port}", *self.trust, *options])

    @property
    def trust(self) -> list[str]:
        return ["--root-certificates", str(self.keys / "ca.crt")]

    def key(self, node: str) -> list[str]:
        return ["--auth-supernode-private-key", str(self.keys / "nodes" / f"{node}.key")]

    def secret(self, file: str) -> list[str]:
        return ["--superexec-auth-secret-file", str(self.keys / file)]

    def child(self, name: str) -> "subprocess.Popen[bytes]":
        return self.home.processes[name][1]

    def says(self, name: str) -> str:
        return (self.home.path / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def until(self, true: Callable[[], bool], name: str) -> None:
        """Look again and again; after a minute fail with the end of the process's log."""
        deadline = time.monotonic() + DEADLINE
        while not true():
            assert time.monotonic() < deadline, self.says(name)[-3000:]
            time.sleep(0.05)

    def ends(self, name: str) -> int:
        """Wait until a process has ended by itself; its exit code."""
        self.until(lambda: self.child(name).poll() is not None, name)
        return self.child(name).wait()

    def registered(self) -> dict[str, registration.Registered]:
        """The SuperLink's own view of our nodes, all keys of the folder registered."""
        nodes = registration.register(self.keys, self.connection.address, self.keys / "ca.crt")
        return {node.node: node for node in nodes}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """The SuperLink, two registered nodes, one of them online, and a stranger who tries to get in."""
    folder = tmp_path_factory.mktemp("security")
    keys, strangers = folder / "keys", folder / "strangers"
    certs.issue([], 2, keys)
    certs.issue([], 1, strangers)
    port, node_port = free_ports(2)
    with flower_home(Connection(f"localhost:{port}", keys / "ca.crt")) as home:
        it = Federation(home, keys, strangers, port, node_port)
        try:
            start(it)
            yield it
        finally:
            for _, child in home.processes.values():
                stop(child)


def tls(stem: Path, key: str) -> list[str]:
    """How SuperLink and SuperNode serve their APIs."""
    authority = next(folder for folder in stem.parents if (folder / "ca.crt").exists()) / "ca.crt"
    files = ["--ssl-certfile", f"{stem}.crt", "--ssl-keyfile", f"{stem}{key}"]
    return [*files, "--ssl-ca-certfile", str(authority)]


def start(it: Federation) -> None:
    link = ["flower-superlink", "--host", "127.0.0.1", "--port", str(it.port), "--isolation", "process"]
    link += ["--enable-supernode-auth", "--database", str(it.home.path / "state.db"), *it.secret("executor.secret")]
    it.home.start("superlink", [*link, *tls(it.keys / "server", ".key")])
    it.until(lambda: healthy(it.port, it.keys / "ca.crt"), "superlink")
    assert {node.done for node in it.registered().values()} == {"registered"}
    serves = [*tls(it.keys / "nodes" / "node-0", ".tls.key"), *it.secret("nodes/node-0.secret")]
    it.node("node-0", *it.trust, *it.key("node-0"), *serves, port=it.node_port)
    it.until(lambda: it.registered()["node-0"].state == "online", "node-0")
    it.node("stranger", *it.trust, "--auth-supernode-private-key", str(it.strangers / "nodes" / "node-0.key"))


def healthy(port: int, authority: Path) -> bool:
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with urllib.request.urlopen(f"https://localhost:{port}/health", timeout=2, context=context):
            return True
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.slow
@pytest.mark.processes
def test_a_stranger_is_refused(federation: Federation) -> None:
    """A real SuperNode whose key was never registered."""
    assert federation.ends("stranger") == 1
    assert "[code: 2004] Failed to activate SuperNode" in federation.says("stranger")
    assert "SuperNode ID" not in federation.says("stranger")


def fleet_client(federation: Federation, key_file: Path | None, authority: Path | None) -> FleetHttpClient:
    """What a SuperNode speaks with: with the key of our choice or none, by TLS if there is an authority to trust."""
    interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperNode")]
    if key_file is not None:
        key = private_key(key_file)
        interceptors.append(node_auth_http_interceptor.NodeAuthHttpInterceptor(key, key.public_key()))
    trusted = authority.read_bytes() if authority else None
    return FleetHttpClient.from_server_address(
        federation.connection.address, authority is None, trusted, interceptors=interceptors
    )


def private_key(file: Path) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key(file.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


# Whose key a client signs with, whose authority it trusts, and how it fails: a pattern, because a server that ends a connection
# before all was read resets it.
REFUSED: dict[str, tuple[str | None, str | None, str]] = {
    "no-tls": ("keys", None, "disconnected without sending a response|reset by peer"),
    "unknown-authority": ("keys", "strangers", "CERTIFICATE_VERIFY_FAILED"),
    "no-key": (None, "keys", "Invalid SuperNode authentication"),
    "a-key-of-its-own": ("strangers", "keys", "2001"),
    "key-of-a-node-online": ("keys", "keys", "2004"),
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", REFUSED)
def test_a_node_is_refused(federation: Federation, name: str) -> None:
    """A program that speaks as a SuperNode does when it starts; one with a key of its own asks to be registered first."""
    signs, trusts, reason = REFUSED[name]
    folders = {"keys": federation.keys, "strangers": federation.strangers}
    key_file = folders[signs or "keys"] / "nodes" / "node-0.key"
    authority = folders[trusts] / "ca.crt" if trusts else None
    client = fleet_client(federation, key_file if signs else None, authority)
    public = public_key_to_bytes(private_key(key_file).public_key())
    with pytest.raises(httpx.HTTPError) as refusal:
        if signs == "strangers":
            client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
        client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30))
    said = refusal.value.response.text if isinstance(refusal.value, httpx.HTTPStatusError) else str(refusal.value)
    assert re.search(reason, said)
    client.close()


@pytest.mark.slow
@pytest.mark.processes
def test_a_revoked_node_is_thrown_out_for_good(federation: Federation) -> None:
    federation.node("node-1", *federation.trust, *federation.key("node-1"))
    federation.until(lambda: federation.registered()["node-1"].state == "online", "node-1")
    call = ["register", str(federation.keys), "--superlink", federation.connection.address, "--json"]
    done = CliRunner().invoke(app, [*call, "--revoke", "node-1"])
    ((node,),) = [json.loads(done.stdout.splitlines()[-1])["nodes"]]
    assert (node["node"], node["done"], node["state"]) == ("node-1", "revoked", "revoked")
    federation.ends("node-1")
    federation.node("node-1-again", *federation.trust, *federation.key("node-1"))
    again = json.loads(CliRunner().invoke(app, call).stdout.splitlines()[-1])["nodes"]
    assert [(n["done"], n["state"]) for n in again] == [("kept", "online"), ("kept", "revoked")]
    assert "never accepted again" in CliRunner().invoke(app, call[:-1]).stdout
    assert federation.ends("node-1-again") == 1
    assert "[code: 2004] Failed to activate SuperNode" in federation.says("node-1-again")


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.processes
def test_nobody_pulls_for_another_node(federation: Federation) -> None:
    """A stranger's own program, which skips what a SuperNode asks first and names the id of a node that is online."""
    node = Node(node_id=federation.registered()["node-0"].node_id)
    client = fleet_client(federation, federation.strangers / "nodes" / "node-0.key", federation.keys / "ca.crt")
    with pytest.raises(httpx.HTTPStatusError) as refusal:
        client.PullMessages(PullMessagesRequest(node=node))
    assert refusal.value.response.status_code == 401
    client.close()


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("ahead", "heard"), [(3.0, True), (15.0, False), (-290.0, True), (-306.0, False)])
def test_clocks(federation: Federation, monkeypatch: pytest.MonkeyPatch, ahead: float, heard: bool) -> None:
    """A board's clock may be 5 s ahead of the SuperLink's, or 305 s behind it."""
    monkeypatch.setattr(node_auth_http_interceptor, "now", lambda: now() + timedelta(seconds=ahead))
    node = Node(node_id=federation.registered()["node-0"].node_id)
    client = fleet_client(federation, federation.keys / "nodes" / "node-0.key", federation.keys / "ca.crt")
    beat = SendNodeHeartbeatRequest(node=node, heartbeat_interval=30)
    if heard:
        assert client.SendNodeHeartbeat(beat).success
    else:
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            client.SendNodeHeartbeat(beat)
        assert refusal.value.response.status_code == 401
    client.close()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("serves", "options"),
    [("superlink", []), ("superlink", ["nodes/node-0.secret"]), ("node-0", ["executor.secret"])],
    ids=["without-secret", "a-nodes-at-the-superlink", "the-servers-at-a-node"],
)
def test_an_executor_without_the_secret_gets_no_task(federation: Federation, serves: str, options: list[str]) -> None:
    name = f"executor-{serves}-{len(options)}"
    port = federation.port if serves == "superlink" else federation.node_port
    refusal = '"POST /v1/runtime/acquire-task HTTP/1.1" 401' if serves == "superlink" else "authentication failed"
    before = federation.says(serves).count(refusal)
    federation.executor(name, port, *(word for file in options for word in federation.secret(file)))
    federation.ends(name)
    assert federation.says(serves).count(refusal) == before + 1


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_reaches_the_registered_node_alone(federation: Federation, tmp_path: Path) -> None:
    """Everybody else is still there, or was refused. And the round is the same in processes as in this one."""
    federation.executor("server-app", federation.port, *federation.secret("executor.secret"))
    federation.executor("client-app", federation.node_port, *federation.secret("nodes/node-0.secret"))
    here = settings_from("", ASKED, nodes=1, output_dir=str(tmp_path / "here")).with_values({"num-rounds": 2})
    local = RunDir(tmp_path / "here" / "run")
    launch(here.with_values({"num-rounds": 1}), local, lambda record: None)
    run_dir = RunDir(Path(shutil.copytree(local.path, tmp_path / "there" / "run")))
    resumed = here.with_values({"resume-from": str(local.path)})
    launch(resumed, local, lambda record: None)
    there = resumed.with_values({"resume-from": str(run_dir.path), "engine": "deployment"})
    summary = launch(there, run_dir, lambda record: None, connection=federation.connection)
    assert summary["status"] == "completed"
    (record,) = run_dir.rounds()[1:]
    assert [(client["client"], client["status"]) for client in record["clients"]] == [(0, "ok")]
    one, other = model_of(local), model_of(run_dir)
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], rtol=0, atol=1e-6)
    assert federation.says("node-0").count("Receiving: train message") == 1
    ours = {"node-0", "superlink", "server-app", "client-app"}
    others = {path.stem for path in federation.home.path.glob("*.log")} - ours
    assert "stranger" in others
    for name in others:
        assert "Receiving" not in federation.says(name), name
    listed = federation.home.command("supernode", "list", "piecework")["nodes"]
    online = [int(node["node-id"]) for node in listed if node["status"] == "online"]
    nodes = federation.registered()
    assert len(listed) == len(nodes) == 2
    assert nodes["node-0"].node_id in online
    assert nodes["node-1"].state in ("registered", "revoked")


def test_what_a_diverged_client_sends_is_dropped(tmp_path: Path) -> None:
    """Clients train until their weights are no numbers."""
    with pytest.raises(RunAbortedError):
        run_local(tmp_path, strategy="fedavg", training__lr=1e30, **TRIO)
    for client in clients_of(RunDir(tmp_path / "run")):
        assert client["status"] == "rejected"
        assert "nan" in client["reason"]
