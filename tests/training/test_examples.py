"""Batches, augmentation, examples from arrays and from stored features."""

import math

import numpy as np
import pytest
import torch
from helpers import digits

from piecework.device_profiles.memory import PeakMemory
from piecework.federated_data.datasets import ArrayDataset, DatasetError
from piecework.models.cascade import fit_features
from piecework.training.examples import Augmentation, batches, feature_examples, normalise, training_examples
from piecework.training.memory_cap import MemoryCap
from piecework.training.scoring import evaluate_examples
from piecework.training.setup import PixelScale, open_dataset, scale_pixels


def test_batches() -> None:
    def cut(count: int, size: int, *, drop: bool) -> list[list[int]]:
        return [b.tolist() for b in batches(count, size, np.random.default_rng(4), drop_single=drop)]

    kept, dropped = cut(17, 4, drop=False), cut(17, 4, drop=True)
    assert [len(b) for b in kept] == [4, 4, 4, 4, 1]
    assert kept[:4] == dropped
    flat = [position for batch in kept for position in batch]
    assert sorted(flat) == list(range(17))
    assert flat != list(range(17))
    assert [len(b) for b in cut(18, 4, drop=True)] == [4, 4, 4, 4, 2]
    assert cut(1, 4, drop=True) == cut(0, 4, drop=False) == []


IMAGE = np.array([[1, 2], [3, 4]], dtype=np.uint8)[None, :, :, None]


@pytest.mark.parametrize(
    ("flip", "shift", "expected"),
    [
        (False, (4, 4), [[1, 2], [3, 4]]),
        (True, (4, 4), [[2, 1], [4, 3]]),
        (False, (5, 4), [[3, 4], [0, 0]]),
        (False, (3, 4), [[0, 0], [1, 2]]),
        (False, (4, 5), [[2, 0], [4, 0]]),
        (False, (4, 3), [[0, 1], [0, 3]]),
        (True, (4, 3), [[1, 0], [3, 0]]),  # shifted, then flipped
        (False, (5, 5), [[4, 0], [0, 0]]),
        (False, (0, 0), [[0, 0], [0, 0]]),
        (False, (8, 8), [[0, 0], [0, 0]]),
    ],
)
def test_augmentation(flip: bool, shift: tuple[int, int], expected: list[list[int]]) -> None:
    augmentation = Augmentation(np.array([flip]), np.array([shift]))
    assert augmentation.read(IMAGE, np.array([0]), np.array([0]))[0, :, :, 0].tolist() == expected


def test_augmentation_belongs_to_the_position() -> None:
    augmentation = Augmentation(np.array([False, True, False]), np.array([[4, 4], [4, 4], [5, 4]]))
    both = augmentation.read(IMAGE, np.array([0, 0, 0]), np.array([2, 0, 1]))
    assert both[..., 0].tolist() == [[[3, 4], [0, 0]], [[1, 2], [3, 4]], [[2, 1], [4, 3]]]


def test_augmentation_is_drawn_evenly() -> None:
    drawn = Augmentation.draw(4000, np.random.default_rng(0))
    assert drawn.flips.mean() == pytest.approx(0.5, abs=0.03)
    assert drawn.shifts.shape == (4000, 2)
    for axis in (0, 1):
        counts = np.bincount(drawn.shifts[:, axis])
        assert len(counts) == 9
        assert counts.min() > 350
    again = Augmentation.draw(4000, np.random.default_rng(0))
    assert (drawn.shifts == again.shifts).all()
    assert (drawn.flips == again.flips).all()


def test_client_examples_are_the_normalised_rows() -> None:
    data = digits()
    rows = np.array([30, 4, 17])
    examples = training_examples(data, rows)
    x = examples.read(np.array([2, 0]))
    assert x.shape == (2, 1, 8, 8)
    assert x.dtype == torch.float32
    assert x.is_contiguous(memory_format=torch.channels_last)
    expected = (data.inputs[[17, 30]].astype(np.float64) / 255 - data.mean[0]) / data.std[0]
    np.testing.assert_allclose(x[:, 0].numpy(), expected[..., 0], atol=1e-6)
    assert len(examples) == 3
    assert examples.targets(np.array([1])).tolist() == [data.labels[4]]
    everything = normalise(data.inputs[:], data)
    assert everything.mean().item() == pytest.approx(0, abs=1e-4)
    assert everything.std().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("scale", "factor"), [("unit", 1 / 255), ("raw", 1.0)])
def test_pixels_of_another_scale(scale: PixelScale, factor: float) -> None:
    data = open_dataset("digits", "", scale)
    x = training_examples(data, np.array([30, 4, 17])).read(np.array([2, 0]))
    np.testing.assert_allclose(x[:, 0].numpy(), factor * data.inputs[[17, 30]][..., 0], rtol=1e-6)
    whole = training_examples(data, np.array([4])).entering((3, 8, 8)).read(np.array([0]))
    assert whole[0, [0, 2]].abs().max() == 0  # missing channels are black


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_only_images_of_8_bits_have_another_scale(dtype: type[np.generic]) -> None:
    inputs = np.zeros((2, 4) if dtype == np.uint16 else (2, 4, 4, 1), dtype)
    labels = np.arange(2)
    data = ArrayDataset("own", inputs, labels, 2, (0.0,), (1.0,), inputs, labels)
    with pytest.raises(
        DatasetError, match=r"data\.pixel-scale = 'raw': data set own holds (float32|uint16) of shape .* use normalised"
    ):
        scale_pixels(data, "raw")


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("shape", [(3, 9, 8), (8, 4, 3), (4, 9, 1), (3, 2, 8)])
def test_images_enter_a_later_atom_as_fit_features_has_them_and_are_never_held_whole(shape, augmented, dtype) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 256, (20, 9, 8, 3)).astype(dtype)
    data = ArrayDataset("mine", inputs, np.zeros(20, np.int64), 2, (0.4, 0.5, 0.6), (0.2, 0.3, 0.1), inputs, inputs)
    rows, positions = np.arange(3, 19), np.array([15, 2, 7])
    examples = training_examples(data, rows, Augmentation.draw(16, rng) if augmented else None)
    whole = fit_features(examples.read(positions), shape)
    memory = PeakMemory()
    with memory:
        x = examples.entering(shape).read(positions)
    assert x.equal(whole)
    assert x.is_contiguous(memory_format=torch.channels_last)
    places = len(positions) * shape[1] * shape[2]
    pixels = np.dtype(dtype).itemsize * 3 * places
    in_place = dtype == np.float32 and shape[0] == 3
    assert memory.peak == (0 if in_place else pixels) + 4 * shape[0] * places + 4 * 3  # of the mean


def test_feature_examples() -> None:
    maps = np.arange(24, dtype=np.float32).reshape(2, 2, 3, 2)  # [n, H, W, C]
    z = feature_examples(maps, np.array([7, 8])).read(np.array([1]))
    assert z.shape == (1, 2, 2, 3)
    assert z[0, 1, 0, 2].item() == maps[1, 0, 2, 1]
    vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert feature_examples(vectors, np.array([7, 8])).read(np.array([1, 0])).tolist() == [[3, 4, 5], [0, 1, 2]]


LOG3 = math.log(3)


def test_evaluate_examples_by_hand() -> None:
    rows = np.array([[0.0, LOG3], [0.0, LOG3], [LOG3, 0.0], [0.0, 0.0], [0.0, LOG3]], dtype=np.float32)
    examples = feature_examples(rows, np.array([1, 0, 0, 0, 1]))
    rng, cap = np.random.default_rng(0), MemoryCap(10**6, enforced=True)
    loss, correct, seen = evaluate_examples(lambda z: z, examples, 3, rng, cap)
    # right with 3/4: three times; wrong with 1/4; undecided, where the first class wins
    assert (correct, seen) == (4, 5)
    assert loss == pytest.approx(-3 * math.log(0.75) - math.log(0.25) - math.log(0.5))
