"""A pickle in place of every kind of file, and in a message: refused, and nothing in it is executed."""

import io
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from helpers import TRIO, clients_of, digits, run_local

import piecework
from piecework.client_app.seal import MANIFEST, seal
from piecework.federated_data.datasets import DatasetError, load, prepare
from piecework.server_app.records import CheckpointError, RunDir


class Trap:
    """Unpickled, it leaves a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that works; it must not have been loaded when the test ends."""
    marker = tmp_path / "executed"
    content = pickle.dumps(Trap(marker))
    pickle.loads(content)
    marker.rmdir()  # so it does work
    yield content
    assert not marker.exists()


def object_array(tmp_path: Path) -> bytes:
    """The trap as numpy itself would save it."""
    file = io.BytesIO()
    np.save(file, np.array([Trap(tmp_path / "executed")], dtype=object), allow_pickle=True)
    return file.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of one round whose clients keep batch norm on their disks."""
    return run_local(tmp_path_factory.mktemp("finished"), strategy="fedavg", architecture__batch_norm="local", **TRIO)


def copied(run_dir: RunDir, to: Path) -> RunDir:
    shutil.copytree(run_dir.path, to / "run")
    return RunDir(to / "run")


@pytest.mark.parametrize("file", ["arrays", "arrays-resealed", "manifest"])
def test_a_pickle_in_a_clients_store(finished: RunDir, tmp_path: Path, trap: bytes, file: str) -> None:
    run_dir = copied(finished, tmp_path)
    (state,) = (run_dir.path / "clients").glob("*/1/state/1")
    files = [state / MANIFEST] if file == "manifest" else sorted(state.rglob("*.safetensors"))
    assert files
    for path in files:
        path.write_bytes(trap)
    if file == "arrays-resealed":  # whoever can write the one file can write the other
        seal(state)
    run_local(
        tmp_path,
        strategy="fedavg",
        architecture__batch_norm="local",
        num_rounds=2,
        resume_from=str(run_dir.path),
        **TRIO,
    )
    told = clients_of(run_dir, 2)
    assert [report["status"] for report in told] == ["ok", "ok", "ok"]
    assert [bool(report["note"]) for report in told] == [False, True, False]
    assert "discarded its state of round 1" in told[1]["note"]
    assert (run_dir.summary() or {})["status"] == "completed"


@pytest.mark.parametrize("checksum", ["old", "new"])
@pytest.mark.parametrize("file", ["arrays.safetensors", "state.json"])
def test_a_pickle_in_a_checkpoint(finished: RunDir, tmp_path: Path, trap: bytes, file: str, checksum: str) -> None:
    run_dir = copied(finished, tmp_path)
    folder = sorted(run_dir.checkpoints.iterdir())[-1]
    (folder / file).write_bytes(trap)
    if checksum == "new":  # whoever can write the one file can write the other
        seal(folder)
    with pytest.raises(CheckpointError, match=folder.name):
        run_dir.load_checkpoint()
    with pytest.raises(CheckpointError, match=folder.name):
        run_local(
            tmp_path,
            strategy="fedavg",
            architecture__batch_norm="local",
            num_rounds=2,
            resume_from=str(run_dir.path),
            **TRIO,
        )


def test_a_pickle_in_place_of_a_model(finished: RunDir, tmp_path: Path, trap: bytes) -> None:
    run_dir = copied(finished, tmp_path)
    (run_dir.path / "model.safetensors").write_bytes(trap)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        piecework.load(run_dir.path)


@pytest.mark.parametrize("how", ["pickle", "object-array"])
@pytest.mark.parametrize("file", ["train-images.npy", "test-labels.npy"])
def test_a_pickle_in_a_data_set(tmp_path: Path, trap: bytes, file: str, how: str) -> None:
    digits()
    folder = prepare("digits", data_dir="", cache_dir=tmp_path / "cache")
    (folder / file).write_bytes(trap if how == "pickle" else object_array(tmp_path))
    with pytest.raises(DatasetError, match=file):
        load(folder)


def test_a_pickle_in_a_users_archive(tmp_path: Path, trap: bytes) -> None:
    array = np.array([Trap(tmp_path / "executed")], dtype=object)
    np.savez(tmp_path / "mine.npz", x_train=array, y_train=np.zeros(1, dtype=np.int64))
    with pytest.raises(DatasetError, match=r"mine\.npz"):
        prepare(f"npz:{tmp_path / 'mine.npz'}", data_dir="", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("how", ["pickle", "object-array"])
def test_a_pickle_in_a_message(tmp_path: Path, trap: bytes, how: str) -> None:
    array = Array("float32", (1,), "numpy.ndarray", trap if how == "pickle" else object_array(tmp_path))
    with pytest.raises(ValueError, match="pickle"):
        array.numpy()
