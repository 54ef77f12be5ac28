"""Flower's processes, with a private home, ports and environment: start, watch, and stop them with all their children.

If this process is killed, its guardian stops them.
"""

import json
import logging
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from piecework.engines import own_user
from piecework.server_app.signals import HANGUP, block_signals

EXPOSED = (
    "this system does not tell whose a local connection is: while the run lasts, every user of this machine can start apps as "
    "you, through the SuperLink on 127.0.0.1. With other users on it, use the engine local (docs/howto/security.md)"
)
START_SECONDS = 180.0  # the first start after an installation compiles all of Flower, on a loaded machine in minutes
TLS_SECONDS = 10.0  # for a handshake
LOG = logging.getLogger("piecework")


class EngineError(RuntimeError):
    """An engine could not be started, or stopped working."""


@dataclass(frozen=True)
class Connection:
    """The address of a SuperLink, `host:port`, and the CA of its certificate; None = no TLS, never the default."""

    address: str
    root_certificates: Path | None

    def to_config(self) -> dict[str, str | bool]:
        """Return an entry of Flower's config.toml."""
        if self.root_certificates is None:
            return {"address": self.address, "insecure": True}
        return {"address": self.address, "root-certificates": str(self.root_certificates.resolve())}

    def explain(self) -> str:
        """Return why this SuperLink cannot be reached, as a TLS handshake tells it, which Flower does not; empty if it can."""
        context, trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.root_certificates
        try:
            if trusted is None:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            else:
                context.load_verify_locations(trusted)
        except OSError as error:
            return f"--root-certificates {trusted} cannot be used: {error}"
        host, _, port = self.address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")  # of an IPv6 address, which a certificate names without them
        try:
            plain = socket.create_connection((host, int(port)), TLS_SECONDS)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name that a host can have
            return f"nothing answers at {self.address}: {error}"
        with plain:
            return self._shake_hands(context, plain, host)

    def _shake_hands(self, context: ssl.SSLContext, plain: socket.socket, host: str) -> str:
        trusted = self.root_certificates
        try:
            context.wrap_socket(plain, server_hostname=host).close()
        except ssl.SSLCertVerificationError as error:
            hint = "give its CA, and a HOST that its certificate names"
            return f"no SuperLink with TLS of {trusted} answers at {self.address}: {error}; {hint}"
        except OSError as error:  # there is no TLS, which only a connection with TLS needs
            hint = "a SuperLink without TLS is reached by --insecure, instead of --root-certificates"
            return f"what answers at {self.address} does not speak TLS: {error}; {hint}" if trusted else ""
        told = f"the SuperLink at {self.address} speaks TLS: give --root-certificates FILE, not --insecure"
        return "" if trusted else told


class FlowerHome:
    """A private FLWR_HOME with the address of a SuperLink: an existing one, or one to be started on a free port."""

    def __init__(self, path: Path, connection: Connection | None = None) -> None:
        self.path = path
        (self.port,) = free_ports(1)
        self.connection = connection or Connection(f"127.0.0.1:{self.port}", None)
        config = {"superlink": {"default": "piecework", "piecework": self.connection.to_config()}}
        (path / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        self.processes: dict[str, tuple[list[str], subprocess.Popen[bytes]]] = {}
        self.environment = os.environ | {
            "FLWR_HOME": str(path),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def start(self, name: str, command: list[str]) -> None:
        """Start a process whose output goes to `<home>/<name>.log`."""
        with (
            (self.path / f"{name}.log").open("ab") as log,
            block_signals(HANGUP),
        ):  # a closed terminal ends the launcher alone
            child = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, cwd=self.path)
        self.processes[name] = command, child

    def revive(self) -> None:
        """Restart processes that ended by themselves, as a container or a systemd unit would be."""
        for name, (command, child) in list(self.processes.items()):
            if child.poll() is not None:
                LOG.warning("%s ended with exit code %s: started again", name, child.returncode)
                self.start(name, command)

    def command(self, *arguments: str) -> dict[str, Any]:
        """Run `flwr` and read its JSON. Raises EngineError."""
        call = ["flwr", *arguments, "--format", "json"]
        done = subprocess.run(call, env=self.environment, capture_output=True, text=True, check=False, cwd=self.path)
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            raise EngineError(f"`{' '.join(call[:2])}` failed: {done.stdout}{done.stderr}") from None
        if done.returncode or not answer.get("success", True):
            raise EngineError(f"`{' '.join(call[:2])}` failed: {answer.get('error-message', done.stdout)}")
        return answer

    def log_of(self, run_id: str) -> str:
        """Return the end of a run's output."""
        call = ["flwr", "log", run_id, "piecework", "--show"]
        done = subprocess.run(call, env=self.environment, capture_output=True, text=True, check=False, cwd=self.path)
        return "\n".join((done.stdout + done.stderr).splitlines()[-120:])


@contextmanager
def flower_home(connection: Connection | None = None) -> Iterator[FlowerHome]:
    """Yield a FLWR_HOME that is removed afterwards, by another process if this one is killed."""
    with tempfile.TemporaryDirectory(prefix="piecework-", ignore_cleanup_errors=True) as folder, guard_folder(folder):
        yield FlowerHome(Path(folder), connection)


@contextmanager
def guard_folder(folder: str) -> Iterator[None]:
    """Have the guardian wait for the end of the body, or of this process, to end what still uses a folder."""
    call = [sys.executable, "-P", str(Path(__file__).with_name("guardian.py")), folder]
    guardian = subprocess.Popen(call, stdin=subprocess.PIPE, start_new_session=True)  # else Ctrl-C would end it too
    assert guardian.stdin is not None
    try:
        yield
    finally:
        guardian.stdin.close()
        guardian.wait()  # as a context, Popen waits no longer than 0.25 s after Ctrl-C


@contextmanager
def superlink(home: FlowerHome, *arguments: str) -> Iterator[None]:
    """Run a healthy SuperLink on the home's port in the body."""
    if not own_user.possible():
        LOG.warning(EXPOSED)
    address = ["--insecure", "--host", "127.0.0.1", "--port", str(home.port)]
    with process(home, "superlink", *for_own_user("flower-superlink"), *address, *arguments):
        wait_until_healthy(home, "superlink", home.port)
        yield


def for_own_user(command: str) -> list[str]:
    """Return the words that start a command of Flower whose server refuses other users of this machine."""
    return [sys.executable, "-P", own_user.__file__, command]


@contextmanager
def process(home: FlowerHome, name: str, *command: str) -> Iterator[None]:
    """Run a process in the body; it is stopped with all its children, even if `FlowerHome.revive` has replaced it."""
    home.start(name, list(command))
    try:
        yield
    finally:
        stop(home.processes.pop(name)[1])


def stop(child: "subprocess.Popen[bytes]") -> None:
    """End a process we started and its descendants: first terminate, then, after ten seconds, kill."""
    if child.poll() is not None:
        return
    try:
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        _quietly(member.terminate)
    _, alive = psutil.wait_procs(family, timeout=10)
    for member in alive:
        _quietly(member.kill)
    child.wait()


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        return  # it ended by itself in between


def wait_until_healthy(home: FlowerHome, name: str, port: int) -> None:
    """Wait for /health of a process. Raises EngineError with the end of its log if it ends, or says nothing for too long."""
    log, child = home.path / f"{name}.log", home.processes[name][1]
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            if child.poll() is not None:
                raise EngineError(f"{name} ended with exit code {child.returncode}:\n{tail(log)}") from None
            time.sleep(0.1)
    raise EngineError(f"nothing answered on port {port} within {START_SECONDS:g} s:\n{tail(log)}")


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback address on which nothing listens now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [int(free.getsockname()[1]) for free in sockets]


def tail(log: Path, lines: int = 20) -> str:
    """Return the end of a log file."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]) if log.is_file() else ""
