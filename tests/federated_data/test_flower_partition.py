"""Flower's partitioners divide any data set, exactly as the library does by itself."""

import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from flwr_datasets import partitioner
from helpers import TRIO, few_digits, tiny_settings

from piecework.commands.export_data import export_data
from piecework.federated_data.datasets import load
from piecework.federated_data.flower_partition import draw_by_flower, parse_options
from piecework.server_app.preflight import preflight
from piecework.training.setup import all_client_rows, dataset_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library about what it was asked for
LABELS = np.repeat(np.arange(5), 40)
GROUPS = np.arange(200) % 8
SEED = 7


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIECEWORK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "partitions"


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "IidPartitioner": ("", {}),
    "DirichletPartitioner": ("alpha=0.5,min_partition_size=2,self_balancing=true", {"partition_by": "label"}),
    "PathologicalPartitioner": ("num_classes_per_partition=2", {"partition_by": "label"}),
    "ShardPartitioner": ("num_shards_per_partition=2", {"partition_by": "label"}),
    "LinearPartitioner": ("", {}),
    "SizePartitioner": ("partition_sizes=[10, 20, 30, 40]", {}),
    "NaturalIdPartitioner": ("", {"partition_by": "group"}),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_library(name: str) -> None:
    options, given = CASES[name]
    rows = draw_by_flower(f"flwr:{name}", LABELS, 4, SEED, options, GROUPS)
    made = getattr(partitioner, name)
    own = {"num_partitions": 4, "seed": SEED} | given | parse_options(options)
    expected = made(**{key: value for key, value in own.items() if key in made.__init__.__annotations__})
    columns = {"label": LABELS, "group": GROUPS, "place": np.arange(len(LABELS))}
    expected.dataset = datasets.Dataset.from_dict(columns).shuffle(seed=SEED)  # as FederatedDataset does
    for client, found in enumerate(rows):
        assert found.dtype == np.int64
        assert found.tolist() == sorted(expected.load_partition(client)["place"])
    assert len(np.unique(np.concatenate(rows))) == sum(map(len, rows))


def test_what_was_drawn_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients' processes need not import the library; a damaged file is drawn again, and another seed is another file."""
    arguments = ("flwr:DirichletPartitioner", LABELS, 4, SEED, "alpha=1.0")
    first = draw_by_flower(*arguments)
    (kept,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flwr_datasets.partitioner", None)
        again = draw_by_flower(*arguments)
        with pytest.raises(ValueError, match=r"flwr:DirichletPartitioner: .*it needs `pip install 'piecework\[hub\]'`"):
            draw_by_flower("flwr:DirichletPartitioner", LABELS, 4, SEED + 1, "alpha=1.0")
    assert all(map(np.array_equal, first, again))
    kept.write_bytes(b"damaged")
    assert all(map(np.array_equal, first, draw_by_flower(*arguments)))
    assert not all(map(np.array_equal, first, draw_by_flower("flwr:DirichletPartitioner", LABELS, 4, 8, "alpha=1.0")))


WRONG = {
    ("IidPartitioner", "alpha=1"): r"data.partition-options has 'alpha'; IidPartitioner takes no options",
    ("IidPartitioner", "seed=1"): r"has 'seed'; .*its seed and partitions are the run's",
    ("DirichletPartitioner", "alpha 1"): r"data.partition-options = 'alpha 1': .*; write NAME=VALUE with commas",
    ("DirichletPartitioner", ""): r"flwr:DirichletPartitioner, data.partition-options = \{\}: .*missing .* 'alpha'",
    ("DirichletPartitioner", "alpha=-1.0"): r"data.partition-options = \{'alpha': -1.0\}: ",
    (
        "DirichletPartitioner",
        "alpha=1.0,partition_by='kind'",
    ): r"divides by 'kind': these data have label; groups are group_train of npz data, or",
    ("NaturalIdPartitioner", ""): r"divides by 'group': these data have label; groups are group_train of npz data, or",
    ("SizePartitioner", "partition_sizes=[1,2]"): r"it makes 2 partitions for 4 clients",
    (
        "DirichletPartitioner",
        "alpha=0.1,min_partition_size=60",
    ): r"'min_partition_size': 60\}: The max number of attempts",
}


@pytest.mark.parametrize(("name", "options"), WRONG)
def test_what_is_wrong_with_the_options(name: str, options: str, cache: Path) -> None:
    with pytest.raises(ValueError, match=WRONG[name, options]):
        draw_by_flower(f"flwr:{name}", LABELS, 4, SEED, options)


def test_a_client_without_examples_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"client \d of 4 gets no example of 6; use fewer clients or other data.partition-opt"
    ):
        draw_by_flower("flwr:DirichletPartitioner", np.arange(6) % 2, 4, 1, "alpha=0.001,min_partition_size=0")


def test_a_run_and_an_export_divide_alike(tmp_path: Path) -> None:
    changes = {
        "data__partition": "flwr:DirichletPartitioner",
        "data__partition_options": "alpha=0.5,min_partition_size=5",
    }
    settings = tiny_settings(**TRIO | changes | {"dataset": f"npz:{few_digits()}", "data__public_fraction": 0.0})
    preflight(settings)
    data, rows = dataset_of(settings), all_client_rows(settings, 3)
    export_data(settings, tmp_path / "out")
    for client, own in enumerate(rows):
        part = load(tmp_path / "out" / f"node-{client}")
        assert np.array_equal(part.inputs, data.inputs[own])
        assert part.export is not None
        assert part.export["settings"]["data.partition-options"] == "alpha=0.5,min_partition_size=5"
