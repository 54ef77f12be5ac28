"""Why a SuperLink cannot be reached, as a handshake with a server of TLS tells it."""

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest
from flwr.cli.utils import SUPERLINK_UNAVAILABLE_MESSAGE
from helpers import tiny_settings

from piecework.deploy.certs import issue
from piecework.engines.launch import follow
from piecework.engines.processes import Connection, EngineError, FlowerHome, free_ports
from piecework.server_app.records import RunDir


@contextmanager
def serving(host: str, answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server, by its port, that gives each connection to `answer`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:

        def serve() -> None:
            while True:
                try:
                    plain, _ = listening.accept()
                except OSError:
                    return  # closed at the end of the test
                with plain, suppress(OSError):  # the client did not trust this server
                    answer(plain)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def serving_tls(folder: Path, host: str = "127.0.0.1", names: Sequence[str] = ()) -> Iterator[int]:
    """A server with a certificate for localhost and these names, whose files are written to a folder."""
    issue(list(names), 1, folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with serving(host, lambda plain: context.wrap_socket(plain, server_side=True).close()) as port:
        yield port


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The port of a server with a certificate for localhost, and the folder of its files."""
    with serving_tls(tmp_path / "certs") as port:
        yield port, tmp_path / "certs"


def test_a_server_that_is_trusted_needs_no_explanation(served: tuple[int, Path]) -> None:
    port, folder = served
    assert Connection(f"localhost:{port}", folder / "ca.crt").explain() == ""


def test_what_is_wrong_is_named(served: tuple[int, Path], tmp_path: Path) -> None:
    port, folder = served
    issue([], 1, tmp_path / "others")
    address, (nobody,) = f"localhost:{port}", free_ports(1)
    foreign = Connection(address, tmp_path / "others" / "ca.crt").explain()
    assert foreign.startswith(f"no SuperLink with TLS of {tmp_path}/others/ca.crt answers at {address}: ")
    assert "CERTIFICATE_VERIFY_FAILED" in foreign
    key = Connection(address, folder / "ca.key").explain()
    assert key.startswith(f"--root-certificates {folder}/ca.key cannot be used: ")
    missing = Connection(address, folder / "none.crt").explain()
    assert missing.startswith(f"--root-certificates {folder}/none.crt cannot be used: ")
    assert Connection("a..b:1", None).explain().startswith("nothing answers at a..b:1: ")  # no name of a host
    assert Connection(address, None).explain() == (
        f"the SuperLink at {address} speaks TLS: give --root-certificates FILE, not --insecure"
    )
    assert Connection(f"localhost:{nobody}", None).explain().startswith(f"nothing answers at localhost:{nobody}: ")


def test_a_host_can_be_an_address_of_ipv6(tmp_path: Path) -> None:
    """Its brackets are none of its certificate."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with serving_tls(tmp_path, "::1", ["::1"]) as port:
        assert Connection(f"[::1]:{port}", tmp_path / "ca.crt").explain() == ""


def refuse(plain: socket.socket) -> None:
    plain.recv(1000)
    plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def hang_up(plain: socket.socket) -> None:
    plain.recv(1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset


@pytest.mark.parametrize("answer", [refuse, hang_up])
def test_a_server_without_tls_is_reached_without_it(answer: Callable[[socket.socket], None], tmp_path: Path) -> None:
    """It does not understand the handshake."""
    issue([], 1, tmp_path)
    with serving("127.0.0.1", answer) as port:
        assert Connection(f"localhost:{port}", None).explain() == ""
        told = Connection(f"localhost:{port}", tmp_path / "ca.crt").explain()
    assert told.startswith(f"what answers at localhost:{port} does not speak TLS: ")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (f"`flwr run` failed: {SUPERLINK_UNAVAILABLE_MESSAGE}", r"^nothing answers at localhost:\d+: "),
        (
            "`flwr run` failed: Authentication failed.",
            r"^`flwr run` failed: Authentication failed.\nnothing answers at ",
        ),
    ],
)
def test_only_what_says_nothing_is_replaced_by_the_explanation(
    said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else Flower says may have another cause, also where this machine cannot connect by itself, as behind a proxy."""

    def fail(*_: object) -> NoReturn:
        raise EngineError(said)

    home = FlowerHome(tmp_path, Connection(f"localhost:{free_ports(1)[0]}", None))
    monkeypatch.setattr(home, "command", fail)
    with pytest.raises(EngineError, match=told):
        follow(home, tiny_settings(), RunDir(tmp_path / "run"), lambda _: None)
