"""Tiny-ImageNet's folders, here of two classes with three training images and one test image each."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from piecework.federated_data import tiny_imagenet
from piecework.federated_data.datasets import PUBLISHED, DatasetError, load, prepare
from piecework.federated_data.tiny_imagenet import EDGE, FOLDER, read_folders

NAMES = ("n02", "n01")  # as wnids.txt lists them


def colour(label: int, number: int) -> tuple[int, int, int]:
    return 100 * label, 40 * number, 200


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Images of one colour each: red is 100 * class, green 40 * number, in the order of their names."""
    base = tmp_path / FOLDER
    (base / "val" / "images").mkdir(parents=True)
    lines = []
    for label, name in enumerate(sorted(NAMES)):
        images = base / "train" / name / "images"
        images.mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (EDGE, EDGE), colour(label, number)).save(images / f"{name}_{number}.JPEG", quality=100)
        Image.new("RGB", (EDGE, EDGE), colour(label, 5)).save(
            base / "val" / "images" / f"val_{1 - label}.JPEG", quality=100
        )
        lines.append(f"val_{1 - label}.JPEG\t{name}\t0\t32\t44\t62\n")
    (base / "val" / "val_annotations.txt").write_text("".join(lines))
    (base / "wnids.txt").write_text("".join(f"{name}\n" for name in NAMES))
    (base / "words.txt").write_text("n00\tentity\nn01\tgoldfish, Carassius auratus\nn02\tbullfrog\n")
    return base


def test_images_labels_and_names(base: Path) -> None:
    source = read_folders(base, 2, 3, 1)
    assert source.inputs.shape == (6, EDGE, EDGE, 3)
    assert source.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert source.test_labels.tolist() == [0, 1]
    expected = [colour(label, number) for label in range(2) for number in range(3)]
    assert abs(source.inputs[:, 30, 30].astype(int) - expected).max() <= 3  # JPEG
    assert abs(source.test_inputs[:, 30, 30].astype(int) - [colour(0, 5), colour(1, 5)]).max() <= 3
    assert source.class_names == ("goldfish", "bullfrog")
    assert source.num_classes == 2


def test_the_published_sizes_are_read_from_data_dir(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CLASSES", 2), ("TRAIN_IMAGES", 3), ("TEST_IMAGES", 1)):
        monkeypatch.setattr(tiny_imagenet, name, value)
    data = load(prepare("tiny-imagenet", data_dir=str(base.parent), cache_dir=tmp_path / "cache"), verify=True)
    assert data.input_shape == PUBLISHED["tiny-imagenet"][0] == (3, EDGE, EDGE)
    assert data.mean == (0.485, 0.456, 0.406)
    assert data.class_names == ("goldfish", "bullfrog")


def test_grey_images_have_three_channels_and_words_are_not_needed(base: Path) -> None:
    grey = base / "train" / "n01" / "images" / "n01_1.JPEG"
    Image.new("L", (EDGE, EDGE), 77).save(grey)
    (base / "words.txt").unlink()
    source = read_folders(base, 2, 3, 1)
    assert source.inputs[1, 10, 10].tolist() == [77] * 3
    assert source.class_names == ()


def test_without_the_folder_the_layout_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"no .*tiny-imagenet-200; set data-dir .*wnids\.txt.* or set data\.download = true"
    ):
        prepare("tiny-imagenet", data_dir=str(tmp_path), cache_dir=tmp_path / "cache")


def write(file: str, text: str):
    return lambda base: (base / file).write_text(text)


DAMAGE = {
    "no list of classes": (lambda base: (base / "wnids.txt").unlink(), "wnids.txt cannot be read: "),
    "a class less": (write("wnids.txt", "n01\n"), "wnids.txt names 1 classes, the published file 2"),
    "an image less": (
        lambda base: (base / "train/n02/images/n02_2.JPEG").unlink(),
        "train/n02/images holds 2 images, the published set 3",
    ),
    "half an image": (
        lambda base: (base / "train/n01/images/n01_0.JPEG").write_bytes(b"\xff\xd8\xff"),
        "train/n01/images/n01_0.JPEG cannot be read as an image: ",
    ),
    "an image of another size": (
        lambda base: Image.new("RGB", (32, EDGE)).save(base / "train/n01/images/n01_0.JPEG"),
        "train/n01/images/n01_0.JPEG is 32x64, all images are 64x64",
    ),
    "no annotations": (
        lambda base: (base / "val/val_annotations.txt").unlink(),
        "val_annotations.txt cannot be read: ",
    ),
    "an unknown class": (
        write("val/val_annotations.txt", "val_0.JPEG\tn01\t0\t0\t1\t1\nval_1.JPEG\tn09\t0\t0\t1\t1\n"),
        "val_annotations.txt, line 2: 'val_1.JPEG\\tn09\\t0\\t0\\t1\\t1' is not an image and a class of wnids.txt",
    ),
    "a line without a class": (
        write("val/val_annotations.txt", "val_0.JPEG"),
        "val_annotations.txt, line 1: 'val_0.JPEG' is not an image and a class",
    ),
    "a path out of the folder": (
        write("val/val_annotations.txt", "../secret.JPEG\tn01\t0\n"),
        "line 1: '../secret.JPEG\\tn01\\t0' is not an image",
    ),
    "an image twice": (
        write("val/val_annotations.txt", "val_0.JPEG\tn01\nval_0.JPEG\tn02\n"),
        "val_annotations.txt lists 2 images, of which 1 differ",
    ),
    "a test image less": (
        write("val/val_annotations.txt", "val_0.JPEG\tn02\n"),
        "val_annotations.txt holds 0 images of class n01, the published set 1",
    ),
    "a missing test image": (
        lambda base: (base / "val/images/val_0.JPEG").unlink(),
        "val/images/val_0.JPEG cannot be read as an image: ",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_with_the_file_and_what_to_do(case: str, base: Path) -> None:
    damage, message = DAMAGE[case]
    damage(base)
    with pytest.raises(DatasetError, match=f"{re.escape(message)}.*; unpack tiny-imagenet-200.zip again"):
        read_folders(base, 2, 3, 1)


def test_pixels_are_bytes(base: Path) -> None:
    source = read_folders(base, 2, 3, 1)
    assert source.inputs.dtype == source.test_inputs.dtype == np.uint8
