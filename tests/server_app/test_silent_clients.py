"""Replies that bring too much, or never come: each is counted with its reason, the run goes on."""

import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message
from helpers import TRIO, RecordingGrid, clients_of, run_local, training

from piecework.federation import registry, transport
from piecework.server_app import rounds
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.training.messages import content_bytes


def test_what_brings_too_much_is_rejected_whatever_it_answers(tmp_path: Path) -> None:
    """Client 1 sends 5 MB that nobody asked for, of a model of 100 kB; the run goes on."""

    class Talks(RecordingGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if reply.metadata.src_node_id == FIRST_NODE + 1 and reply.metadata.message_type != "query.device":
                    reply.content["more"] = ArrayRecord({"more": Array(np.zeros(5_000_000, np.uint8))})
            return replies

    run = run_local(tmp_path, Talks, strategy="fedavg", evaluation__on_clients_every=1, messages__max_bytes=1, **TRIO)
    (record,) = run.rounds()
    assert [c["status"] for c in record["clients"]] == ["ok", "rejected", "ok"]
    reason = (
        "error 400: its reply brings 5,157,376 bytes, of the 4,505,888 that it may bring"  # twice 155,792 and 2**22
    )
    assert record["clients"][1]["reason"] == reason
    assert [(c["client"], c["status"]) for c in record["evaluation"]["others"]] == [(1, "rejected")]


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.naps = 0
        stand_in = SimpleNamespace(
            monotonic=lambda: self.now, perf_counter=time.perf_counter, sleep=self.nap, strftime=time.strftime
        )
        for module in (rounds, transport, registry):
            monkeypatch.setattr(module, "time", stand_in)

    def nap(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1
        assert self.naps < 100_000, "the loop waits for ever"


def test_a_client_that_never_answers_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loses(RecordingGrid):
        """The answer of client 1 in round 1 is lost on the way."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return [
                m
                for m in super().pull_messages(message_ids)
                if not (m.metadata.message_type == "train" and len(training(self.received)) == 2)
            ]

    clock = Clock(monkeypatch)
    run = run_local(tmp_path, Loses, strategy="fedavg", num_rounds=2, messages__round_timeout=50.0, **TRIO)
    assert [c["status"] for c in clients_of(run, 1)] == ["ok", "timeout", "ok"]
    assert clients_of(run, 1)[1]["reason"] == "no answer within messages.round-timeout"
    assert [c["client"] for c in clients_of(run, 2)] == [0, 2]  # client 1 may still be at its task
    assert run.rounds()[1]["busy"] == [1]
    assert 50 <= clock.now < 60


def test_after_a_timeout_the_next_round_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Slow(RecordingGrid):
        """The first train answer takes until after the deadline, when two tasks are still unanswered."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = super().pull_messages(message_ids)
            if len(training(self.received)) == 1:
                clock.now += 1e6
            return replies

    run = run_local(tmp_path, Slow, strategy="fedavg", num_rounds=2, **TRIO)
    assert [c["status"] for c in clients_of(run, 1)] == ["ok", "timeout", "timeout"]
    assert [c["status"] for c in clients_of(run, 2)] == ["ok"] * 3
    second = run.rounds()[1]
    sizes = [content_bytes(m.content) for m in training(RecordingGrid.last.received)]
    late = [{"client": c, "round": 1, "status": "ok", "bytes": sizes[c]} for c in (1, 2)]
    assert second["late_replies"] == late
    assert second["bytes_up"] == sum(sizes[1:])
