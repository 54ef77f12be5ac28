"""deploy/piecework-health, as compose files and units call it: who answers lives, who takes connections only does not."""

import configparser
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from piecework.deploy import certs
from piecework.engines.processes import free_ports

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "deploy" / "piecework-health"


class Answer(BaseHTTPRequestHandler):
    """200 for /health, as Flower's SuperLink and SuperNode give it, else 404."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Ill(Answer):
    """503, whatever was asked."""

    def do_GET(self) -> None:
        self.send_error(503)


def serving(handler: type[Answer], keys: Path | None = None) -> HTTPServer:
    server = HTTPServer(("127.0.0.1", 0), handler)
    if keys is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "server.crt", keys / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


@pytest.fixture
def hung() -> Iterator[int]:
    """The port of a process that is stopped: the kernel takes its connections, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as silent:
        yield silent.getsockname()[1]


def check(*arguments: object) -> int:
    return subprocess.run([CHECK, *map(str, arguments)], capture_output=True, check=False).returncode


def test_who_answers_lives(hung: int) -> None:
    found = {}
    for handler in (Answer, Ill):
        server = serving(handler)
        found[handler] = check(server.server_port, 5)
        server.shutdown()
        server.server_close()
    assert found == {Answer: 0, Ill: 1}
    assert check(hung, 0.05) == 1
    assert check(free_ports(1)[0], 5) == 3


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_by_tls_its_certificate_must_be_trusted(tmp_path: Path, hung: int) -> None:
    for folder in ("own", "other"):
        certs.issue(["superlink"], 1, tmp_path / folder)
    server = serving(Answer, tmp_path / "own")
    assert check(server.server_port, 5, tmp_path / "own" / "ca.crt") == 0
    assert check(server.server_port, 5, tmp_path / "other" / "ca.crt") == 1
    assert check(hung, 0.05, tmp_path / "own" / "ca.crt") == 1
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["supernode", "superlink"])
def test_a_unit_restarts_what_hangs_and_nothing_else(name: str, hung: int, tmp_path: Path) -> None:
    """Its two commands as systemd reads them ($$ is $), with a systemctl that only says what it was asked."""
    parsed = configparser.ConfigParser(interpolation=None, delimiters="=")
    parsed.optionxform = str  # type: ignore[assignment]
    parsed.read_string((ROOT / "deploy/systemd" / f"piecework-{name}-health.service").read_text(encoding="utf-8"))
    service = parsed["Service"]
    command, after = (service[key].replace("\\\n", " ").replace("$$", "$") for key in ("ExecStart", "ExecStopPost"))
    (tmp_path / "systemctl").write_text('#!/bin/sh\necho "$*"\n', encoding="utf-8")
    (tmp_path / "systemctl").chmod(0o755)
    asked = {}
    for state, port in (("hangs", hung), ("has ended", free_ports(1)[0])):
        words = shlex.split(re.sub(r"piecework-health .*", f"piecework-health {port} 0.05", command))
        words = [word.replace("/opt/piecework/bin/piecework-health", str(CHECK)) for word in words]
        ended = subprocess.run(words, capture_output=True, check=False).returncode
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SERVICE_RESULT": "exit-code" if ended else "success"}
        call = shlex.split(after.removeprefix("+"))
        asked[state] = subprocess.run(call, env=environment, capture_output=True, text=True, check=False).stdout
    assert asked == {"hangs": f"--no-block try-restart piecework-{name}.service\n", "has ended": ""}
    assert service["ExecStopPost"].startswith("+")  # as root: the check itself is not


def test_no_check_starts_a_python() -> None:
    for name in ("docker-compose.yml", "docker-compose.tls.yml"):
        tests = re.findall(r"^      test: (.*)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert tests
        assert all(line.startswith('["CMD", "piecework-health", ') for line in tests)
