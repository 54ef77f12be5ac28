"""A Flower `Grid` whose nodes are emulated clients that Ray's actors train, on one machine or many.

It has the semantics of the in-process grid, so a run's results are the same to the bit, on however many machines. Arrays go to
each machine once (shared_arrays.py), the book says which client trains where (book.py), and a client's state finds it there
(homes.py). What dies with a worker or a machine is run again once, elsewhere if there is an elsewhere.
"""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import ray
from flwr.app import Error, Message

from piecework.engines.cluster.book import Node, Want, choose, price_of
from piecework.engines.cluster.homes import Homes
from piecework.engines.cluster.nodes import Nodes
from piecework.engines.cluster.shared_arrays import SharedArrays, put_together, take_apart
from piecework.engines.cluster.waiting import Address, Prepared, Waiting
from piecework.engines.cluster.worker import Answered, Job
from piecework.planning.now import doing
from piecework.server_app.local_grid import NodeConfig
from piecework.server_app.ordered_grid import OrderedGrid, client_of
from piecework.training.messages import Question, Task, content_bytes

POLL_SECONDS = 1.0
LOOK_SECONDS = 2.0  # between looks for nodes that came or went
DIED = 8  # Flower's code for a client app that died
LOG = logging.getLogger("piecework")


class Call(NamedTuple):
    """A worker that has a message."""

    worker: str
    identifier: str


class RayGrid(OrderedGrid):
    """A grid on the Ray that this process has joined, with at most `workers` workers a node; 0 = one for each of its cores.

    `node_config` is added to the nodes' partition ids, as on the in-process grid.
    """

    def __init__(
        self,
        clients: int,
        run_config: Mapping[str, Any],
        workers: int = 0,
        node_config: NodeConfig | None = None,
    ) -> None:
        super().__init__(clients)
        self._waiting = Waiting()
        self._begun: dict[str, Prepared] = {}
        self._calls: dict[Any, Call] = {}
        self._answered: dict[str, Answered] = {}
        self._again: set[str] = set()
        self._expected: Mapping[int, float] = {}
        self._arrays = SharedArrays()
        self._looked = 0.0
        self._nodes = Nodes(dict(run_config), clients, node_config or {}, workers)
        self._homes = Homes(self._nodes)

    def close(self) -> None:
        """End the workers."""
        self._nodes.close()
        self._homes.close()

    def expect(self, seconds: Mapping[int, float]) -> None:
        """Say for how many seconds nodes will compute on their next messages; the longest begins first."""
        self._expected = seconds

    def answer_by(self, deadline: float) -> None:
        """Set the deadline of messages. An exchange that ends drops the arrays that none of them has."""
        super().answer_by(deadline)
        if deadline == math.inf:
            self._arrays.forget()

    def bring_home(self) -> None:
        """Bring the states of clients that lie on other machines to the run's folder."""
        self._homes.bring_all()

    @property
    def in_flight(self) -> int:
        """How many messages may be unanswered: two for each worker."""
        return max(4, 2 * self._nodes.count)

    def _wait(self, identifier: str, message: Message) -> None:
        """Take a message apart: what is waiting takes little memory here, and its arrays lie where Ray shares them."""
        content, size = message.content, content_bytes(message.content)
        client, price, address = client_of(message.metadata.dst_node_id), 2 * size, Address("", "")
        if "task" in content.config_records:
            task = Task.from_record(content.config_records["task"])
            price, address = price_of(task, size), Address(task.state_dir, task.experiment_id)
        elif "question" in content.config_records:
            question = Question.from_record(content.config_records["question"])
            address = Address(question.state_dir, question.experiment_id)
        seconds = self._expected.get(message.metadata.dst_node_id, 0.0)
        apart, buffers = take_apart(message)
        want = Want(identifier, client, price, seconds)
        trains = message.metadata.message_type == "train"
        self._waiting.add(Prepared(want, apart, self._arrays.put(buffers), address, trains))

    def _pushed(self) -> None:
        """Take in replies that have come meanwhile, and begin what waits; the first messages wait for the longest of them."""
        if self._calls:
            for reference in ray.wait([*self._calls], num_returns=len(self._calls), timeout=0)[0]:
                self._settle(reference)
            self._feed()

    def _feed(self) -> None:
        full: set[str] = set()  # of nodes: other jobs on the cluster have what memory is left there
        while self._waiting:
            address = next(iter(self._waiting)).address
            self._homes.look(address.state_dir, address.experiment)
            if self._homes.begun and not self._nodes.all_came(self._homes.asked):
                return None  # a state may lie on a node that has not said so yet
            busy = {each.want.client for each in self._begun.values()}
            wants = (each.want for each in self._waiting if each.want.client not in busy)
            nodes = [
                node
                for name, node in self._nodes.known.items()
                if name not in full and (self._homes.asked(name) or not self._homes.begun)
            ]
            found = choose(wants, nodes, self._homes.places)
            if found is None:
                return self._make_room()
            if self._nodes.reserve(found[1], found[0].price):
                self._begin(*found)
            else:
                full.add(found[1].name)
        return None

    def _begin(self, want: Want, node: Node, worker: str) -> None:
        prepared = self._waiting.pop(want.identifier)
        self._begun[want.identifier] = prepared
        node.prices[worker] = want.price
        folder, state, note = "", None, ""
        if prepared.address.experiment:
            folder, state, note = self._homes.prepare(want.client, node)
        references = self._arrays.references(prepared.digests)
        fresh = want.client not in self._homes.places
        job = Job(prepared.message, references, want.client, fresh, *prepared.address, folder, state, note)
        call = self._nodes.actor(worker).answer.remote(job)
        self._calls[call] = Call(worker, want.identifier)

    def _make_room(self) -> None:
        """If all workers are idle and nothing fits beside them: end some of them, or refuse what is too large for each node."""
        nodes = self._nodes.known.values()
        if not self._nodes.ready or self._calls:
            return
        for want in [each.want for each in self._waiting]:
            able = [node for node in nodes if node.could_ever_take(want.price)]
            if able:
                return self._nodes.retire(max(able, key=lambda node: node.memory), want.price)
            most = max((node.memory for node in nodes), default=0)
            reason = f"it takes {want.price:,} bytes beside its worker's own; the largest node of Ray has {most:,}"
            self._arrays.release(self._waiting.pop(want.identifier).digests)
            self._fail(want.identifier, Error(2, reason))

    def _has(self, identifier: str) -> bool:
        return identifier in self._done or identifier in self._answered

    def _take(self, identifier: str) -> Message:
        if identifier in self._answered:
            answered = self._answered.pop(identifier)
            self._done[identifier] = put_together(answered.message, answered.arrays, copied=True)
        return super()._take(identifier)

    def _collect(self, deadline: float) -> bool:
        """Take in what a worker says, or that one died, waiting for it until `deadline`."""
        self._feed()
        while True:
            self._nodes.require_some()
            if not self._nodes.ready:
                doing("Ray: %s", self._nodes.describe())
            pending = [*self._calls, *self._nodes.starting]
            left = max(0.0, deadline - time.monotonic())
            found, _ = ray.wait(pending, timeout=min(POLL_SECONDS, left)) if pending else ([], [])
            if not pending:
                doing("Ray: clients that wait for a node with memory for them: %d", len(self._waiting))
                time.sleep(min(POLL_SECONDS, left))  # for memory that Ray has not given yet, or a node
            if found and found[0] in self._nodes.starting:
                self._nodes.greet(found[0])
                self._feed()
            elif found:
                self._settle(found[0])
                self._feed()
                return True
            self._look()
            if time.monotonic() >= deadline:
                return False

    def _look(self) -> None:
        """Take in nodes that came or went, now and then, and start what fits now."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            self._nodes.refresh()
            self._homes.forget_lost()
            self._feed()

    def _settle(self, reference: Any) -> None:
        """Take in a worker's reply, or that it died."""
        worker, identifier = self._calls.pop(reference)
        node = self._nodes.node_of(worker)
        try:
            answered: Answered = ray.get(reference)
        except ray.exceptions.RayError as error:
            return self._lose(worker, identifier, error)
        if node is not None:
            node.prices.pop(worker, None)
        prepared = self._begun.pop(identifier)
        self._arrays.release(prepared.digests)
        self._again.discard(identifier)
        if prepared.address.experiment:
            self._homes.note(prepared.want.client, node, answered.rounds, trained=prepared.trains)
        self._answered[identifier] = answered

    def _lose(self, worker: str, identifier: str, error: ray.exceptions.RayError) -> None:
        """Run a message again whose worker died, or answer it in the place of its client the second time.

        What ran out of memory would do so again. What failed in a worker that lives is not run again either.
        """
        node, prepared = self._nodes.node_of(worker), self._begun.pop(identifier)
        alive, who = isinstance(error, ray.exceptions.RayTaskError), self._nodes.describe_worker(worker)
        if alive and node is not None:
            node.prices.pop(worker, None)
        else:
            self._nodes.replace(worker)
            self._homes.forget_lost()
        why = str(error).strip().splitlines()[-1 if alive else 0]
        if identifier in self._again or alive or isinstance(error, ray.exceptions.OutOfMemoryError):
            self._arrays.release(prepared.digests)
            self._again.discard(identifier)
            return self._fail(identifier, Error(2 if alive else DIED, f"{type(error).__name__}: {why}"))
        LOG.warning("client %d is asked again, %s died: %s", prepared.want.client, who, why)
        self._again.add(identifier)
        avoided = node.name if node is not None else ""
        again = replace(prepared, want=prepared.want._replace(avoided=avoided))
        self._waiting.add(again, again=True)

    def _abandon(self, identifiers: set[str]) -> set[str]:
        begun = {reference: call for reference, call in self._calls.items() if call.identifier in identifiers}
        for reference, call in begun.items():
            del self._calls[reference]
            self._arrays.release(self._begun.pop(call.identifier).digests)
            self._nodes.replace(call.worker)
        for identifier in filter(self._waiting.__contains__, identifiers):
            self._arrays.release(self._waiting.pop(identifier).digests)
        self._feed()
        return {call.identifier for call in begun.values()}
