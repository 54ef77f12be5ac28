"""Draw the pictures of the systems' cards: what boards of different memory train with each system.

    python -m benchmarks.cards docs/pictures/systems

The program's plan of one small fleet gives what is trained, memory and messages (card_rows.py). The model is the demo's, with
FedDF and FedET a family of ResNets.
"""

import argparse
from collections.abc import Iterable
from html import escape
from pathlib import Path
from textwrap import wrap

from benchmarks.card_captions import CAPTIONS, NUMBERS, PARTS
from benchmarks.card_rows import ALL, MB, Board, Cell, Picture, Row
from piecework.training.methods import METHODS

SMALL, USUAL = 12, 13  # letters
INK, GREY, RED, LINE = "#222222", "#6b6b6b", "#cc3311", "#bbbbbb"
KINDS = {  # of boxes: colour, and what the legend says
    "trained": ("#4477AA", "trained"),
    "attacked": ("#AA3377", "trained on attacked examples"),
    "kept": ("#997700", "trained, never sent"),
    "masked": ("#228833", "a mask of frozen random weights is trained"),
    "frozen": ("#BBCCEE", "frozen, runs before"),
    "int8": ("#CCCCCC", "frozen, in int8"),
    "extra": ("#EE8866", "helper head or layer, trained"),
    "server": ("#44AA99", "learns from the clients' answers"),
}
LEFT, NUMBER, MODEL, GAP, MEMORY, SENT = 80, 18, 228, 10, 82, 90
X_MODEL, X_MEMORY = LEFT + NUMBER, LEFT + NUMBER + MODEL + GAP
X_SENT = X_MEMORY + MEMORY + 10
WIDTH = X_SENT + SENT
ROW, TALL, BETWEEN, TOP = (
    22,
    40,
    12,
    40,
)  # heights: of one of several rows, of a board's only row, between boards, of the head
LETTERS = 74  # a line of the caption


def main() -> None:
    """Draw the systems' pictures, all or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="SYSTEM", help="all systems if none is named")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name in asked.names or METHODS:
        (asked.folder / f"{name}.svg").write_text(draw(Picture(name)), encoding="utf-8")


def draw(picture: Picture) -> str:
    """Return the picture as SVG."""
    boards = picture.boards
    most = max(1.0, *(max(board.budget, *(row.peak for row in board.rows)) for board in boards))
    body, y = header(picture, most), float(TOP)
    for board in boards:
        body += draw_board(board, picture, y, most)
        y += height(board) + BETWEEN
    if picture.server:
        body += [text(0, y + 17, "server", weight=600), *boxes(picture.server, len(picture.columns), y, 26)]
        y += 26 + BETWEEN
    bottom = y - BETWEEN + 3
    whole = X_MEMORY + MEMORY / most
    body.append(f'<path d="M{whole:.1f} {TOP - 4}V{bottom:.0f}" stroke="{GREY}" stroke-dasharray="3 3"/>')
    below, end = footer(picture, y + 8)
    size = f'viewBox="0 0 {WIDTH + 16} {end + 10:.0f}" width="{WIDTH + 16}" height="{end + 10:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="Helvetica, Arial, sans-serif" '
            f'font-size="{USUAL}" fill="{INK}">',
            f"<title>What boards of different memory train with {picture.name}</title>",
            f'<rect width="{WIDTH + 16}" height="{end + 10:.0f}" rx="6" fill="#ffffff"/>',
            '<g transform="translate(8 4)">',
            *body,
            *below,
            "</g>",
            "</svg>\n",
        ]
    )


def header(picture: Picture, most: float) -> list[str]:
    """Return the names of the columns."""
    width = MODEL / len(picture.columns)
    if len(picture.columns) > 7:
        names = [text(X_MODEL, 30, picture.title, size=SMALL, colour=GREY)]
    else:
        names = [
            text(X_MODEL + (n + 0.5) * width, 30, name, "middle", 11, GREY) for n, name in enumerate(picture.columns)
        ]
    return [
        text(0, 30, "memory", size=SMALL, colour=GREY),
        *names,
        text(X_MEMORY, 12, "peak memory,", size=SMALL, colour=GREY),
        text(X_MEMORY, 26, "┆ whole step", size=SMALL, colour=GREY),
        text(X_SENT, 12, "sent, in", size=SMALL, colour=GREY),
        text(X_SENT, 26, f"{'MB' if picture.unit == MB else 'kB'} a round", size=SMALL, colour=GREY),
    ]


def height(board: Board) -> int:
    """Return the height of a board's rows."""
    return TALL if len(board.rows) == 1 else ROW * len(board.rows)


def draw_board(board: Board, picture: Picture, top: float, most: float) -> list[str]:
    """Return a board with its rows."""
    memory = f"{board.memory / 1e6:.3g} MB"
    lines = [text(0, top + 12, board.name, weight=600), text(0, top + 26, memory, size=SMALL, colour=GREY)]
    if board.trains:
        lines.append(text(0, top + 39, board.trains, size=SMALL, colour=GREY))
    tall = len(board.rows) == 1
    step = TALL if tall else ROW
    for n, row in enumerate(board.rows):
        y = top + n * step
        lines += draw_row(row, len(picture.columns), y, step - (4 if tall else 3), most, picture.unit)
    at, end = X_MEMORY + MEMORY * board.budget / most, top + height(board) - 3
    lines.append(f'<path d="M{at:.1f} {top:.0f}V{end:.0f}" stroke="{RED}" stroke-width="2.5"/>')
    return lines


def draw_row(row: Row, columns: int, y: float, high: float, most: float, unit: float) -> list[str]:
    """Return the boxes of a row, its memory and its messages."""
    middle = y + high / 2
    lines = [outline(columns, y, high), text(X_MODEL - 10, middle + 4, row.number, "middle", SMALL)]
    if row.note:
        return [*lines, text(X_MODEL + MODEL / 2, middle + 4, row.note, "middle", halo="#fafafa")]
    lines += boxes(row.cells, columns, y, high)
    bar = min(12.0, high - 8)
    lines.append(rect(X_MEMORY, middle - bar / 2, MEMORY * row.peak / most, bar, "#8899AA"))
    if row.sent is not None:
        lines.append(text(X_SENT, middle + 4, sent(*row.sent, unit), size=SMALL, colour=GREY))
    return lines


def outline(columns: int, y: float, high: float) -> str:
    """Return dashed boxes for all parts of the model."""
    width = MODEL / columns
    path = "".join(
        f"M{X_MODEL + n * width + 1.5:.1f} {y:.1f}h{width - 3:.1f}v{high:.1f}h{3 - width:.1f}z" for n in range(columns)
    )
    return f'<path d="{path}" fill="#fafafa" stroke="{LINE}" stroke-dasharray="2 2"/>'


def boxes(cells: Iterable[Cell], columns: int, y: float, high: float) -> list[str]:
    """Return boxes, filled where channels are trained."""
    width = MODEL / columns
    lines, words = [], []
    for cell in cells:
        x, wide = X_MODEL + cell.place * width + 1.5, cell.width * width - 3
        colour = KINDS[cell.kind][0]
        edge = ' stroke="#ffffff"' if cell.kind == "extra" and cell.width < 0.3 else ""
        gap = (
            0.8
            if len(cell.runs) > 1 and any(a[1] == b[0] for a, b in zip(cell.runs, cell.runs[1:], strict=False))
            else 0
        )
        path = "".join(
            f"M{x:.1f} {y + start * high:.1f}h{wide:.1f}v{(end - start) * high - gap:.1f}h{-wide:.1f}z"
            for start, end in cell.runs
        )
        lines.append(f'<path d="{path}" fill="{colour}"{edge}/>')
        if cell.runs != ALL:
            frame = f"M{x:.1f} {y:.1f}h{wide:.1f}v{high:.1f}h{-wide:.1f}z"
            lines.append(f'<path d="{frame}" fill="none" stroke="{colour}"/>')
        if cell.text:
            words.append(text(x + wide / 2, y + high / 2 + 4, cell.text, "middle", SMALL, "#ffffff", halo=colour))
    return lines + words


def footer(picture: Picture, y: float) -> tuple[list[str], float]:
    """Return the legend and the caption, and where they end."""
    rows = [row for board in picture.boards for row in board.rows]
    cells = [cell for row in rows for cell in row.cells]
    found = {cell.kind for cell in [*cells, *picture.server]}
    entries = [(kind, KINDS[kind][1]) for kind in KINDS if kind in found]
    if any(cell.runs != ALL for cell in cells):
        entries.append(("part", f"filled: the board's {PARTS.get(picture.name, 'channels')}"))
    if any(sum(cell.width for cell in row.cells if cell.kind != "extra") < len(picture.columns) - 0.1 for row in rows):
        entries.append(("none", "not on the board"))
    lines, x = [], 0.0
    for kind, meaning in [*entries, ("budget", "the board's memory")]:
        wide = 18 + 6.6 * len(meaning) + 8
        if x + wide > WIDTH:
            x, y = 0.0, y + 18
        lines += [swatch(kind, x, y), text(x + 17, y + 10, meaning, size=SMALL)]
        x += wide
    if picture.name not in CAPTIONS:
        raise SystemExit(f"{picture.name} has no caption: write one in CAPTIONS of benchmarks/card_captions.py")
    words = " ".join(filter(None, [NUMBERS.get(picture.name, ""), CAPTIONS[picture.name]]))
    for line in wrap(words, LETTERS):
        y += 18
        lines.append(text(0, y + 16, line))
    return lines, y + 24


def swatch(kind: str, x: float, y: float) -> str:
    """Return the legend's sample of a kind of box."""
    if kind == "budget":
        return rect(x + 4, y, 3, 12, RED)
    if kind == "none":
        return f'<path d="M{x + 0.5:.1f} {y + 0.5}h11v11h-11z" fill="#fafafa" stroke="{LINE}" stroke-dasharray="2 2"/>'
    if kind == "part":
        colour = KINDS["trained"][0]
        frame = f'<path d="M{x + 0.5:.1f} {y + 0.5}h11v11h-11z" fill="none" stroke="{colour}"/>'
        return rect(x, y, 12, 5, colour) + frame
    return rect(x, y, 12, 12, KINDS[kind][0])


def sent(down: int, up: int, unit: float) -> str:
    """Return the bytes of a round's messages to a client and back, in words."""
    return f"↓ {amount(down / unit)} ↑ {amount(up / unit)}" if down or up else "nothing"


def amount(value: float) -> str:
    """Return a number in two digits or more."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def rect(x: float, y: float, wide: float, high: float, colour: str) -> str:
    """Return a filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{colour}"/>'


def text(
    x: float,
    y: float,
    words: str,
    anchor: str = "start",
    size: int = USUAL,
    colour: str = "",
    weight: int = 0,
    halo: str = "",
) -> str:
    """Return a line of text."""
    extra = "" if anchor == "start" else f' text-anchor="{anchor}"'
    extra += f' font-size="{size}"' if size != USUAL else ""
    extra += f' fill="{colour}"' if colour else ""
    extra += f' font-weight="{weight}"' if weight else ""
    extra += f' stroke="{halo}" stroke-width="4" paint-order="stroke"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(words)}</text>' if words else ""


if __name__ == "__main__":
    main()
