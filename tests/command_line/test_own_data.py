"""A node trains on data of its own: one command makes its folder, and the run checks what is in it."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from helpers import clients_of, few_digits, model_of, run_local, same, tiny_settings
from typer.testing import CliRunner

from piecework import load as load_model
from piecework.cli import app
from piecework.federated_data.datasets import ArrayDataset, DatasetError, load, prepare
from piecework.federated_data.own_data import Expected, adopt
from piecework.federation.errors import TooFewNodesError
from piecework.server_app.experiment import run_experiment
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import RunDir
from piecework.training.setup import open_own

KINDS = ("ant", "bee", "cow")


def animals(kinds: tuple[str, ...], rows: int, seed: int, extra: int = 0) -> pandas.DataFrame:
    """Kinds that differ in the first feature."""
    rng = np.random.default_rng(seed)
    named = [kinds[n % len(kinds)] for n in range(rows)]
    x = {"size": [100.0 * KINDS.index(kind) for kind in named] + rng.normal(size=rows), "age": rng.normal(size=rows)}
    return pandas.DataFrame(x | {f"more{n}": 1.0 for n in range(extra)} | {"kind": named})


def write(folder: Path, name: str, frame: pandas.DataFrame) -> Path:
    frame.to_csv(folder / f"{name}.csv", index=False)
    return folder / f"{name}.csv"


def make(source: str, out: Path, *options: str) -> tuple[int, str]:
    """`piecework own-data`: its exit code, and what it printed."""
    done = CliRunner().invoke(app, ["own-data", source, "--out", str(out), "--set=data.label-column=kind", *options])
    return done.exit_code, done.output


def run_over(tmp_path: Path, server: Path, folders: list[Path], **changes: Any) -> RunDir:
    asked = {"clients": len(folders), "dataset": f"table:{server}", "data__label_column": "kind", "model": "mlp"}
    asked |= {
        "fleet": "unlimited",
        "training__local_epochs": 10,
        "training__lr": 0.2,
        "output_dir": str(tmp_path),
        "strategy": "fedavg",
    }
    settings = tiny_settings(**asked | {"clients_per_round": 0} | changes)
    run_dir = RunDir(tmp_path / settings.run_name)
    nodes = [{"data-dir": str(folder)} for folder in folders]
    with LocalGrid(len(folders), settings.to_run_config(), 1, nodes) as grid:
        run_experiment(grid, settings, run_dir)
    return run_dir


def test_nodes_with_some_of_the_classes_train_one_model(tmp_path: Path) -> None:
    """By the names of their classes, and at the scale of the server's data: neither node has all classes."""
    server = write(tmp_path, "server", animals(KINDS, 60, 0))
    folders = []
    for name, kinds in (("one", ("cow", "ant")), ("two", ("bee", "cow"))):
        source, out = write(tmp_path, name, animals(kinds, 40, len(name))), tmp_path / f"{name}-data"
        code, text = make(f"table:{source}", out)
        assert code == 0
        assert "32 training and 8 test examples, feature vectors of shape 2, 2 classes" in text
        assert f'set data-dir="{out}" in its node-config' in text
        folders.append(out)
    learn = {
        "training__lr": 0.5,
        "training__momentum": 0.0,
        "training__local_iterations": 2,
    }  # small steps between averages
    run = run_over(tmp_path, server, folders, num_rounds=8, evaluation__every=0, **learn)
    assert {client["status"] for client in clients_of(run)} == {"ok"}
    assert {client["examples"] for client in clients_of(run)} == {26}
    assert run.rounds()[-1]["accuracy"] > 0.9
    model = load_model(run.path)
    assert model.predict([[0.0, 0.0], [100.0, 0.0], [200.0, 0.0]]).names == list(KINDS)
    assert not list(tmp_path.glob("runs*/**/*.csv"))


def test_a_node_with_data_of_another_shape_is_refused_with_both_shapes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = write(tmp_path, "server", animals(KINDS, 60, 0))
    good, bad = (write(tmp_path, name, animals(KINDS, 30, 1, extra=n)) for n, name in enumerate(("good", "bad")))
    for source in (good, bad):
        assert make(f"table:{source}", source.with_suffix(""))[0] == 0
    folders = [good.with_suffix(""), bad.with_suffix("")]
    told = (
        "this node's own data, table:bad.csv, hold feature vectors of float32 and shape 3, and the run's, table:server.csv, "
        "feature vectors of float32 and shape 2: prepare data like those of the run (piecework own-data), or leave the node out"
    )
    with pytest.raises(TooFewNodesError) as caught:
        run_over(tmp_path, server, folders, messages__node_timeout=0.1)
    assert told in str(caught.value)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "piecework"):
        run = run_over(tmp_path, server, folders, messages__node_timeout=0.1, faults__min_clients=1, run_name="other")
    assert [client["client"] for client in clients_of(run)] == [0]
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [f"node 3 does not take part: ValueError: error 2: DatasetError: {told}"]


def test_data_that_change_in_a_run_fail_the_task_not_the_client(tmp_path: Path) -> None:
    server = write(tmp_path, "server", animals(KINDS, 60, 0))
    source, out = write(tmp_path, "own", animals(KINDS, 30, 1)), tmp_path / "data"
    assert make(f"table:{source}", out)[0] == 0
    meta = out / "meta.json"

    class Changing(LocalGrid):
        """After the first query the node's classes have another name."""

        def push_messages(self, messages: Any) -> Any:
            sent = list(messages)
            if any(message.metadata.message_type == "train" for message in sent):
                meta.write_text(meta.read_text().replace('"bee"', '"wasp"'))
            return super().push_messages(sent)

    settings = tiny_settings(
        clients=1, dataset=f"table:{server}", data__label_column="kind", model="mlp", fleet="unlimited",
        output_dir=str(tmp_path), strategy="fedavg", faults__max_empty_rounds=2,
    )  # fmt: skip
    with Changing(1, settings.to_run_config(), 1, [{"data-dir": str(out)}]) as grid:
        run_experiment(grid, settings, RunDir(tmp_path / "run"))
    (client,) = clients_of(RunDir(tmp_path / "run"))
    assert client["status"] == "failed"
    assert (
        "have a class 'wasp', and the run's, table:server.csv, have ant, bee, cow: name the classes" in client["reason"]
    )


def numbers(labels: list[int], names: tuple[str, ...] = (), vocabulary: int = 0) -> ArrayDataset:
    y = np.array(labels, dtype=np.int64)
    x = np.zeros((len(y), 4), dtype=np.uint16 if vocabulary else np.float32)
    scale = () if vocabulary else (0.0,) * 4
    count = len(names) or max(labels) + 1
    return ArrayDataset("npz:mine", x, y, count, scale, scale, x, y, vocabulary=vocabulary, class_names=names)


@pytest.mark.parametrize(
    ("own", "theirs", "labels"),
    [
        (numbers([0, 1]), numbers([0, 3]), [0, 1]),
        (numbers([0, 1], ("b", "a")), numbers([0, 2], ("a", "b", "c")), [1, 0]),
        (numbers([0, 1], ("2", "3")), numbers([0, 3]), [2, 3]),  # a table's numbers, and a file without names
        (numbers([2, 0]), numbers([0, 2], ("a", "b", "c")), [2, 0]),
        (numbers([0, 1], vocabulary=5), numbers([0, 1], vocabulary=9), [0, 1]),
    ],
)
def test_classes_are_those_of_the_run(own: ArrayDataset, theirs: ArrayDataset, labels: list[int]) -> None:
    found = adopt(own, Expected.from_values(json.loads(Expected.of(theirs).to_text())))
    assert (found.labels.tolist(), found.test_labels.tolist()) == (labels, labels)
    assert (found.num_classes, found.class_names) == (theirs.num_classes, theirs.class_names)
    assert (found.mean, found.std, found.vocabulary) == (theirs.mean, theirs.std, theirs.vocabulary)


@pytest.mark.parametrize(
    ("own", "theirs", "told"),
    [
        (numbers([0, 4]), numbers([0, 1]), "have labels up to 4, and the run's, npz:mine, 2 classes, from 0"),
        (numbers([0, 1], ("5", "6")), numbers([0, 1]), "have labels up to 6, and the run's"),
        (numbers([0, 1], ("a", "b")), numbers([0, 1]), "have a class 'a', and the run's, npz:mine, have numbers below 2"),
        (numbers([0, 1]), numbers([0, 1], vocabulary=9), "hold feature vectors of float32 and shape 4, and the run's"),
        (numbers([0, 1], vocabulary=9), numbers([0, 1], vocabulary=5), "have tokens up to 8, and the run's, npz:mine, up to 4"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_the_run(own: ArrayDataset, theirs: ArrayDataset, told: str) -> None:
    with pytest.raises(DatasetError, match=told):
        adopt(own, Expected.of(theirs))


def made(folder: Path, name: str, x: np.ndarray) -> ArrayDataset:
    """A data set of two classes, converted as a user's is."""
    np.savez(folder / f"{name}.npz", x_train=x, y_train=np.arange(len(x)) % 2, x_test=x, y_test=np.arange(len(x)) % 2)
    return load(prepare(f"npz:{folder / name}.npz", data_dir="", cache_dir=folder / "cache"))


def test_images_of_another_unit_are_refused_with_both_scales(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).uniform(size=(40, 4, 4, 3)).astype(np.float32)
    run = made(tmp_path, "run", pixels)
    wide = made(tmp_path, "wide", 255 * pixels)
    for own, theirs in ((wide, run), (run, wide)):
        ours, others = (f"mean {np.median(d.mean):.4g} and deviation {np.median(d.std):.4g}" for d in (own, theirs))
        told = (
            f"{own.name.rpartition('/')[2]}, have pixels of {ours}, and the run's, .*, of {others} .*0-255 beside 0-1"
        )
        with pytest.raises(DatasetError, match=told):
            adopt(own, Expected.of(theirs))
    masks = made(tmp_path, "masks", (pixels > 0.5).astype(np.uint8))
    with pytest.raises(DatasetError, match=r"of pixel / 255\): that is another scale, such as 0-255 beside 0-1"):
        adopt(masks, Expected.of(made(tmp_path, "bytes", (255 * pixels).astype(np.uint8))))


def test_a_folder_that_stops_being_a_part_of_an_export_in_a_run_is_an_error(tmp_path: Path) -> None:
    assert make(f"npz:{few_digits()}", tmp_path / "own", "--set=data.label-column=")[0] == 0
    with pytest.raises(DatasetError, match="were a part of an export when it connected, and are not now"):
        open_own(tmp_path / "own", tiny_settings(), 0, 1)


def test_darker_images_and_columns_with_long_tails_are_not_of_another_unit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.uniform(size=(40, 4, 4, 1)).astype(np.float32)
    incomes = rng.lognormal(sigma=1.0, size=(40, 1)).astype(np.float32)
    for name, ours, theirs in (
        ("dark", 0.05 * pixels, pixels),
        ("bright", 1 - 0.1 * pixels, 0.1 * pixels),
        ("incomes", np.exp(5 + 3 * np.log(incomes)), incomes),
    ):
        own, run = made(tmp_path, name, ours), made(tmp_path, f"{name}-run", theirs)
        assert adopt(own, Expected.of(run)).std == run.std != own.std


@pytest.mark.parametrize("scale", ["normalised", "raw"])
def test_the_servers_data_as_a_nodes_own_train_the_same_model(tmp_path: Path, scale: str) -> None:
    """The settings of the run hold for them: the scale, the part for validation, augmentation, and the node's own test part."""
    changes: dict[str, Any] = {
        "clients": 1,
        "strategy": "fedavg",
        "fleet": "unlimited",
        "dataset": f"npz:{few_digits()}",
    }
    changes |= {"data__pixel_scale": scale, "data__validation_fraction": 0.3, "data__augment": True}
    changes |= {"evaluation__mode": "personal", "clients_per_round": 0}
    assert make(f"npz:{few_digits()}", tmp_path / "own", "--set=data.label-column=")[0] == 0
    simulated = run_local(tmp_path / "one", **changes)
    settings, deployed = tiny_settings(**changes, output_dir=str(tmp_path)), RunDir(tmp_path / "two")
    with LocalGrid(1, settings.to_run_config(), 1, [{"data-dir": str(tmp_path / "own")}]) as grid:
        run_experiment(grid, settings, deployed)
    assert same(model_of(simulated), model_of(deployed))
    assert simulated.rounds()[-1]["accuracy"] == deployed.rounds()[-1]["accuracy"] is not None


def test_what_the_command_refuses_costs_no_data(tmp_path: Path) -> None:
    source = f"table:{write(tmp_path, 'own', animals(KINDS, 30, 1))}"
    out = tmp_path / "data"
    code, text = make(source, out, "--json")
    assert code == 0
    assert json.loads(text)["classes"] == list(KINDS)
    assert "holds data already" in make(source, out)[1]
    assert make(source, out, "--force")[0] == 0
    (out / "notes.txt").write_text("mine")
    assert "exists and is no node's own data" in make(source, out, "--force")[1].replace("\n", " ")
    assert load(out).num_classes == 3
    (tmp_path / "texts" / "a").mkdir(parents=True)
    for n in range(9):
        (tmp_path / "texts" / "a" / f"{n}.txt").write_text("a good word")
    done = CliRunner().invoke(app, ["own-data", f"text:{tmp_path / 'texts'}", "--out", str(tmp_path / "words")])
    assert done.exit_code == 2
    assert "numbered by how frequent they are here" in done.output.replace("\n", " ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "own.csv", "texts"]
