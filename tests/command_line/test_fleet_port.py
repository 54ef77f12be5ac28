"""Who reaches which of a SuperLink's APIs: the Fleet API everybody, the others this machine and whom `--control` names."""

import asyncio
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import click
import httpx
import psutil
import pytest
from flwr.cli.utils import flwr_cli_exc_handler

from piecework.deploy.fleet_port import Gate, networks_of, own_networks
from piecework.deploy.registration import detail
from piecework.engines.processes import free_ports

ABROAD = "198.51.100.7"  # reserved for documentation
FLEET = ["/v1/fleet/pull-messages", "/health"]
OTHERS = [
    "/v1/control/start-run",
    "/v1/runtime/acquire-task",
    "/v1/fleetx",
    "/v1/fleet",
    "//v1/control/start-run",
    "/docs",
    "*",
    "",
]


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def answers(path: str, peer: str | None, *control: str, ours: str = "192.0.2.1", kind: str = "http") -> Any:
    """What the gate sends first to a request from `peer`."""
    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "client": peer and (peer, 1234), "server": (ours, 8000)}
    asyncio.run(Gate(app, [ip_network(network) for network in control])(scope, None, send))
    return sent[0].get("status", sent[0]["type"])


@pytest.mark.parametrize("path", FLEET)
@pytest.mark.parametrize("peer", [ABROAD, "2001:db8::7", "127.0.0.1", None, "unknown"])
def test_everybody_reaches_the_fleet_api(path: str, peer: str | None) -> None:
    assert answers(path, peer) == 200


@pytest.mark.parametrize("path", OTHERS)
@pytest.mark.parametrize(
    ("peer", "status"),
    [
        (ABROAD, 403),
        ("2001:db8::7", 403),
        (f"::ffff:{ABROAD}", 403),
        (None, 403),
        ("unknown", 403),
        ("127.0.0.1", 200),
        ("127.0.0.2", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("192.0.2.1", 200),  # the machine, by the address at which it was called
        ("10.8.3.9", 200),
        ("::ffff:10.8.3.9", 200),
        ("fe80::9%eth0", 200),
        ("10.9.3.9", 403),
    ],
)
def test_the_other_apis_answer_this_machine_and_who_is_named(path: str, peer: str | None, status: int) -> None:
    assert answers(path, peer, "10.8.0.0/16", "fe80::/10") == status


def test_a_websocket_of_a_stranger_is_closed() -> None:
    assert answers("/v1/control/start-run", ABROAD, kind="websocket") == "websocket.close"


def test_an_address_names_itself_and_its_network_only_if_told_so() -> None:
    """The address of the server itself, in CONTROL of the units, does not admit its neighbours."""
    assert networks_of("127.0.0.1") == {ip_network("127.0.0.1")}
    assert networks_of("network-of:127.0.0.1") == {ip_network("127.0.0.0/8")}
    assert networks_of(ABROAD) == {ip_network(ABROAD)}
    assert networks_of("10.8.0.0/16") == {ip_network("10.8.0.0/16")}
    for address, network in own_networks().items():
        assert networks_of(str(address)) == {ip_network(address)}
        assert networks_of(f"network-of:{address}") == {network}
        assert address in network


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no-such-host.invalid", r"'no-such-host\.invalid' is no address, no network such as"),
        ("network-of:no-such-host.invalid", r"'no-such-host\.invalid' is no address, no network such as"),
        (
            f"network-of:{ABROAD}",
            rf"'network-of:{ABROAD}': this machine does not have {ABROAD}; write the network itself",
        ),
        ("network-of:10.8.0.0/16", "'network-of:10.8.0.0/16' does not appear to be an IPv4 or IPv6 network"),
        ("10.8.0.1/16", "10.8.0.1/16 has host bits set"),
    ],
)
def test_a_word_for_no_network_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        networks_of(name)


def test_who_is_refused_is_told_why() -> None:
    """By `piecework register` and by Flower's command line, in the words of the gate."""

    async def refused() -> httpx.Response:
        gate = httpx.ASGITransport(Gate(app, []), client=(ABROAD, 1234))
        async with httpx.AsyncClient(transport=gate, base_url="http://192.0.2.1:8000") as client:
            return await client.post("/v1/control/list-runs")

    answer = asyncio.run(refused())
    assert answer.status_code == 403
    assert detail(answer).startswith(
        f"{ABROAD} may use the Fleet API alone: start runs and register keys on the SuperLink"
    )
    with pytest.raises(click.ClickException) as told, flwr_cli_exc_handler():
        answer.raise_for_status()
    assert told.value.message == detail(answer)


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, psutil.Process]]:
    """A real SuperLink on all of the machine's addresses: its port, and its process."""
    (port,) = free_ports(1)
    home = tmp_path_factory.mktemp("superlink")
    call = [sys.executable, "-m", "piecework.deploy.fleet_port", "--control", "10.8.0.0/16", "--insecure"]
    call += ["--host", "0.0.0.0", "--port", str(port), "--isolation", "process"]
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_INTERNAL_GRPC_CONTROL_API": "1",
        "FORWARDED_ALLOW_IPS": "*",
    }
    with (home / "log").open("wb") as log, subprocess.Popen(call, env=environment, stdout=log, stderr=log) as child:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    assert status(port, "/health", method="GET") == 200
                    break
                except OSError:
                    assert time.monotonic() < deadline and child.poll() is None, (home / "log").read_text()
                    time.sleep(0.1)
            yield port, psutil.Process(child.pid)
        finally:
            child.terminate()


@pytest.fixture
def port(link: tuple[int, psutil.Process]) -> int:
    return link[0]


def status(port: int, path: str, *, forwarded_for: str = "", source: str = "", method: str = "POST") -> int:
    """What a SuperLink answers on 127.0.0.1 to a request, through a proxy on this machine or from one of its addresses."""
    headers = {"x-forwarded-for": forwarded_for} if forwarded_for else {}
    connection = http.client.HTTPConnection(
        "127.0.0.1", port, timeout=30, source_address=(source, 0) if source else None
    )
    connection.request(method, path, headers=headers)
    answer = connection.getresponse().status
    connection.close()
    return answer


@pytest.mark.slow
@pytest.mark.processes
def test_a_superlink_refuses_devices_all_but_the_fleet_api(port: int) -> None:
    assert status(port, "/v1/control/list-runs") not in (403, 404)
    assert status(port, "/v1/control/list-runs", forwarded_for="10.8.1.2") not in (403, 404)
    for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/openapi.json"):
        assert status(port, path, forwarded_for=ABROAD) == 403
    assert status(port, "/v1/fleet/register-node", forwarded_for=ABROAD) not in (403, 404)
    assert status(port, "/health", forwarded_for=ABROAD, method="GET") == 200


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("forwarded_for", [f"127.0.0.1, {ABROAD}", f"10.8.1.2, {ABROAD}"])
def test_a_strangers_own_word_for_where_it_is_is_not_believed(port: int, forwarded_for: str) -> None:
    """A proxy appends from where it was called; the environment of this SuperLink asks to believe everybody."""
    assert status(port, "/v1/control/list-runs", forwarded_for=forwarded_for) == 403


@pytest.mark.slow
@pytest.mark.processes
def test_an_address_without_a_proxy(port: int) -> None:
    """The machine's own other addresses are the only ones that a test can come from; to 127.0.0.1 they are strange."""
    addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    others = [a for a in addresses if a.count(".") == 3 and not a.startswith(("127.", "10.8."))]
    if not others:
        pytest.skip("this machine has no address beside 127.0.0.1 from which a stranger could call")
    address = others[0]
    assert status(port, "/v1/control/list-runs", source=address) == 403
    assert status(port, "/v1/control/list-runs", source=address, forwarded_for="127.0.0.1") == 403
    assert status(port, "/v1/fleet/register-node", source=address) not in (403, 404)
    with socket.create_connection((address, port), timeout=30) as here:  # from this address to itself
        here.sendall(b"POST /v1/control/list-runs HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert here.recv(100).split()[1] not in (b"403", b"404")


@pytest.mark.slow
@pytest.mark.processes
def test_nothing_else_listens(link: tuple[int, psutil.Process]) -> None:
    """Flower's older APIs, of which the environment of this SuperLink asks for one, would have ports of their own."""
    port, process = link
    listening = {each.laddr.port for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}
    assert listening == {port}


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.processes
def test_a_network_that_cannot_be_found_is_named(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "piecework.deploy.fleet_port", "--control", "no-such-host.invalid", "--insecure"]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("--control no-such-host.invalid: 'no-such-host.invalid' is no address")


@pytest.mark.slow
@pytest.mark.processes
def test_the_help_names_our_option_and_flowers() -> None:
    call = [sys.executable, "-m", "piecework.deploy.fleet_port", "--help"]
    told = subprocess.run(call, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "[--control A,B]" in told
    assert told.index("network-of:HOST") < told.index("--superexec-auth-secret-file")
