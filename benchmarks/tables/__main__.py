"""Write docs/results/papers.md: the papers' tables beside what Piecework computes.

    python -m benchmarks.tables [--check]

`--check` only compares, and exits with 1 if the file differs.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.tables import fedepth, fedprophet, presets, prism, profl, sizes, spafl
from benchmarks.tables.shared import section

TABLES = Path(__file__).resolve().parents[2] / "docs" / "results" / "papers.md"
SECTIONS = (sizes, fedprophet, fedepth, prism, profl, spafl, presets)


def document() -> str:
    """Return the text of docs/results/papers.md."""
    head = section(
        "Written by `python -m benchmarks.tables` (`make tables`). Do not edit: `--check` and a test compare it.",
        "# The papers' tables beside ours",
        """The figures of `piecework plan` beside those that the papers print. Deviations are in percent of the paper's figure;
        "as printed" is yes if ours rounds to the printed digits, so that the deviation is the paper's rounding. No plan needs
        a data set or trains. The keys named here are those of `--json`.""",
    )
    return "\n\n".join([head, *(each.text() for each in SECTIONS)]) + "\n"


def main() -> None:
    """Write or check the document."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.tables", description=__doc__, formatter_class=layout)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the file differs")
    check, text = parser.parse_args().check, document()
    if not check:
        TABLES.write_text(text, encoding="utf-8")
    elif not TABLES.is_file() or TABLES.read_text(encoding="utf-8") != text:
        sys.exit(f"{TABLES} is not what is computed: run make tables")


if __name__ == "__main__":
    main()
