"""Frozen units are sent once, ahead of the tasks that name them, identified by content hash, in messages of bounded size.

The server keeps in memory which units each client reported to hold. After a server restart, or if a client has a new node id,
the client is queried first, so that only missing units are sent again.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from flwr.app import Array, ArrayRecord, Message, RecordDict

from piecework.client_app.frozen import content_hash
from piecework.federation.registry import ClientRegistry
from piecework.federation.reports import ClientReport
from piecework.federation.transport import MESSAGE_LIFETIME
from piecework.models.cascade import unit_of
from piecework.training.messages import Question, Task, content_bytes
from piecework.training.parcels import pack
from piecework.training.settings import Settings


def pack_units(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Pack units in order into messages of at most `limit` bytes; a larger unit is sent alone. `sizes` is bytes by unit."""
    packed: list[list[str]] = []
    room = -1
    for unit, size in sizes.items():
        room -= size
        if room < 0:
            packed.append([])
            room = limit - size
        packed[-1].append(unit)
    return packed


def without_units(arrays: ArrayRecord, units: Iterable[str]) -> ArrayRecord:
    """Return the arrays of all units but these, not copied."""
    excluded = set(units)
    return ArrayRecord({name: a for name, a in arrays.items() if unit_of(name) not in excluded}) if excluded else arrays


def units_of(arrays: ArrayRecord, units: Iterable[str]) -> dict[str, dict[str, Array]]:
    """Return the arrays of some units by unit and global name, not copied; without units that have none."""
    found: dict[str, dict[str, Array]] = {unit: {} for unit in units}
    for name, array in arrays.items():
        if (unit := unit_of(name)) in found:
            found[unit][name] = array
    return {unit: held for unit, held in found.items() if held}


@dataclass
class Holdings:
    """The content hashes of the frozen units that the client on a node is known to hold."""

    node: int
    hashes: set[str] = field(default_factory=set)


class WeightCache:
    """Which frozen units each client holds. `unreached` are the clients that have not answered their last chunk."""

    def __init__(self, settings: Settings, registry: ClientRegistry, experiment_id: str, state_dir: str) -> None:
        self.settings, self.registry = settings, registry
        self.unreached: set[int] = set()
        self._address = experiment_id, state_dir
        self._held: dict[int, Holdings] = {}
        self._sent: dict[int, Holdings] = {}
        self._hashes: dict[str, tuple[list[bytes], str]] = {}

    def hashes(self, arrays: ArrayRecord, units: Iterable[str]) -> dict[str, str]:
        """Return the content hashes of units. Units whose bytes are the same objects as before are not hashed again."""
        named = {}
        for unit, held in units_of(arrays, units).items():
            known, digest = self._hashes.get(unit, ([], ""))
            objects = [array.data for array in held.values()]
            if len(known) != len(objects) or any(one is not other for one, other in zip(known, objects, strict=True)):
                digest = content_hash((name, array.numpy()) for name, array in held.items())
                self._hashes[unit] = objects, digest
            named[unit] = digest
        return named

    def with_frozen_hashes(self, task: Task, arrays: ArrayRecord, units: Iterable[str]) -> Task:
        """Return the task with the content hashes of these frozen units, which the client must hold before it begins."""
        return replace(task, frozen=self.hashes(arrays, units))

    def batches(
        self, tasks: Mapping[int, Task], arrays: ArrayRecord, reports: Mapping[int, ClientReport]
    ) -> Iterator[Iterator[Message]]:
        """Yield batches of messages with the frozen units that clients miss, one message per client in each batch.

        The first batch queries clients whose holdings are unknown. The answers to a batch must be passed to `note` before the
        next batch is requested.
        """
        for client in self.unreached:
            self._held.pop(client, None)
        self.unreached.clear()
        for client, task in tasks.items():
            held, node = self._held.get(client), self.registry.members[client].node_id
            if held is not None and held.node == node:
                held.hashes &= set(task.frozen.values())  # a client drops units that its task does not name
            else:
                self._held.pop(client, None)
        tasks = {client: task for client, task in tasks.items() if task.frozen}
        questions = {client: list(task.frozen) for client, task in tasks.items() if client not in self._held}
        if questions:
            yield self._messages(questions, tasks, arrays, reports, bring=False)
        queues = {client: self._missing(client, task, arrays) for client, task in tasks.items()}
        while batch := {c: queue.pop(0) for c, queue in queues.items() if queue and c not in self.unreached}:
            yield self._messages(batch, tasks, arrays, reports, bring=True)

    def _missing(self, client: int, task: Task, arrays: ArrayRecord) -> list[list[str]]:
        if client not in self._held:
            return []  # it did not answer the query
        missing = [unit for unit, digest in task.frozen.items() if digest not in self._held[client].hashes]
        sizes = {u: sum(len(a.data) for a in held.values()) for u, held in units_of(arrays, missing).items()}
        return pack_units(sizes, self.settings.messages.max_bytes)

    def _messages(
        self,
        batch: Mapping[int, list[str]],
        tasks: Mapping[int, Task],
        arrays: ArrayRecord,
        reports: Mapping[int, ClientReport],
        *,
        bring: bool,
    ) -> Iterator[Message]:
        for client, units in batch.items():
            hashes, node = [tasks[client].frozen[unit] for unit in units], self.registry.members[client].node_id
            self._sent[client] = Holdings(node, set(hashes))
            self.unreached.add(client)
            experiment_id, state_dir = self._address
            brought = units_of(arrays, units).values() if bring else []
            content = RecordDict(
                {
                    "question": Question(experiment_id, state_dir, hashes).to_record(),
                    "arrays": pack((name, array) for unit in brought for name, array in unit.items()),
                }
            )
            reports[client].bytes_down += content_bytes(content)
            reports[client].reason = "no answer to its frozen units within messages.round-timeout"
            yield Message(
                content,
                dst_node_id=node,
                message_type="query.units",
                group_id=str(tasks[client].round),
                ttl=MESSAGE_LIFETIME * self.settings.messages.round_timeout,
            )

    def note(self, client: int, missing: Iterable[str]) -> None:
        """Record from a client's answer that the units of its last message arrived, but for those of these hashes."""
        if (sent := self._sent.get(client)) is not None:
            self._held.setdefault(client, Holdings(sent.node)).hashes |= sent.hashes - set(missing)
            self.unreached.discard(client)

    def forget(self, client: int, hashes: Iterable[str]) -> None:
        """Record that a client does not hold units of these hashes after all."""
        if client in self._held:
            self._held[client].hashes -= set(hashes)
