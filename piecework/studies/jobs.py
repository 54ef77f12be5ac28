"""What a queue runs: a job for each run, identified by the settings that were given for it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from piecework.device_profiles.documents import read_json
from piecework.training.settings import Scalar

Given = Mapping[str, Scalar]


class Job(Protocol):
    """A run. `settings` are those that were given for it, with the fleet as JSON."""

    @property
    def settings(self) -> Given: ...

    @property
    def label(self) -> str:
        """The job in words."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """What the note beside the run says it is, as JSON values, `hash` among them."""
        ...

    def folder(self, out: Path) -> Path:
        """Return the folder of the run below `out`."""
        ...


def hash_of(given: Given) -> str:
    """Return eight characters that identify settings; a default that a later version adds or changes is not in it."""
    values: dict[str, object] = {**given}
    if "fleet" in values:
        content = read_json(str(values["fleet"]))
        values["fleet"] = {key: value for key, value in content.items() if key not in ("name", "description")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def slug(name: str) -> str:
    """Return a name as a folder has it: `Mine, fitted` becomes `mine-fitted`."""
    words = "".join(character if character.isalnum() or character == "." else " " for character in name.lower()).split()
    found = "-".join(words)
    return found if found.strip(".") else "unnamed"  # `..` would be the folder above
