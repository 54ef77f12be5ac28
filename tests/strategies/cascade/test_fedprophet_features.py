"""What FedProphet's clients keep: features behind modules that no client trains any more, and states to go back to."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedprophet_helpers import seasoned
from helpers import a_client, tiny_settings

from piecework.client_app.client import FIXED_FILL, Client
from piecework.client_app.features import make_room, prefix_features
from piecework.client_app.seal import seal_file
from piecework.client_app.store import Store
from piecework.models.partition import Piece
from piecework.training.loop import PieceModel

MODULES: list[Piece] = [(0, 1), (2, 3), (4,)]


# ---- features


def kept(client: Client) -> list[Path]:
    return sorted(client.store.features.glob("*"))


def by_hand(client: Client, atoms: Piece) -> torch.Tensor:
    """What atoms make of each example of the share alone."""
    piece = PieceModel(client.blueprint, atoms, None, client.load())
    piece.train(False)
    share = client.local_data(FIXED_FILL)
    with torch.no_grad():
        return torch.cat([piece.features(share.read(np.array([n]))) for n in range(len(share))])


def test_features_are_what_frozen_atoms_make_of_each_example(tmp_path: Path) -> None:
    client = seasoned(tmp_path)
    share = client.local_data(FIXED_FILL)
    assert prefix_features(client, []).read(np.arange(5)).equal(share.read(np.arange(5)))
    for count, atoms in ((1, (0, 1)), (2, (0, 1, 2, 3)), (3, (0, 1, 2, 3, 4))):
        features = prefix_features(client, MODULES[:count])
        assert features.labels.tolist() == share.labels.tolist()
        torch.testing.assert_close(features.read(np.arange(40)), by_hand(client, atoms), rtol=1e-4, atol=1e-5)
        (path,) = kept(client)  # that of the shorter prefix is gone
        stored = np.load(path, mmap_mode="r")
        channels, height, width = client.blueprint.atoms[atoms[-1]].shape
        assert (stored.shape, stored.dtype) == ((40, height, width, channels), np.float32)
    assert client.store.notes == []


@pytest.mark.parametrize("batch_norm", ["running", "batch"])
@pytest.mark.parametrize("rows", [40, 33])  # the last batch: of 8, of 1
def test_features_do_not_depend_on_the_round_or_the_way(tmp_path: Path, batch_norm: str, rows: int) -> None:
    found = []
    for number, steps in ((1, [2]), (7, [2]), (3, [1, 2])):
        settings = tiny_settings(strategy="fedprophet", architecture__batch_norm=batch_norm, data__augment=True)
        client = a_client(tmp_path / str(number), settings, rows=rows, round=number)
        for count in steps:
            features = prefix_features(client, MODULES[:count])
        (path,) = kept(client)
        found.append((path.name, path.read_bytes()))
        assert features.read(np.arange(rows)).isfinite().all()
    assert found[0] == found[1] == found[2]


def test_features_that_are_there_are_not_computed_again(tmp_path: Path) -> None:
    client = seasoned(tmp_path)
    prefix_features(client, MODULES[:2])
    (path,) = kept(client)
    features = np.load(path, mmap_mode="r+")
    features[3] = 42.0  # which no atom made
    features.flush()
    path.write_bytes(path.read_bytes()[:-32])
    seal_file(path)
    os.utime(path, (1000, 1000))
    assert (prefix_features(client, MODULES[:2]).read(np.array([3])) == 42).all()
    assert path.stat().st_mtime > 10**6  # not the oldest
    assert (prefix_features(client, MODULES).read(np.array([3])) > 1).any()  # goes on from there
    # other weights, another prefix
    head, *_ = (name for name in dict(client.store.read(["atoms.0"])) if name.endswith("weight"))
    arrays = dict(client.store.read(["atoms.0"]))
    client.store.write_units(arrays | {head: arrays[head] * 2})
    again = prefix_features(client, MODULES[:2])
    torch.testing.assert_close(again.read(np.arange(40)), by_hand(client, (0, 1, 2, 3)), rtol=1e-4, atol=1e-5)
    assert len(kept(client)) == 1
    assert kept(client) != [path]


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def emptied(path: Path) -> None:
    """What a power failure makes of a file that was not synced."""
    path.write_bytes(b"")


def other_content(path: Path) -> None:
    path.write_bytes(b"this is not an array")


def cut_in_its_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def one_value(path: Path) -> None:
    """The smallest damage, which leaves an array of the right shape and finite values."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def without_its_checksum(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-32])


@pytest.mark.parametrize(
    "damage", [cut_short, emptied, other_content, cut_in_its_header, one_value, without_its_checksum]
)
def test_damaged_features_are_computed_again(tmp_path: Path, damage: Any) -> None:
    client = seasoned(tmp_path)
    prefix_features(client, MODULES[:2])
    (path,) = kept(client)
    sound = path.read_bytes()
    damage(path)
    again = prefix_features(client, MODULES[:2])
    assert path.read_bytes() == sound
    assert again.read(np.arange(40)).isfinite().all()
    (note,) = client.store.notes
    assert note.startswith(
        "the stored features behind atom 3 are damaged and are computed again: they do not match their"
    )


def test_features_of_another_number_of_examples_are_not_used(tmp_path: Path) -> None:
    prefix_features(a_client(tmp_path, rows=30), MODULES[:1])
    client = a_client(tmp_path, rows=40)
    assert len(prefix_features(client, MODULES[:1])) == 40
    assert [np.load(path, mmap_mode="r").shape[0] for path in kept(client)] == [40]


def test_without_a_feature_cache_nothing_stays(tmp_path: Path) -> None:
    cached, client = seasoned(tmp_path / "1"), seasoned(tmp_path / "2", memory__feature_cache=False)
    one, other = (prefix_features(c, MODULES[:2]).read(np.arange(40)) for c in (cached, client))
    assert one.equal(other)
    client.store.close()
    assert list(client.store.root.rglob("*.npy")) == []


# ---- room for features


def a_file(experiment: Path, client: int, name: str, size: int, time: int) -> Path:
    path = experiment / str(client) / "features" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (time, time))
    return path


@pytest.mark.parametrize(
    ("size", "limit", "gone"),
    [
        (10, 70, ""),  # 60 are there
        (10, 69, "b"),
        (30, 70, "b"),
        (31, 70, "bc"),
        (50, 70, "bc"),
        (51, 70, "bca"),
        (70, 70, "bca"),
    ],
)
def test_the_oldest_features_of_all_clients_make_room(tmp_path: Path, size: int, limit: int, gone: str) -> None:
    here = {
        name: a_file(tmp_path, client, f"{name}.npy", length, time)
        for name, client, length, time in (("a", 0, 20, 300), ("b", 1, 20, 100), ("c", 0, 20, 200))
    }
    make_room(tmp_path, tmp_path / "2" / "features" / "new.npy", size, limit)
    assert {name for name, path in here.items() if not path.exists()} == set(gone)


def test_features_larger_than_all_room_remove_nothing(tmp_path: Path) -> None:
    here = a_file(tmp_path, 0, "a.npy", 20, 100)
    message = (
        r"features of 1,001 bytes \(new\.npy\) exceed memory\.feature-cache-bytes = 1,000: raise it, or give the client"
    )
    with pytest.raises(OSError, match=message):
        make_room(tmp_path, tmp_path / "1" / "features" / "new.npy", 1001, 1000)
    assert here.exists()


def test_features_evicted_from_a_full_cache_are_computed_again(tmp_path: Path) -> None:
    """Room for the features of one: 40 x 16 x 64 values and a header; the two clients take turns."""
    clients = []
    for number in (0, 1):
        settings = tiny_settings(strategy="fedprophet", memory__feature_cache_bytes=4 * 40 * 16 * 64 + 200)
        client = a_client(tmp_path, settings, number=number)
        store = Store(tmp_path, "experiment", number, "train-2")
        store.write_units(dict(client.store.read(client.blueprint.units())))
        clients.append(replace(client, store=store))
    first = prefix_features(clients[0], MODULES[:1]).read(np.arange(40))
    prefix_features(clients[1], MODULES[:1])
    assert [len(kept(client)) for client in clients] == [0, 1]
    assert prefix_features(clients[0], MODULES[:1]).read(np.arange(40)).equal(first)
    assert [len(kept(client)) for client in clients] == [1, 0]


# ---- states that the server may go back to, and states of rounds that it undid


def commit(store: Store, server_round: int, kept_round: int = 0) -> None:
    folder = store.new_state(server_round)
    (folder / "value").write_text(str(server_round))
    store.commit_state(folder, kept_round)


def states(store: Store) -> list[int]:
    return sorted(int(path.name) for path in (store.root / "state").iterdir())


@pytest.mark.parametrize(
    ("kept_round", "left"),
    [
        (0, [9, 12]),  # the last two
        (12, [9, 12]),
        (11, [9, 12]),  # the newest that is not newer than round 11
        (9, [9, 12]),
        (8, [7, 9, 12]),
        (7, [7, 9, 12]),
        (3, [2, 4, 7, 9, 12]),
        (1, [2, 4, 7, 9, 12]),  # it had none yet: nothing to go back to, nothing that is older
    ],
)
def test_the_state_of_the_best_round_is_kept(tmp_path: Path, kept_round: int, left: list[int]) -> None:
    store = Store(tmp_path, "experiment", 0, "train-1")
    for server_round in (2, 4, 7, 9):
        commit(store, server_round, kept_round=1)
    assert states(store) == [2, 4, 7, 9]
    commit(store, 12, kept_round)
    assert states(store) == left


@pytest.mark.parametrize(
    ("state_round", "void", "newest", "left"),
    [
        (9, [], 9, [2, 4, 7, 9]),
        (8, [], 7, [2, 4, 7]),
        (9, [[8, 9]], 7, [2, 4, 7]),
        (9, [[5, 9]], 4, [2, 4]),
        (9, [[5, 6], [9, 9]], 7, [2, 4, 7]),
        (9, [[4, 7]], 9, [2, 4, 7, 9]),  # trained after the server had gone back
        (8, [[4, 7]], 2, [2]),
        (9, [[1, 9]], None, []),
    ],
)
def test_states_of_undone_rounds_are_not_used(
    tmp_path: Path, state_round: int, void: list[list[int]], newest: int | None, left: list[int]
) -> None:
    store = Store(tmp_path, "experiment", 0, "train-1")
    for server_round in (2, 4, 7, 9):
        commit(store, server_round, kept_round=1)
    found = store.newest_state(state_round, void)
    assert (found and int((found / "value").read_text())) == newest
    assert states(store) == left
    assert store.notes == []


def test_a_stage_that_ends_behind_its_best_round_and_the_next(tmp_path: Path) -> None:
    """Rounds 1 to 3, the best is the first; the next stage goes on from there, and its own best is kept from then on."""
    store = Store(tmp_path, "experiment", 0, "train-1")
    for server_round, best in ((1, 0), (2, 1), (3, 1)):
        commit(store, server_round, best)
    assert states(store) == [1, 2, 3]
    found = store.newest_state(3, [[2, 3]])
    assert found is not None
    assert (found / "value").read_text() == "1"
    for server_round, best in ((4, 0), (5, 4), (6, 5)):
        commit(store, server_round, best)
        assert store.newest_state(server_round, [[2, 3]]) is not None
    assert states(store) == [5, 6]
