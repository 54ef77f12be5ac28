"""A `flower-superexec` for SuperNodes of this machine whose tasks start at once: `warm_executor.py --runtime-api-address ...`.

Flower starts a Python for each message, which imports torch and Flower before it does anything. This process imports them
once, and forks a child for each task, which runs Flower's own `flwr-clientapp`. A task thus still has a process of its own: the
kernel accounts its memory, and may kill it alone. The pages of what was imported are shared. The options are those of
`flower-superexec`; `--runtime-api-address` may be given several times, once for each SuperNode.

A process that has threads or a CUDA context cannot be forked safely. This one only imports, and waits. Each SuperNode is asked
for tasks by a forked `flower-superexec`, whose executor tells this process what to start. The app itself is not imported here:
each task imports it from the bundle that its run brings, so that a new version needs no new process.

It runs as a file, outside of the package, because a task must find the `piecework` of its bundle. Only Linux is supported,
where a child ends with its parent.
"""

import ctypes
import fcntl
import gc
import hashlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, NoReturn

from flwr.common.constant import APP_DIR
from flwr.supercore import log
from flwr.supercore.constant import ExecutorType, TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supercore.utils import get_flwr_home

IMPORTED = (  # what a task imports beside the app; a module that is not installed is left out
    *("flwr.supercore.cli.flower_superexec", "flwr.supernode.cli.flwr_clientapp"),
    *("torch", "numpy", "safetensors.numpy", "psutil"),
)
ENDING = (signal.SIGTERM, signal.SIGINT)
GRACE_SECONDS = 8.0  # less than the ten seconds after which the launcher, Docker and others kill
PAUSE_SECONDS = 1.0
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # of Linux's prctl
FIRST_TO_KILL = 500  # of -1000 to 1000: a task goes before what can start the next one


class ForkExecutor(SubprocessExecutor):
    """Has a client's task started by the process at the other end of a socket, and other tasks as Flower starts them.

    So are tasks that may install packages, because they must not find what is imported already.
    """

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self.requests, self.parent = requests, parent

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Send the words of the command that Flower would start."""
        if spec.task_type != TaskType.CLIENT_APP or spec.runtime_dependency_install:
            return super().launch(spec)
        words = ["flwr-clientapp", "--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
        words += ["--parent-pid", str(self.parent)]
        if spec.insecure:
            words += ["--insecure"]
        elif spec.root_certificates_path is not None:
            words += ["--root-certificates", spec.root_certificates_path]
        try:
            self.requests.send(json.dumps(words).encode())
        except OSError as error:
            return LaunchResult.failed(f"process {self.parent}, which starts tasks, took none: {error}")
        return LaunchResult.accepted()


def install_once(install: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that installs a bundle if it is not installed yet.

    Flower's own unpacks it for each task, which takes longer than importing the app, and drops that if a folder is there, also
    if another task is still filling it: here the others wait.
    """

    def installed(bundle: bytes, **options: Any) -> Path:
        apps = get_flwr_home() / APP_DIR
        apps.mkdir(parents=True, exist_ok=True)
        with (apps / f".{hashlib.sha256(bundle).hexdigest()}").open("a+", encoding="utf-8") as note:
            fcntl.flock(note, fcntl.LOCK_EX)
            note.seek(0)
            known = note.read()
            if known and Path(known).is_dir():
                return Path(known)
            note.truncate(0)
            path = install(bundle, **options)
            note.write(str(path))
            return path

    return installed


def run_task(words: list[str]) -> None:
    """Run `flwr-clientapp`."""
    flower = vars(import_module("flwr.supernode.runtime.run_clientapp"))
    flower["install_from_fab"] = install_once(flower["install_from_fab"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else each task would draw what the last one drew
    sys.argv = words
    import_module("flwr.supernode.cli.flwr_clientapp").flwr_clientapp()


def run_poller(words: list[str], requests: socket.socket, parent: int) -> None:
    """Run `flower-superexec`, with our executor instead of its own."""
    flower = vars(run_superexec)
    choose = flower["get_executor"]

    def executor(kind: ExecutorType, **options: Any) -> Any:
        return ForkExecutor(requests, parent) if kind == ExecutorType.SUBPROCESS else choose(kind, **options)

    flower["get_executor"] = executor
    sys.argv = ["flower-superexec", *words]
    import_module("flwr.supercore.cli.flower_superexec").flower_superexec()


class ForkServer:
    """The process that forks. `pollers` has the options of each `flower-superexec` by pid, `tasks` the pids of tasks."""

    def __init__(self) -> None:
        self.pollers, self.tasks = dict[int, list[str]](), set[int]()
        # Datagrams, so that what several pollers write does not mix.
        self.requests, self.of_pollers = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.woken, self.waker = socket.socketpair()
        for each in (self.woken, self.waker, self.requests):
            each.setblocking(False)
        self.asked_to_end = False
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for each_signal in ENDING:
            signal.signal(each_signal, self._end)

    def _end(self, *_: object) -> None:
        self.asked_to_end = True

    def serve(self, pollers: list[list[str]]) -> int:
        """Start pollers with these options and the tasks that they get, until told to end; returns the exit code.

        A poller that was killed is replaced. One that ends by itself, for instance because its secret is wrong, ends this
        process with its exit code, as `flower-superexec` would have ended.
        """
        for words in pollers:
            self._poll(words)
        with selectors.DefaultSelector() as selector:
            selector.register(self.requests, selectors.EVENT_READ)
            selector.register(self.woken, selectors.EVENT_READ)
            while not self.asked_to_end:
                selector.select()
                _drain(self.woken)
                for pid, status in _ended():
                    code = os.waitstatus_to_exitcode(status)
                    if pid in self.pollers and code >= 0:
                        del self.pollers[pid]
                        return code
                    self._replace(pid, code)
                for request in _received(self.requests):
                    self.tasks.add(self._fork("flwr-clientapp", run_task, json.loads(request)))
        return 0

    def _replace(self, pid: int, code: int) -> None:
        if pid in self.tasks and code < 0:
            log(WARNING, "a task (process %s) was killed by signal %s", pid, -code)
        self.tasks.discard(pid)
        if (words := self.pollers.pop(pid, None)) is not None:
            log(WARNING, "process %s, which asks for tasks, was killed by signal %s: started again", pid, -code)
            time.sleep(PAUSE_SECONDS)
            self._poll(words)

    def _poll(self, words: list[str]) -> None:
        self.pollers[self._fork("flower-superexec", run_poller, words, self.of_pollers, os.getpid())] = words

    def _fork(self, name: str, work: Callable[..., None], *arguments: Any) -> int:
        """Fork a child that does its work and nothing else, and return its pid."""
        parent = os.getpid()
        with _held(signal.SIGCHLD, *ENDING):  # until the child has its own handlers
            pid = os.fork()
            if pid == 0:
                self._be_child(parent, name, work, *arguments)
        return pid

    def _be_child(self, parent: int, name: str, work: Callable[..., None], *arguments: Any) -> NoReturn:
        code = 1
        try:
            _end_with(parent, name)
            signal.set_wakeup_fd(-1)
            for each in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for each_socket in (self.requests, self.woken, self.waker):
                each_socket.close()
            if work is run_task:
                self.of_pollers.close()
                _go_first()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *ENDING})
            work(*arguments)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)  # nothing of the parent's, neither its loop nor what it registered for its own end

    def end(self) -> None:
        """End all children: first terminate, and after GRACE_SECONDS kill."""
        left, deadline = {*self.pollers, *self.tasks}, time.monotonic() + GRACE_SECONDS
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        while left and time.monotonic() < deadline:
            left -= {pid for pid, _ in _ended()}
            time.sleep(0.05)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def _held(*signals: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(parent: int, name: str) -> None:
    """Have the kernel kill this child when its parent is gone, and name it as Flower names what it does."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    libc.prctl(PR_SET_NAME, ctypes.c_char_p(name[:15].encode()))
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def _go_first() -> None:
    """Have the kernel kill this process rather than its parent when memory ends."""
    place = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):
        place.write_text(str(max(FIRST_TO_KILL, int(place.read_text(encoding="ascii")))), encoding="ascii")


def _drain(woken: socket.socket) -> None:
    with suppress(BlockingIOError):
        while woken.recv(4096):
            pass


def _received(requests: socket.socket) -> Iterator[bytes]:
    with suppress(BlockingIOError):
        while True:
            yield requests.recv(2**16)


def _ended() -> Iterator[tuple[int, int]]:
    """Yield the pid and status of each child that has ended, which are no zombies from then on."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def import_all() -> None:
    """Import what tasks need. What exists then is no garbage: its pages stay shared with the children."""
    for name in IMPORTED:
        if find_spec(name.partition(".")[0]) is not None:
            import_module(name)
    gc.collect()
    gc.freeze()


def main() -> int:
    """Serve until told to end; returns the exit code."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runtime-api-address", action="append", required=True)
    known, others = parser.parse_known_args()
    import_all()
    server = ForkServer()
    log(INFO, "tasks of %s are run by children of process %s", ", ".join(known.runtime_api_address), os.getpid())
    try:
        return server.serve([["--runtime-api-address", each, *others] for each in known.runtime_api_address])
    finally:
        server.end()


if __name__ == "__main__":
    sys.exit(main())
