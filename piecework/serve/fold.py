"""What the pages show of a run's rounds, from records that are read one by one and then forgotten.

A long run has hundreds of megabytes of records, of which this keeps the curves, a row a client, and counted failures.
"""

import re
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from piecework.report.display import fullness

Record = dict[str, Any]
# Keys of a round that curves need, and sums. Those of `adversarial_clients` only say that there were any.
CURVES = (
    *("round", "stage", "accuracy", "loss", "train_loss", "client_accuracy", "adversarial_accuracy"),
    *("client_adversarial_accuracy", "personal", "modules", "adversarial_clients", "seconds", "simulated_seconds"),
    *("asked", "answered", "failed", "enforced"),
)
RECENT = 5  # rounds whose median is the expected duration of the next
KINDS = 100  # reasons that are told apart
OTHER = ("", "other reasons")


@dataclass
class Client:
    """A client so far: `closest` is its record of the round in which it came closest to its budget, `last` the newest."""

    closest: Record
    last: Record
    round: int
    asked: int = 0
    failed: int = 0


@dataclass
class Failure:
    """Failures of one kind: reasons that differ only in numbers are of one kind. `example` is the first of them."""

    status: str
    example: str
    count: int = 0


@dataclass
class Fold:
    """The rounds so far. `devices` has by device class how many requests there were, and how many of them failed."""

    rounds: list[Record] = field(default_factory=list)
    clients: dict[int, Client] = field(default_factory=dict)
    failures: dict[tuple[str, str], Failure] = field(default_factory=dict)
    devices: dict[str, list[int]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Add the next round, a record that read_records.check_round accepts."""
        self.rounds.append({key: record[key] for key in CURVES if key in record})
        for row in record["clients"]:
            self._add_client(row, record["round"])

    def _add_client(self, row: Record, server_round: int) -> None:
        row = {key: value for key, value in row.items() if key not in ("pieces", "trained")}
        client = self.clients.setdefault(row["client"], Client(row, row, server_round))
        if fullness(row) > fullness(client.closest):
            client.closest = row
        client.last, client.round = row, server_round
        device = self.devices.setdefault(row["device"], [0, 0])
        client.asked, device[0] = client.asked + 1, device[0] + 1
        if row["status"] != "ok":
            client.failed, device[1] = client.failed + 1, device[1] + 1
            self._add_failure(row, server_round)

    def _add_failure(self, row: Record, server_round: int) -> None:
        kind = row["status"], re.sub(r"\d[\d.,]*", "#", row["reason"])
        if kind not in self.failures and len(self.failures) >= KINDS:
            kind = OTHER
        example = OTHER[1] if kind == OTHER else f"{row['reason']} (client {row['client']}, round {server_round})"
        failure = self.failures.setdefault(kind, Failure(kind[0], example))
        failure.count += 1

    @property
    def round_seconds(self) -> float | None:
        """The seconds that the next round is expected to take; None before the first."""
        recent = [record["seconds"] for record in self.rounds[-RECENT:]]
        return median(recent) if recent else None

    @property
    def last_accuracy(self) -> float | None:
        """The accuracy of the newest round that was evaluated."""
        return next((r["accuracy"] for r in reversed(self.rounds) if r["accuracy"] is not None), None)
