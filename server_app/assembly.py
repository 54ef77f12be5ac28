"""The time between rounds: late answers come in, and the next round waits for enough idle clients."""

import time
from typing import Any

from flwr.serverapp import Grid

from piecework.device_profiles.clock import Stragglers
from piecework.federation.faults import status_of
from piecework.federation.pace import Done
from piecework.federation.transport import Transport
from piecework.server_app.deadlines import TRAIN, Deadlines
from piecework.server_app.round_record import training_seconds
from piecework.strategies.server import MethodServer
from piecework.training.messages import content_bytes


class Assembly:
    """Knows which clients are still at work on a task of an earlier round: really, or on the simulated clock.

    `tasks` are those of the simulated clock's `stragglers` in a checkpoint. `deadlines` learns the pace of late clients.
    """

    def __init__(
        self,
        grid: Grid,
        transport: Transport,
        server: MethodServer,
        deadlines: Deadlines,
        tasks: list[dict[str, Any]],
    ) -> None:
        self.grid, self.transport, self.server, self.deadlines = grid, transport, server, deadlines
        self.settings, self.registry = server.settings, server.registry
        self.stragglers = Stragglers(tasks)

    def pass_time(self, server_round: int) -> None:
        """Let the simulated seconds of the round's training pass, and note who is still at work when it ends.

        Those are not asked to measure batch norms.
        """
        seconds = training_seconds(self.server)
        self.stragglers.wait(seconds)
        for report in self.server.round.reports.values() if self.settings.simulated else ():
            if report.status == "late":
                done = self.deadlines.simulate_task(report)
                self.stragglers.add(report.client, server_round, done.total - seconds, (report.device, *done))
        self._note_busy()

    def assemble(self) -> tuple[list[dict[str, Any]], float]:
        """Wait for enough idle clients, at most `messages.node-timeout` seconds.

        Returns the late replies, and the simulated seconds of waiting for clients that are at work on the simulated clock.
        """
        late, deadline = [], time.monotonic() + self.settings.messages.node_timeout
        waited, few = 0.0, self.settings.least
        self.server.late.begin()
        while True:
            for sent, reply, seconds in self.transport.late():
                client = self.registry.client_of(sent.node_id)
                status = status_of(reply.error) if reply.has_error() else "ok"
                if client is not None:
                    if status == "crashed":
                        self.server.note_crash(client, sent.server_round)
                    self.deadlines.came_late(client, sent, reply, seconds)
                    if sent.kind == TRAIN:
                        self.server.late.receive(self.server.round, sent.server_round, client, reply)
                size = content_bytes(reply.content) if reply.has_content() else 0
                late.append({"client": client, "round": sent.server_round, "status": status, "bytes": size})
            self.registry.update(self.grid)
            while len(self._idle()) < few and (more := self.stragglers.until_next()):
                waited += more
                self.stragglers.wait(more)
            for task in self.stragglers.take_answered():
                if task.get("done"):
                    device, *done = task["done"]
                    self.deadlines.note_simulated(task["client"], device, Done(*done))
                self.server.late.arrive(task["round"], task["client"])
                late.append({"client": task["client"], "round": task["round"], "status": "ok"})
            enough = len(self._idle()) >= few
            if (enough and not self.registry.incomplete()) or time.monotonic() > deadline:
                return late, waited
            time.sleep(0.2)

    def _idle(self) -> list[int]:
        """Return the clients that are connected and not at work, after telling the registry who is."""
        self._note_busy()
        return self.registry.present(self.grid)

    def _note_busy(self) -> None:
        members = self.registry.members
        at_work = {members[client].node_id for client in self.stragglers.clients if client in members}
        self.registry.busy = self.transport.busy() | at_work
