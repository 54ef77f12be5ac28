"""Why a SuperLink cannot be reached, as a handshake with a server of TLS tells it."""

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from piecework.deploy.certs import issue
from piecework.engines.processes import Connection, free_ports


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The port of a server with a certificate for localhost, and the folder of its files."""
    issue([], 1, tmp_path / "certs")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certs" / "server.crt", tmp_path / "certs" / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    plain, _ = listening.accept()
                except OSError:
                    return  # closed at the end of the test
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    plain.close()  # the client did not trust this server

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listening.getsockname()[1], tmp_path / "certs"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


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
    assert key.startswith(f"no SuperLink with TLS of {folder}/ca.key answers")
    assert Connection(address, None).explain() == (
        f"the SuperLink at {address} speaks TLS: give --root-certificates FILE, not --insecure"
    )
    assert Connection(f"localhost:{nobody}", None).explain().startswith(f"nothing answers at localhost:{nobody}: ")


def test_a_server_without_tls_is_reached_without_it() -> None:
    """It does not understand the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            plain, _ = listening.accept()
            plain.recv(1000)
            plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            plain.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert Connection(f"localhost:{listening.getsockname()[1]}", None).explain() == ""
        thread.join()
