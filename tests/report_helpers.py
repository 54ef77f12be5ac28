"""What tests of reports share: run folders written by hand, and what a page is made of."""

import io
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from settings_helpers import key_of

from piecework.commands.console import PlainConsole
from piecework.server_app.records import RunDir
from piecework.training.settings import Settings

pytest.importorskip("plotly")


def client(number: int, **changes: Any) -> dict[str, Any]:
    """A client's record: 900 of 1000 bytes, trained."""
    record = {
        "client": number,
        "device": "small",
        "budget": 1000,
        "bytes_down": 10,
        "status": "ok",
        "reason": "",
        "bytes_up": 5,
        "needed": 0,
        "predicted_peak": 900,
        "measured_peak": 900,
        "val_accuracy": 0.5,
        "val_examples": 4,
    }
    return record | changes


def round_record(number: int, accuracy: float | None, clients: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A round's record from its clients'."""
    ok = [c for c in clients if c["status"] == "ok"]
    record = {
        "round": number,
        "stage": "",
        "accuracy": accuracy,
        "loss": None if accuracy is None else 1.0 - accuracy,
        "train_loss": 0.5 if ok else None,
        "client_accuracy": None,
        "accuracy_by_device": {c["device"]: 0.5 for c in ok},
        "asked": len(clients),
        "answered": len(ok),
        "failed": len(clients) - len(ok),
        "bytes_down": sum(c["bytes_down"] for c in clients),
        "bytes_up": sum(c["bytes_up"] for c in clients),
        "bytes_evaluation": 0,
        "enforced": True,
        "seconds": 2.0,
        "simulated_seconds": 3.0,
        "clients": clients,
    }
    return record | changes


def refused(number: int, reason: str = "") -> dict[str, Any]:
    """A client whose budget was too small."""
    reason = reason or f"needs 2,000 bytes, the budget allows {1000 + number:,}"
    nothing = {"predicted_peak": 0, "measured_peak": 0, "val_accuracy": None, "val_examples": 0}
    return client(number, status="memory", reason=reason, needed=2000, **nothing)


def make_run(
    path: Path, rounds: list[dict[str, Any]], status: str = "completed", reason: str = "", **settings: Any
) -> RunDir:
    """A run's folder; no summary where `status` is empty."""
    run_dir = RunDir(path)
    values = {key_of(key): value for key, value in settings.items()}
    run_dir.create(Settings.from_run_config({"num-rounds": 2, "run-name": path.name, **values}))
    for record in rounds:
        run_dir.append_round(record)
    if status:
        run_dir.write_summary({"status": status, "reason": reason, "rounds": len(rounds), "seconds": 10.0})
    return run_dir


def two_rounds(*accuracies: float | None, **changes: Any) -> list[dict[str, Any]]:
    return [round_record(i + 1, a, [client(0, **changes), client(1)]) for i, a in enumerate(accuracies)]


class Attributes(HTMLParser):
    """Tags, and what would make a browser ask for something; script contents are not tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def text_of(*renderables: Any, width: int = 80) -> str:
    console = PlainConsole(file=io.StringIO(), width=width)
    for renderable in renderables:
        console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def assert_self_contained(page: str) -> None:
    found = Attributes(page)
    assert found.links == []
    assert {"link", "iframe", "img"}.isdisjoint(found.tags)
    assert "url(" not in page[page.index("<style>") : page.index("</style>")]
    assert page.count("* plotly.js v") == 1
    assert "default-src 'none'" in page
