"""The process whose children run tasks: what it survives, what ends with it, and what its children have of it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import psutil
import pytest

from piecework.deploy import supernode
from piecework.engines.launch import client_executors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Flower's own executor runs the tasks")
ROOT = Path(__file__).resolve().parents[2]

# Three times the real server, with pollers that get their tasks from standard input and tasks that do as they are told.
SCRIPT = """
import os, sys, time
import torch
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec
from piecework.executor import fork_server, tasks, __main__ as command

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def poll(words, requests, parent):
    executor = tasks.ForkExecutor(requests, parent)
    say("poller", os.getpid(), *words)
    with open(0, "rb", buffering=0, closefd=False) as told:
        while (word := told.readline().decode().strip()) != "quit":
            executor.launch(ExecutionSpec(TaskType.CLIENT_APP, "host:1", word, True, None, False, 0, False, 1))
    sys.exit(3)

def work(words, note):
    score, name = (open(f"/proc/self/{file}").read().strip() for file in ("oom_score_adj", "comm"))
    say("task", os.getpid(), *words, "ppid", os.getppid(), "score", score, name)
    if words[4] == "noted":
        os.write(note, b"0a\\n")
        say("noted")
    if words[4] == "compute":
        torch.set_num_threads(2)
        ones = torch.ones(400, 400, requires_grad=True)
        (ones @ ones).sum().backward()
        say("computed", torch.get_num_threads(), float(ones.grad.sum()), torch.cuda.is_initialized())
    else:
        time.sleep(600)

def answer(words, notes, reason):
    say("answer", words[4], notes, reason.replace(" ", "_"))

tasks.answer_for = answer
tasks.run_poller, tasks.run_task, tasks.IMPORTED, fork_server.PAUSE_SECONDS = poll, work, ("torch",), 0.0
"""


SEVERAL = """
for _ in range(3):
    server = fork_server.Executor(600)
    code = server.serve([["option"]])
    server.end()
    say("ended", code)
"""
ALONE = """
sys.argv += ["--idle-seconds", "0", "--parent-pid", str(os.getppid())]
sys.exit(command.main())
"""


class Server:
    """A script, in a process."""

    def __init__(self, script: str) -> None:
        command = [sys.executable, "-c", script]
        self.child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = psutil.Process(self.child.pid)

    def tell(self, word: str) -> None:
        """Have the poller get a task, or end."""
        assert self.child.stdin is not None
        self.child.stdin.write(f"{word}\n")
        self.child.stdin.flush()

    def said(self, kind: str) -> list[str]:
        """The words of the next line, which is of this kind."""
        assert self.child.stdout is not None
        found, *words = self.child.stdout.readline().split()
        assert found == kind
        return words

    def named(self, kind: str) -> psutil.Process:
        """The process that the next line names."""
        return psutil.Process(int(self.said(kind)[0]))

    def task(self) -> psutil.Process:
        """A running task."""
        self.tell("sleep")
        return self.named("task")


@contextmanager
def serving(script: str) -> Iterator[Server]:
    """A server; it and its children are ended."""
    started = Server(script)
    family = [started.process]
    try:
        yield started
    finally:
        family += started.process.children(recursive=True) if started.child.poll() is None else []
        for each in family:
            if each.is_running():
                each.kill()
        started.child.communicate()


@pytest.fixture
def server() -> Iterator[Server]:
    """One for several SuperNodes."""
    with serving(SCRIPT + SEVERAL) as started:
        yield started


@pytest.fixture
def alone() -> Iterator[Server]:
    """One for a single SuperNode."""
    with serving(SCRIPT + ALONE) as started:
        yield started


@pytest.mark.slow
def test_tasks_are_children_that_harm_nobody_and_end_with_their_parent(server: Server) -> None:
    parent = str(server.child.pid)
    poller, option = server.said("poller")
    assert option == "option"

    server.tell("sleep")
    first, *words = server.said("task")
    command = [
        "flwr-clientapp",
        "--runtime-api-address",
        "host:1",
        "--token",
        "sleep",
        "--parent-pid",
        parent,
        "--insecure",
    ]
    warm = psutil.Process(int(first)).parent()
    assert warm is not None
    assert (warm.name(), warm.ppid()) == ("piecework-warm", server.child.pid)
    # when memory ends the kernel ends the task first
    assert words == [*command, "ppid", str(warm.pid), "score", "500", "flwr-clientapp"]
    assert [score_of(pid) for pid in (warm.pid, server.child.pid)] == ["250", score_of(os.getpid())]

    server.tell("compute")  # while the first task runs
    server.said("task")
    assert server.said("computed") == ["2", str(2 * 400.0**3), "False"]

    killed = psutil.Process(int(first))
    killed.kill()  # as the kernel does when memory ends
    assert psutil.wait_procs([killed], timeout=60)[1] == []  # reaped: a zombie would still be there
    reason = "the_process_of_the_task_was_killed_by_signal_9_(Killed)"
    assert server.said("answer") == ["sleep", "b''", reason]
    server.tell("noted")
    noted = server.named("task")
    server.said("noted")
    noted.kill()
    assert server.said("answer") == ["noted", r"b'0a\n'", reason]
    second = server.task()

    psutil.Process(int(poller)).kill()
    again = server.named("poller")
    assert str(again.pid) != poller
    assert server.task().ppid() == warm.pid == second.ppid()

    server.tell("quit")
    assert server.said("ended") == ["3"]
    assert not second.is_running()

    of_second = [server.named("poller"), server.task()]
    server.process.terminate()
    assert server.said("ended") == ["0"]
    assert psutil.wait_procs(of_second, timeout=60)[1] == []

    of_third = [server.named("poller"), server.task()]
    server.process.kill()
    assert psutil.wait_procs(of_third, timeout=60)[1] == []


def score_of(pid: int) -> str:
    return Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii").strip()


@pytest.mark.slow
def test_what_forks_is_there_only_while_there_are_tasks(alone: Server) -> None:
    poller = alone.named("poller")
    assert alone.process.children() == [poller]
    alone.tell("sleep")
    task = alone.named("task")
    warm = psutil.Process(task.ppid())
    assert {*alone.process.children()} == {poller, warm}

    task.kill()
    alone.said("answer")
    assert psutil.wait_procs([task, warm], timeout=60)[1] == []  # for it was idle
    assert alone.process.children() == [poller]

    task = alone.task()
    warm = psutil.Process(task.ppid())
    warm.kill()  # as the kernel may do after the task
    assert psutil.wait_procs([task, warm], timeout=60)[1] == []
    task = alone.task()
    family = [poller, psutil.Process(task.ppid()), task]
    alone.process.kill()
    assert psutil.wait_procs(family, timeout=60)[1] == []


@pytest.mark.slow
def test_the_executor_ends_with_the_supernode_that_started_it() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as node,
        serving(SCRIPT + ALONE.replace("os.getppid()", str(node.pid))) as executor,
    ):
        family = [executor.named("poller"), executor.task()]
        node.kill()
        assert executor.child.wait(60) == 0
        assert psutil.wait_procs(family, timeout=60)[1] == []


@pytest.mark.slow
def test_a_supernode_that_starts_its_own_executor_finds_ours(tmp_path: Path) -> None:
    """With the options of Flower's: here the one that says what there are, and then the first command on PATH of that name."""
    commands = Path(sys.executable).parent
    environment = os.environ | {"FLWR_HOME": str(tmp_path)}
    command = [commands / "piecework-supernode", "--look-seconds", "0.5", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert told.returncode == 0
    assert "[--look-seconds 3]" in told.stdout
    assert "--auth-supernode-private-key" in told.stdout
    found = shutil.which("flower-superexec", path=str(tmp_path / "piecework"))
    assert found is not None
    assert Path(found).resolve() == commands / "piecework-executor"


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_a_time_that_is_none_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["piecework-supernode", f"--look-seconds={text}"])
    with pytest.raises(SystemExit):
        supernode.main()
    assert f"{text!r} is no time: give seconds above 0, such as 0.5" in capsys.readouterr().err


def test_one_process_serves_all_clients_and_has_nothing_of_the_app() -> None:
    """The app is imported by each task from the bundle of its run, so that the next run may bring another version."""
    assert client_executors([1, 2], warm=True) == {
        "clientapps": [
            *(sys.executable, "-P", "-m", "piecework.executor", "--insecure"),
            *("--runtime-api-address", "127.0.0.1:1", "--runtime-api-address", "127.0.0.1:2"),
        ]
    }
    assert set(client_executors([1, 2], warm=False)) == {"clientapp-0", "clientapp-1"}
    read = "import sys; from piecework.executor import __main__; print(*sorted(n for n in sys.modules if 'piecework' in n))"
    found = subprocess.run([sys.executable, "-P", "-c", read], capture_output=True, text=True, check=True, cwd="/")
    names = ["piecework", "piecework.executor"]
    assert found.stdout.split() == [
        *names,
        *(f"piecework.executor.{name}" for name in ("__main__", "fork_server", "lone_command", "tasks")),
    ]


def test_a_bundle_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from piecework.executor import tasks  # Windows has no fcntl

    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    unpacked = list[bytes]()

    def install(bundle: bytes, install_dir: Path, skip_prompt: bool) -> Path:
        assert skip_prompt
        path = install_dir / bundle.decode()
        path.mkdir()
        (path / "part").write_bytes(b"")
        first, _ = bundle not in unpacked, unpacked.append(bundle)
        if bundle == b"bad" and first:
            raise OSError(28, "No space left on device")
        return path

    once = tasks.install_once(install)
    found = [once(bundle, skip_prompt=True) for bundle in (b"old", b"old", b"new", b"old")]
    assert [path.name for path in found] == ["old", "old", "new", "old"]
    assert unpacked == [b"old", b"new"]
    shutil.rmtree(found[2])  # a user may do so
    once(b"new", skip_prompt=True)
    assert unpacked == [b"old", b"new", b"new"]
    with pytest.raises(OSError, match="No space"):
        once(b"bad", skip_prompt=True)
    (found[0].with_name("bad") / "of Flower's own, which was killed").mkdir(parents=True)
    assert [each.name for each in once(b"bad", skip_prompt=True).iterdir()] == ["part"]
    assert sorted(each.name for each in found[0].parent.iterdir() if each.is_dir()) == ["bad", "new", "old"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node_config", "said"),
    [
        ("partition-id=0 device=auto", "The provided configuration string is in an invalid"),
        ("not-there.toml", "not-there.toml: No such file or directory"),
    ],
)
def test_a_supernode_with_wrong_arguments_says_so_in_a_line(tmp_path: Path, node_config: str, said: str) -> None:
    """A device without quotes is a likely mistake in a node-config."""
    own_home = os.environ | {"FLWR_HOME": str(tmp_path)}  # else a real SuperNode of this user would get this executor
    command = [Path(sys.executable).with_name("piecework-supernode"), "--insecure", "--superlink", "localhost:1"]
    command += ["--node-config", node_config]
    done = subprocess.run(command, capture_output=True, text=True, env=own_home, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"piecework-supernode: {said}")
    assert "Traceback" not in done.stderr


def test_only_what_prevents_a_start_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the months after it has its traceback."""
    said = list[str]()

    def fail() -> NoReturn:
        raise RuntimeError(said[-1])

    monkeypatch.setattr(sys, "argv", ["piecework-supernode", "--isolation", "process"])
    monkeypatch.setattr(supernode, "look_every", lambda _: None)
    monkeypatch.setattr(supernode, "entry_points", lambda **_: [SimpleNamespace(load=lambda: fail)])
    said.append("SuperNode Runtime HTTP API failed to start.")
    with pytest.raises(SystemExit, match=r"^piecework-supernode: SuperNode .* to start; a second .* another --port$"):
        supernode.main()
    said.append("can't start new thread")
    with pytest.raises(RuntimeError, match=r"^can't start new thread$"):
        supernode.main()
