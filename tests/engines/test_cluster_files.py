"""What travels between the machines of a cluster: messages' arrays, clients' folders, the data set; and refused versions."""

import hashlib
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from helpers import few_digits, tiny_settings

from piecework.client_app.store import Store
from piecework.engines.cluster import shared_arrays
from piecework.engines.cluster.packed import Packed, held_clients, keeps, pack, state_rounds, unpack
from piecework.engines.cluster.shared_arrays import SMALL, put_together, take_apart
from piecework.engines.cluster.start import collect_code, require_same, software
from piecework.engines.cluster.travel import checksums, find_data, keep_data, node_folder, read_data, shares
from piecework.engines.processes import EngineError
from piecework.federated_data.datasets import DatasetError, load
from piecework.server_app.ordered_grid import identify
from piecework.training.parcels import pack as pack_arrays
from piecework.training.parcels import unpack as unpack_arrays
from piecework.training.parcels import view
from piecework.training.setup import prepare_dataset


def test_a_message_is_taken_apart_and_put_together() -> None:
    """Its larger arrays leave it, without a copy, and come back as views or copies; small ones stay."""
    identify(1)
    large, small = np.arange(SMALL, dtype=np.float32), np.ones(3, np.float32)
    content = RecordDict({"task": ConfigRecord({"round": 3}), "arrays": pack_arrays([("atoms.0.w", large)])})
    content["more"] = pack_arrays([("head.b", small)])
    message = Message(content, dst_node_id=2, message_type="train", group_id="3")
    sent = {key: message.content.array_records[key]["0"].data for key in ("arrays", "more")}
    apart, (buffer,) = take_apart(message)
    assert (buffer.obj is sent["arrays"], apart.places, len(apart.rest) < SMALL) == (True, (("arrays", "0"),), True)
    for copied in (True, False):
        found = put_together(apart, [np.frombuffer(buffer, np.uint8)], copied=copied)
        assert found.content.config_records["task"] == {"round": 3}
        assert isinstance(found.content.array_records["arrays"]["0"].data, bytes if copied else memoryview)
        arrays = unpack_arrays(found.content.array_records["arrays"])
        np.testing.assert_array_equal(view(arrays["atoms.0.w"]), large)
        assert bytes(found.content.array_records["more"]["0"].data) == sent["more"]


def test_the_same_objects_are_hashed_once_and_put_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What several messages have is kept until `forget`. Equal bytes are one object, also if they are another's."""
    put, hashed, blake2b = list[bytes](), list[int](), hashlib.blake2b

    def hash_of(buffer: memoryview, digest_size: int) -> Any:
        hashed.append(len(buffer))
        return blake2b(buffer, digest_size=digest_size)

    monkeypatch.setattr(shared_arrays.ray, "put", lambda array: put.append(array.tobytes()) or len(put))
    monkeypatch.setattr(shared_arrays.hashlib, "blake2b", hash_of)
    one, other, equal = b"one", b"other", bytes(bytearray(b"one"))
    held = shared_arrays.SharedArrays()
    first = held.put([memoryview(one), memoryview(other)])
    assert held.put([memoryview(other), memoryview(one)]) == first[::-1]
    assert hashed == [3, 5]
    assert held.put([memoryview(equal)]) == first[:1]
    assert held.put([memoryview(one)]) == first[:1]  # not of the last message: hashed again
    assert (hashed, put) == ([3, 5, 3, 3], [b"one", b"other"])
    assert held.references(first) == [1, 2]
    halves = [memoryview(b"leftright")[:4], memoryview(b"leftright")[4:]]
    assert len({*held.put(halves), *held.put(halves)}) == 2  # parts of one object are told apart
    for digests in (first, first[::-1], first[:1], first[:1]):
        held.release(digests)
    assert len(held) == 4
    held.release(held.put(halves) * 3)
    held.forget()
    assert len(held) == 0


def client_with_a_state(root: Path) -> Path:
    store = Store(root, "experiment", 3, "train-7")
    for number in (6, 7):
        folder = store.new_state(number)
        store.write_units({"atoms.0.w": np.full(4, number, np.float32)}, folder)
        store.commit_state(folder)
    store.close()
    return store.root


def test_a_clients_state_travels(tmp_path: Path) -> None:
    """With what another folder had before gone, and with the rounds of its states."""
    source = client_with_a_state(tmp_path / "here")
    packed = pack(source)
    assert state_rounds(source) == (6, 7)
    target = client_with_a_state(tmp_path / "there")
    (target / "state" / "9").mkdir()
    assert (unpack(packed, target), held_clients(target.parent)) == ("", {3: (6, 7)})
    store = Store(tmp_path / "there", "experiment", 3, "train-8")
    newest = store.newest_state(7)
    assert newest is not None
    ((name, array),) = store.read(["atoms.0"], newest)
    assert (name, array.tolist(), store.notes) == ("atoms.0.w", [7.0] * 4, [])
    store.close()


def test_a_damaged_state_is_no_state(tmp_path: Path) -> None:
    packed = pack(client_with_a_state(tmp_path / "here"))
    archive = packed.archive.copy()
    archive[1000] ^= 1
    target = client_with_a_state(tmp_path / "there")
    assert "damaged" in unpack(Packed(archive, packed.digest), target)
    assert not keeps(target)
    assert held_clients(target.parent) == {}


def test_a_node_sees_the_runs_folder_or_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    monkeypatch.delenv("PIECEWORK_STATE_DIR", raising=False)
    assert shares(mark, "secret") is False
    mark.write_text("of another run")
    assert shares(mark, "secret") is False  # another machine's folder of the same name
    mark.write_text("secret")
    assert shares(mark, "secret") is True
    monkeypatch.setenv("PIECEWORK_STATE_DIR", str(tmp_path / "own"))
    assert (shares(mark, "secret"), node_folder()) == (False, tmp_path / "own")


def test_a_node_without_the_data_gets_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE", str(tmp_path / "head"))
    settings = tiny_settings(dataset=f"npz:{few_digits()}")
    folder = prepare_dataset(settings)
    expected = checksums(folder)
    elsewhere = settings.with_values({"dataset": "npz:/nowhere/few.npz"})
    monkeypatch.setenv("PIECEWORK_CACHE", str(tmp_path / "node"))
    assert find_data(elsewhere, expected) is None
    kept = keep_data(read_data(folder), expected)
    assert (kept.parent, find_data(elsewhere, expected)) == (tmp_path / "node", kept)
    np.testing.assert_array_equal(load(kept).labels, load(folder).labels)
    assert keep_data(iter([]), expected) == kept  # another worker of the node has written it
    assert find_data(settings, expected | {"train-labels.npy": "of other data"}) is None


def test_data_that_was_damaged_on_its_way_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE", str(tmp_path / "head"))
    folder = prepare_dataset(tiny_settings(dataset=f"npz:{few_digits()}"))
    expected = checksums(folder)
    monkeypatch.setenv("PIECEWORK_CACHE", str(tmp_path / "node"))
    files = dict(read_data(folder))
    files["train-labels.npy"][-1] ^= 1
    with pytest.raises(DatasetError, match=r"train-labels\.npy is damaged"):
        keep_data(files.items(), expected)
    assert [*(tmp_path / "node").iterdir()] == []


def test_other_versions_are_refused_with_both_named() -> None:
    require_same("a", software())
    with pytest.raises(
        EngineError, match=rf"node a has torch 1\.0, this machine torch {torch.__version__.partition('+')[0]}"
    ):
        require_same("a", software() | {"torch": "1.0"})
    with pytest.raises(
        EngineError, match=rf"node b has Python 3\.1\.4, this machine Python {platform.python_version()}"
    ):
        require_same("b", software() | {"Python": "3.1.4"})


@pytest.mark.slow
def test_the_code_that_goes_along_is_all_of_this_package(tmp_path: Path) -> None:
    """It is imported from there, in a process that has nothing else of it."""
    collect_code(tmp_path / "code")
    assert [*(tmp_path / "code").rglob("*.pyc"), *(tmp_path / "code").rglob("shipped")] == []
    words = "import piecework.client_app.app as app; print(app.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", words], cwd=tmp_path / "code", capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == tmp_path / "code" / "piecework" / "client_app" / "app.py"
