"""A client's examples, read in batches: its share of a data set, or features of them that lie in its store."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from client_app.accelerator import CPU, to_device
from federated_data.datasets import ArrayDataset

PADDING = 4  # pixels, of the random crop


@dataclass(frozen=True)
class Examples:
    """`read(positions)` gives float32 [B, ...], or tokens, for int positions [B], on the device; `labels` is int64 [n], or
    float32 [n, m] where there is more to learn of an example.
    """

    read: Callable[[np.ndarray], Tensor]
    labels: np.ndarray
    device: torch.device = CPU

    def __len__(self) -> int:
        return len(self.labels)

    def targets(self, positions: np.ndarray) -> Tensor:
        """Labels [B], int64, or targets [B, m], on the device."""
        return to_device(torch.tensor(self.labels[positions]), self.device)

    def on(self, device: torch.device) -> "Examples":
        """The same, for a device."""
        if device == self.device:
            return self
        return Examples(lambda positions: to_device(self.read(positions), device), self.labels, device)


def batches(count: int, batch_size: int, rng: np.random.Generator, *, drop_single: bool) -> Iterator[np.ndarray]:
    """Positions 0..count-1 in random order, cut into batches; a last batch of one is dropped where asked.

    Batch norm has no statistics of one example.
    """
    order = rng.permutation(count)
    for start in range(0, count, batch_size):
        positions = order[start : start + batch_size]
        if not (drop_single and len(positions) == 1):
            yield positions


@dataclass(frozen=True)
class Augmentation:
    """A flip and a crop for each example of a share, drawn once per cache fill: `flips` bool [n], `shifts` int [n, 2]."""

    flips: np.ndarray
    shifts: np.ndarray

    @classmethod
    def draw(cls, count: int, rng: np.random.Generator) -> "Augmentation":
        """Flip one in two; shift by up to 4 pixels each way."""
        return cls(rng.random(count) < 0.5, rng.integers(0, 2 * PADDING + 1, size=(count, 2)))

    def apply(self, images_BHWC: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The augmented batch; what a shift uncovers is zero."""
        height, width = images_BHWC.shape[1:3]
        padded = np.pad(images_BHWC, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
        rows = self.shifts[positions, 0, None] + np.arange(height)
        columns = self.shifts[positions, 1, None] + np.arange(width)
        columns = np.where(self.flips[positions, None], columns[:, ::-1], columns)
        return padded[np.arange(len(positions))[:, None, None], rows[:, :, None], columns[:, None, :]]


def share_examples(data: ArrayDataset, rows: np.ndarray, augmentation: Augmentation | None = None) -> Examples:
    """A share of the training examples: rows is int [n]; batches are as `as_inputs` has them."""

    def read(positions: np.ndarray) -> Tensor:
        inputs = data.inputs[rows[positions]]
        if augmentation is not None:
            inputs = augmentation.apply(inputs, positions)
        return as_inputs(inputs, data)

    return Examples(read, data.labels[rows])


def examples_of_test(data: ArrayDataset, rows: np.ndarray) -> Examples:
    """Examples of the test split: rows is int [n]."""
    return Examples(lambda positions: as_inputs(data.test_inputs[rows[positions]], data), data.test_labels[rows])


def as_inputs(rows: np.ndarray, data: ArrayDataset) -> Tensor:
    """What a model reads of rows of a data set: `normalised` images, or tokens [B, length], int64."""
    return torch.from_numpy(rows.astype(np.int64)) if data.vocabulary else normalised(rows, data)


def normalised(images_BHWC: np.ndarray, data: ArrayDataset) -> Tensor:
    """Float images [B, C, H, W], in channels-last memory because the pixels lie so on disk."""
    x = torch.tensor(images_BHWC).permute(0, 3, 1, 2).float()
    if data.inputs.dtype == np.uint8:
        x.div_(255)
    shape = (1, len(data.mean), 1, 1)
    return x.sub_(torch.tensor(data.mean).view(shape)).div_(torch.tensor(data.std).view(shape))


def feature_examples(features: np.ndarray, labels: np.ndarray) -> Examples:
    """Features from a store: float32 [n, H, W, C] (read as [B, C, H, W]) or [n, F]."""

    def read(positions: np.ndarray) -> Tensor:
        z = torch.from_numpy(features[positions])
        return z.permute(0, 3, 1, 2) if z.dim() == 4 else z

    return Examples(read, labels)
