"""A client's examples, read in batches: rows of a data set, or features of them from its store."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from piecework.federated_data.datasets import ArrayDataset
from piecework.models.cascade import Shape, kept_places, padding
from piecework.models.resizing import resize_into
from piecework.training.accelerator import CPU, to_device

PADDING = 4  # pixels, of the random crop
WHOLE = (slice(None), slice(None))  # all rows and columns


@dataclass(frozen=True)
class Examples:
    """Examples that are read in batches.

    `read(positions)` returns float32 [B, ...], or tokens, for int positions [B], on the device. `labels` is int64 [n], or
    float32 [n, m] if the targets are vectors. `smaller(shape)` returns the same examples with images fitted to that shape;
    stored features have no such function.
    """

    read: Callable[[np.ndarray], Tensor]
    labels: np.ndarray
    device: torch.device = CPU
    smaller: Callable[[Shape], "Examples"] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def targets(self, positions: np.ndarray) -> Tensor:
        """Return labels [B], int64, or targets [B, m], on the device."""
        return to_device(torch.tensor(self.labels[positions]), self.device)

    def on(self, device: torch.device) -> "Examples":
        """Return the same examples for a device."""
        if device == self.device:
            return self
        smaller = self.smaller
        return Examples(
            lambda positions: to_device(self.read(positions), device),
            self.labels,
            device,
            (lambda shape: smaller(shape).on(device)) if smaller else None,
        )

    def entering(self, shape: Shape) -> "Examples":
        """Return the same examples for an atom whose input has this shape: images are read as `fit_features` makes them.

        They are never read larger, because the cost of a step does not include the full image.
        """
        return self.smaller(shape) if self.smaller else self


def batches(count: int, batch_size: int, rng: np.random.Generator, *, drop_single: bool) -> Iterator[np.ndarray]:
    """Yield positions 0..count-1 in random order, in batches; `drop_single` drops a last batch of one.

    Batch norm has no statistics of one example.
    """
    order = rng.permutation(count)
    for start in range(0, count, batch_size):
        positions = order[start : start + batch_size]
        if not (drop_single and len(positions) == 1):
            yield positions


@dataclass(frozen=True)
class Augmentation:
    """A flip and a crop per example, drawn once per cache fill: `flips` bool [n], `shifts` int [n, 2]."""

    flips: np.ndarray
    shifts: np.ndarray

    @classmethod
    def draw(cls, count: int, rng: np.random.Generator) -> "Augmentation":
        """Draw flips with probability one half and shifts by up to 4 pixels each way."""
        return cls(rng.random(count) < 0.5, rng.integers(0, 2 * PADDING + 1, size=(count, 2)))

    def read(
        self,
        images_NHWC: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        down: slice = slice(None),
        across: slice = slice(None),
    ) -> np.ndarray:
        """Return these rows of the images, augmented for the positions [B], at some heights and widths.

        Pixels that a shift uncovers are zero.
        """
        height, width = images_NHWC.shape[1:3]
        columns = np.arange(width)
        columns = np.where(self.flips[positions, None], columns[::-1], columns)[:, across]
        y = self.shifts[positions, 0, None] - PADDING + np.arange(height)[down]
        x = self.shifts[positions, 1, None] - PADDING + columns
        rows, ys, xs = rows[:, None, None], y.clip(0, height - 1)[:, :, None], x.clip(0, width - 1)[:, None, :]
        taken: np.ndarray = images_NHWC[rows, ys, xs]
        taken[(y < 0) | (y >= height)] = 0
        taken.swapaxes(1, 2)[(x < 0) | (x >= width)] = 0
        return taken


def training_examples(
    data: ArrayDataset, rows: np.ndarray, augmentation: Augmentation | None = None, shape: Shape = ()
) -> Examples:
    """Return rows, int [n], of the training examples, in batches as from `as_inputs`; images are fitted to `shape` if given."""
    return _examples(data, data.inputs, rows, data.labels[rows], augmentation, shape)


def examples_of_test(data: ArrayDataset, rows: np.ndarray) -> Examples:
    """Return rows, int [n], of the test split."""
    return _examples(data, data.test_inputs, rows, data.test_labels[rows])


def _examples(
    data: ArrayDataset,
    inputs: np.ndarray,
    rows: np.ndarray,
    labels: np.ndarray,
    augmentation: Augmentation | None = None,
    shape: Shape = (),
) -> Examples:
    """Return rows of inputs. Images are read only at the places that `shape` keeps, which saves memory."""
    channels, *spatial = shape or data.input_shape
    places = [kept_places(have, want) for have, want in zip(data.input_shape[1:], spatial, strict=True)]

    def copy(positions: np.ndarray, *places: slice) -> np.ndarray:
        if augmentation is not None:
            return augmentation.read(inputs, rows[positions], positions, *places)
        taken: np.ndarray = inputs[(slice(None), *places)][rows[positions]]
        return taken

    def read(positions: np.ndarray) -> Tensor:
        if data.vocabulary:
            return _copy_tokens(copy(positions))
        if is_resized(data):
            images = (copy(position)[0] for position in np.split(positions, len(positions)))
            return _resize_images(images, len(positions), data, channels, places)
        return _copy_images(copy(positions, *places), data, channels)

    return Examples(
        read,
        labels,
        smaller=lambda wanted: _examples(data, inputs, rows, labels, augmentation, wanted),
    )


def is_resized(data: ArrayDataset) -> bool:
    """Return whether images have another size on disk than as they are read."""
    return data.input_shape != data.stored_shape


def as_inputs(rows: np.ndarray, data: ArrayDataset) -> Tensor:
    """Convert rows of a data set to a model's input: normalised images of its size, or tokens [B, length], int64."""
    return _copy_tokens(np.array(rows)) if data.vocabulary else normalise(rows, data)


def normalise(images_BHWC: np.ndarray, data: ArrayDataset) -> Tensor:
    """Return normalised float images [B, C, H, W], in channels-last memory because that is their layout on disk.

    They are resized if the data set's are.
    """
    channels = images_BHWC.shape[-1]
    if is_resized(data):
        return _resize_images(map(np.array, images_BHWC), len(images_BHWC), data, channels, WHOLE)
    return _copy_images(np.array(images_BHWC), data, channels)


# The functions below turn arrays that have no other owner into tensors without a copy. The accounting counts such a tensor from
# its first operation on.


def _copy_tokens(rows: np.ndarray) -> Tensor:
    return torch.from_numpy(rows).long()


def _copy_images(images_BHWC: np.ndarray, data: ArrayDataset, channels: int) -> Tensor:
    """Return normalised images with `channels` channels, or vectors with as many features; missing ones are zero."""
    pixels = torch.from_numpy(images_BHWC)
    if channels == pixels.shape[-1]:
        x = own = pixels.float()
    else:
        x = torch.zeros(*pixels.shape[:-1], channels)
        own = _own_channels(x, pixels.shape[-1]).copy_(pixels)
    _scale(own, data)
    return x.permute(0, 3, 1, 2) if x.dim() == 4 else x


def _resize_images(
    images: Iterable[np.ndarray], count: int, data: ArrayDataset, channels: int, places: Sequence[slice]
) -> Tensor:
    """Do as `_copy_images` with images[h, w, C] that are resized one by one, so that only one has another size in memory.

    Only `places`, rows and columns of the new size, are kept.
    """
    own_channels, *size = data.input_shape
    x = torch.zeros(count, *(len(range(edge)[kept]) for edge, kept in zip(size, places, strict=True)), channels)
    own = _own_channels(x, own_channels)
    for number, image in enumerate(images):
        resize_into(own[number], torch.from_numpy(image), size, places)
    _scale(own, data)
    return x.permute(0, 3, 1, 2)


def _own_channels(x_BHWC: Tensor, channels: int) -> Tensor:
    """Return the view of an image's `channels`, between those that `fit_features` adds."""
    before, _ = padding(channels, x_BHWC.shape[-1])
    return x_BHWC[..., before : before + channels]


def _scale(own_BHWC: Tensor, data: ArrayDataset) -> None:
    if data.inputs.dtype == np.uint8:
        own_BHWC.div_(255)
    own_BHWC.sub_(torch.tensor(data.mean)).div_(torch.tensor(data.std))


def feature_examples(features: np.ndarray, labels: np.ndarray) -> Examples:
    """Return features from a store: float32 [n, H, W, C] (read as [B, C, H, W]) or [n, F]; uint16 are bits of bfloat16."""

    def read(positions: np.ndarray) -> Tensor:
        z = torch.from_numpy(features[positions])
        if z.dtype == torch.uint16:
            z = z.view(torch.bfloat16).float()
        return z.permute(0, 3, 1, 2) if z.dim() == 4 else z

    return Examples(read, labels)
