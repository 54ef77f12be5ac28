"""How long each answer of a round is awaited, really or on the simulated clock, by the pace of the clients."""

import math
from typing import Any

from flwr.app import Message

from piecework.device_profiles.clock import simulated_seconds
from piecework.federation.pace import Done, Load, Pace, deadline_message
from piecework.federation.reports import ClientReport
from piecework.federation.transport import Sent
from piecework.planning.timing import round_flops
from piecework.strategies.server import MethodServer
from piecework.training.messages import Task

TRAIN = "train"  # the kind of training messages
TRAINED = ("ok", "rejected")  # the statuses of clients that have trained, also if the update is not used


class Deadlines:
    """The deadlines of a strategy's training messages, and of messages with frozen units; see federation/pace.py.

    Deadlines are in force once half of the updates that may come are there, and `faults.min-clients`. On real
    devices a transport asks for them while it waits (`seconds`, `ended`), and a client without a task so far is compared with
    those that have answered in the meantime. Where clients are emulated, the gate asks for them on the simulated clock.

    `values` are those of a checkpoint. The paces in it are of one clock, and are forgotten if the run goes on by another.
    """

    def __init__(self, server: MethodServer, values: dict[str, Any]) -> None:
        self.server, self.settings, self.registry = server, server.settings, server.registry
        self.simulated, faults = self.settings.simulated, self.settings.faults
        longest = math.inf if self.simulated else self.settings.messages.round_timeout
        self.pace = Pace(faults.deadline_factor, faults.deadline_floor, longest)
        if values and values["simulated"] == self.simulated:
            self.pace.restore(values["clients"])
        server.gate.deadline = self._on_simulated_clock
        self._works: dict[int, tuple[str, float]] = {}  # device and FLOPs of each client's last task
        self._answered: dict[int, tuple[Sent, float]] = {}
        self._given_up: dict[int, float] = {}

    def to_values(self) -> dict[str, Any]:
        """Return the paces as JSON values."""
        return {"simulated": self.simulated, "clients": self.pace.to_values()}

    def begin(self) -> None:
        """Prepare for the tasks of a round, which the strategy has just made."""
        self._answered, self._given_up = {}, {}
        for client, task in self.server.dispatcher.tasks.items():
            self._works[client] = self.server.round.reports[client].device, self._work(client, task)

    def _work(self, client: int, task: Task) -> float:
        """Return the FLOPs of all work items in a task's cost list, on the client's examples; 0 if there are no deadlines.

        A client may do less, but only what grew since an earlier task counts.
        """
        if not self.settings.faults.deadline_factor:
            return 0.0
        cut = self.server.method.cut
        cost_model = cut.cost_model if task.adversarial else cut.cost_model.unattacked
        parts = [cut.part(item) for item in task.costs]
        return max(1.0, round_flops(self.settings, cost_model, parts, self.registry.members[client].examples))

    def seconds(self, sent: Sent) -> float:
        """Return the seconds for which the answer to a message of this round is awaited."""
        self._note_answers()
        return self._deadline(sent) if self._in_force(sent) else self.pace.longest

    def _in_force(self, sent: Sent) -> bool:
        """Return whether enough clients have answered: trained, or taken in their frozen units."""
        if sent.kind != TRAIN:
            there = len(self.server.round.reports) - len(self.server.weight_cache.unreached)
        else:
            there = sum(report.status == "ok" for report in self.server.round.reports.values())
        return there >= self.server.gate.before_deadlines(self.server.round)

    def _deadline(self, sent: Sent) -> float:
        client = self.registry.client_of(sent.node_id)
        if client not in self._works:
            return self.pace.longest
        device, work = self._works[client]
        return self.pace.deadline(client, device, Load(work if sent.kind == TRAIN else 0.0, sent.bytes))

    def note_end(self, sent: Sent, waited: float, *, answered: bool) -> None:
        """Take note of how long the answer to a message was awaited. If it came, it is read after this."""
        self._note_answers()
        client = self.registry.client_of(sent.node_id)
        if client is None or client not in self.server.round.reports:
            return
        report, deadline = self.server.round.reports[client], self._deadline(sent)
        report.waited_seconds = waited
        report.deadline_seconds = deadline if deadline < self.pace.longest else None
        if not answered and self._in_force(sent) and deadline <= waited < self.pace.longest:
            self._given_up[client] = deadline
        elif answered and sent.kind == TRAIN:
            self._answered[client] = sent, waited

    def _note_answers(self) -> None:
        """Note the pace of the clients whose answers have come and been read."""
        for client, (sent, waited) in self._answered.items():
            report = self.server.round.reports[client]
            if report.status in TRAINED:
                self._note(client, report.seconds, waited, sent.bytes)
        self._answered = {}

    def _note(self, client: int, training: float, total: float, sent: int) -> None:
        """Note a task that took `total` seconds."""
        if client in self._works and self.settings.faults.deadline_factor:
            device, work = self._works[client]
            self.pace.note(client, device, Done(training, total, work, sent))

    def came_late(self, client: int, sent: Sent, reply: Message, seconds: float) -> None:
        """Note the pace of a client whose answer came `seconds` after its task, so that the next one is awaited longer."""
        report = ClientReport(client, "", 0)
        if sent.kind == TRAIN and (answer := report.take(reply)) is not None and answer.outcome.status == "ok":
            report.read(answer)
            self._note(client, report.seconds, seconds, sent.bytes)

    def finish(self) -> None:
        """End the training of a round: clients that were given up are late."""
        reports = self.server.round.reports
        if not self.simulated:
            self._note_answers()
        for client, deadline in self._given_up.items():
            if reports[client].status == "timeout":
                reports[client].end("late", deadline_message(deadline))
        for report in reports.values() if self.simulated else ():
            if report.status in TRAINED:
                self.note_simulated(report.client, report.device, self.simulate_task(report))

    def _on_simulated_clock(self, report: ClientReport) -> float:
        _, work = self._works.get(report.client, ("", 0.0))
        return self.pace.deadline(report.client, report.device, Load(work, report.bytes_down))

    def simulate_task(self, report: ClientReport) -> Done:
        """Return what a client did in this round, on the simulated clock."""
        device = self.server.round.assigned[report.client].device
        network = simulated_seconds(device, 0, report.bytes_down, report.bytes_up)
        total, (_, work) = report.simulated_seconds, self._works[report.client]
        return Done(total - network, total, work, report.bytes_down)

    def note_simulated(self, client: int, device: str, done: Done) -> None:
        """Note a task that a client did on the simulated clock, unless it did not train in it."""
        if done.training > 0 and self.settings.faults.deadline_factor:
            self.pace.note(client, device, done)
