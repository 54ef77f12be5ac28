"""Late answers: updates that come after their round was closed, and enter the model of a later one.

With `faults.accept-late = n`, the update of a client that was sent the model x_q in round q, and whose answer was there before
round r, enters the model of that round, if its age a = r - q is at most n:

  x_(r+1) = [sum_k n_k x_k + sum_j n_j s(a_j) (x_r + D_j)] / [sum_k n_k + sum_j n_j s(a_j)],   s(a) = (1 + a)^(-1/2)

Here k are the clients that answered in time, j the late ones, n the weights that the method gives them, which are their numbers
of examples unless it says otherwise, and D_j what client j changed of the
model that it was sent. The mean is over the clients that trained an array, for each array by itself. The weight s is that of
FedBuff (John Nguyen, Kshitiz Malik, Hongyuan Zhan, Ashkan Yousefpour, Mike Rabbat, Mani Malek, Dzmitry Huba, "Federated
Learning with Buffered Asynchronous Aggregation", AISTATS 2022, https://arxiv.org/abs/2106.06639) and the polynomial one of
FedAsync (Cong Xie, Sanmi Koyejo, Indranil Gupta, "Asynchronous Federated Optimization", 2019,
https://arxiv.org/abs/1903.03934) with exponent 1/2; that the change is added to the present model is FedBuff's. FedBuff divides
by the number of updates, so that old ones make a step smaller. Here, as in FedAvg, the weights are normalised: old updates only
count less than new ones.

Statistics of batch norms are no steps: a late client's own ones enter their mean, with the same weight.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from piecework.federation.aggregation import CheckedUpdate, Norms, UpdateRejectedError, require_within
from piecework.federation.reports import ClientReport
from piecework.strategies.method import Assigned, Round
from piecework.strategies.update_gate import UpdateGate

KEPT = "late/"  # of the names of its arrays in a checkpoint
Key = tuple[int, int]  # round and client


def discount(age: int) -> float:
    """Return the factor of the weight of an update that is `age` rounds old, s(a) in the module's head."""
    return float((1 + age) ** -0.5)


@dataclass
class Held:
    """A late update in plain values; its arrays are apart. `arrived`: whether its answer is there, on the simulated clock."""

    client: int
    round: int
    device: str
    examples: int
    trained: list[str]
    norms: Norms
    arrived: bool
    weight: int  # before the discount


class Awaited(NamedTuple):
    """What a late client on a real device was asked, and the model that it was sent."""

    asked: Assigned
    report: ClientReport
    model: ArrayRecord


class LateAnswers:
    """The late answers of a strategy that accepts them. A checkpoint holds those that have not been used.

    On real devices an answer is read and checked when it comes, by the gate of all answers. Where clients are emulated it has
    been; it is held until its client's simulated seconds have passed. Before it enters the model, the norms of its update are
    compared with those accepted so far. `used` and `dropped` are for the record of the round.
    """

    def __init__(self, gate: UpdateGate) -> None:
        self.gate, self.simulated, self.most = gate, gate.settings.simulated, gate.settings.faults.accept_late
        self.held: dict[Key, Held] = {}
        self.changes: dict[Key, dict[str, np.ndarray]] = {}
        self.used: list[dict[str, Any]] = []
        self.dropped: list[dict[str, Any]] = []
        self._awaited: dict[Key, Awaited] = {}

    def begin(self) -> None:
        """Begin a round, before late answers come in."""
        self.used, self.dropped = [], []

    def close(self, current: Round, model: ArrayRecord) -> None:
        """End the training of a round, whose clients were sent this model: keep what it takes to use late answers."""
        silent = [report for report in current.reports.values() if report.status in ("late", "timeout")]
        for report in silent if self.most else ():
            if self.simulated and report.client in current.updates:
                self._hold(current.number, report, current.updates[report.client], model, arrived=False)
            elif not self.simulated:
                asked = current.assigned[report.client]
                self._awaited[current.number, report.client] = Awaited(asked, report, model)
        current.updates = {}
        oldest = current.number + 1 - self.most  # that can be used in the next round
        self._awaited = {key: awaited for key, awaited in self._awaited.items() if key[0] >= oldest}
        self.changes = {key: changes for key, changes in self.changes.items() if key[0] >= oldest}

    def _hold(
        self, server_round: int, report: ClientReport, update: CheckedUpdate, model: ArrayRecord, *, arrived: bool
    ) -> None:
        key, (client, device) = (server_round, report.client), (report.client, report.device)
        self.changes[key] = {n: measure_change(n, array, model[n].numpy()) for n, array in update.arrays.items()}
        trained, norms = list(report.trained), dict(update.norms)
        weight = self.gate.method.weight(update)
        self.held[key] = Held(client, server_round, device, update.examples, trained, norms, arrived, weight)

    def arrive(self, server_round: int, client: int) -> None:
        """Take note that the answer of an emulated client has arrived."""
        if (server_round, client) in self.held:
            self.held[server_round, client].arrived = True

    def receive(self, current: Round, server_round: int, client: int, reply: Message) -> None:
        """Take in an answer of a real device to its task of an earlier round than the current one."""
        awaited = self._awaited.pop((server_round, client), None)
        if not self.most or reply.has_error():
            return
        if awaited is None:
            self._drop(client, server_round, self._too_old())
            return
        sent = awaited.report
        report = ClientReport(client, sent.device, sent.budget, bytes_down=sent.bytes_down)
        update = self.gate.read_late(current, awaited.asked, awaited.model, report, reply)
        if update is None:
            self._drop(client, server_round, f"{report.status}: {report.reason}")
            return
        self._hold(server_round, report, update, awaited.model, arrived=True)

    def merge(self, current: Round) -> None:
        """Add the answers that have arrived to the round's mean, in the order of their rounds and clients."""
        model, (limits, _) = current.arrays, self.gate.limits(current.arrays)
        for key in sorted(key for key, held in self.held.items() if held.arrived):
            held, changes = self.held.pop(key), self.changes.pop(key, None)
            age = current.number - held.round
            if changes is None or age > self.most:
                self._drop(held.client, held.round, self._too_old())
                continue
            try:
                require_within(held.norms, limits)
            except UpdateRejectedError as error:
                self._drop(held.client, held.round, f"rejected: {error}")
                continue
            weight = held.weight * discount(age)
            current.mean.add({name: add_change(name, c, model[name].numpy()) for name, c in changes.items()}, weight)
            told = {key: value for key, value in asdict(held).items() if key not in ("norms", "arrived")}
            self.used.append(told | {"age": age, "weight": weight})

    def _drop(self, client: int, server_round: int, reason: str) -> None:
        self.dropped.append({"client": client, "round": server_round, "reason": reason})

    def _too_old(self) -> str:
        return f"its task is more than {self.most} rounds old (faults.accept-late), or from before the run was resumed"

    @property
    def recorded(self) -> dict[str, Any]:
        """The entries of the round's record."""
        return {"late_used": self.used, "late_dropped": self.dropped}

    def to_values(self) -> list[dict[str, Any]]:
        """Return what is held as JSON values, without arrays."""
        return [asdict(held) for _, held in sorted(self.held.items())]

    def to_arrays(self) -> dict[str, Array]:
        """Return the arrays of what is held for a checkpoint."""
        return {
            f"{KEPT}{server_round}/{client}/{name}": Array(array)
            for (server_round, client), changes in sorted(self.changes.items())
            for name, array in changes.items()
        }

    def restore(self, values: list[dict[str, Any]], kept: ArrayRecord) -> ArrayRecord:
        """Take over what `to_values` and `to_arrays` returned. Returns the other arrays of the checkpoint."""
        for each in values:
            update = CheckedUpdate({}, each["examples"], each["norms"])
            held = Held(**{"weight": self.gate.method.weight(update)} | each)  # those of older versions have none
            self.held[held.round, held.client] = held
        for name in [name for name in kept if name.startswith(KEPT)]:
            server_round, client, own = name.removeprefix(KEPT).split("/", 2)
            self.changes.setdefault((int(server_round), int(client)), {})[own] = kept[name].numpy()
        return ArrayRecord({name: array for name, array in kept.items() if not name.startswith(KEPT)})


def is_step(name: str, array: np.ndarray) -> bool:
    """Return whether training moves an array by steps: not a count, nor a batch norm's statistics."""
    return np.issubdtype(array.dtype, np.floating) and not name.endswith(("running_mean", "running_var"))


def measure_change(name: str, array: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """Return what a client changed of an array that it was sent, in the array's dtype; statistics as they are.

    The result is no view of the client's message, which would stay in memory with it.
    """
    return np.subtract(array, sent, dtype=np.float64).astype(array.dtype) if is_step(name, array) else array.copy()


def add_change(name: str, change: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return a change on top of the present array, in float64; statistics as they are."""
    return np.add(present, change, dtype=np.float64) if is_step(name, change) else change
