"""FEMNIST as LEAF's preprocess.sh writes it, here with three writers in two files."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piecework.federated_data.datasets import PUBLISHED, ArrayDataset, DatasetError, load, prepare
from piecework.federated_data.femnist import CLASS_NAMES
from piecework.training.settings import Settings
from piecework.training.setup import client_rows

COUNTS = {"f1_b": 4, "f0_a": 6, "f2_c": 5}


def character(writer: str, number: int) -> list[float]:
    """A picture whose first pixels are the writer's place and the number, on white."""
    return [sorted(COUNTS).index(writer) / 255, number / 255] + [1.0] * 782


def part_of(writers: list[str], numbers: range | None = None) -> dict[str, Any]:
    chosen = {writer: numbers or range(COUNTS[writer]) for writer in writers}
    return {
        "users": writers,
        "num_samples": [len(chosen[writer]) for writer in writers],
        "user_data": {
            writer: {"x": [character(writer, n) for n in own], "y": [(10 * n) % 62 for n in own]}
            for writer, own in chosen.items()
        },
    }


def write(folder: Path, name: str, held: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(held if isinstance(held, str) else json.dumps(held))
    return file


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    """A data-dir with LEAF's folders train and test, of two files each."""
    base = tmp_path / "data" / "femnist"
    for part, numbers in (("train", None), ("test", range(1))):
        write(base / part, "all_data_0.json", part_of(["f1_b", "f0_a"], numbers))
        write(base / part, "all_data_1.json", part_of(["f2_c"], numbers))
    return tmp_path / "data"


def prepared(data_dir: Path) -> ArrayDataset:
    return load(prepare("femnist", data_dir=str(data_dir), cache_dir=data_dir / "cache"), verify=True)


def test_images_labels_and_writers(leaf: Path) -> None:
    data = prepared(leaf)
    assert data.input_shape == PUBLISHED["femnist"][0] == (1, 28, 28)
    assert (data.num_classes, data.inputs.dtype) == (62, np.uint8)
    assert data.groups is not None
    assert np.array_equal(data.groups, data.inputs[:, 0, 0, 0])  # by their names, whatever their order in the files
    assert np.bincount(data.groups).tolist() == [6, 4, 5]
    assert np.array_equal(data.labels, (10 * data.inputs[:, 0, 1, 0].astype(int)) % 62)
    assert (data.inputs[:, 5:] == 255).all()
    assert data.test_inputs.shape == (3, 28, 28, 1)
    assert data.class_names[10:12] == ("A", "B")
    assert "".join(CLASS_NAMES[i] for i in (0, 9, 35, 36, 61)) == "09Zaz"


def test_each_writer_may_be_a_client(leaf: Path) -> None:
    data = prepared(leaf)
    settings = Settings.from_run_config({"data.partition": "natural", "data.partition-groups": 1, "clients": 3})
    rows = client_rows(settings, data.labels, 3, data.groups)
    assert data.groups is not None
    assert sorted(len(own) for own in rows) == [4, 5, 6]
    assert all(len(set(data.groups[own])) == 1 for own in rows)


def test_of_all_data_alone_a_fifth_of_each_class_is_held_out(tmp_path: Path) -> None:
    base = tmp_path / "femnist" / "all_data"
    for number, writer in enumerate(("f0_a", "f1_b")):
        held = part_of([writer])
        held["user_data"][writer]["y"] = [3] * COUNTS[writer]
        write(base, f"all_data_{number}.json", held)
    data = prepared(tmp_path)
    assert (len(data.labels), len(data.test_labels)) == (8, 2)
    assert data.groups is not None
    assert np.array_equal(data.groups, data.inputs[:, 0, 0, 0])


@pytest.mark.parametrize(("kept", "lost"), [((), "all_data"), (("train",), "test"), (("test",), "train")])
def test_missing_folders_are_named(kept: tuple[str, ...], lost: str, tmp_path: Path) -> None:
    for part in kept:
        write(tmp_path / "femnist" / part, "all_data_0.json", part_of(["f0_a"]))
    with pytest.raises(DatasetError, match=rf"no .*femnist/{lost}/\*\.json; set data-dir .*preprocess\.sh writes them"):
        prepared(tmp_path)


def broken(key: str, value: object) -> dict[str, Any]:
    """A file of one writer with another value in the writer's own table."""
    held = part_of(["f2_c"])
    held["user_data"]["f2_c"][key] = value
    return held


X, Y = ([character("f2_c", n) for n in range(5)], [0] * 5)
DAMAGE: dict[str, tuple[object, str]] = {
    "cut off": ('{"users": ["f2_c"], "num_s', "all_data_1.json cannot be read: "),
    "another file": ({"users": ["f2_c"]}, "all_data_1.json holds ['users'], not users, num_samples and user_data"),
    "a list": ([1], "all_data_1.json holds [1], not users"),
    "no writers": ({"users": [], "num_samples": [], "user_data": {}}, "are not of the same writers, []"),
    "a writer without data": (
        part_of(["f2_c"]) | {"users": ["f2_c", "f3_d"], "num_samples": [5, 1]},
        "are not of the same writers, ['f2_c', 'f3_d']",
    ),
    "no lists": (part_of(["f2_c"]) | {"users": 3}, "are not of the same writers, 3"),
    "no y": (
        part_of(["f2_c"]) | {"user_data": {"f2_c": {"x": X}}},
        "writer 'f2_c' has no lists x and y of numbers (KeyError('y'))",
    ),
    "fewer labels": (
        broken("y", [0]),
        "has x of shape (5, 784) and y of (1,), for num_samples = 5 they are (5, 784) and (5,)",
    ),
    "another count": (part_of(["f2_c"]) | {"num_samples": [4]}, "for num_samples = 4 they are (4, 784)"),
    "ragged images": (broken("x", [*X[:4], [0.5]]), "writer 'f2_c' has no lists x and y of numbers"),
    "pixels of bytes": (broken("x", [[255.0] * 784] * 5), "has pixels from 255.0 to 255.0; they are 0 to 1"),
    "pixels that are no numbers": (broken("x", [[float("nan")] * 784] * 5), "has pixels from nan to nan"),
    "a label too high": (broken("y", [0, 1, 2, 3, 62]), "has a label 62; labels are whole numbers from 0 to 61"),
    "a label that is a fraction": (broken("y", [0, 1, 2, 3, 0.5]), "has a label 0.5; labels are"),
    "a label that is a word": (broken("y", ["a"] * 5), "has a label 'a'; labels are"),
    "a writer twice": (part_of(["f0_a"]), "all_data_1.json: writer 'f0_a' is in all_data_0.json too"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_with_the_file_and_what_to_do(case: str, leaf: Path) -> None:
    held, message = DAMAGE[case]
    file = write(leaf / "femnist" / "train", "all_data_1.json", held)
    with pytest.raises(DatasetError, match=f"{re.escape(message)}.*preprocess.sh") as caught:
        prepared(leaf)
    assert str(file) in str(caught.value)
