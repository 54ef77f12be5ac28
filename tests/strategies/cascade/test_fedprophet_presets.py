import itertools
from typing import Any

import numpy as np
import pytest

from piecework.commands.options import read_preset, settings_from
from piecework.device_profiles.fleet import load_fleet
from piecework.federated_data.datasets import PUBLISHED
from piecework.federated_data.partition import client_class_counts
from piecework.training.setup import client_rows

SETTINGS = [
    f"fedprophet-{data}-{level}"
    for data, level in itertools.product(("cifar10", "caltech"), ("balanced", "unbalanced"))
]
AUTHORS_OWN = {
    "architecture.batch-norm",
    "fleet",
    "attack.epsilon",
    "attack.step-size",
    "attack.warmup",
    "fedprophet.apa-every",
    "fedprophet.apa-after",
    "fedprophet.apa-window",
}
FEDPROPHETS_OWN = {
    "strategy",
    "num-rounds",
    "fedprophet.r-min",
    "fedprophet.convexity",
    "fedprophet.stage-rounds",
    "fedprophet.stage-patience",
    "fedprophet.apa-start",
    "fedprophet.apa-step",
    "fedprophet.apa-margin",
    "fedprophet.apa-every",
    "fedprophet.apa-after",
    "fedprophet.apa-window",
    "fedprophet.apa-bound",
    "fedprophet.aux-pool",
    "fedprophet.lr-restart",
    "fedprophet.validation-clients",
}


def difference(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


def labels_like(dataset: str) -> np.ndarray:
    """Labels of as many images: CIFAR's classes are equal, of Caltech's 256 each has at least 55 training images."""
    _, classes, examples = PUBLISHED[dataset]
    minimum = examples // classes if dataset == "cifar10" else 55
    rng = np.random.default_rng(0)
    more = rng.multinomial(examples - minimum * classes, rng.dirichlet(np.ones(classes)))
    return np.repeat(np.arange(classes), minimum + more)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_authors_variant_differs_where_their_code_does(name: str) -> None:
    assert difference(read_preset(name), read_preset(f"{name}-authors")) == AUTHORS_OWN
    assert read_preset(f"{name}-authors")["fleet"] == f"{read_preset(name)['fleet']}-authors"


@pytest.mark.parametrize("variant", ["", "-authors"])
@pytest.mark.parametrize("data", ["cifar10", "caltech"])
def test_levels_of_heterogeneity_are_fleets(data: str, variant: str) -> None:
    balanced, unbalanced = (read_preset(f"fedprophet-{data}-{level}{variant}") for level in ("balanced", "unbalanced"))
    assert difference(balanced, unbalanced) == {"fleet"}
    for level, values in (("balanced", balanced), ("unbalanced", unbalanced)):
        assert load_fleet(str(values["fleet"])).name == f"fedprophet-{data}-{level}{variant}"


def test_jfat_trains_on_the_same() -> None:
    assert difference(read_preset("jfat-cifar10"), read_preset("fedprophet-cifar10-balanced")) == FEDPROPHETS_OWN


@pytest.mark.parametrize(
    ("name", "own"), [("fedprophet-cifar10-balanced", 0.84), ("fedprophet-caltech-balanced", 0.83)]
)
def test_clients_have_the_papers_skew(name: str, own: float) -> None:
    settings = settings_from(name, [])
    labels = labels_like(settings.dataset)
    shares = client_rows(settings, labels, settings.clients)
    counts = client_class_counts(labels, shares, PUBLISHED[settings.dataset][1])
    assert {len(share) for share in shares} == {PUBLISHED[settings.dataset][2] // 100}
    largest = np.sort(counts)[:, -settings.data.partition_classes :].sum(1) / counts.sum(1)
    assert largest.mean() == pytest.approx(own, abs=0.01)
