"""The picture of who trained which piece: device classes down, parts of the model across, shaded by how often.

A share is that of a class's answers that had trained the part. Parts without a gap between them were trained together, as one
piece, in most of the class's answers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from piecework.device_profiles.profile import format_percent
from piecework.report.page import Section, table
from piecework.report.svg import Cell, grid

Record = dict[str, Any]
CAPTION = (
    "How many of a device class's answers had trained each part of the model. Cells without a gap were trained together, as "
    "one piece, in most of the class's answers; pieces were trained one after another."
)


@dataclass
class ClassTraining:
    """What the clients of one device class trained: answers by part, and the commonest pieces, as tuples of atoms."""

    device: str
    answers: int = 0
    parts: Counter[str] = field(default_factory=Counter)
    ways: Counter[tuple[tuple[int, ...], ...]] = field(default_factory=Counter)

    @property
    def pieces(self) -> tuple[tuple[int, ...], ...]:
        """The pieces of most answers; of equally common ways the first."""
        return self.ways.most_common(1)[0][0] if self.ways else ()

    def share(self, part: str) -> float | None:
        """Return the fraction of answers that had trained a part; None without answers."""
        return self.parts[part] / self.answers if self.answers else None


def part_names(rounds: Sequence[Record]) -> list[str]:
    """Return the parts of the model in order, atoms first; none if records do not list them."""
    return list(dict.fromkeys(row["part"] for record in rounds for row in record.get("trained", [])))


def classes(rounds: Sequence[Record]) -> list[ClassTraining]:
    """Return what each device class trained, by name; answers that came late count if they were used."""
    found: dict[str, ClassTraining] = {}
    for record in rounds:
        for row in record["clients"]:
            found.setdefault(row["device"], ClassTraining(row["device"]))
        for row in [c for c in record["clients"] if c["status"] == "ok"] + record.get("late_used", []):
            of = found.setdefault(row["device"], ClassTraining(row["device"]))
            of.answers += 1
            of.parts.update(row.get("trained", []))
            if pieces := row.get("pieces"):
                of.ways[tuple(tuple(piece) for piece in pieces)] += 1
    return [found[name] for name in sorted(found)]


def who_trained(rounds: Sequence[Record]) -> Section | None:
    """Return the section with the picture and its figures as a table; None if records do not say what was trained."""
    parts, rows = part_names(rounds), classes(rounds)
    if not parts or not rows:
        return None
    cells = [[cell(row, number, part, parts) for number, part in enumerate(parts)] for row in rows]
    picture = grid(
        [row.device for row in rows], parts, cells, "Who trained which part of the model", describe(rows, parts)
    )
    counted = table(
        ([row.device, *(f"{row.parts[part]} of {row.answers}" for part in parts)] for row in rows), ["device", *parts]
    )
    below = f"{picture}<details><summary>{escape('the same as a table')}</summary>{counted}</details>"
    return Section("Who trained which piece", CAPTION, below=below)


def cell(row: ClassTraining, number: int, part: str, parts: Sequence[str]) -> Cell:
    """Return a part's cell: its share, whether it is of one piece with the part before, and its words."""
    said = f"{row.device}, {part}: trained in {row.parts[part]} of {row.answers} answers"
    of = [i for i, piece in enumerate(row.pieces, start=1) if number in piece]
    if len(of) == 1:
        own = ", ".join(parts[atom] for atom in row.pieces[of[0] - 1] if atom < len(parts))
        said += f"; in most of them in piece {of[0]} of {len(row.pieces)} ({own})"
    joined = any(number in piece and number - 1 in piece for piece in row.pieces)
    return Cell(row.share(part), said, joined)


def describe(rows: Sequence[ClassTraining], parts: Sequence[str]) -> str:
    """Return the picture in words: for each class the shares of parts, those alike together."""
    told = []
    for row in rows:
        shares = {part: format_percent(row.share(part), 0) for part in parts}
        if not row.answers:
            told.append(f"{row.device} trained nothing")
        elif len(set(shares.values())) == 1:
            told.append(f"{row.device} trained every part in {shares[parts[0]]} of its {row.answers} answers")
        else:
            each = ", ".join(f"{part} {share}" for part, share in shares.items())
            told.append(f"{row.device}, in its {row.answers} answers: {each}")
    return "; ".join(told) + "."
