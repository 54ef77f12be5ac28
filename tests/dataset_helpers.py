"""An .npz file, and a data set as it is loaded once converted."""

import numpy as np

from piecework.federated_data.datasets import load, prepare


def save_npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def prepared(name, cache, data_dir=""):
    return load(prepare(name, data_dir=str(data_dir), cache_dir=cache), verify=True)
