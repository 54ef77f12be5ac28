"""Frozen units: sent once, by content hash, in bounded messages; told, and sent again, where they are damaged or lost."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message
from helpers import TRIO, RecordingGrid, clients_of, model_of, record_of, run_local, same
from hypothesis import given
from hypothesis import strategies as st
from tail import FROZEN

from piecework.client_app import frozen
from piecework.client_app.frozen import MissingUnitsError, content_hash
from piecework.federation.weight_cache import pack_units, units_of, without_units
from piecework.models.cascade import unit_of
from piecework.server_app.records import RunDir
from piecework.training.answers import Outcome
from piecework.training.messages import content_bytes

SETTINGS: dict[str, Any] = {**TRIO, "strategy": "tail:Tail", "faults__allow_untrained": True}


class Interfering(RecordingGrid):
    """Does something to the clients' stores before the train messages of a round."""

    harm: Callable[[int, "Interfering"], None] = lambda server_round, grid: None
    root: Path

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == "query.device":
                continue
            server_round = int(message.metadata.group_id)
            if server_round not in self.__dict__.setdefault("seen", set()):
                self.__dict__["seen"].add(server_round)
                type(self).harm(server_round, self)
        return super().push_messages(messages)

    def deliveries(self, server_round: int) -> list[Message]:
        """The messages with frozen units of a round, questions included."""
        found = [m for m in self.sent if m.metadata.message_type == "query.units"]
        return [m for m in found if m.metadata.group_id == str(server_round)]

    def brought(self, server_round: int) -> Counter[tuple[int, str]]:
        """How often each client was sent each unit in a round."""
        return Counter(
            (message.metadata.dst_node_id - 2, unit)
            for message in self.deliveries(server_round)
            for unit in {unit_of(name) for name in record_of(message)}
        )


def files_of(grid: Interfering, client: int) -> list[Path]:
    return sorted(grid.root.glob(f"run/clients/*/{client}/frozen/*"))


def run(tmp_path: Path, grids: Any, harm: Any = None, **settings: Any) -> tuple[RunDir, Interfering]:
    grid = grids(Interfering, root=tmp_path, **({"harm": staticmethod(harm)} if harm else {}))
    run_dir = run_local(tmp_path, grid, **SETTINGS | settings)
    return run_dir, grid.last


EVERYTHING = Counter((client, unit) for client in range(3) for unit in FROZEN)


# ---- on the grid


@pytest.mark.slow
def test_sent_once_and_the_same_as_sending_everything(tmp_path: Path, grids: Any) -> None:
    run_dir, grid = run(tmp_path / "hashes", grids, num_rounds=3, evaluation__on_clients_every=1)
    whole, _ = run(tmp_path / "whole", grids, num_rounds=3, evaluation__on_clients_every=1, strategy="tail:WholeTail")
    assert same(model_of(run_dir), model_of(whole))
    assert [r["client_accuracy"] for r in run_dir.rounds()] == [r["client_accuracy"] for r in whole.rounds()]
    assert grid.brought(1) == EVERYTHING
    assert grid.deliveries(2) == grid.deliveries(3) == []
    for client in range(3):
        assert len(files_of(grid, client)) == len(FROZEN)
    for message in grid.sent:
        if message.metadata.message_type in ("train", "evaluate"):
            units = {unit_of(name) for name in record_of(message)}
            assert units == {"atoms.2", "atoms.3", "atoms.4", "head"}


def test_bytes_of_deliveries_count(tmp_path: Path, grids: Any) -> None:
    run_dir, grid = run(tmp_path, grids, num_rounds=2)
    for number in (1, 2):
        for client, report in enumerate(clients_of(run_dir, number)):
            of_client = [m for m in grid.sent if m.metadata.dst_node_id == client + 2]
            sent = [m for m in of_client if m.metadata.group_id == str(number)]
            assert report["bytes_down"] == sum(content_bytes(message.content) for message in sent)
            replies = {m.metadata.reply_to_message_id: m for m in grid.received}
            answers = [replies[m.metadata.message_id] for m in sent]
            assert report["bytes_up"] == sum(content_bytes(message.content) for message in answers)
    first, second = run_dir.rounds()
    assert first["bytes_down"] > second["bytes_down"]


@pytest.mark.parametrize("limit", [1, 10**4, 10**6])
def test_messages_are_bounded_and_one_at_a_time(tmp_path: Path, grids: Any, limit: int) -> None:
    run_dir, grid = run(tmp_path, grids, messages__max_bytes=limit)
    assert grid.brought(1) == EVERYTHING
    sizes = []
    for message in grid.deliveries(1):
        arrays = record_of(message)
        size = sum(len(array.data) for array in arrays.values())
        assert size <= limit or len({unit_of(name) for name in arrays}) == 1
        sizes.append(size)
    questions = 3
    assert sizes[:questions] == [0] * questions
    assert len(sizes) == questions + 3 * (1 if sum(sizes) / 3 <= limit else 2)
    order = [m.metadata.dst_node_id for m in grid.sent if m.metadata.group_id == "1"]
    assert all(order[i : i + 3] == [2, 3, 4] for i in range(0, len(order), 3))  # batches: no client has two at once
    assert {client["status"] for client in clients_of(run_dir)} == {"ok"}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replace_by_text(path: Path) -> None:
    path.write_bytes(b"\x80\x04not a safetensors file")


@pytest.mark.parametrize("harm", [flip, replace_by_text, Path.unlink])
def test_damaged_units_are_reported_and_sent_again(tmp_path: Path, grids: Any, harm: Callable[[Path], None]) -> None:
    damaged: list[str] = []

    def damage_one(server_round: int, grid: Interfering) -> None:
        if server_round == 2:
            path = files_of(grid, 1)[0]
            damaged.append(path.stem)
            harm(path)

    run_dir, grid = run(tmp_path, grids, damage_one, num_rounds=3)
    assert grid.deliveries(2) == []
    assert [client["status"] for client in clients_of(run_dir, 2)] == ["ok", "failed", "ok"]
    (lost,) = [u for u in FROZEN if content_hash(arrays_of(run_dir, u)) == damaged[0]]
    assert clients_of(run_dir, 2)[1]["reason"] == (
        f"frozen units {lost} are missing or damaged in the client's store and must be sent again"
    )
    assert grid.brought(3) == Counter([(1, lost)])
    assert [client["status"] for client in clients_of(run_dir, 3)] == ["ok", "ok", "ok"]


def arrays_of(run_dir: RunDir, unit: str) -> list[tuple[str, np.ndarray]]:
    return [(name, array) for name, array in model_of(run_dir).items() if unit_of(name) == unit]


def test_only_missing_units_are_sent_after_a_restart(tmp_path: Path, grids: Any) -> None:
    """A new server knows nothing: it asks. One client's store was wiped in between, one lost a file."""
    _, grid = run(tmp_path, grids, num_rounds=1)
    lost = files_of(grid, 1)[0]
    lost.unlink()
    shutil.rmtree(files_of(grid, 2)[0].parents[1])
    run_dir, grid = run(tmp_path, grids, num_rounds=2, resume_from=str(tmp_path / "run"))
    (unit,) = [unit for unit in FROZEN if content_hash(arrays_of(run_dir, unit)) == lost.stem]
    assert grid.brought(2) == Counter([(1, unit), (2, FROZEN[0]), (2, FROZEN[1])])
    assert [client["status"] for client in clients_of(run_dir, 2)] == ["ok", "ok", "ok"]


class FailsAtUnits(Interfering):
    """Client 1 answers its first chunk with an error, client 2 with nonsense."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        kinds = {m.metadata.message_id: m for m in self.sent}
        replies = []
        for reply in super().pull_messages(message_ids):
            sent = kinds[reply.metadata.reply_to_message_id]
            if sent.metadata.message_type == "query.units" and sent.metadata.group_id == "1":
                if sent.metadata.dst_node_id == 3:
                    replies.append(Message(Error(8, "its process ended"), reply_to=sent))
                    continue
                if sent.metadata.dst_node_id == 4:
                    reply.content["outcome"] = Outcome("ok", missing=7).to_record()  # type: ignore[arg-type]
            replies.append(reply)
        return replies


def test_a_client_that_fails_at_its_units_gets_no_task(tmp_path: Path, grids: Any) -> None:
    grid = grids(FailsAtUnits, root=tmp_path)
    run_dir = run_local(tmp_path, grid, num_rounds=2, **SETTINGS)
    reports = clients_of(run_dir, 1)
    assert [report["status"] for report in reports] == ["ok", "crashed", "rejected"]
    assert reports[1]["reason"] == "error 8: its process ended"
    assert reports[2]["reason"] == "outcome missing is 7: it must be a valid list"
    trained = [m for m in grid.last.sent if m.metadata.message_type == "train" and m.metadata.group_id == "1"]
    assert [message.metadata.dst_node_id for message in trained] == [2]
    assert grid.last.brought(2)[2, FROZEN[0]] == 1  # asked again in round 2


# ---- parts


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 60))
def test_chunks(sizes: list[int], limit: int) -> None:
    units = {f"atoms.{number}": size for number, size in enumerate(sizes)}
    packed = pack_units(units, limit)
    assert [unit for chunk in packed for unit in chunk] == list(units)
    loads = [sum(units[unit] for unit in chunk) for chunk in packed]
    assert all(load <= limit or len(chunk) == 1 for load, chunk in zip(loads, packed, strict=True))
    assert all(a + units[following[0]] > limit for a, following in zip(loads, packed[1:], strict=False))


A = np.arange(6, dtype=np.float32)


def test_content_hash() -> None:
    whole = content_hash([("a", A), ("b", A.astype(np.int64))])
    assert whole == content_hash([("b", A.astype(np.int64)), ("a", A[::-1][::-1])])
    others = [
        [("a", A)],
        [("a", A), ("c", A.astype(np.int64))],
        [("a", A), ("b", A)],
        [("a", A.reshape(2, 3)), ("b", A.astype(np.int64))],
        [("a", A + 0.5), ("b", A.astype(np.int64))],
    ]
    assert len({whole, *map(content_hash, others)}) == 1 + len(others)


def test_units_of_a_record() -> None:
    record = ArrayRecord({name: Array(A) for name in ("atoms.1.w", "atoms.10.w", "head.w")})
    assert list(without_units(record, ["atoms.1"])) == ["atoms.10.w", "head.w"]
    assert without_units(record, []) is record
    assert units_of(record, ["head"])["head"]["head.w"] is record["head.w"]
    assert list(units_of(record, ["head", "atoms.2"])) == ["head"]  # a unit without arrays is not sent


def test_frozen_files(tmp_path: Path) -> None:
    folder, scratch, model = tmp_path / "frozen", tmp_path / "task", tmp_path / "model"
    scratch.mkdir()
    model.mkdir()
    one, other = {"atoms.0.w": A, "atoms.0.n": np.array(3)}, {"atoms.1.w": A.reshape(2, 3)}
    hashes = [content_hash(unit.items()) for unit in (one, other)]
    for unit in (one, other):
        frozen.keep(folder, scratch, unit)
    assert list(scratch.iterdir()) == []
    assert list(frozen.not_held(folder, [*hashes, "0" * 64])) == ["0" * 64]
    frozen.link_units(folder, {"atoms.0": hashes[0]}, model)
    assert (model / "atoms.0.safetensors").samefile(folder / f"{hashes[0]}.safetensors")  # no second copy
    frozen.forget_others(folder, {hashes[1]})
    assert [path.stem for path in folder.iterdir()] == [hashes[1]]
    with pytest.raises(MissingUnitsError, match=r"frozen units atoms\.0 are missing"):
        frozen.link_units(folder, {"atoms.0": hashes[0], "atoms.1": hashes[1]}, model)
    with pytest.raises(ValueError, match=r"'\.\./head' is not a content hash"):
        list(frozen.not_held(folder, ["../head"]))


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", refuse)
    frozen.keep(tmp_path / "frozen", tmp_path, {"atoms.0.w": A})
    digest = content_hash([("atoms.0.w", A)])
    (tmp_path / "model").mkdir()
    frozen.link_units(tmp_path / "frozen", {"atoms.0": digest}, tmp_path / "model")
    laid = tmp_path / "model" / "atoms.0.safetensors"
    assert laid.read_bytes() == (tmp_path / "frozen" / f"{digest}.safetensors").read_bytes()
