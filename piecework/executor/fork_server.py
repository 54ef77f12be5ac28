"""Processes that only fork, and wait for what their children do; and what they owe to the kernel and to these children."""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, NoReturn

from flwr.supercore import log

from piecework.executor import tasks

ENDING = (signal.SIGTERM, signal.SIGINT)
GRACE_SECONDS = 8.0  # less than the ten seconds after which the launcher, Docker and others kill
PAUSE_SECONDS = 1.0
LOOK_SECONDS = 2.0  # between looks whether the process lives that has started this one
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # of Linux's prctl
FIRST_TO_KILL, NEXT_TO_KILL = 500, 250  # of -1000 to 1000: when memory ends a task goes before what starts the next one


class Parent:
    """A process that forks. `children` are the pids of those that live; `asked_to_end`: a signal said so."""

    def __init__(self) -> None:
        self.children, self.asked_to_end = set[int](), False
        self.woken, self.waker = socket.socketpair()
        for each in (self.woken, self.waker):
            each.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for each_signal in ENDING:
            signal.signal(each_signal, self._end)

    def _end(self, *_: object) -> None:
        self.asked_to_end = True

    def wait(self, *others: Any, seconds: float | None = None) -> list[Any]:
        """Wait for a signal, the end of a child, or something to read; return what can be read, of `others` and `woken`."""
        readable = select.select([self.woken, *others], [], [], seconds)[0]
        with suppress(BlockingIOError):
            while self.woken.recv(4096):
                pass
        return readable

    def reap(self) -> Iterator[tuple[int, int]]:
        """Yield pid and exit code (-9 after signal 9) of each child that has ended, which are no zombies from then on."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self.children.discard(found[0])
                yield found[0], os.waitstatus_to_exitcode(found[1])

    def fork(self, name: str, work: Callable[..., object], *arguments: Any) -> int:
        """Fork a child that does its work and nothing else, and return its pid."""
        parent = os.getpid()
        with _block(signal.SIGCHLD, *ENDING):  # until the child has its own handlers
            pid = os.fork()
            if pid == 0:
                self._be_child(parent, name, work, *arguments)
        self.children.add(pid)
        return pid

    def _be_child(self, parent: int, name: str, work: Callable[..., object], *arguments: Any) -> NoReturn:
        code = 1
        try:
            _end_with(parent, name)
            signal.set_wakeup_fd(-1)
            for each in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for each_socket in (self.woken, self.waker):
                each_socket.close()
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
        deadline = time.monotonic() + GRACE_SECONDS
        for pid in self.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        while self.children and time.monotonic() < deadline:
            list(self.reap())
            time.sleep(0.05)
        for pid in self.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Executor(Parent):
    """The first process: it forks a `flower-superexec` for each SuperNode, and what forks tasks when the first is asked for.

    `pollers` has the options of each `flower-superexec` by pid, `warm` the pid of what forks tasks, 0 without one. What the
    former write to `of_pollers` the latter reads from `requests`: datagrams, so that what several write does not mix.
    """

    def __init__(self, idle: float) -> None:
        super().__init__()
        self.idle, self.pollers, self.warm = idle, dict[int, list[str]](), 0
        self.requests, self.of_pollers = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.requests.setblocking(False)

    def serve(self, pollers: list[list[str]], parent: int | None = None) -> int:
        """Start pollers with these options and the tasks that they get, until told to end; returns the exit code.

        So does the end of the process `parent`. A poller that was killed is replaced. A single one that ends by itself, for
        instance because its secret is wrong, ends this process with its exit code, as `flower-superexec` would have ended; one
        of several is replaced too, because the others' tasks are not to end with it.
        """
        for words in pollers:
            self._poll(words)
        while not self.asked_to_end and (parent is None or lives(parent)):
            readable = self.wait(
                *([] if self.warm else [self.requests]), seconds=None if parent is None else LOOK_SECONDS
            )
            for pid, code in self.reap():
                if pid in self.pollers and code >= 0 and len(pollers) == 1:
                    return code
                self._replace(pid, code)
            if self.requests in readable and not self.warm:
                self.warm = self.fork_or_wait("piecework-warm", self._start_tasks)
        return 0

    def _replace(self, pid: int, code: int) -> None:
        if pid == self.warm:
            self.warm = 0
            if (
                code
            ):  # Flower offers again what is not begun, so that a process that cannot start is not tried all the time
                dropped = len(list(receive(self.requests)))
                log(
                    WARNING,
                    "process %s, which started tasks, ended with code %s; %s waited for it",
                    pid,
                    code,
                    dropped,
                )
        elif (words := self.pollers.pop(pid, None)) is not None:
            log(WARNING, "process %s, which asks for tasks, ended with code %s: started again", pid, code)
            time.sleep(PAUSE_SECONDS)
            self._poll(words)

    def fork_or_wait(self, name: str, work: Callable[..., object], *arguments: Any) -> int:
        """Fork, and try again while the system has nothing left for another process; 0 when told to end meanwhile."""
        while not self.asked_to_end:
            try:
                return self.fork(name, work, *arguments)
            except OSError as error:
                log(WARNING, "%s cannot be started: %s", name, error)
                time.sleep(PAUSE_SECONDS)
        return 0

    def _poll(self, words: list[str]) -> None:
        self.pollers[self.fork_or_wait("flower-superexec", self._run_poller, words, os.getpid())] = words

    def _run_poller(self, words: list[str], parent: int) -> None:
        self.requests.close()
        tasks.run_poller(words, self.of_pollers, parent)

    def _start_tasks(self) -> None:
        self.of_pollers.close()
        _go_before_others(NEXT_TO_KILL)
        tasks.import_all()
        log(INFO, "tasks are run by children of process %s, until there was none for %g s", os.getpid(), self.idle)
        server = ForkServer(self.requests)
        try:
            server.serve(self.idle)
        finally:
            server.end()


class ForkServer(Parent):
    """What forks a child for each task that is asked for.

    `tasks` has by pid the words of each and the pipe of its notes (crash_reply.py).
    """

    def __init__(self, requests: socket.socket) -> None:
        super().__init__()
        self.requests, self.tasks = requests, dict[int, tuple[list[str], int]]()

    def serve(self, idle: float) -> None:
        """Start tasks until told to end, or until there was none for `idle` seconds."""
        while not self.asked_to_end:
            if not self.wait(self.requests, seconds=None if self.children else idle):
                return
            for pid, code in self.reap():
                if pid in self.tasks:
                    self._conclude(pid, code)
            for request in receive(self.requests):
                self._start(json.loads(request))

    def _start(self, words: list[str]) -> None:
        """Start a task; one that cannot be started now is offered again by Flower."""
        try:
            reader, writer = os.pipe()
        except OSError as error:
            return log(WARNING, "a task cannot be started: %s", error)
        os.set_blocking(reader, False)
        try:
            self.tasks[self.fork("flwr-clientapp", self._run_task, words, writer)] = words, reader
        except OSError as error:
            os.close(reader)
            log(WARNING, "a task cannot be started: %s", error)
        finally:
            os.close(writer)
        return None

    def _run_task(self, words: list[str], notes: int) -> None:
        self._forget_others()
        _go_before_others(FIRST_TO_KILL)
        tasks.run_task(words, notes)

    def _forget_others(self) -> None:
        """Close in a child what belongs to other tasks, whose tokens it must not have."""
        self.requests.close()
        for _, reader in self.tasks.values():
            os.close(reader)
        self.tasks.clear()

    def _conclude(self, pid: int, code: int) -> None:
        """Answer the message of a task that was killed before it answered."""
        words, reader = self.tasks.pop(pid)
        with os.fdopen(reader, "rb") as pipe:
            notes = pipe.read() or b""
        if code < 0:
            reason = f"the process of the task was killed by signal {-code} ({signal.strsignal(-code)})"
            log(WARNING, "process %s: %s", pid, reason)
            try:
                self.fork("flwr-clientapp", self._answer, words, notes, reason)
            except OSError as error:
                log(WARNING, "process %s is answered for by Flower, in a minute: %s", pid, error)

    def _answer(self, words: list[str], notes: bytes, reason: str) -> None:
        self._forget_others()
        tasks.answer_for(words, notes, reason)


def lives(pid: int) -> bool:
    """Return whether a process is there and has not ended; one that has is there until its parent asks for its exit code."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def receive(requests: socket.socket) -> Iterator[bytes]:
    """Yield the datagrams that are there."""
    with suppress(BlockingIOError):
        while True:
            yield requests.recv(2**16)


@contextmanager
def _block(*signals: signal.Signals) -> Iterator[None]:
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


def _go_before_others(score: int) -> None:
    """Have the kernel kill this process rather than its parent when memory ends."""
    place = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):
        place.write_text(str(max(score, int(place.read_text(encoding="ascii")))), encoding="ascii")
