"""A small drawing of shaded cells as SVG inside of a page, whose colours are the page's variables."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

# Pixels: a row, the gap between pieces, a letter of a name, the widest and the narrowest column.
ROW, GAP, LETTER, WIDE, NARROW = 34, 8, 7.2, 54, 26
LONGEST = 18  # letters of a device's name that are drawn; the rest is in the text of the cells
MANY = 14  # columns above which they are narrow, and have their figures only as text
# The shares from which a figure in its cell is written in other colours: on a dark page, and on a light one too.
HALF, FULL = 0.55, 0.86
SMALLEST = 0.8  # of the drawing's size: to this it shrinks in a narrow window; beyond, it scrolls
NUMBERS = count(1)  # of drawings of this process: names of elements on one page must differ


@dataclass(frozen=True)
class Cell:
    """A cell: its share of 1 (None: there is none), its words, and whether it is drawn as one with the cell to its left."""

    share: float | None
    text: str
    joined: bool = False


def shorten(text: str) -> str:
    """Return a name of at most LONGEST letters."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def grid(
    rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[Cell]], title: str, description: str
) -> str:
    """Return shaded cells with a name for each row and column, a title and a description.

    A narrow window shows it smaller, and scrolls a wide one.
    """
    number, wide = next(NUMBERS), len(columns) <= MANY
    step = WIDE if wide else NARROW
    left = 12 + LETTER * max(len(shorten(name)) for name in rows)
    level = max(map(len, columns)) * LETTER <= step
    top = 24.0 if level else 14 + 0.75 * LETTER * max(len(shorten(name)) for name in columns)
    right = 4.0 if level else 0.6 * LETTER * len(shorten(columns[-1]))
    width, height = left + step * len(columns) + right, top + ROW * len(rows)
    drawn = []
    for place, name in enumerate(columns):
        x, y = left + step * (place + 0.5), top - 8
        how = 'text-anchor="middle"' if level else f'transform="rotate(-45 {x:.0f} {y:.0f})"'
        drawn.append(f'<text x="{x:.0f}" y="{y:.0f}" {how}>{escape(shorten(name))}</text>')
    for line, name in enumerate(rows):
        middle = top + ROW * (line + 0.5) + 4
        drawn.append(f'<text x="0" y="{middle:.0f}">{escape(shorten(name))}<title>{escape(name)}</title></text>')
        drawn += [
            box(cell, left + step * place, top + ROW * line, step, wide) for place, cell in enumerate(cells[line])
        ]
    return (
        f'<div class="scroll drawn"><svg class="grid" role="img" aria-labelledby="grid-{number}-title grid-{number}-text" '
        f'style="min-width: {SMALLEST * width:.0f}px" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">'
        f'<title id="grid-{number}-title">{escape(title)}</title><desc id="grid-{number}-text">{escape(description)}</desc>'
        f"{''.join(drawn)}</svg></div>"
    )


def box(cell: Cell, x: float, y: float, width: float, figures: bool) -> str:
    """Return a cell at (x, y), darker with its share, with its percentage where there is room, and its words on hover."""
    start, share = x + (0 if cell.joined else GAP), cell.share or 0.0
    place = f'x="{start:.0f}" y="{y + 2:.0f}" width="{x + width - start - 1:.0f}" height="{ROW - 4}"'
    shade = f'<rect {place} class="empty"/><rect {place} class="full" fill-opacity="{share:.2f}"/>'
    if not figures:
        return f"<g>{shade}<title>{escape(cell.text)}</title></g>"
    said = "-" if cell.share is None else "<1%" if 0 < share < 0.01 else f"{share:.0%}"
    if share < 1 and said == "100%":
        said = ">99%"
    ink = ' class="on-full"' if share > FULL else ' class="on-half"' if share > HALF else ""
    middle, line = (start + x + width) / 2, y + ROW / 2 + 4
    figure = f'<text x="{middle:.0f}" y="{line:.0f}" text-anchor="middle"{ink}>{escape(said)}</text>'
    return f"<g>{shade}{figure}<title>{escape(cell.text)}</title></g>"
