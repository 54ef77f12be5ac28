"""Arrays in an .npz file and folders of images: their layouts, what is held out, and what is wrong with a file."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
from dataset_helpers import prepared, save_npz
from PIL import Image

from piecework.federated_data.datasets import DatasetError, prepare


def test_npz_statistics_and_channels_last(tmp_path):
    # Channel 0 is 0 and 255 in equal parts, channel 1 constant: means 0.5 and 0.2, deviations 0.5 and (constant) 1.
    images = np.zeros((4, 5, 6, 2), dtype=np.uint8)
    images[:2, ..., 0] = 255
    images[..., 1] = 51
    file = save_npz(
        tmp_path / "own.npz", x_train=images, y_train=np.array([0, 1, 0, 1]), x_test=images, y_test=np.array([[2]] * 4)
    )
    data = prepared(f"npz:{file}", tmp_path / "cache")
    assert data.input_shape == (2, 5, 6)
    assert data.num_classes == 3
    assert data.mean == pytest.approx([0.5, 0.2])
    assert data.std == pytest.approx([0.5, 1.0])
    assert data.test_labels.tolist() == [2, 2, 2, 2]
    assert data.name == f"npz:{file}"


@pytest.mark.parametrize(
    ("shape", "input_shape"), [((10, 8, 9), (1, 8, 9)), ((10, 8, 9, 3), (3, 8, 9)), ((10, 3, 8, 9), (3, 8, 9))]
)
def test_npz_layouts_and_hold_out(tmp_path, shape, input_shape):
    images = np.random.default_rng(0).random(shape, dtype=np.float32)
    save_npz(tmp_path / "own.npz", x_train=images, y_train=np.arange(10, dtype=np.uint8) % 2)
    data = prepared("npz:own.npz", tmp_path / "cache", tmp_path)
    assert data.input_shape == input_shape
    assert data.inputs.dtype == np.float32
    assert np.bincount(data.labels).tolist() == [4, 4]
    assert np.bincount(data.test_labels).tolist() == [1, 1]
    assert data.mean == pytest.approx(np.mean(data.inputs, axis=(0, 1, 2)).tolist(), rel=1e-4)
    assert data.std == pytest.approx(np.std(data.inputs, axis=(0, 1, 2)).tolist(), rel=1e-4)


def test_a_changed_npz_is_converted_again(tmp_path):
    file = tmp_path / "own.npz"
    for value in (1, 2):
        save_npz(file, x_train=np.full((10, 4, 4 + value), value, dtype=np.uint8), y_train=np.zeros(10, dtype=int))
        assert prepared(f"npz:{file}", tmp_path / "cache").inputs[0, 0, 0, 0] == value


X, Y = np.zeros((5, 8, 8), dtype=np.uint8), np.zeros(5, dtype=np.int64)
NAN = X.astype(np.float32)
NAN[3, 2, 7] = NAN[4, 0, 0] = np.nan


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_train": X}, "has no y_train; it holds x_train"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "has no y_test"),
        (
            {"x_train": X.astype(float), "y_train": Y},
            "is float64; images are uint8 (0..255) or float32; write x.astype(",
        ),
        ({"x_train": np.zeros((5, 8, 8, 7), np.uint8), "y_train": Y}, "has shape (5, 8, 8, 7); allowed are (N, H, W)"),
        (
            {"x_train": NAN[:, None], "y_train": Y},
            "has nan at [3, 0, 2, 7], the first of 2 such values: fill missing values",
        ),
        ({"x_train": NAN[:, 2], "y_train": Y}, "has nan at [3, 7], the first of 1 such values: fill missing values"),
        (
            {"x_train": X, "y_train": np.array([*"abcab"])},
            "numpy.unique(ALL, return_inverse=True)[1] numbers those of all",
        ),
        ({"x_train": np.array([None] * 5), "y_train": Y}, "x_train holds Python objects"),
        ({"x_train": X, "y_train": Y[:4]}, "is int64 of shape (4,); labels are integers of shape (5,)"),
        ({"x_train": X[:0], "y_train": Y[:0]}, "has no examples: its shape is (0, 8, 8)"),
        (
            {"x_train": X, "y_train": Y, "x_test": X[:0], "y_test": Y[:0]},
            "own.npz has no examples: its shape is (0, 8, 8)",
        ),
        ({"x_train": X, "y_train": Y - 1}, "has a label -1; labels count from 0"),
        ({"x_train": X, "y_train": Y + 2**31}, "own.npz has a label 2147483648; labels are below 1,000,000"),
        ({"x_train": X, "y_train": Y + 2**62}, "own.npz has a label 4611686018427387904; labels are below 1,000,000"),
        ({f"a{n:02}": Y for n in range(12)}, "it holds a00, a01, a02, a03, a04, a05, a06, a07, a08, a09 and 2 more"),
        ({"x_train": X, "y_train": np.array([{}] * 5)}, "is damaged or not an .npz file of plain arrays"),
        ({"x_train": X[:2], "y_train": Y[:2]}, "2 examples are too few to hold out a test set"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, 1:], "y_test": Y}, "they must have the same type and shape"),
    ],
)
def test_npz_errors_name_the_array(tmp_path, arrays, message):
    file = save_npz(tmp_path / "own.npz", **arrays)
    with pytest.raises(DatasetError) as caught:
        prepare(f"npz:{file}", data_dir="", cache_dir=tmp_path / "cache")
    assert message in str(caught.value)


def npy(shape: tuple[int, ...] | str, descr: str = "|u1", content: bytes = b"") -> bytes:
    """A .npy file with this header, whatever follows it."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        ("x_train", b"no array", "x_train is no array"),
        ("x_train.npy", b"", "is damaged"),
        ("x_train.npy", b"no array", "is damaged"),
        ("x_train.npy", b"\x93NUMPY\x01\x00" + (9000).to_bytes(2, "little") + b"[" * 9000, "is damaged"),
        (
            "x_train.npy",
            npy((10**15, 8, 8)),
            r"declares uint8 of shape \(10+, 8, 8\), 64,000,000,000,000,000 bytes, and has",
        ),
        ("x_train.npy", npy((2**32, 2**32), "<i8"), "147,573,952,589,676,412,928 bytes, and has at most"),
        ("x_train.npy", npy((-1, 8, 8)), "is damaged"),
        ("x_train.npy", npy("(" * 4000 + ")" * 4000), "is damaged"),
        ("x_train.npy", npy((5, 8, 8), "|O", b"x" * 5000), "is damaged"),
        ("x_train.npy", npy((10**15,), "|S0"), "x_train"),
    ],
)
def test_a_member_that_is_no_array_or_declares_too_much(
    tmp_path: Path, member: str, content: bytes, message: str
) -> None:
    file = tmp_path / "own.npz"
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(file, "w", compression) as archive:
            archive.writestr(member, content)
            archive.writestr("y_train.npy", npy((5,), "<i8", bytes(40)))
        with pytest.raises(DatasetError, match=message):
            prepare(f"npz:{file}", data_dir="", cache_dir=tmp_path / "cache")


def test_an_array_larger_than_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piecework.federated_data.own_sources.available_memory", lambda: 300)
    file = save_npz(tmp_path / "own.npz", x_train=X, y_train=Y)
    with pytest.raises(DatasetError, match=r"x_train is uint8 of shape \(5, 8, 8\), 320 bytes, and 300 are available"):
        prepare(f"npz:{file}", data_dir="", cache_dir=tmp_path / "cache")


def test_npz_missing_or_truncated(tmp_path):
    with pytest.raises(DatasetError, match=r"no file .*own\.npz"):
        prepare("npz:own.npz", data_dir=str(tmp_path), cache_dir=tmp_path / "cache")
    file = save_npz(tmp_path / "own.npz", x_train=X, y_train=Y)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(DatasetError, match=r"own\.npz is damaged"):
        prepare("npz:own.npz", data_dir=str(tmp_path), cache_dir=tmp_path / "cache")


def picture(path, level, size=(6, 4), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level).save(path)


def test_images_of_another_format_are_not_left_out(tmp_path):
    for name in ("a/0.png", "a/1.webp", "a/deep/2.TIF", "b/0.png"):
        picture(tmp_path / name, 9)
    with pytest.raises(DatasetError, match=r"1\.webp is neither PNG nor JPEG, and one of 2 such images"):
        prepare(f"folder:{tmp_path}", data_dir="", cache_dir=tmp_path / "cache")


def test_folder_with_train_and_test(tmp_path):
    for i, name in enumerate(("cat", "dog")):
        for level in (10, 20):
            picture(tmp_path / "pets" / "train" / name / f"{level}.png", level + i)
    picture(tmp_path / "pets" / "test" / "dog" / "1.PNG", 99)
    data = prepared("folder:pets", tmp_path / "cache", tmp_path)
    assert data.input_shape == (1, 4, 6)
    assert data.inputs[:, 0, 0, 0].tolist() == [10, 20, 11, 21]
    assert data.labels.tolist() == [0, 0, 1, 1]
    assert data.test_inputs[:, 3, 5, 0].tolist() == [99]
    assert data.test_labels.tolist() == [1]
    assert data.mean == pytest.approx([15.5 / 255])


def test_folder_of_classes_holds_out_a_fifth_and_one_coloured_image_makes_all_rgb(tmp_path):
    for i in range(5):
        picture(tmp_path / "a" / f"{i}.png", 50)
        picture(tmp_path / "b" / f"{i}.png", (1, 2, 3), mode="RGB")
    data = prepared(f"folder:{tmp_path}", tmp_path / "cache")
    assert data.input_shape == (3, 4, 6)
    assert np.bincount(data.labels).tolist() == [4, 4]
    assert np.bincount(data.test_labels).tolist() == [1, 1]
    assert data.inputs[0, 0, 0].tolist() == [50, 50, 50]
    assert data.inputs[-1, 0, 0].tolist() == [1, 2, 3]


def test_folder_errors_name_the_file(tmp_path):
    def message():
        with pytest.raises(DatasetError) as caught:
            prepare("folder:pets", data_dir=str(tmp_path), cache_dir=tmp_path / "cache")
        return str(caught.value)

    pets = tmp_path / "pets"
    assert f"no folder {pets}" in message()
    pets.mkdir()
    assert f"no .png, .jpg or .jpeg in the class folders of {pets}" in message()
    for i in range(6):
        picture(pets / "train" / "a" / f"{i}.png", 5)
    picture(pets / "train" / "a" / "3.png", 5, size=(7, 4))
    assert f"{pets}/train/a/3.png is 7x4, {pets}/train/a/0.png is 6x4" in message()
    (pets / "train" / "a" / "3.png").write_bytes((pets / "train" / "a" / "0.png").read_bytes()[:45])
    assert f"{pets}/train/a/3.png cannot be read as an image" in message()
    picture(pets / "train" / "a" / "3.png", 5, mode="I;16")
    assert f"{pets}/train/a/3.png has more than 8 bits a channel" in message()
    picture(pets / "train" / "a" / "3.png", 5)
    picture(pets / "test" / "zebra" / "0.png", 5)
    assert f"{pets}/test/zebra is not a class of the training images; those are a" in message()
