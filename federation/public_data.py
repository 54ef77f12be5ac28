"""The server's public examples, for distillation or for learning to recognise attacks.

They are a part of the training split that no client has, or the user's own data.
"""

from dataclasses import replace

import numpy as np

from piecework.federated_data.columns import NO_COLUMNS
from piecework.federated_data.datasets import ArrayDataset, default_cache, prepare
from piecework.training.examples import Examples, training_examples
from piecework.training.settings import Settings
from piecework.training.setup import columns_of, dataset_of, open_dataset, public_rows


def public_examples(settings: Settings) -> Examples:
    """Return the server's public examples, normalised like the run's. They have labels, but distillation does not read them.

    Raises ValueError for fewer than two examples, or if those of `data.public` differ from the run's in shape or type.
    """
    data = dataset_of(settings)
    if settings.data.public:
        return _own(settings, data)
    rows = np.arange(len(data.labels)) if data.export is not None else public_rows(settings, len(data.labels))
    if len(rows) < 2:
        raise ValueError(
            f"data.public-fraction = {settings.data.public_fraction}: {settings.strategy} needs public examples on the "
            f"server, but has {len(rows)}; set data.public-fraction = 0.1 (of the training examples), or data.public to a "
            "folder of your own data"
        )
    return training_examples(data, rows)


def _own(settings: Settings, data: ArrayDataset) -> Examples:
    if settings.data.public_fraction or settings.data.public == settings.dataset:
        raise ValueError(
            f"data.public = {settings.data.public!r}: needs data.public-fraction = 0, not {settings.data.public_fraction}, and "
            f"data other than dataset = {settings.dataset!r}"
        )
    # With an export, data-dir is a part of it, which holds no other data.
    folder = "" if data.export is not None else settings.data_dir
    name, columns = settings.data.public, columns_of(settings)
    if name.partition(":")[0] != settings.dataset.partition(":")[0]:
        columns = NO_COLUMNS  # they name those of the run's data
    prepare(name, data_dir=folder, cache_dir=default_cache(), download=settings.data.download, columns=columns)
    own = open_dataset(name, folder, image_size=settings.data.image_size, columns=columns)
    if (own.input_shape, own.inputs.dtype, own.vocabulary) != (data.input_shape, data.inputs.dtype, data.vocabulary):
        raise ValueError(
            f"data.public = {settings.data.public!r} holds {own.inputs.dtype} of shape {own.input_shape}, data set "
            f"{data.name} {data.inputs.dtype} of shape {data.input_shape}: type and shape must be equal"
        )
    if len(own.labels) < 2:
        raise ValueError(
            f"data.public = {settings.data.public!r} holds {len(own.labels)} training examples: two or more"
        )
    return training_examples(replace(own, mean=data.mean, std=data.std), np.arange(len(own.labels)))
