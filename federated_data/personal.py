"""Each client's own part of the test split, for methods that train a model per client.

A client gets the same fraction of each class as of the training examples, as in SpaFL's experiments, where one draw of
proportions splits both.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from piecework.federated_data.partition import client_class_counts

Ints = NDArray[np.int64]

_TEST = 21  # purpose of the stream of random numbers


def client_test_rows(labels: NDArray[Any], client_rows: list[Ints], test_labels: NDArray[Any], seed: int) -> list[Ints]:
    """Return the rows of the test split of each client, sorted; no row is given twice.

    A client gets the fraction of a class's test examples that it has of the class's training examples held by clients, rounded
    so that all are given. A class that no client trains on is given to no client. A client with few examples may get none.
    """
    classes = int(labels.max(initial=-1)) + 1
    held = client_class_counts(labels, client_rows, classes)
    rng = np.random.default_rng(np.random.SeedSequence((seed, _TEST)))
    drawn: list[list[Ints]] = [[] for _ in client_rows]
    for k in range(classes):
        rows = rng.permutation(np.flatnonzero(test_labels == k))
        if not (total := held[:, k].sum()):
            continue
        cuts = np.rint(np.cumsum(held[:, k]) / total * len(rows)).astype(np.int64)
        for own, part in zip(drawn, np.split(rows, cuts), strict=False):
            own.append(part)
    return [np.sort(np.concatenate(own)).astype(np.int64) if own else np.arange(0) for own in drawn]
