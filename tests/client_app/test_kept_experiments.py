"""Clients that share a state-dir remove old experiments at the same time, and what is not theirs stays."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from piecework.client_app.kept_experiments import IN_USE, hold, old_experiments, remove, remove_old, remove_under

CURRENT = "f" * 32


def experiments(state_dir: Path, number: int, clients: int = 1) -> list[Path]:
    """Old experiments, in no one's use, in each of which so many clients have a folder, in order of their last use."""
    folders = [state_dir / f"{index:032x}" for index in range(number)]
    for index, folder in enumerate(folders):
        hold(folder).close()
        for client in range(clients):
            (folder / str(client) / "model").mkdir(parents=True)
            os.utime(folder / str(client), (index, index))
    return folders


def note(experiment: Path, kept: int) -> str:
    return f"removed its store of experiment {experiment.name}: memory.keep-experiments = {kept}"


def test_clients_remove_at_the_same_time(tmp_path: Path) -> None:
    """Each of the folders goes, and none of the clients fails."""
    barrier = Barrier(4)

    def client(state_dir: Path) -> list[str]:
        barrier.wait()
        return remove_old(state_dir, CURRENT, 1)

    with ThreadPoolExecutor(4) as pool:
        for turn in range(20):
            state_dir = tmp_path / str(turn)
            old = experiments(state_dir, 4, clients=6)
            notes = [line for answer in pool.map(client, [state_dir] * 4) for line in answer]
            assert list(state_dir.iterdir()) == old[-1:]
            assert {*map(note, old[:-1], [1] * 3)} <= {*notes}


def test_another_client_removes_what_this_one_has_listed(tmp_path: Path) -> None:
    old = experiments(tmp_path, 3)
    listed = old_experiments(tmp_path, CURRENT, 1)
    assert listed == old[:2]
    assert remove_old(tmp_path, CURRENT, 1) == [note(path, 1) for path in old[:2]]
    for path in listed:
        with pytest.raises(FileNotFoundError):
            remove(path)
    assert remove_old(tmp_path, CURRENT, 1) == []


def test_a_task_that_began_anew_keeps_its_experiment(tmp_path: Path) -> None:
    """This client opened the file of the folder before another removed that, and locks it after a task began a new one."""
    experiment = experiments(tmp_path, 2)[0]
    with (experiment / IN_USE).open("ab") as file:
        assert remove_old(tmp_path, CURRENT, 1)
        with hold(experiment):
            (experiment / "3").mkdir()
            assert not remove_under(file, experiment)
            assert (experiment / "3").is_dir()


def test_what_cannot_be_removed_is_named_and_the_others_go(tmp_path: Path) -> None:
    odd, full, old, newest = experiments(tmp_path, 4)
    (odd / IN_USE).unlink()
    (odd / IN_USE).mkdir()
    os.utime(odd / IN_USE, (0, 0))
    (full / "3").write_text("no folder of a client")
    (tmp_path / ("e" * 32)).write_text("no experiment")
    assert remove_old(tmp_path, CURRENT, 1) == [
        f"could not remove its store of experiment {odd.name}: Is a directory",
        f"could not remove its store of experiment {full.name}: 3 in it stays",
        note(old, 1),
    ]
    assert not old.exists() and newest.is_dir()
