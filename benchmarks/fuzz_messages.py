"""Changed messages to a client: it answers each, in time, within its store, and serves true messages as before.

A small run of each system (as in `benchmarks.hostile`) leaves the true messages to one client: the first query, training,
evaluation, queries, measured batch norms, frozen units. Each message that the client then gets is one of them, changed once or
twice: a field of the task, a value within one of its JSON texts, a record, an array, how arrays are packed, or the message's
type. At times the true ones are repeated in their order, and must have the same answers: the same bits of arrays, the same
figures. An error must be one of the project's own, in one sentence. The client is a board with a store of its own, where what
arrives is not of the process that started the client.
"""

import json
import pickle
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
from flwr.app import Message, RecordDict

from benchmarks.hostile import Target
from benchmarks.hostile_arrays import NESTED, WAYS, change_arrays, change_parcels
from benchmarks.mutations import SCALARS, any_value, as_json, spoil_value
from piecework.server_app.local_grid import reply_to
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.training.answers import read_answer
from piecework.training.parcels import pack, unpack
from piecework.training.readable import UNUSABLE

CLIENT = 1
SECONDS = 20  # for one message, which takes milliseconds
PARCELS = (
    "cut",
    "padded",
    "prefix",
    "data",
    "list",
    "stype",
    "again",
    "plain",
    "order",
    "twice",
    "size",
    "shift",
    "dtype",
    "shape",
)
CLEAR = (  # what an error may begin with: each is this project's own, or Flower's, and names what is wrong
    "MessageError: ",
    "ParcelError: ",
    "SettingsError: ",
    "ValueError: unknown strategy ",
    "ValueError: the task is of strategy ",
    "ValueError: strategy ",
    "ValueError: model = ",
    "ValueError: convnet needs ",
    "FileNotFoundError: the client's store has no ",
    "ValueError: No query function registered with name ",
)
# What a well-formed task ends with that nobody can carry out. It names the task, and then what the trainer met.
IMPOSSIBLE = "TaskError: task "
MESSAGES = (
    "train",
    "evaluate",
    "query",
    "query.device",
    "query.units",
    "query.statistics",
    "query.query",
    "query.nonsense",
)
STEADY = ("num-examples", "train-loss", "seen", "val-loss", "val-accuracy")


class HangError(Exception):
    """A message took too long."""


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise HangError in the body after so many seconds."""

    def ring(*_: object) -> None:
        raise HangError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Watch:
    """Notes each path that this process opens to write, makes, moves or removes outside a folder, while it is `on`."""

    def __init__(self) -> None:
        self.on, self.folder, self.outside = False, "", list[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if not writes and event not in (
            "os.mkdir",
            "os.rename",
            "os.remove",
            "os.rmdir",
            "os.link",
            "os.symlink",
            "shutil.rmtree",
        ):
            return
        for path in (each for each in arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]):
            if isinstance(path, str | bytes | Path) and not self._within(
                str(path if not isinstance(path, bytes) else path.decode())
            ):
                self.outside.append(f"{event} {path!s}")

    def _within(self, path: str) -> bool:
        # a path that is relative to an open folder has no slash, and is seen where that folder was opened
        return path.startswith((self.folder, "/proc/self/", "/dev/null")) or "/" not in path


def spoil_record(record: Any, drawn: Random) -> None:
    """Change a record of a message in place: a field, or a value within a field that is JSON."""
    names = list(record)
    name = drawn.choice(names) if names else "new"
    kind = drawn.randrange(10)
    try:
        if kind == 0 and names:
            del record[name]
        elif kind == 1:
            record[drawn.choice(["new", "\x1b", "x" * 1000, *names])] = record.get(name, 0)
        elif kind < 7 and isinstance(record.get(name), str) and record[name][:1] in ("[", "{"):
            record[name] = as_json(spoil_value(json.loads(record[name]), drawn), drawn)
        elif kind == 7 and isinstance(record.get(name), str):
            record[name] = drawn.choice([*NESTED, "", record[name] * 2, record[name][:-1]])
        else:
            record[name] = drawn.choice([any_value(drawn), drawn.choice(SCALARS), b"\x80\x04K\x01."])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):  # Flower's records do not hold it
        return


def spoil(message: Message, others: list[RecordDict], drawn: Random) -> None:
    """Change a message in place, in one way."""
    content, kind = message.content, drawn.randrange(12)
    records = [name for name in content if name != "arrays"]
    if kind < 6 and records:
        spoil_record(content[drawn.choice(records)], drawn)
    elif kind < 8 and "arrays" in content:
        spoil_arrays(content, drawn, packed=False)
    elif kind == 8 and "arrays" in content:
        spoil_arrays(content, drawn, packed=True)
    elif kind == 9 and len(content):
        name = drawn.choice(list(content))
        del content[name]
        if drawn.random() < 0.5 and (other := drawn.choice(others)):
            content[name] = other[drawn.choice(list(other))]
    elif kind == 10:
        message.metadata.__dict__["_message_type"] = drawn.choice(MESSAGES)
    elif other := drawn.choice(others):
        name = drawn.choice(list(other))
        content.pop(name, None)
        content[name] = other[name]


def spoil_arrays(content: RecordDict, drawn: Random, *, packed: bool) -> None:
    """Change an array of a message in place, or how its arrays are packed. What cannot be changed stays as it is."""
    how = drawn.choice(PARCELS)
    try:
        if packed:
            change_parcels(content.array_records["arrays"], drawn.randrange(100), (how, value_for(how, drawn)))
            return
        arrays = unpack(content.array_records["arrays"])
        change_arrays(arrays, drawn.randrange(100), drawn.choice(WAYS))
        content["arrays"] = pack(arrays.items())
    except (KeyError, TypeError, ValueError, ArithmeticError, IndexError, StopIteration, RecursionError):
        return


def value_for(how: str, drawn: Random) -> Any:
    """Return a value for a change of parcels, of the type that it takes."""
    if how in ("cut", "padded"):
        return drawn.randrange(1, 2000)
    if how == "prefix":
        return drawn.choice([0, 1, 2**20, 2**32 - 1])
    if how == "data":
        return bytes(drawn.randrange(256) for _ in range(20))
    if how in ("list", "stype"):
        return drawn.choice([*NESTED, "[]", "{}", "[0]", ""])
    if how in ("size", "shift"):
        return drawn.choice([0, 1, -1, 64, 127, 2**31, 2**63])
    return drawn.choice([[2**31, 2**31], [], [0], "float16", "object", -1, 2**63, None])


@dataclass
class Client:
    """A client that gets changed messages of one system, and what came of it."""

    strategy: str
    folder: Path
    watch: Watch
    came: Counter[str] = field(default_factory=Counter)
    unclear: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        target = Target(self.strategy, self.folder)
        self.config = target.run.settings.to_run_config()
        self.clients = target.run.settings.clients
        # Of each kind one is enough, and the order is that of the run.
        sent = [each for each in target.grid.sent() if each.metadata.dst_node_id == FIRST_NODE + CLIENT]
        self.true = [pickle.dumps(each) for each in sent]
        self.store = self.folder / "board"
        self.store.mkdir()
        self.node = {"state-dir": str(self.store)}
        self.expected = self.replay()

    def answer(self, message: Message) -> Message:
        """Return the client's answer."""
        self.watch.folder, self.watch.on = str(self.store), True
        try:
            with limit(SECONDS):
                return reply_to(message, self.config, self.clients, self.node)
        finally:
            self.watch.on = False

    def replay(self) -> list[Any]:
        """Return what the client answers to the true messages, in their order, without times and memory."""
        found = []
        for data in self.true:
            reply = self.answer(pickle.loads(data))
            assert not reply.has_error(), reply.error
            arrays = {name: array.data for name, array in unpack(reply.content.array_records["arrays"]).items()}
            figures = dict(reply.content.metric_records["metrics"])
            outcome = dict(reply.content.config_records["outcome"]) | {"note": "", "missing": []}
            found.append(
                (outcome, {name: figures.get(name) for name in STEADY}, {n: bytes(each) for n, each in arrays.items()})
            )
        return found

    def attack(self, messages: int, seed: int = 1) -> int:
        """Send that many changed messages, and now and then the true ones. Returns by how many bytes the process grew after
        a fifth of them.

        Raises AssertionError for what must not be, HangError for a message that takes too long.
        """
        others = [pickle.loads(data).content for data in self.true]
        process, before = psutil.Process(), 0
        for number in range(messages):
            drawn = Random(f"{seed} {self.strategy} {number}")
            message = pickle.loads(drawn.choice(self.true))
            for _ in range(drawn.choice([1, 1, 2])):
                spoil(message, others, drawn)
            self.judge(self.answer(message), f"{self.strategy} {number}")
            if number % max(25, messages // 40) == 0:
                assert self.replay() == self.expected, (
                    f"{self.strategy} {number}: a true message is answered in another way"
                )
            if number == messages // 5:
                before = process.memory_info().rss
        return process.memory_info().rss - before

    def judge(self, reply: Message, where: str) -> None:
        """Raise AssertionError for an answer that is none, or for files outside of the client's store."""
        outside, self.watch.outside = self.watch.outside, []
        assert not outside, f"{where}: {outside[:3]}"
        if reply.has_error():
            reason = str(reply.error.reason)
            if not reason.startswith((*CLEAR, IMPOSSIBLE)):
                self.unclear[f"{where}: {reason:.200}"] += 1
            self.came["impossible" if reason.startswith(IMPOSSIBLE) else "error"] += 1
            return
        try:
            self.came[read_answer(reply.content).outcome.status] += 1
        except UNUSABLE:  # such as a loss that is not finite: the server rejects it, and says why
            self.came["rejected"] += 1
