"""The meaning of Flower's errors, and the treatment of clients whose process died.

Flower reports that a client's process died (error 8; 0 in its simulation), but not why. The usual cause is memory: the kernel
kills a process that exceeds its container's limit. So a strategy that can fit the model to a budget gives the client a smaller
budget, and any other strategy excludes the client for 1, 2, 4, ... rounds.
"""

from dataclasses import dataclass, field

from flwr.app import Error

UNAVAILABLE = 3  # Flower's code of a reply that is lost
REFUSED = 400  # our own code of a reply that is not taken (federation/reply_guard.py); Flower's are below 10
STATUS = {0: "crashed", UNAVAILABLE: "gone", 4: "gone", 5: "gone", 8: "crashed", REFUSED: "rejected"}
# Clients with these statuses get no evaluation task in the same round.
UNRESPONSIVE_STATUSES = ("crashed", "gone", "timeout", "late")
SHRINK, GROW = 0.75, 0.02  # after a crash the fraction of the budget is multiplied by SHRINK; a good answer adds GROW


def status_of(error: Error) -> str:
    """Return `crashed` (the client's process died), `gone` (its node left, or the message was lost), `rejected` or `failed`."""
    return STATUS.get(error.code, "failed")


@dataclass
class CrashHistory:
    """Clients whose process died. Keys are client numbers as text, as JSON requires.

    `crashes` counts crashes in a row. `fractions` is the fraction of its budget (0 to 1) that a client is given. `until` is the
    last round from which a client is excluded.
    """

    crashes: dict[str, int] = field(default_factory=dict)
    fractions: dict[str, float] = field(default_factory=dict)
    until: dict[str, int] = field(default_factory=dict)

    def note_crash(self, client: int, server_round: int, cuts: bool) -> None:
        """Record that the client's process died in a round. `cuts`: the strategy can give it a smaller part of the model."""
        key = str(client)
        self.crashes[key] = self.crashes.get(key, 0) + 1
        if cuts:
            self.fractions[key] = SHRINK * self.fraction(client)
        else:
            self.until[key] = server_round + 2 ** (self.crashes[key] - 1)

    def note_answer(self, client: int) -> None:
        """Record that the client did its task. Its fraction grows only slowly, because the cause of the crash is unknown."""
        self.crashes.pop(str(client), None)
        self.until.pop(str(client), None)
        if fraction := self.fractions.pop(str(client), None):
            self.fractions |= {str(client): fraction + GROW} if fraction + GROW < 1 else {}

    def fraction(self, client: int) -> float:
        """Return the fraction of its budget that the client is given, 0 to 1."""
        return self.fractions.get(str(client), 1.0)

    def excluded_clients(self, server_round: int) -> dict[int, int]:
        """Return the clients excluded from a round, and how often each crashed in a row."""
        return {int(c): self.crashes.get(c, 0) for c, until in self.until.items() if server_round <= until}
