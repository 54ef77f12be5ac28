"""A board with data of its own: `piecework own-data` converts them as the run's card says, and the run compares both."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import clients_of, digits, few_digits, tiny_settings
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.own_data import write_own_data
from piecework.federated_data.card import card_of, number_classes, read_card, require_like
from piecework.federated_data.datasets import DatasetError, load, write
from piecework.federated_data.sources import Source
from piecework.federation.errors import TooFewNodesError
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import RunDir
from piecework.server_app.rounds import run_experiment


def write_card(folder: Path, **changes: object) -> Path:
    card = card_of(digits()).model_dump() | changes
    (folder / "card.json").write_text(json.dumps(card))
    return folder / "card.json"


def write_npz(folder: Path, name: str = "mine.npz", side: int = 8, classes: int = 5) -> Path:
    rng = np.random.default_rng(0)
    np.savez(
        folder / name,
        x_train=rng.integers(0, 256, (40, side, side), dtype=np.uint8),
        y_train=np.arange(40) % classes,
        x_test=rng.integers(0, 256, (10, side, side), dtype=np.uint8),
        y_test=np.arange(10) % classes,
    )
    return folder / name


def test_two_commands_make_a_boards_folder(tmp_path: Path) -> None:
    described = CliRunner().invoke(app, ["describe-data", "--dataset", "digits"])
    assert described.exit_code == 0, described.stderr
    (tmp_path / "card.json").write_text(described.stdout)
    words = [
        "own-data",
        f"npz:{write_npz(tmp_path)}",
        "--like",
        str(tmp_path / "card.json"),
        "--out",
        str(tmp_path / "own"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    assert "40 training examples, 10 classes" in done.stdout
    data = load(tmp_path / "own", verify=True)
    assert (data.num_classes, data.mean, data.std) == (10, digits().mean, digits().std)
    assert data.labels.tolist() == (np.arange(40) % 5).tolist()
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2
    assert "exists and is not empty" in again.stderr


def test_classes_are_numbered_by_their_names(tmp_path: Path) -> None:
    names = ["zebra", "ant", "bee"]
    card = write_card(tmp_path, class_names=names, num_classes=3)
    write(tmp_path_made(tmp_path / "named"), "own", source_of(("ant", "zebra"), [0, 1, 1]))
    data = load(tmp_path / "named")
    assert number_classes(data, data.labels, read_card(json.loads(card.read_text()), "card")).tolist() == [1, 0, 0]
    with pytest.raises(DatasetError, match="class 0 of this node's data is 'ant', and the run's is 'bee'"):
        require_like(
            data, read_card(json.loads(card.read_text()) | {"class_names": ["bee", "zebra"], "num_classes": 2}, "card")
        )


def tmp_path_made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def source_of(names: tuple[str, ...], labels: list[int]) -> Source:
    images, numbers = np.zeros((len(labels), 8, 8, 1), dtype=np.uint8), np.array(labels)
    return Source(images, numbers, images, numbers, len(names), class_names=names)


def test_what_own_data_refuse(tmp_path: Path) -> None:
    card = write_card(tmp_path)
    wide, many = write_npz(tmp_path, "wide.npz", side=9), write_npz(tmp_path, "many.npz", classes=12)
    (tmp_path / "texts").mkdir()
    for name, like, said in (
        ("digits", card, "'digits' is no data of one's own: expected npz:<file>"),
        (f"npz:{wide}", card, "these data have examples of shape 1x9x9, and the run's 1x8x8"),
        (
            f"npz:{many}",
            card,
            "labels go up to 11, and the run has 10",
        ),
        (f"text:{tmp_path / 'texts'}", card, "text: numbers words by their frequency"),
        (f"npz:{wide}", tmp_path / "no.json", "no.json cannot be read"),
        (f"npz:{wide}", write_npz(tmp_path, "other.npz"), "cannot be read"),
    ):
        with pytest.raises(DatasetError, match=said):
            write_own_data(name, tmp_path / "out", like)
    with pytest.raises(DatasetError, match="is no card of a data set: num_classes: "):
        write_own_data(f"npz:{wide}", tmp_path / "out", write_card(tmp_path, num_classes="ten"))
    assert not list(tmp_path.glob(".out*"))
    assert not (tmp_path / "out").exists()


def run_with(folder: Path, tmp_path: Path) -> RunDir:
    """A run of two clients, of which the first has its own data in a folder."""
    settings = tiny_settings(
        clients=2,
        dataset=f"npz:{few_digits()}",
        output_dir=str(tmp_path),
        messages__node_timeout=0.5,
        fleet="unlimited",
    )
    run_dir = RunDir(tmp_path / "run")
    with LocalGrid(2, settings.to_run_config(), 1, [{"data-dir": str(folder)}, {}]) as grid:
        run_experiment(grid, settings, run_dir)
    return run_dir


def test_a_node_trains_on_its_own_data_and_a_wrong_one_is_told_what_differs(tmp_path: Path) -> None:
    source, few = write_npz(tmp_path), few_digits()
    card = CliRunner().invoke(app, ["describe-data", "--dataset", f"npz:{few}"]).stdout
    (tmp_path / "few.json").write_text(card)
    write_own_data(f"npz:{source}", tmp_path / "own", tmp_path / "few.json")
    run = run_with(tmp_path / "own", tmp_path)
    assert [client["status"] for client in clients_of(run)] == ["ok", "ok"]
    write_own_data(f"npz:{source}", tmp_path / "five", None)
    with pytest.raises(
        TooFewNodesError, match="this node's data have classes: 5, and the run's 10: make the folder by"
    ):
        run_with(tmp_path / "five", tmp_path / "second")
