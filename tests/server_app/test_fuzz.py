"""Changed messages to a client and changed files, the short form of `benchmarks.fuzz`: a clear error, or success."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array

from benchmarks.fuzz_files import KINDS, Reader, World
from benchmarks.fuzz_messages import Client, HangError, Watch, limit
from piecework.client_app.seal import seal
from piecework.federated_data.datasets import DatasetError, load
from piecework.server_app.experiment import open_run
from piecework.server_app.records import CheckpointError
from piecework.training.messages import Task
from piecework.training.methods import find_entry
from piecework.training.parcels import pack, unpack

MESSAGES, FILES = 100, 12  # to each system, of each kind


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedepth", "heterofl", "profl"])
def test_a_client_answers_every_message_and_true_ones_as_before(strategy: str, tmp_path: Path, watch: Watch) -> None:
    client = Client(strategy, tmp_path, watch)
    client.attack(MESSAGES)
    assert sum(client.came.values()) == MESSAGES
    assert not client.unclear
    assert client.came["ok"] > 0
    assert client.came["error"] > 0


@pytest.mark.slow
def test_an_impossible_task_is_named(tmp_path: Path, watch: Watch) -> None:
    client = Client("fedpm", tmp_path, watch)
    message = next(each for each in map(pickle.loads, client.true) if each.metadata.message_type == "train")
    arrays = unpack(message.content.array_records["arrays"])
    wrong = {name: Array(np.full_like(array.numpy(), np.nan)) for name, array in arrays.items()}  # no probabilities
    message.content["arrays"] = pack(wrong.items())
    said = client.answer(message).error.reason
    assert said.startswith("TaskError: task 'fedpm' of round 1 cannot be carried out: "), said


@pytest.mark.slow
def test_harm_of_a_message_is_seen(tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of Python's own, a file beside the store, and another answer to a true message."""
    client = Client("fedavg", tmp_path, watch)
    with pytest.raises(HangError), limit(1):
        while True:
            pass
    true = Task.from_record
    monkeypatch.setattr(Task, "from_record", lambda record: {}[record["round"]])
    with pytest.raises(AssertionError, match="KeyError"):
        client.replay()
    client.unclear.clear()
    monkeypatch.setattr(Task, "from_record", lambda record: (tmp_path / "beside").write_text("x") and true(record))
    with pytest.raises(AssertionError, match=r"open .*beside"):
        client.attack(20)
    monkeypatch.setattr(Task, "from_record", true)
    monkeypatch.setattr(client, "expected", client.expected[1:])
    with pytest.raises(AssertionError, match="a true message is answered in another way"):
        client.attack(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_read_or_refused_in_a_sentence(kind: str, world: World) -> None:
    reader = Reader(kind, world)
    reader.attack(FILES)
    assert not reader.wrong
    assert reader.came["refused"] > 0


def test_headers_of_arrays_that_numpy_itself_fails_on(world: World) -> None:
    """Of a tuple that does not end, of a negative length, and of one that is no whole number."""
    path = world.cached / "train-images.npy"
    content = path.read_bytes()
    length = int.from_bytes(content[8:10], "little")
    head, shape = content[10 : 10 + length], np.load(path).shape
    for old, new in (("(", "(("), (f"({shape[0]},", "(-1,"), (f"({shape[0]},", "(1e9,")):
        spoilt = head.decode().replace(old, new, 1).encode()
        path.write_bytes(content[:8] + len(spoilt).to_bytes(2, "little") + spoilt + content[10 + length :])
        with pytest.raises(DatasetError, match=r"train-images\.npy is damaged"):
            load(world.cached)
    path.write_bytes(content)


def test_a_sealed_checkpoint_that_is_another_versions(world: World) -> None:
    folder = world.run.checkpoint_paths()[-1]
    file = folder / "state.json"
    content = file.read_text(encoding="utf-8")
    values = json.loads(content)
    for changed, says in (
        ({key: value for key, value in values.items() if key != "settings"}, "KeyError: 'settings'"),
        (values | {"pace": 7}, "TypeError: "),
    ):
        file.write_text(json.dumps(changed), encoding="utf-8")
        seal(folder)
        with pytest.raises(
            CheckpointError, match=rf"state\.json is not as this version of Piecework writes it \({says}"
        ):
            open_run(world.grid, world.again, world.run)
    file.write_text(content, encoding="utf-8")
    seal(folder)
    open_run(world.grid, world.again, world.run)


def test_a_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'xxx.*\(100,002 characters\)") as caught:
        find_entry("x" * 100_000)
    assert len(str(caught.value)) < 1000
