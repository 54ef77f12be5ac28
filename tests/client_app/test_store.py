"""A client's store on disk: units, states, and tasks and experiments beside each other."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TRIO, run_local
from store_helpers import A, files
from torch import nn

from piecework.client_app import file_lock
from piecework.client_app.local_norms import overlay_norms, spread
from piecework.client_app.store import Store
from piecework.server_app.local_grid import LocalGrid

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, "experiment", 3, "train-1")


# ---- units


def test_one_file_a_unit(tmp_path: Path, store: Store) -> None:
    count = np.array(7, dtype=np.int64)
    store.write_units({"atoms.1.w": A, "atoms.10.w": A + 1, "head.fc.bias": A[0], "atoms.1.n": count})
    assert store.root == tmp_path / "experiment" / "3"
    assert files(store.model) == [f"{name}.safetensors" for name in ("atoms.1", "atoms.10", "head")]
    assert files(store.root) == ["train-1/lock", *(f"train-1/model/{name}" for name in files(store.model))]
    read = dict(store.read(["head", "atoms.1"]))
    assert list(read) == ["head.fc.bias", "atoms.1.n", "atoms.1.w"]
    assert read["atoms.1.w"].tolist() == A.tolist()
    assert read["atoms.1.n"].dtype == np.int64
    assert (read["atoms.1.n"].shape, int(read["atoms.1.n"])) == ((), 7)


def test_arrays_in_another_memory_order_keep_their_values(store: Store) -> None:
    store.write_units({"head.w": A.T, "head.v": A[:, ::2]})
    read = dict(store.read(["head"]))
    assert read["head.w"].tolist() == A.T.tolist()
    assert read["head.v"].tolist() == [[0, 2], [3, 5]]


def test_save_and_load_a_module(store: Store) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))

    torch.manual_seed(0)
    module, other = build(), build()
    module[0].weight.data = module[0].weight.data.contiguous(memory_format=torch.channels_last)
    module[1].running_mean.fill_(5)
    module[1].num_batches_tracked.fill_(9)
    store.save("atoms.2", module)
    weight = other[0].weight
    store.load("atoms.2", other)
    assert other[0].weight is weight  # in place
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_unit_that_was_not_sent(store: Store) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no atoms\.4\.safetensors in .*model: the task names a unit that was not sent"
    ):
        store.load("atoms.4", nn.Linear(1, 1))
    with pytest.raises(FileNotFoundError, match=r"no head\.safetensors"):
        list(store.read(["head"]))


def test_rewriting_a_unit_replaces_it(store: Store) -> None:
    store.write_units({"head.w": A, "head.b": A})
    store.write_units({"head.w": A + 1})
    assert [name for name, _ in store.read(["head"])] == ["head.w"]
    assert files(store.model) == ["head.safetensors"]


def test_own_norms_replace_the_sent_ones_by_name(store: Store, tmp_path: Path) -> None:
    kept = tmp_path / "batch-norm"
    kept.mkdir()
    store.write_units({"head.w": A, "head.bn": A, "atoms.0.w": A})
    store.write_units({"head.bn": A * 10}, kept)
    overlay_norms(store, tmp_path, {})
    read = dict(store.read(["head", "atoms.0"]))
    assert read["head.bn"].tolist() == (A * 10).tolist()
    assert read["head.w"].tolist() == read["atoms.0.w"].tolist() == A.tolist()


def test_own_norms_of_other_channels(store: Store, tmp_path: Path) -> None:
    """Of four channels the client has trained the second and the third; now it has the third and the fourth."""
    folder = tmp_path / "batch-norm"
    folder.mkdir()
    own = spread(np.float32([1, 2]), (np.array([1, 2]),), np.full(4, np.nan, np.float32))
    np.testing.assert_array_equal(own, [np.nan, 1, 2, np.nan])
    store.write_units({"head.bn": own, "head.count": np.array(7)}, folder)
    store.write_units({"head.bn": np.float32([20, 30]), "head.count": np.array(9)})
    overlay_norms(store, tmp_path, {"head.bn": (np.array([2, 3]),), "head.count": ()})
    read = dict(store.read(["head"]))
    assert (read["head.bn"].tolist(), int(read["head.count"])) == ([2, 30], 7)
    again = spread(read["head.bn"] + 100, (np.array([2, 3]),), own)
    np.testing.assert_array_equal(again, [np.nan, 1, 102, 130])


def test_closing_keeps_the_state(store: Store) -> None:
    store.write_units({"head.w": A})
    for name in ("features-train-0.npy", "features-train-1.tmp", "momentum.safetensors"):
        (store.task / name).write_bytes(b"x")
    folder = store.new_state(1)
    (folder / "kept").write_text("x")
    store.commit_state(folder)
    store.close()
    assert files(store.root) == ["state/1/kept", "state/1/manifest.json"]


# ---- states


def commit(store: Store, server_round: int) -> None:
    folder = store.new_state(server_round)
    (folder / "value").write_text(str(server_round))
    store.commit_state(folder)


def states(store: Store) -> list[str]:
    return sorted(path.name for path in (store.root / "state").iterdir())


def test_no_state_yet(store: Store) -> None:
    assert store.newest_state(5) is None


def test_the_last_two_states_are_kept(store: Store) -> None:
    for server_round in (2, 9, 10):  # in the order of numbers, not of names
        commit(store, server_round)
    assert states(store) == ["10", "9"]
    newest = store.newest_state(10)
    assert newest is not None
    assert (newest / "value").read_text() == "10"


def test_newer_states_are_discarded(store: Store) -> None:
    commit(store, 4)
    commit(store, 7)
    newest = store.newest_state(6)
    assert newest is not None
    assert newest.name == "4"
    assert states(store) == ["4"]
    assert store.newest_state(3) is None
    assert states(store) == []


def test_a_state_that_was_not_committed_is_none(store: Store) -> None:
    commit(store, 1)
    (store.new_state(2) / "half").write_text("x")
    newest = store.newest_state(5)
    assert newest is not None
    assert newest.name == "1"
    assert list(store.new_state(2).iterdir()) == []  # begun again


def test_committing_a_round_again_replaces_it(store: Store) -> None:
    commit(store, 1)
    folder = store.new_state(1)
    (folder / "other").write_text("x")
    store.commit_state(folder)
    assert files(store.root / "state") == ["1/manifest.json", "1/other"]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


class Executed(Exception):
    """Raised by the pickle below, should anybody load it."""


def a_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb()))


class Bomb:
    def __reduce__(self) -> tuple[type[Exception], tuple[str]]:
        return Executed, ("a pickle was loaded",)


def a_sealed_pickle(path: Path) -> None:
    """As someone would put it there who knows about manifests."""
    a_pickle(path)
    manifest = path.parent / "manifest.json"
    listed = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(listed | {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}))


def a_foreign_file(path: Path) -> None:
    (path.parent / "extra.bin").write_bytes(b"x")


def no_manifest(path: Path) -> None:
    (path.parent / "manifest.json").unlink()


DAMAGES = {
    flip_a_bit: "head.safetensors does not match its checksum",
    cut_short: "head.safetensors does not match its checksum",
    a_pickle: "head.safetensors does not match its checksum",
    a_sealed_pickle: "head.safetensors is not a safetensors file",
    a_foreign_file: "extra.bin is not in its manifest",
    Path.unlink: "head.safetensors is missing",
    no_manifest: "manifest.json cannot be read (FileNotFoundError)",
    lambda path: (path.parent / "manifest.json").write_text("[1]"): "manifest.json is not a JSON object",
    lambda path: (path.parent / "manifest.json").write_bytes(
        b"\xff"
    ): "manifest.json cannot be read (UnicodeDecodeError)",
}


@pytest.mark.parametrize(("harm", "fault"), DAMAGES.items(), ids=DAMAGES.values())
def test_a_damaged_state_is_discarded_and_reported(store: Store, harm: Callable[[Path], None], fault: str) -> None:
    for server_round in (1, 2):
        folder = store.new_state(server_round)
        store.write_units({"head.w": A + server_round}, folder)
        store.commit_state(folder)
    harm(store.root / "state" / "2" / "head.safetensors")
    assert store.newest_state(5) == store.root / "state" / "1"
    assert store.notes == [f"discarded its state of round 2 ({fault}), continues from its state of round 1"]
    assert states(store) == ["1"]
    harm(store.root / "state" / "1" / "head.safetensors")
    assert store.newest_state(5) is None
    assert store.notes[1:] == [f"discarded its state of round 1 ({fault}), starts without a state"]
    assert states(store) == []


def test_a_file_in_place_of_a_state(store: Store) -> None:
    (store.root / "state").mkdir()
    a_pickle(store.root / "state" / "3")
    assert store.newest_state(3) is None
    assert store.notes == [
        "discarded its state of round 3 (manifest.json cannot be read (NotADirectoryError)), starts without a state"
    ]
    assert states(store) == []


# ---- tasks beside each other


def test_a_task_that_still_runs_keeps_its_folder(tmp_path: Path, store: Store) -> None:
    store.write_units({"head.w": A})
    following, again = Store(tmp_path, "experiment", 3, "train-2"), Store(tmp_path, "experiment", 3, "train-1")
    assert (following.task.name, again.task.name) == ("train-2", "train-1-2")
    assert files(again.model) == []
    assert following.notes == again.notes == []
    assert files(store.model) == ["head.safetensors"]
    store.close()
    assert Store(tmp_path, "experiment", 3, "train-1").task == store.task


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from piecework.client_app.store import Store
store = Store(Path(sys.argv[1]), "experiment", 3, sys.argv[2])
store.write_units({"head.w": np.zeros(3)})
store.new_state(4)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("following", ["train-4", "train-3"])  # the next round, and the same one once more
def test_what_a_killed_task_left_is_removed(tmp_path: Path, store: Store, following: str) -> None:
    commit(store, 1)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "train-3"], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert files(store.root / "train-3") == ["lock", "model/head.safetensors"]
    assert (store.root / "train-3" / "state" / "4").is_dir()
    task = Store(tmp_path, "experiment", 3, following)
    assert task.notes == ["removed train-3, left by a task whose process died"]
    assert files(task.task) == ["lock"]
    assert sorted(path.name for path in store.root.iterdir()) == ["state", "train-1", following]


def test_without_locks_nothing_of_others_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "fcntl", None)
    (tmp_path / "experiment" / "3" / "train-1").mkdir(parents=True)
    one, other = (Store(tmp_path, "experiment", 3, f"train-{number}") for number in (2, 3))
    assert one.notes == other.notes == []
    assert sorted(path.name for path in one.root.iterdir()) == ["train-1", "train-2", "train-3"]


# ---- experiments beside each other


def experiments(folder: Path, *names: str) -> list[Path]:
    """The folders of experiments that one client has had, each with a state, in order of their last use."""
    found = []
    for time, name in enumerate(names):
        store = Store(folder, name * 32, 3, "train-1")
        commit(store, 1)
        store.close()
        os.utime(store.root, (time, time))
        found.append(store.root.parent)
    return found


def test_the_experiments_used_last_are_kept(tmp_path: Path) -> None:
    a, b, c, d = experiments(tmp_path, "a", "b", "c", "d")
    (mine := tmp_path / "photos").mkdir()  # no experiment's name
    now = Store(tmp_path, "a" * 32, 3, "train-2")  # resumed: the oldest, but the current one
    now.remove_other_experiments(0)
    assert all(each.is_dir() for each in (a, b, c, d))
    now.remove_other_experiments(2)
    assert sorted(tmp_path.iterdir()) == sorted([a, c, d, mine])
    assert now.newest_state(1) is not None
    assert now.notes == [f"removed its store of experiment {'b' * 32}: memory.keep-experiments = 2"]


def test_a_device_removes_old_experiments_and_says_so(tmp_path: Path, grids: Any) -> None:
    """Only one with a state-dir of its own: what emulated clients have on the server's disk stays."""
    fleet, device = tmp_path / "emulated", tmp_path / "device"
    old = [experiments(folder, "a", "b") for folder in (fleet, device)]

    class Shelf(LocalGrid):
        def __init__(self, clients: int, run_config: Any, workers: int) -> None:
            super().__init__(clients, run_config, workers, [{"state-dir": str(device)}, {}, {}])

    run = run_local(tmp_path, grids(Shelf), strategy="fedavg", state_dir=str(fleet), memory__keep_experiments=1, **TRIO)
    assert [[path.exists() for path in folders] for folders in old] == [[True, True], [False, True]]
    notes = {each["client"]: each.get("note", "") for each in run.rounds()[0]["clients"]}
    assert notes == {0: f"removed its store of experiment {'a' * 32}: memory.keep-experiments = 1", 1: "", 2: ""}


def test_an_experiment_in_use_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one removed without locks. A task that waited while its experiment was removed begins a new folder."""
    (a, b) = experiments(tmp_path, "a", "b")
    now, busy = Store(tmp_path, "c" * 32, 3, "train-1"), Store(tmp_path, "a" * 32, 4, "train-1")
    os.utime(busy.root, (0, 0))
    now.remove_other_experiments(1)
    assert a.is_dir()
    busy.close()
    os.utime(busy.root, (0, 0))
    with monkeypatch.context() as without:
        without.setattr(file_lock, "fcntl", None)
        now.remove_other_experiments(1)
    assert a.is_dir()
    now.remove_other_experiments(1)
    assert (a.exists(), b.is_dir(), len(now.notes)) == (False, True, 1)
    again = Store(tmp_path, "a" * 32, 3, "train-2")
    assert again.newest_state(1) is None
