"""What is done with the record of each round."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piecework.server_app.callbacks import Callback


class AccuracyFile(Callback):
    """Writes the accuracy of each round to accuracy.csv in the folder of the run."""

    def start(self, settings: Mapping[str, Any], folder: Path, resumed: bool) -> None:
        """Begin the file, or go on with it in a resumed run."""
        self.file = folder / "accuracy.csv"
        if not resumed:
            self.file.write_text("round,accuracy\n", encoding="utf-8")

    def round(self, number: int, record: dict[str, Any]) -> None:
        """Add a line. `record` is the line of rounds.jsonl."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{number},{record['accuracy']}\n")
