"""The server's public examples: no client's, a function of the seed, or the user's own."""

from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_settings

from piecework.commands.export_data import export_data
from piecework.federated_data.datasets import load
from piecework.federation.public_data import public_examples
from piecework.training.setup import client_rows, open_dataset, public_rows

DIGITS = {"dataset": "digits", "clients": 3, "data__public_fraction": 0.1}


def test_public_examples_are_no_clients() -> None:
    settings = tiny_settings(**DIGITS)
    labels = open_dataset("digits", "").labels
    public, shares = public_rows(settings, len(labels)), client_rows(settings, labels, 3)
    assert len(public) == round(0.1 * 1438) == 144
    everything = np.concatenate([public, *shares])
    assert len(np.unique(everything)) == len(everything)
    assert np.array_equal(public, public_rows(settings, len(labels)))
    assert not np.array_equal(public, public_rows(tiny_settings(**DIGITS | {"seed": 2}), len(labels)))


def test_the_remaining_examples_are_partitioned_as_usual() -> None:
    """The rows of the clients are those that they would have of a data set without the public examples."""
    settings, labels = tiny_settings(**DIGITS), np.asarray(open_dataset("digits", "").labels)
    left = np.setdiff1d(np.arange(len(labels)), public_rows(settings, len(labels)))
    without = client_rows(tiny_settings(**DIGITS | {"data__public_fraction": 0.0}), labels[left], 3)
    for one, other in zip(client_rows(settings, labels, 3), without, strict=True):
        assert np.array_equal(one, left[other])


def test_without_a_fraction_nothing_changes() -> None:
    settings, labels = tiny_settings(**DIGITS | {"data__public_fraction": 0.0}), open_dataset("digits", "").labels
    assert len(public_rows(settings, len(labels))) == 0
    assert sum(map(len, client_rows(settings, labels, 3))) == 1438


def test_groups_stay_whole_beside_public_examples() -> None:
    settings = tiny_settings(**DIGITS | {"data__partition": "natural", "data__public_fraction": 0.5})
    labels, groups = np.arange(40) % 4, np.arange(40) // 4
    public, shares = public_rows(settings, 40), client_rows(settings, labels, 3, groups)
    owners = [set(groups[share]) for share in shares]
    assert len(public) == 20
    assert not owners[0] & owners[1] and not owners[1] & owners[2] and not owners[0] & owners[2]
    assert sorted(np.concatenate([public, *shares])) == list(range(40))


def test_the_server_reads_its_own_rows_normalised() -> None:
    settings, data = tiny_settings(**DIGITS), open_dataset("digits", "")
    public = public_rows(settings, len(data.labels))
    examples = public_examples(settings)
    assert np.array_equal(examples.labels, data.labels[public])
    pixel = (float(data.inputs[public[5], 3, 4, 0]) / 255 - data.mean[0]) / data.std[0]
    assert float(examples.read(np.array([5]))[0, 0, 3, 4]) == pytest.approx(pixel, abs=1e-6)


def test_own_public_data_are_normalised_as_the_runs(tmp_path: Path) -> None:
    pixels = np.full((4, 8, 8), 255, dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=pixels, y_train=np.arange(4), x_test=pixels, y_test=np.arange(4))
    examples = public_examples(
        tiny_settings(**DIGITS | {"data__public_fraction": 0.0, "data__public": f"npz:{tmp_path / 'own.npz'}"})
    )
    data = open_dataset("digits", "")
    assert len(examples) == 4
    assert float(examples.read(np.array([0]))[0, 0, 0, 0]) == pytest.approx((1 - data.mean[0]) / data.std[0], abs=1e-5)


def test_public_data_have_to_be_like_the_runs(tmp_path: Path) -> None:
    pixels = np.zeros((4, 9, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=pixels, y_train=np.arange(4), x_test=pixels, y_test=np.arange(4))
    with pytest.raises(ValueError, match=r"data.public = .*own.npz' holds uint8 of shape \(1, 9, 8\), data set digits"):
        public_examples(
            tiny_settings(**DIGITS | {"data__public_fraction": 0.0, "data__public": f"npz:{tmp_path / 'own.npz'}"})
        )


@pytest.mark.parametrize(
    "changes", [{"data__public": "digits", "data__public_fraction": 0.0}, {"data__public": "npz:own.npz"}]
)
def test_public_data_are_other_data_and_no_fraction_beside_them(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="data other than dataset"):
        public_examples(tiny_settings(**DIGITS | changes))


def test_own_public_data_go_with_exported_ones(tmp_path: Path) -> None:
    pixels = np.zeros((4, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=pixels, y_train=np.arange(4), x_test=pixels, y_test=np.arange(4))
    changes = {"data__public_fraction": 0.0, "data__public": f"npz:{tmp_path / 'own.npz'}"}
    export_data(tiny_settings(**DIGITS | changes), tmp_path / "out")
    server = {"data_dir": str(tmp_path / "out" / "server")}
    assert len(public_examples(tiny_settings(**DIGITS | changes | server))) == 4


def test_too_few_public_examples_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"data.public-fraction = 0.0: .* needs public examples on the server, but has 0; set data.public-fraction = 0.1",
    ):
        public_examples(tiny_settings(**DIGITS | {"data__public_fraction": 0.0}))


def test_an_export_gives_them_to_the_server_alone(tmp_path: Path) -> None:
    settings, data = tiny_settings(**DIGITS), open_dataset("digits", "")
    export_data(settings, tmp_path / "out")
    server = load(tmp_path / "out" / "server")
    public = public_rows(settings, len(data.labels))
    assert np.array_equal(server.inputs, data.inputs[public])
    examples = public_examples(tiny_settings(**DIGITS | {"data_dir": str(tmp_path / "out" / "server")}))
    assert np.array_equal(examples.labels, data.labels[public])
    shares = client_rows(settings, data.labels, 3)
    for client, share in enumerate(shares):
        assert np.array_equal(load(tmp_path / "out" / f"node-{client}").inputs, data.inputs[share])
