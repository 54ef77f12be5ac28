"""The documents, as `benchmarks.docs` finds them, and the pages that are written from records."""

from pathlib import Path

from benchmarks.docs import ROOT
from benchmarks.docs import pages as pages_with_commands


def pages() -> list[Path]:
    """Every document of this repository but those that the program writes from itself."""
    return [*pages_with_commands(), *sorted((ROOT / "docs" / "claims").glob("*.md"))]


def cards() -> list[Path]:
    """The parts of the systems' cards that are written by hand."""
    return sorted((ROOT / "strategies").rglob("*.md"))
