"""What tests of the live page share: folders with runs, and a client of its application."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from report_helpers import client, make_run, refused, round_record, two_rounds
from starlette.testclient import TestClient

from piecework.commands.serve import listen_on, make_server, url_of
from piecework.serve.app import make_app
from piecework.server_app.records import RunDir

HERE = "http://127.0.0.1:8321"


def client_of(root: Path, host: str = "127.0.0.1", headers: dict[str, str] | None = None) -> TestClient:
    """A client of the pages about the runs in a folder, from a server that listens on `host`."""
    return TestClient(make_app(root, host), HERE, headers=headers)


def listed(root: Path) -> dict[str, Any]:
    """The rows of the list, by run."""
    return {row["name"]: row for row in client_of(root).get("/api/runs").raise_for_status().json()["runs"]}


def completed(path: Path, **settings: Any) -> RunDir:
    """A run of two rounds that ended with an accuracy of 75 %."""
    return make_run(path, two_rounds(0.25, 0.75), **settings)


def going_on(path: Path, rounds: int = 2, planned: int = 12, **settings: Any) -> RunDir:
    """A run without a summary, of which some rounds are done; they took 2 s each."""
    return make_run(path, [next_round(n) for n in range(1, rounds + 1)], "", num_rounds=planned, **settings)


def next_round(number: int) -> dict[str, Any]:
    """The record of a round in which a client trained and another one refused; its accuracy is its number in percent."""
    return round_record(number, number / 100, [client(0), refused(1)])


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def served(root: Path, port: int = 0) -> Iterator[str]:
    """The address of a real server of the pages, in a thread."""
    listening = listen_on("127.0.0.1", port, root)
    server = make_server(root, "127.0.0.1")
    thread = Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield url_of(listening, "127.0.0.1").rstrip("/")
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
