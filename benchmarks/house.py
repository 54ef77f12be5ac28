"""Draw how the house is laid out: the folders with code, from the ground up, and how often each imports those below.

    python -m benchmarks.house docs/pictures/house.svg

The counts are of the imports in the code. `tests/command_line/test_layers.py` fails for an import that runs upwards.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# From the ground up: a folder imports what stands before it, and nothing that stands behind it.
FOLDERS = (
    *("device_profiles", "federated_data", "models", "training", "planning"),
    *("client_app", "federation", "strategies", "server_app", "piecework"),
)
WHAT = {
    "device_profiles": "devices, fleets, bytes and time",
    "federated_data": "data sets and their partition",
    "models": "models as cascades of atoms, and their variants",
    "training": "settings, messages, local training, memory cap",
    "planning": "how a system cuts a model, and what each part costs",
    "client_app": "a client: a message becomes an update",
    "federation": "clients, dispatch, faults, aggregation, privacy",
    "strategies": "the systems: one folder or file each",
    "server_app": "the round loop, records, recovery",
    "piecework": "command line, Python API, engines, reports",
}
WIDTH, ROW, LEFT = 700, 44, 330


def imported(file: Path) -> Iterator[str]:
    """The folders of this repository that a file imports anywhere in it, for type checkers too; `piecework` is its top."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "piecework":
            names = [f"piecework.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "piecework":
                folder = rest.partition(".")[0]
                yield folder if folder in FOLDERS else top


def files_of(folder: str) -> list[Path]:
    """The folder's own files; `piecework` has links to all others, which are not followed."""
    files = [
        path for path in (ROOT / folder).rglob("*.py") if not set(path.relative_to(ROOT).parts[1:-1]) & set(FOLDERS)
    ]
    # `piecework.load` is handed through from the models; it imports them when it is called
    return sorted(path for path in files if path != ROOT / "piecework" / "__init__.py")


def draw() -> str:
    """Return the picture as SVG: a row a folder, the command line at the top, with a square for each folder that it imports."""
    size = (WIDTH - LEFT - 20) / len(FOLDERS)
    height = ROW * len(FOLDERS) + 74
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" fill="#222222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for row, folder in enumerate(reversed(FOLDERS)):
        y = 10 + row * ROW
        counts = Counter(name for file in files_of(folder) for name in imported(file) if name != folder)
        parts.append(f'<text x="12" y="{y + 18}" font-size="15" font-weight="bold">{folder}/</text>')
        parts.append(f'<text x="12" y="{y + 35}" font-size="11.5" fill="#555555">{escape(WHAT[folder])}</text>')
        for column, other in enumerate(FOLDERS[: len(FOLDERS) - row]):
            x, own = LEFT + column * size, other == folder
            colour = "#4477aa" if own else "#cce0f0" if counts[other] else "#f4f4f4"
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{size - 3:.1f}" height="{ROW - 4}" fill="{colour}"/>')
            if counts[other] and not own:
                middle = f'x="{x + size / 2 - 1.5:.1f}" y="{y + 25}"'
                parts.append(f'<text {middle} font-size="12" text-anchor="middle">{counts[other]}</text>')
    y = 10 + len(FOLDERS) * ROW
    for column, folder in enumerate(FOLDERS):
        first, _, second = folder.partition("_")
        for line, word in enumerate(filter(None, (first, second))):
            middle = f'x="{LEFT + (column + 0.5) * size - 1.5:.1f}" y="{y + 12 + 11 * line}"'
            parts.append(f'<text {middle} font-size="7.5" text-anchor="middle">{word}</text>')
    said = (
        "A row imports from columns to the left of its own (blue), as often as the number says; nothing points upwards."
    )
    parts += [f'<text x="12" y="{y + 52}" font-size="12">{said}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Draw into the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.parse_args().file.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
