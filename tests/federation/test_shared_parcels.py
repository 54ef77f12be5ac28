"""Clients that get the same arrays get the same parcels, which are packed once."""

from pathlib import Path
from typing import Any

from flwr.app import Message
from helpers import TRIO, RecordingGrid, arrays_of, fleet_json, run_local, same, training


def parcels_of(tmp_path: Path, **settings: Any) -> tuple[list[Message], list[list[Any]]]:
    """The messages of two rounds' training, and the bytes of each one's parcels."""
    run_local(tmp_path, RecordingGrid, **TRIO | {"num_rounds": 2} | settings)
    sent = training(RecordingGrid.last.sent)
    assert len(sent) == 6
    return sent, [[array.data for array in m.content.array_records["arrays"].values()] for m in sent]


def are_one(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def test_what_all_clients_of_a_round_get_is_packed_once(tmp_path: Path) -> None:
    _, data = parcels_of(tmp_path, strategy="fedavg", fleet="unlimited")
    assert [are_one(data[0], each) for each in data] == [True, True, True, False, False, False]
    assert [are_one(data[3], each) for each in data[3:]] == [True, True, True]


def test_another_width_is_packed_anew(tmp_path: Path) -> None:
    """Clients 0 and 2 are rich, and get the same arrays, but not one after the other."""
    sent, data = parcels_of(tmp_path, strategy="heterofl", fleet=fleet_json(rich=2.0, poor=0.4))
    assert not any(are_one(data[0], each) for each in data[1:])
    arrays = [arrays_of(each) for each in sent[:3]]
    assert same(arrays[0], arrays[2])
    assert {name: a.shape for name, a in arrays[0].items()} != {name: a.shape for name, a in arrays[1].items()}


def test_what_is_chosen_from_the_model_is_packed_once(tmp_path: Path) -> None:
    """A client of ProFL gets some units alone, in a record of its own."""
    sent, data = parcels_of(tmp_path, strategy="profl", fleet="unlimited", profl__stage_rounds=1)
    assert not any(name.startswith("atoms.0.") for name in arrays_of(sent[0]))  # shrinking begins with the last block
    assert [are_one(data[0], each) for each in data] == [True, True, True, False, False, False]
