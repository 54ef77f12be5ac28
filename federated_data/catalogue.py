"""The data sets that can be read, by name, and the shapes of the published ones."""

from collections.abc import Callable, Mapping

from piecework.federated_data import caltech, femnist, hub, own_sources, sources, tables, texts, tiny_imagenet
from piecework.federated_data.sources import Source

# Each reader takes the folder to read and whether it may download; those of COLUMNAR also the columns that the user names.
DATASETS: Mapping[str, Callable[..., Source]] = {
    "digits": sources.digits,
    "digits32": sources.digits32,
    "fashion-mnist": sources.fashion_mnist,
    "cifar10": sources.cifar10,
    "cifar10-16": sources.cifar10_16,
    "cifar100": sources.cifar100,
    "caltech256": caltech.caltech256,
    "femnist": femnist.femnist,
    "tiny-imagenet": tiny_imagenet.tiny_imagenet,
    "imdb": texts.imdb,
    "imdb-pooled": texts.imdb_pooled,
    "npz": own_sources.npz,
    "folder": own_sources.folder,
    "text": texts.text,
    "table": tables.table,
    "hub": hub.hub,
}

_NAMED = ("fashion-mnist", "cifar10", "cifar10-16", "cifar100", "caltech256", "imdb", "folder", "text")
# What readers did not find, or did not leave out, in their first versions: data converted so are converted again.
READERS = {"npz": ("groups",), "table": ("spaces behind words",)} | dict.fromkeys(_NAMED, ("class names",))
OWN = {
    "npz": "file",
    "folder": "dir",
    "text": "dir",
    "table": "file or dir",
    "hub": "name or dir",
}  # what each is named with
COLUMNAR = ("table", "hub")
EMBEDDED = ("digits", "digits32")  # they come with scikit-learn, not from data-dir

# Published sets, so that plans do not need their files: (C, H, W) or (length,), classes, training examples.
PUBLISHED: Mapping[str, tuple[tuple[int, ...], int, int]] = {
    "digits": ((1, 8, 8), 10, 1438),
    "digits32": ((1, 32, 32), 10, 1438),
    "fashion-mnist": ((1, 28, 28), 10, 60_000),
    "cifar10": ((3, 32, 32), 10, 50_000),
    "cifar10-16": ((3, 16, 16), 10, 50_000),
    "cifar100": ((3, 32, 32), 100, 50_000),
    "caltech256": ((3, 224, 224), 256, 23_380),
    "femnist": ((1, 28, 28), 62, 724_737),  # nine tenths of LEAF's 805,263, its usual part; preprocess.sh decides
    "tiny-imagenet": ((3, 64, 64), 200, 100_000),
    "imdb": ((texts.LENGTH,), 2, 25_000),
    "imdb-pooled": ((texts.LENGTH,), 2, 37_500),
}
