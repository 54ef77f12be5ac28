"""A federation in containers for tests: built and started by compose, watched from the host, always taken down."""

import io
import json
import os
import shutil
import subprocess
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piecework.engines.processes import free_ports

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "piecework:tests"
CGROUPS = Path("/sys/fs/cgroup")
POLL = 0.05  # seconds


def compose_command() -> list[str]:
    """Compose v2 where it is there, else docker-compose; empty where neither is."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True, check=False).returncode
        ):
            return command
    return []


def missing() -> str:
    """Why no federation can be started here; empty where one can."""
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        return "no Docker engine answers (docker info)"
    if not compose_command():
        return "neither `docker compose` nor `docker-compose` is installed"
    return "" if CGROUPS.is_dir() else f"the engine's control groups are not seen here ({CGROUPS})"


def docker(*arguments: str) -> str:
    """Run docker and return what it printed. Raises CalledProcessError with it."""
    return checked(["docker", *arguments]).stdout.strip()


def checked(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command. Raises RuntimeError with what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def wait_for(what: str, condition: Callable[[], Any], seconds: float = 300) -> Any:
    """Poll until a condition holds; what it gave. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(POLL)
    return found


@dataclass
class Memory:
    """What was seen of one container's memory, in bytes: the largest anonymous memory, the limit; kills by the kernel."""

    limit: int
    anonymous: int = 0
    killed: int = 0


@dataclass
class Run:
    """`piecework run` in the federation: its process, and the name of the run."""

    name: str
    process: "subprocess.Popen[str]"
    output: str = ""


@dataclass
class Containers:
    """The containers of one compose project. `files` are compose files, `clients` how many there are."""

    project: str
    files: list[Path]
    environment: dict[str, str]
    clients: int
    runs: list[Run] = field(default_factory=list)
    _ids: dict[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str) -> list[str]:
        """A compose command of this project."""
        files = [word for file in self.files for word in ("-f", str(file))]
        return [*compose_command(), "-p", self.project, "--project-directory", str(ROOT), *files, *arguments]

    def call(self, *arguments: str) -> str:
        """Run compose. Raises RuntimeError with what it printed."""
        return checked(self.compose(*arguments), env=self.environment).stdout.strip()

    def id(self, service: str) -> str:
        """The container of a service."""
        if service not in self._ids:
            self._ids[service] = self.call("ps", "-q", service)
        return self._ids[service]

    def start_run(self, *arguments: str, connection: tuple[str, ...] = ("--insecure",)) -> Run:
        """Start `piecework run` in the container of the command line."""
        name = f"run-{uuid.uuid4().hex[:8]}"
        command = self.compose("run", "--rm", "-T", "piecework", "run", "--superlink", "superlink:8000", *connection)
        command += [*arguments, "--set", f"run-name={name}"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=self.environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self.runs.append(Run(name, process))
        return self.runs[-1]

    def finish(self, run: Run, seconds: float = 1500) -> dict[str, Any]:
        """Wait until a run ended; its summary. Fails with its output where it did not complete."""
        try:
            run.output, _ = run.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            run.process.terminate()
            run.output, _ = run.process.communicate()
        assert run.process.returncode == 0, f"{run.output}\n{self.logs('server')}"
        return dict(json.loads(self.read(f"/runs/{run.name}/summary.json")))

    def read(self, path: str, service: str = "server") -> str:
        """A file of a container, which need not run; empty where there is none."""
        copied = subprocess.run(["docker", "cp", f"{self.id(service)}:{path}", "-"], capture_output=True, check=False)
        if copied.returncode:
            return ""
        with tarfile.open(fileobj=io.BytesIO(copied.stdout)) as archive:
            member = archive.extractfile(archive.getmembers()[0])
            return member.read().decode() if member else ""

    def rounds(self, run: Run) -> list[dict[str, Any]]:
        """The records of the rounds that ended."""
        return [json.loads(line) for line in self.read(f"/runs/{run.name}/rounds.jsonl").splitlines()]

    def logs(self, service: str) -> str:
        """The end of a container's log."""
        tail = ["docker", "logs", "--tail", "40", self.id(service)]
        done = subprocess.run(tail, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def wait_in_round(self, run: Run, number: int, client: int) -> None:
        """Wait until a client works on its task of a round after the first: its store then has that task's folder."""
        newest = f'test -d "$(ls -td /store/*/{client} | head -n 1)/train-{number}"'
        look = ["docker", "exec", self.id(f"client-{client}"), "sh", "-c", newest]

        def working() -> bool:
            assert run.process.poll() is None, f"the run ended before round {number}: {run.process.communicate()[0]}"
            done = len(self.rounds(run)) == number - 1
            return done and not subprocess.run(look, check=False, capture_output=True).returncode

        wait_for(f"client {client} at work in round {number}", working)

    def recover(self) -> None:
        """End runs that still go on, and bring back every container."""
        for run in self.runs:
            if run.process.poll() is None:
                run.process.terminate()
                run.process.communicate()
        services = ["superlink", "server"] + [f"{kind}-{i}" for kind in ("node", "client") for i in range(self.clients)]
        for container in map(self.id, services):
            state = json.loads(docker("inspect", "-f", "{{json .State}}", container))
            if state["Paused"]:
                docker("unpause", container)
            elif not state["Running"]:
                docker("start", container)

    def group(self, client: int) -> dict[str, Path]:
        """The memory control group of a client's container: its `stat`, `limit` and `oom` files, of cgroup v1 or v2."""
        pid = docker("inspect", "-f", "{{.State.Pid}}", self.id(f"client-{client}"))
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "memory":
                group = CGROUPS / "memory" / path.lstrip("/")
                return {"stat": group / "memory.stat", "oom": group / "memory.oom_control"}
        group = CGROUPS / path.lstrip("/")
        return {"stat": group / "memory.stat", "oom": group / "memory.events"}

    @contextmanager
    def watched(self) -> Iterator[dict[int, Memory]]:
        """Sample the memory of all clients while the body runs."""
        groups = {client: self.group(client) for client in range(self.clients)}
        seen, before = {}, {client: counter(group["oom"], "oom_kill") for client, group in groups.items()}
        for client in groups:
            limit = docker("inspect", "-f", "{{.HostConfig.Memory}}", self.id(f"client-{client}"))
            seen[client] = Memory(int(limit))
        stop = threading.Event()

        def sample() -> None:
            while not stop.wait(POLL):
                for client, group in groups.items():
                    anonymous = counter(group["stat"], "total_rss", "anon")
                    seen[client].anonymous = max(seen[client].anonymous, anonymous)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield seen
        finally:
            stop.set()
            thread.join()
            for client, group in groups.items():
                seen[client].killed = counter(group["oom"], "oom_kill") - before[client]


def counter(path: Path, *names: str) -> int:
    """The first of some counters that a control group's file has; 0 while there is no such group (a container restarts)."""
    with suppress(OSError):
        found = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        for name in names:
            if name in found:
                return int(found[name])
    return 0


@contextmanager
def federation(
    data: Path, clients: int, files: list[Path], start: bool = True, **environment: str
) -> Iterator[Containers]:
    """Build the image, start the containers (or leave that to the body), and take them down with their volumes."""
    (port,) = free_ports(1)
    own = {"PIECEWORK_IMAGE": IMAGE, "PIECEWORK_EXPORT": str(data), "PIECEWORK_PORT": str(port)}
    containers = Containers(f"piecework{uuid.uuid4().hex[:8]}", files, os.environ | own | environment, clients)
    containers.call("build", "superlink")
    try:
        if start:
            containers.call("up", "-d")
        yield containers
    finally:
        containers.call("--profile", "cli", "down", "--volumes", "--remove-orphans", "--timeout", "5")
