"""Data sets by name: files as others publish them, what is converted once and kept, and labels that are never seen."""

import gzip
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dataset_helpers import prepared, save_npz

from piecework.commands.options import readable_anywhere
from piecework.federated_data import datasets, sources
from piecework.federated_data.datasets import ArrayDataset, DatasetError, load, prepare
from piecework.federated_data.labels import label_remarks
from piecework.training.settings import Settings

REAL_DATA = Path(os.environ.get("PIECEWORK_DATA", "/nonexistent"))
IDX = sources._FASHION_MNIST


def write_idx(path, array):
    header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.tobytes())


@pytest.fixture
def fashion(tmp_path):
    """A data-dir in torchvision's layout: 6 training and 2 test images of 3x2, pixel = 10 * image number."""
    raw = tmp_path / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for count, images, labels in ((6, IDX[0], IDX[1]), (2, IDX[2], IDX[3])):
        pixels = np.arange(count, dtype=np.uint8) * 10
        write_idx(raw / images, np.broadcast_to(pixels[:, None, None], (count, 3, 2)))
        write_idx(raw / labels, np.arange(count, dtype=np.uint8))
    return tmp_path / "data"


def test_importing_datasets_loads_nothing_heavy():
    code = "import sys, piecework.federated_data.datasets; print(*sys.modules)"
    root = Path(datasets.__file__).parents[1]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert not {"torch", "torchvision", "sklearn", "scipy", "PIL"} & set(out.split())


def test_digits(tmp_path):
    data = prepared("digits", tmp_path)
    assert data.input_shape == (1, 8, 8)
    assert data.num_classes == 10
    assert len(data.inputs) + len(data.test_inputs) == 1797
    # A fifth of each class: class sizes are 178 182 177 183 181 182 181 179 174 180.
    assert np.bincount(data.test_labels).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert np.bincount(data.labels).tolist() == [142, 146, 142, 146, 145, 146, 145, 143, 139, 144]
    assert data.inputs.dtype == np.uint8
    assert (data.inputs.min(), data.inputs.max()) == (0, 255)
    assert data.mean == pytest.approx([np.mean(data.inputs / 255)])
    assert data.std == pytest.approx([np.std(data.inputs / 255)])
    assert isinstance(data.inputs, np.memmap)
    assert not data.inputs.flags.writeable


def test_digits_at_32_pixels(tmp_path):
    small, large = prepared("digits", tmp_path), prepared("digits32", tmp_path)
    assert large.input_shape == (1, 32, 32)
    for one, other in ((small.inputs, large.inputs), (small.test_inputs, large.test_inputs)):
        assert np.array_equal(other, np.kron(one, np.ones((1, 4, 4, 1), np.uint8)))
    assert np.array_equal(small.labels, large.labels)
    assert np.array_equal(small.test_labels, large.test_labels)
    assert (large.mean, large.std) == (pytest.approx(small.mean), pytest.approx(small.std))
    shape, classes, examples = datasets.PUBLISHED["digits32"]
    assert (large.input_shape, large.num_classes, len(large.labels)) == (shape, classes, examples)


def test_prepare_converts_once(tmp_path, fashion):
    first = prepare("fashion-mnist", data_dir=str(fashion), cache_dir=tmp_path / "cache")
    written = (first / "meta.json").stat().st_mtime_ns
    (fashion / "FashionMNIST" / "raw" / IDX[0]).unlink()
    assert prepare("fashion-mnist", data_dir=str(fashion), cache_dir=tmp_path / "cache") == first
    assert (first / "meta.json").stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]  # and no temporary folder is left


def test_fashion_mnist_layout(tmp_path, fashion):
    data = prepared("fashion-mnist", tmp_path, fashion)
    assert data.inputs[:, 2, 1, 0].tolist() == [0, 10, 20, 30, 40, 50]
    assert data.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert data.labels.dtype == np.int64
    assert data.test_inputs.shape == (2, 3, 2, 1)
    assert (data.name, data.num_classes, data.mean, data.std) == ("fashion-mnist", 10, (0.2860,), (0.3530,))


def test_fashion_mnist_gzipped(tmp_path, fashion):
    plain = fashion / "FashionMNIST" / "raw" / IDX[1]
    packed = plain.with_name(plain.name + ".gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert prepared("fashion-mnist", tmp_path, fashion).labels.tolist() == [0, 1, 2, 3, 4, 5]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DatasetError, match=f"{IDX[1]}.gz cannot be read"):
        prepare("fashion-mnist", data_dir=str(fashion), cache_dir=tmp_path / "other")


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"PNG!" + data[4:], lambda data: data[:7]])
def test_a_damaged_idx_file_is_named(tmp_path, fashion, damage):
    path = fashion / "FashionMNIST" / "raw" / IDX[2]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DatasetError, match=f"{IDX[2]} is damaged"):
        prepare("fashion-mnist", data_dir=str(fashion), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_labels_that_do_not_match_the_images_are_an_error(tmp_path, fashion):
    write_idx(fashion / "FashionMNIST" / "raw" / IDX[3], np.array([1], dtype=np.uint8))
    with pytest.raises(DatasetError, match=r"t10k-\* do not match: 2 images of \(3, 2\), 1 labels"):
        prepare("fashion-mnist", data_dir=str(fashion), cache_dir=tmp_path)


@pytest.mark.skipif(not (REAL_DATA / "FashionMNIST" / "raw").is_dir(), reason="PIECEWORK_DATA has no FashionMNIST/raw")
def test_real_fashion_mnist(tmp_path):
    data = prepared("fashion-mnist", tmp_path, REAL_DATA)
    assert data.inputs.shape == (60000, 28, 28, 1)
    assert data.test_inputs.shape == (10000, 28, 28, 1)
    assert np.bincount(data.labels).tolist() == [6000] * 10
    assert np.mean(data.inputs) / 255 == pytest.approx(data.mean[0], abs=1e-4)
    assert np.std(data.inputs) / 255 == pytest.approx(data.std[0], abs=1e-4)


@pytest.mark.skipif(
    not (REAL_DATA / "cifar-10-batches-py").is_dir(), reason="PIECEWORK_DATA has no cifar-10-batches-py"
)
def test_real_cifar10(tmp_path):
    data = prepared("cifar10", tmp_path, REAL_DATA)
    assert (data.inputs.shape, data.test_inputs.shape) == ((50000, 32, 32, 3), (10000, 32, 32, 3))
    assert np.bincount(data.labels).tolist() == [5000] * 10
    assert data.inputs[0, 0, 0].tolist() == [59, 62, 63]  # the frog; channels last
    assert data.inputs[::50].mean((0, 1, 2)) / 255 == pytest.approx(data.mean, abs=0.01)


def test_pixels_at_half_the_size_are_means_of_two_by_two():
    # (1 + 2 + 3 + 5) / 4 = 2.75, 4 * 255 / 4 = 255 (no overflow), (0 + 0 + 0 + 2) / 4 = 0.5 and 2.5 to the even 0 and 2
    rows = [[1, 2, 255, 255], [3, 5, 255, 255], [0, 0, 2, 2], [0, 2, 2, 4]]
    image = np.array(rows, np.uint8)[None, :, :, None]
    assert sources.halve(image)[0, :, :, 0].tolist() == [[3, 255], [0, 2]]


@pytest.mark.skipif(
    not (REAL_DATA / "cifar-10-batches-py").is_dir(), reason="PIECEWORK_DATA has no cifar-10-batches-py"
)
def test_real_cifar10_at_16_pixels(tmp_path):
    data, full = prepared("cifar10-16", tmp_path, REAL_DATA), prepared("cifar10", tmp_path, REAL_DATA)
    assert (data.input_shape, data.num_classes, data.examples) == datasets.PUBLISHED["cifar10-16"]
    assert np.array_equal(data.labels, full.labels)
    assert data.class_names == full.class_names
    assert data.inputs[:100].mean() == pytest.approx(full.inputs[:100].mean(), abs=0.1)


def test_cifar10_with_a_wrong_md5_is_named_and_never_unpickled(tmp_path):
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    bomb = tmp_path / "exploded"
    for file in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (base / file).write_bytes(f"cos\nmkdir\n(S'{bomb}'\ntR.".encode())
    with pytest.raises(DatasetError, match="data_batch_1 is damaged: its md5 is not c99cafc152244af753f735de768cd75f"):
        prepare("cifar10", data_dir=str(tmp_path), cache_dir=tmp_path / "cache")
    assert not bomb.exists()


def test_pickles_hold_numpy_arrays_and_nothing_else():
    batch = {"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [1, 2]}
    read = sources.read_pickle(pickle.dumps(batch, protocol=4))
    assert read["labels"] == [1, 2]
    assert np.array_equal(read["data"], batch["data"])
    with pytest.raises(DatasetError, match=r"a pickle asks for (posix|nt)\.mkdir; only numpy arrays"):
        sources.read_pickle(pickle.dumps(os.mkdir))


@pytest.mark.parametrize(
    ("name", "layout"),
    [("fashion-mnist", "FashionMNIST/raw/"), ("cifar10", "cifar-10-batches-py/"), ("cifar100", "cifar-100-python/")],
)
def test_a_missing_data_dir_names_the_setting_the_path_and_the_layout(tmp_path, name, layout):
    with pytest.raises(DatasetError) as caught:
        prepare(name, data_dir=str(tmp_path / "nowhere"), cache_dir=tmp_path / "cache")
    for part in ("data-dir", str(tmp_path / "nowhere"), layout, "download = true"):
        assert part in str(caught.value)


def test_a_file_that_lies_elsewhere_is_named(tmp_path, monkeypatch):
    """PIECEWORK_DATA sets the data-dir of every command, also of one about a file in the working directory."""
    monkeypatch.chdir(tmp_path)
    x, y = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 2
    np.savez("mine.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    options = {"data_dir": str(tmp_path / "data"), "cache_dir": tmp_path / "cache"}
    said = rf"there is no .*data/mine\.npz, and data-dir \(or PIECEWORK_DATA\) says .* write npz:{tmp_path}/mine\.npz$"
    with pytest.raises(DatasetError, match=said):
        prepare("npz:mine.npz", **options)
    with pytest.raises(DatasetError, match=said):  # as every command asks, before it reads anything
        readable_anywhere(Settings(dataset="npz:mine.npz", data_dir=options["data_dir"]))
    assert len(load(prepare(f"npz:{tmp_path}/mine.npz", **options)).labels) == 6
    with pytest.raises(
        DatasetError, match=r"no file .*data/other\.npz; write npz:<file>, absolute, or relative to data-dir"
    ):
        prepare("npz:other.npz", **options)


@pytest.mark.parametrize("name", ["imagenet", "npz", "npz:", "folder", "digits:", "digits:x", ""])
def test_an_unknown_name_lists_all(tmp_path, name):
    with pytest.raises(DatasetError, match="unknown data set") as caught:
        prepare(name, data_dir="", cache_dir=tmp_path)
    known = "known: digits, digits32, fashion-mnist, cifar10, cifar10-16, cifar100, caltech256, femnist, tiny-imagenet, imdb"
    known += ", imdb-pooled"
    assert f"{known}, npz:<file>, folder:<dir>, text:<dir>" in str(caught.value)


@pytest.fixture
def converted(tmp_path, fashion):
    return prepare("fashion-mnist", data_dir=str(fashion), cache_dir=tmp_path / "cache")


def test_meta_holds_the_md5_of_every_file(converted):
    meta = json.loads((converted / "meta.json").read_text())
    assert sorted(meta["md5"]) == ["test-images.npy", "test-labels.npy", "train-images.npy", "train-labels.npy"]
    for file, md5 in meta["md5"].items():
        assert hashlib.md5((converted / file).read_bytes()).hexdigest() == md5


def test_a_flipped_byte_is_found_by_verify_only(converted):
    path = converted / "train-images.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    load(converted)
    with pytest.raises(DatasetError) as caught:
        load(converted, verify=True)
    assert f"{path} is damaged (its md5 differs); delete the folder {converted} and rerun" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 50, 130])
@pytest.mark.parametrize("file", ["train-images.npy", "test-labels.npy"])
def test_a_truncated_array_is_found_without_verify(converted, file, keep):
    path = converted / file
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DatasetError, match=f"{file} is damaged .* delete the folder"):
        load(converted)


def test_a_missing_or_foreign_array_is_an_error(converted):
    np.save(converted / "train-labels.npy", np.zeros(3))
    with pytest.raises(DatasetError, match=r"train-labels\.npy is damaged \(float64 \(3,\) for inputs uint8"):
        load(converted)
    (converted / "train-labels.npy").unlink()
    with pytest.raises(DatasetError, match=r"train-labels\.npy is damaged \(.*No such file"):
        load(converted)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 1}', '{"schema": 0}', "[" * 100_000])
def test_an_unreadable_meta_is_an_error_for_load_and_replaced_by_prepare(converted, fashion, text):
    (converted / "meta.json").write_text(text)
    with pytest.raises(DatasetError, match=r"meta\.json is damaged .* delete the folder"):
        load(converted)
    assert prepare("fashion-mnist", data_dir=str(fashion), cache_dir=converted.parent) == converted
    assert load(converted, verify=True).num_classes == 10
    assert list(converted.parent.iterdir()) == [converted]


@pytest.mark.parametrize(
    ("key", "value"), [("num_classes", "10"), ("mean", [[0.5]]), ("std", 1), ("md5", []), ("name", 1)]
)
def test_a_meta_with_other_types_is_an_error_that_names_the_key(converted, key, value):
    meta = json.loads((converted / "meta.json").read_text())
    (converted / "meta.json").write_text(json.dumps(meta | {key: value}))
    with pytest.raises(DatasetError, match=re.escape(f"meta.json is damaged (its {key} = {value!r})")):
        load(converted)


def test_load_of_nothing_says_so(tmp_path):
    with pytest.raises(DatasetError, match=r"no .*meta\.json: there is no prepared data set"):
        load(tmp_path / "digits")


def test_processes_that_prepare_at_once_agree(tmp_path):
    save_npz(tmp_path / "own.npz", x_train=np.ones((2000, 28, 28), np.uint8), y_train=np.arange(2000) % 10)
    code = (
        "import sys; from pathlib import Path; from piecework.federated_data.datasets import *\n"
        "print(prepare('npz:own.npz', data_dir=sys.argv[1], cache_dir=Path(sys.argv[1], 'cache')))"
    )
    root = Path(datasets.__file__).parents[1]
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    (folder,) = (tmp_path / "cache").iterdir()
    assert answers == {str(folder)}
    assert len(load(folder, verify=True).inputs) == 1600


def test_the_slower_of_two_processes_keeps_the_others_folder(tmp_path, converted):
    before = (converted / "meta.json").stat().st_ino
    staging = tmp_path / "staging"
    staging.mkdir()
    (staging / "meta.json").write_text("{}")
    datasets._install(staging, converted)
    assert (converted / "meta.json").stat().st_ino == before


def test_a_cache_that_cannot_be_written_says_which_setting(tmp_path, fashion):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatasetError, match=r"cannot write the cache .*set PIECEWORK_CACHE"):
        prepare("fashion-mnist", data_dir=str(fashion), cache_dir=tmp_path / "file" / "cache")


def test_default_cache(monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.delenv("PIECEWORK_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert datasets.default_cache() == Path("/home/u/.cache/piecework")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert datasets.default_cache() == Path("/xdg/piecework")
    monkeypatch.setenv("PIECEWORK_CACHE", "~/own")
    assert datasets.default_cache() == Path("/home/u/own")


def labelled(train, test, classes, names=()):
    """A data set with these labels."""
    images = np.zeros((0, 2, 2, 1), np.uint8)
    arrays = images, np.array(train), classes, (0.0,), (1.0,), images, np.array(test)
    return ArrayDataset("mine", *arrays, class_names=names)


def test_labels_that_are_never_seen_or_never_used_are_said():
    assert label_remarks(labelled([0, 1, 2], [2, 2], 3)) == []
    unseen, skipped = label_remarks(labelled([0, 1, 1], [0, 5, 5, 1], 6))
    assert unseen == "no training example of mine has the test labels 5: 50.0% of the test examples will be wrong"
    assert skipped.startswith(
        "no example of mine has the labels 2, 3, 4, although labels go up to 5: the model has an output"
    )
    (many,) = label_remarks(labelled([0, 20], [0], 21))
    assert "has the labels 1, 2, 3, 4, 5 and 14 more, although" in many
    (named,) = label_remarks(labelled([0, 1], [2], 3, ("ape", "bat", "cat")))
    assert "the test labels 2 (cat): 100.0% of" in named
    assert label_remarks(replace(labelled([0], [1], 2), export={})) == []  # a part of an export


@pytest.mark.parametrize(("names", "label"), [((), "1"), (("ape", "bat"), "1 (bat)")])
def test_one_class_is_nothing_to_learn(names, label):
    said = f"all 2 training examples of mine have the label {label}: there is nothing to learn"
    with pytest.raises(DatasetError, match=re.escape(said)):
        label_remarks(labelled([1, 1], [0], 2, names))
