"""Nothing leaks from one client to the next in a process: each answers as in a process where no other was trained."""

import multiprocessing
import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from helpers import RecordingGrid, arrays_of, run_local, same, training
from ray_helpers import TINY_RUN, require_same_run, states

from piecework.server_app.local_grid import answer
from piecework.server_app.ordered_grid import SERVER, identify

pytestmark = pytest.mark.processes


def answer_alone(connection: Connection, message: bytes, arguments: Any) -> None:
    """What a process does that answers one message."""
    identify(SERVER)
    connection.send_bytes(answer([message], *arguments))


class FreshGrid(RecordingGrid):
    """Each message is answered in a new process, the child of one that has only imported the client."""

    def _run_here(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["piecework.client_app.app"])
        identifier = next(iter(self._waiting))
        ours, theirs = context.Pipe()
        process = context.Process(
            target=answer_alone, args=(theirs, self._waiting.pop(identifier), self._arguments), daemon=True
        )
        process.start()
        theirs.close()
        self._done[identifier] = pickle.loads(ours.recv_bytes())
        process.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "fedavg", "architecture__batch_norm": "running"},
        {"strategy": "fedavg", "architecture__batch_norm": "local", "training__precision": "bfloat16"},
        {"strategy": "spafl"},
        {"strategy": "fedprophet"},
    ],
    ids=lambda changes: "-".join(changes.values()),
)
def test_a_client_answers_as_in_a_process_of_its_own(tmp_path: Path, changes: dict[str, Any]) -> None:
    """What a process of all clients keeps for the next one (data, models, traces) is what that would make itself."""
    settings = TINY_RUN | changes
    together = run_local(tmp_path / "together", RecordingGrid, **settings)
    one = RecordingGrid.last.received
    alone = run_local(tmp_path / "alone", FreshGrid, **settings)
    other = RecordingGrid.last.received
    assert len(one) == len(other)
    replies = [*zip(training(one), training(other), strict=True)]
    assert len(replies) == TINY_RUN["clients_per_round"] * TINY_RUN["num_rounds"]
    assert all(same(arrays_of(ours), arrays_of(theirs)) for ours, theirs in replies)
    require_same_run(together, alone)
    assert states(together) == states(alone)
