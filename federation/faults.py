"""What Flower's errors mean, and what becomes of a client whose process died.

Flower tells that a client's process died (error 8; 0 in its simulation), not why. Memory is the usual cause: the kernel kills
whoever passes a container's limit. So a strategy that cuts models gives that client a smaller budget, and one that does not
leaves it out for 1, 2, 4, ... rounds.
"""

from dataclasses import dataclass, field

from flwr.app import Error

STATUS = {0: "crashed", 3: "gone", 4: "gone", 5: "gone", 8: "crashed"}
SILENT = ("crashed", "gone", "timeout")  # statuses of clients that are not asked to evaluate in the same round
SHRINK, GROW = 0.75, 0.02  # of a budget: after a crash, after a good answer


def status_of(error: Error) -> str:
    """`crashed` (its process died), `gone` (its node left, or the message was lost) or `failed` (it raised an exception)."""
    return STATUS.get(error.code, "failed")


@dataclass
class CrashHistory:
    """Clients, by number as text (JSON's keys), whose process died.

    `crashes` in a row; `fractions` of its budget (0 to 1) that a client is given; `until`, the last round it is excluded of.
    """

    crashes: dict[str, int] = field(default_factory=dict)
    fractions: dict[str, float] = field(default_factory=dict)
    until: dict[str, int] = field(default_factory=dict)

    def crashed(self, client: int, server_round: int, cuts: bool) -> None:
        """The client's process died in a round; `cuts` says whether the strategy can give it a smaller piece."""
        key = str(client)
        self.crashes[key] = self.crashes.get(key, 0) + 1
        if cuts:
            self.fractions[key] = SHRINK * self.fraction(client)
        else:
            self.until[key] = server_round + 2 ** (self.crashes[key] - 1)

    def answered(self, client: int) -> None:
        """The client did its task: it may have been killed for another reason than memory, so its fraction grows slowly."""
        self.crashes.pop(str(client), None)
        self.until.pop(str(client), None)
        if fraction := self.fractions.pop(str(client), None):
            self.fractions |= {str(client): fraction + GROW} if fraction + GROW < 1 else {}

    def fraction(self, client: int) -> float:
        """Of its budget, what the client is given."""
        return self.fractions.get(str(client), 1.0)

    def excluded(self, server_round: int) -> dict[int, int]:
        """The clients that a round leaves out, and how often each crashed in a row."""
        return {int(c): self.crashes.get(c, 0) for c, until in self.until.items() if server_round <= until}
