"""Who took part in a run: how many clients of the fleet trained, with how much of the data, and which classes never did.

A system that leaves clients out needs less time and memory than one that trains them, so a comparison says both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from piecework.server_app.failures import excluded_classes

Record = dict[str, Any]


@dataclass(frozen=True)
class Participation:
    """The clients of a run.

    `trained` counts those whose updates entered the model in any round, `asked` those that were asked to train, and `clients`
    those of the fleet. `data` is the fraction of all training examples that the first ones have. Records of older versions do
    not say the last two: None. `excluded` has the device classes of which no client ever trained, each with the reason.
    """

    trained: int = 0
    asked: int = 0
    clients: int | None = None
    data: float | None = None
    excluded: dict[str, str] = field(default_factory=dict)

    @property
    def partial(self) -> bool:
        """Whether some clients of the fleet never trained: they could not, or were never asked."""
        return self.clients is not None and self.trained < self.clients


def accepted(rounds: Iterable[Record]) -> list[Record]:
    """Return the records of clients whose updates entered the model, in their round or late."""
    rows = []
    for record in rounds:
        rows += [c for c in record["clients"] if c["status"] == "ok" and record.get("aggregated", True)]
        rows += record.get("late_used", [])
    return rows


def participation(rounds: Sequence[Record]) -> Participation:
    """Return who took part in a run, from its rounds' records."""
    own = {row["client"]: row.get("examples", 0) for row in accepted(rounds)}
    asked = {row["client"] for record in rounds for row in record["clients"]} | own.keys()
    everyone = max((sum(record.get("devices", {}).values()) for record in rounds), default=0)
    examples = max((record.get("examples", 0) for record in rounds), default=0)
    return Participation(
        trained=len(own),
        asked=len(asked),
        clients=max(everyone, len(asked)) if everyone else None,
        data=min(1.0, sum(own.values()) / examples) if examples else None,
        excluded=excluded_classes(rounds),
    )


def clients_text(trained: Sequence[int], of: Sequence[int | None]) -> str:
    """Return how many clients trained in each of some runs, of how many: `12 of 20`, or `12 to 14 of 20` where they differ."""
    known = [each for each in of if each is not None]
    return f"{span(trained)}{f' of {span(known)}' if known else ''}" if trained else "-"


def span(values: Iterable[int]) -> str:
    """Format as `3`, or `3 to 5` where values differ."""
    found = list(values)
    return str(min(found)) if min(found) == max(found) else f"{min(found)} to {max(found)}"
