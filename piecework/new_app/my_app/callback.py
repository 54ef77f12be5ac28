"""What is done with the record of each round."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piecework.server_app.callbacks import Callback


class AccuracyFile(Callback):
    """Writes the accuracy of each round to accuracy.csv in the folder of the run."""

    size = 0  # of the file in bytes, in the state of a resumed run

    def restore(self, state: dict[str, Any]) -> None:
        """Take what `state` returned after the last round that a resumed run does not repeat."""
        self.size = state["size"]

    def start(self, settings: Mapping[str, Any], folder: Path, resumed: bool) -> None:
        """Begin the file, or go on with it in a resumed run, without the lines of rounds that will be repeated."""
        self.file = folder / "accuracy.csv"
        if self.size:
            os.truncate(self.file, self.size)
        else:
            self.file.write_text("round,accuracy\n", encoding="utf-8")

    def round(self, number: int, record: dict[str, Any]) -> None:
        """Add a line. `record` is the line of rounds.jsonl."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{number},{record['accuracy']}\n")

    def state(self) -> dict[str, Any]:
        """Return what `restore` shall get."""
        return {"size": self.file.stat().st_size}
