"""Read Caltech-256 (Griffin, Holub and Perona, 2007) in torchvision's layout, as FedProphet uses it: 224 x 224 pixels."""

import http.client
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piecework.federated_data.own_sources import open_image
from piecework.federated_data.sources import DatasetError, Source, import_extra

CLASSES, IMAGES = 256, 29_780  # without the 827 images of clutter
_SHORT_EDGE, _EDGE, _TEST_IMAGES, _TEST_SEED = 256, 224, 25, 2024


def caltech256(source: Path, download: bool) -> Source:
    """Return 256 classes without the clutter; 25 images per class, always the same, are the test set.

    Images are normalised as ImageNet's, for weights that were trained on it. Reading takes 4.5 GB of memory and as much disk.
    """
    base = source / "caltech256" / "256_ObjectCategories"
    if download and not base.is_dir():
        try:
            import_extra("torchvision.datasets").Caltech256(str(source), download=True)
        except (OSError, RuntimeError, EOFError, http.client.HTTPException) as error:
            raise DatasetError(
                f"cannot download caltech256 to {source}: {error}; fetch it by hand and set data-dir"
            ) from None
    if not base.is_dir():
        raise DatasetError(
            f"caltech256: no {base}; set data-dir (now {source}) to the folder that holds "
            "caltech256/256_ObjectCategories/{001.ak47,..}, or set data.download = true"
        )
    folders = [entry for entry in sorted(base.iterdir()) if entry.is_dir() and not entry.name.endswith(".clutter")]
    classes = [sorted(folder.glob("*.jpg")) for folder in folders]
    if (len(classes), found := sum(map(len, classes))) != (CLASSES, IMAGES):
        raise DatasetError(
            f"{base} holds {found} images of {len(classes)} classes besides clutter, the published set {IMAGES} of {CLASSES}; "
            "fetch it again, or take your own images by folder:<dir>"
        )
    names = tuple(folder.name.partition(".")[2] for folder in folders)
    return replace(hold_out_squares(classes, _TEST_IMAGES, _SHORT_EDGE, _EDGE), class_names=names)


def hold_out_squares(classes: list[list[Path]], test_images: int, short_edge: int, edge: int) -> Source:
    """Return the pictures of each class as `square` makes them; a fixed seed draws `test_images` of each for tests."""
    rng = np.random.default_rng(np.random.SeedSequence(_TEST_SEED))
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for label, files in enumerate(classes):
        drawn = set(rng.permutation(len(files))[:test_images].tolist())
        for place, file in enumerate(files):
            (test if place in drawn else train).append((file, label))
    sets = (*_read(train, short_edge, edge), *_read(test, short_edge, edge))
    return Source(*sets, num_classes=len(classes), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def square(picture: Any, short_edge: int, edge: int) -> NDArray[np.uint8]:
    """Return the central [edge, edge, 3] of a picture whose shorter edge is scaled to `short_edge`, as torchvision does."""
    width, height = picture.size
    short = min(width, height)
    size = tuple(int(short_edge * length / short) for length in (width, height))
    left, top = (round((length - edge) / 2) for length in size)
    resized = picture.convert("RGB").resize(size, import_extra("PIL.Image").Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + edge, top + edge)))


def _read(part: list[tuple[Path, int]], short_edge: int, edge: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    image = import_extra("PIL.Image")
    pixels = np.empty((len(part), edge, edge, 3), dtype=np.uint8)
    for row, (file, _) in zip(pixels, part, strict=True):
        row[:] = open_image(image, file, lambda picture: square(picture, short_edge, edge))
    return pixels, np.array([label for _, label in part], dtype=np.int64)
