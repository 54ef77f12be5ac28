import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from piecework.federated_data import caltech
from piecework.federated_data.caltech import hold_out_squares, square
from piecework.federated_data.datasets import PUBLISHED, DatasetError, prepare


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = () if mode == "L" else (3,)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, *channels), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(("width", "height"), [(300, 257), (256, 256), (97, 341), (640, 480), (225, 600)])
def test_a_square_is_what_torchvisions_transforms_make(width, height):
    transforms = pytest.importorskip("torchvision.transforms")
    picture = noise(width, height)
    theirs = transforms.CenterCrop(224)(transforms.Resize(256)(picture))
    assert np.array_equal(square(picture, 256, 224), np.asarray(theirs))


def test_grey_pictures_have_three_channels():
    found = square(noise(40, 30, "L"), 16, 12)
    assert found.shape == (12, 12, 3)
    assert (found == found[..., :1]).all()


@pytest.fixture
def pictures(tmp_path):
    """Three classes of 4, 6 and 5 pictures, every one of one colour: 20 * class, 10 * number."""
    classes = []
    for label, count in enumerate((4, 6, 5)):
        files = [tmp_path / f"{label}_{number}.jpg" for number in range(count)]
        for number, file in enumerate(files):
            Image.new("RGB", (20 + number, 30), (20 * label, 10 * number, 200)).save(file, quality=100)
        classes.append(files)
    return classes


def test_every_class_gives_as_many_test_images_and_nothing_is_lost(pictures):
    source = hold_out_squares(pictures, test_images=2, short_edge=16, edge=14)
    assert np.bincount(source.labels).tolist() == [2, 4, 3]
    assert np.bincount(source.test_labels).tolist() == [2, 2, 2]
    assert source.inputs.shape == (9, 14, 14, 3)
    assert source.num_classes == 3
    colours = {
        (round(int(pixel[0]) / 20), round(int(pixel[1]) / 10))
        for images in (source.inputs, source.test_inputs)
        for pixel in images[:, 7, 7]
    }
    assert colours == {(label, number) for label, files in enumerate(pictures) for number in range(len(files))}
    for images, labels in ((source.inputs, source.labels), (source.test_inputs, source.test_labels)):
        assert abs(images[:, 0, 0, 0].astype(int) - 20 * labels).max() <= 3  # JPEG
    again = hold_out_squares(pictures, test_images=2, short_edge=16, edge=14)
    assert np.array_equal(source.test_inputs, again.test_inputs)


def test_the_layout_is_torchvisions_without_clutter(tmp_path, monkeypatch):
    base = tmp_path / "data" / "caltech256" / "256_ObjectCategories"
    for name, count in (("001.ak47", 27), ("002.american-flag", 26), ("257.clutter", 3)):
        (base / name).mkdir(parents=True)
        for number in range(1, count + 1):
            noise(30, 40, seed=number).save(base / name / f"{name[:3]}_{number:04d}.jpg")
    (base / "001.ak47" / "RENAME2").write_text("what the archive has beside pictures")
    with pytest.raises(
        DatasetError, match=re.escape("holds 53 images of 2 classes besides clutter, the published set 29780 of 256")
    ):
        prepare("caltech256", data_dir=str(tmp_path / "data"), cache_dir=tmp_path / "cache")
    # The set cannot be had here: two of its classes are taken for all of it.
    monkeypatch.setattr(caltech, "CLASSES", 2)
    monkeypatch.setattr(caltech, "IMAGES", 53)
    found = caltech.caltech256(tmp_path / "data", download=False)
    assert np.bincount(found.labels).tolist() == [2, 1]
    assert np.bincount(found.test_labels).tolist() == [25, 25]
    assert found.inputs.shape == (3, 224, 224, 3)
    assert found.mean == (0.485, 0.456, 0.406)
    (base / "002.american-flag" / "002_0001.jpg").write_bytes(b"no picture")
    with pytest.raises(DatasetError, match=r"002_0001\.jpg cannot be read as an image"):
        caltech.caltech256(tmp_path / "data", download=False)


def test_what_plans_know_of_it_is_the_published_set_less_its_test_images():
    shape, classes, examples = PUBLISHED["caltech256"]
    assert (shape, classes) == ((3, 224, 224), caltech.CLASSES)
    assert examples == caltech.IMAGES - 25 * caltech.CLASSES


def test_without_the_files_the_error_describes_the_layout(tmp_path: Path):
    with pytest.raises(
        DatasetError, match=r"caltech256/256_ObjectCategories.*set data-dir.*or set data.download = true"
    ):
        prepare("caltech256", data_dir=str(tmp_path), cache_dir=tmp_path / "cache")
