"""Read Tiny-ImageNet (Le and Yang, "Tiny ImageNet Visual Recognition Challenge", 2015) from its archive's folder.

The published test images have no labels, so the 10,000 validation images are the test set, as in most papers.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from piecework.federated_data.own_sources import open_image
from piecework.federated_data.sources import DatasetError, Ints, Source, fetch, import_extra

CLASSES, TRAIN_IMAGES, TEST_IMAGES, EDGE = 200, 500, 50, 64  # images per class
FOLDER = "tiny-imagenet-200"
URL, MD5 = f"http://cs231n.stanford.edu/{FOLDER}.zip", "90528d7ca1a48142e341f4ef8d21d0de"
_AGAIN = f"unpack {FOLDER}.zip again, or take your own images by folder:<dir>"


def tiny_imagenet(source: Path, download: bool) -> Source:
    """Return 200 classes of 500 training and 50 test images, in the order of their WordNet names; grey ones as RGB.

    Images are normalised as ImageNet's, whose they are. Reading takes 1.4 GB of memory and as much disk.
    """
    base = source / FOLDER
    if download and not base.is_dir():
        fetch(URL, source, f"{FOLDER}.zip", MD5)
    if not base.is_dir():
        raise DatasetError(
            f"tiny-imagenet: no {base}; set data-dir (now {source}) to the folder that holds {FOLDER}/"
            "{train/<class>/images/*.JPEG,val/val_annotations.txt,val/images/*.JPEG,wnids.txt}, or set data.download = true"
        )
    return read_folders(base, CLASSES, TRAIN_IMAGES, TEST_IMAGES)


def read_folders(base: Path, classes: int, train_images: int, test_images: int) -> Source:
    """Read a folder of this layout with so many classes, and so many images of each. Raises DatasetError."""
    names = sorted(_lines(base / "wnids.txt"))
    if len(names) != classes or len(set(names)) != classes:
        raise DatasetError(
            f"{base / 'wnids.txt'} names {len(set(names))} classes, the published file {classes}; {_AGAIN}"
        )
    files = [sorted((base / "train" / name / "images").glob("*.JPEG")) for name in names]
    for name, found in zip(names, files, strict=True):
        _require_count(base / "train" / name / "images", len(found), train_images)
    labels = np.repeat(np.arange(classes, dtype=np.int64), train_images)
    test_files, test_labels = _validation(base / "val", names)
    for name, count in zip(names, np.bincount(test_labels, minlength=classes).tolist(), strict=True):
        _require_count(base / "val" / "val_annotations.txt", count, test_images, f" of class {name}")
    return Source(
        _read([file for each in files for file in each]),
        labels,
        _read(test_files),
        test_labels,
        classes,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        class_names=_class_names(base / "words.txt", names),
    )


def _validation(folder: Path, names: list[str]) -> tuple[list[Path], Ints]:
    """Return the images that val_annotations.txt lists, one a line: its name, its class, and the edges of a box."""
    annotations, numbers = folder / "val_annotations.txt", {name: number for number, name in enumerate(names)}
    files, labels = [], []
    for number, line in enumerate(_lines(annotations), start=1):
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in numbers or Path(file).name != file:
            raise DatasetError(
                f"{annotations}, line {number}: {line[:80]!r} is not an image and a class of wnids.txt; {_AGAIN}"
            )
        files.append(folder / "images" / file)
        labels.append(numbers[name])
    if len(set(files)) != len(files):
        raise DatasetError(f"{annotations} lists {len(files)} images, of which {len(set(files))} differ; {_AGAIN}")
    return files, np.array(labels, dtype=np.int64)


def _read(files: list[Path]) -> NDArray[np.uint8]:
    image = import_extra("PIL.Image")
    pixels = np.empty((len(files), EDGE, EDGE, 3), dtype=np.uint8)
    for row, file in zip(pixels, files, strict=True):
        try:
            found = open_image(image, file, lambda picture: np.asarray(picture.convert("RGB")))
        except DatasetError as error:
            raise DatasetError(f"{error}; {_AGAIN}") from None
        if found.shape != row.shape:
            raise DatasetError(f"{file} is {found.shape[1]}x{found.shape[0]}, all images are {EDGE}x{EDGE}; {_AGAIN}")
        row[:] = found
    return pixels


def _class_names(words: Path, names: list[str]) -> tuple[str, ...]:
    """Return the first word for each class, from lines of a WordNet name and its words; none without the file."""
    if not words.is_file():
        return ()
    known = dict(line.split("\t", 1) for line in _lines(words) if "\t" in line)
    return tuple(known.get(name, name).split(",")[0] for name in names)


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} cannot be read: {error}; {_AGAIN}") from None


def _require_count(where: Path, found: int, wanted: int, what: str = "") -> None:
    if found != wanted:
        raise DatasetError(f"{where} holds {found} images{what}, the published set {wanted}; {_AGAIN}")
