"""Features in a client's store: written batch by batch, in two bytes or four, and within their limit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from store_helpers import files

from piecework.client_app.store import FeatureWriter
from piecework.training.examples import feature_examples


def test_features_are_written_batch_by_batch(tmp_path: Path) -> None:
    path = tmp_path / "features-train.npy"
    writer = FeatureWriter(path, 5, (2, 3), limit=5 * 6 * 4)
    blocks = np.arange(30, dtype=np.float32).reshape(5, 2, 3)
    writer.put(np.array([2, 3, 0]), blocks[[2, 3, 0]])  # two neighbours, and one
    writer.put(np.array([1, 4]), blocks[[1, 4]])
    assert not path.exists()
    features = writer.close()
    assert isinstance(features, np.memmap)
    assert not features.flags.writeable
    assert features.tolist() == blocks.tolist()
    assert files(tmp_path) == ["features-train.npy"]


def test_features_in_another_order_or_type(tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path / "f.npy", 2, (3, 2), limit=10**6)
    block = np.arange(12, dtype=np.float64).reshape(2, 2, 3).transpose(0, 2, 1)
    writer.put(np.arange(2), block)
    features = writer.close()
    assert features.dtype == np.float32
    assert features.tolist() == block.tolist()


def test_features_in_bfloat16(tmp_path: Path) -> None:
    """Two bytes a value: 257 needs nine bits and rounds to 256."""
    writer = FeatureWriter(tmp_path / "f.npy", 2, (2,), limit=8, kind=np.uint16)
    writer.put(np.arange(2), torch.tensor([[1.0, 257.0], [-0.5, 0.0]]).bfloat16().view(torch.uint16).numpy())
    features = writer.close()
    assert (features.dtype, features.nbytes) == (np.uint16, 8)
    z = feature_examples(features, np.zeros(2)).read(np.array([1, 0]))
    assert (z.dtype, z.tolist()) == (torch.float32, [[-0.5, 0.0], [1.0, 256.0]])


def test_features_over_the_limit_say_so_before_writing(tmp_path: Path) -> None:
    message = (
        r"features of 1000 examples of shape \(16, 8\) take 512,000 bytes, more than memory.feature-cache-bytes = 511,999: "
        "raise it, or give the client fewer examples"
    )
    with pytest.raises(OSError, match=message):
        FeatureWriter(tmp_path / "f.npy", 1000, (16, 8), limit=511_999)
    assert files(tmp_path) == []
