"""What was tried and what came of it, line by line in a file, so that an interrupted benchmark goes on."""

import json
from pathlib import Path
from typing import Any

FILE = "chaos.jsonl"


def note(folder: Path, **found: Any) -> None:
    """Append a trial, and print it."""
    line = json.dumps(found)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, flush=True)


def noted(folder: Path, **like: Any) -> list[dict[str, Any]]:
    """Return the trials with these values."""
    path = folder / FILE
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    found = [json.loads(line) for line in lines]
    return [each for each in found if all(each.get(key) == value for key, value in like.items())]
