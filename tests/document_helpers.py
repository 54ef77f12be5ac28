"""The documents: README and its companions, the pages of the site, and the systems' cards."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = {ROOT / "docs" / "reference" / name for name in ("commands.md", "settings.md")}  # by benchmarks.site


def pages() -> list[Path]:
    """Every document that is written by hand."""
    site = [
        path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "systems" and path not in WRITTEN
    ]
    return [*sorted(ROOT.glob("*.md")), *(path for path in site if "_build" not in path.parts), *cards()]


def cards() -> list[Path]:
    """The parts of the systems' cards that are written by hand."""
    return sorted((ROOT / "strategies").rglob("*.md"))
