"""One folder a node: what is in it, that training on the folders is the simulation, and who is refused."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import FEW, clients_of, few_digits, model_of, run_local, same, tiny_settings
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.export_data import export_data
from piecework.commands.options import settings_from
from piecework.federated_data.datasets import ArrayDataset, DatasetError, default_cache, load, prepare
from piecework.federated_data.personal import client_test_rows
from piecework.federation.errors import TooFewNodesError
from piecework.plans.question import data_shape
from piecework.server_app.experiment import run_experiment
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.preflight import preflight
from piecework.server_app.records import RunDir
from piecework.training.settings import Settings
from piecework.training.setup import client_rows

TRIO = {
    "clients": 3,
    "clients_per_round": 0,
    "dataset": "digits",
    "data__partition": "dirichlet",
    "data__partition_alpha": 0.5,
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "data"
    export_data(tiny_settings(**TRIO), folder)
    return folder


def whole() -> ArrayDataset:
    return load(prepare("digits", data_dir="", cache_dir=default_cache()))


def run_over(folders: list[Path], server: Path, output: Path, workers: int = 1, **changes: object) -> RunDir:
    """A run in which each node has a folder of its own."""
    settings = tiny_settings(**TRIO | {"output_dir": str(output), "data_dir": str(server)} | changes)
    run_dir = RunDir(output / settings.run_name)
    nodes = [{"data-dir": str(folder)} for folder in folders]
    with LocalGrid(len(folders), settings.to_run_config(), workers, nodes) as grid:
        run_experiment(grid, settings, run_dir)
    return run_dir


def nodes_of(exported: Path) -> list[Path]:
    return [exported / f"node-{client}" for client in range(3)]


def test_each_folder_has_its_clients_rows_and_no_others(exported: Path) -> None:
    data, settings = whole(), tiny_settings(**TRIO)
    shares = client_rows(settings, data.labels, 3)
    tests = client_test_rows(data.labels, shares, data.test_labels, settings.seed)
    assert sorted(path.name for path in exported.iterdir()) == ["node-0", "node-1", "node-2", "server"]
    for client, folder in enumerate(nodes_of(exported)):
        part = load(folder, verify=True)
        assert np.array_equal(part.inputs, data.inputs[shares[client]])
        assert np.array_equal(part.labels, data.labels[shares[client]])
        assert np.array_equal(part.test_inputs, data.test_inputs[tests[client]])
        assert np.array_equal(part.test_labels, data.test_labels[tests[client]])
        assert (part.name, part.num_classes, part.input_shape) == ("digits", 10, (1, 8, 8))
        # so that every node normalises as the simulation does, and not by its own few images
        assert (part.mean, part.std) == (data.mean, data.std)
        # nothing in the folder is as large as what it would take to hold another's rows too
        rows = len(shares[client]) + len(tests[client])
        assert sum(file.stat().st_size for file in folder.iterdir()) < rows * (64 + 8) + 4 * 128 + 1000
    server = load(exported / "server", verify=True)
    assert np.array_equal(server.test_inputs, data.test_inputs)
    assert np.array_equal(server.test_labels, data.test_labels)
    assert server.inputs.shape == (0, 8, 8, 1)
    assert (server.mean, server.std) == (data.mean, data.std)
    made = json.loads((exported / "node-1" / "meta.json").read_text())["export"]
    assert made == {
        "client": 1,
        "clients": 3,
        "examples": 1438,
        "seed": 1,
        "settings": {
            "data.partition": "dirichlet",
            "data.public-fraction": 0.0,
            "data.partition-alpha": 0.5,
            "data.partition-balanced": True,
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_over_exported_folders_is_the_simulation(exported: Path, tmp_path: Path, workers: int) -> None:
    changes = {"data__validation_fraction": 0.2, "num_rounds": 2, "strategy": "fedepth"}
    simulated = run_local(tmp_path / "one", **TRIO | changes)
    deployed = run_over(nodes_of(exported), exported / "server", tmp_path / "two", workers, **changes)
    assert same(model_of(simulated), model_of(deployed))
    ours, theirs = simulated.rounds()[-1], deployed.rounds()[-1]
    assert (ours["accuracy"], ours["loss"]) == (theirs["accuracy"], theirs["loss"])
    assert [c["examples"] for c in clients_of(simulated)] == [c["examples"] for c in clients_of(deployed)]


def test_another_seed_trains_otherwise_on_the_same_folders(exported: Path, tmp_path: Path) -> None:
    one = run_over(nodes_of(exported), exported / "server", tmp_path / "one", strategy="fedavg")
    other = run_over(nodes_of(exported), exported / "server", tmp_path / "two", strategy="fedavg", seed=2)
    assert not same(model_of(one), model_of(other))


def test_own_data_are_found_by_the_files_name_wherever_the_folders_lie(tmp_path: Path) -> None:
    """The server has neither the .npz file nor its path, only data-dir."""
    changes = TRIO | {"data.partition": "iid", "dataset": f"npz:{few_digits()}"}
    rows = export_data(tiny_settings(**changes), tmp_path / "data")
    assert [row["examples"] for row in rows] == [70, 70, 70, 0]
    assert "few-digits" in (tmp_path / "data" / "server" / "meta.json").read_text()
    assert str(few_digits().parent) not in (tmp_path / "data" / "server" / "meta.json").read_text()
    named = {"dataset": "npz:few-digits.npz", "data-dir": str(tmp_path / "data" / "server")}
    settings = settings_from("", ["data.partition=iid"], nodes=3, named=named)
    assert len(preflight(settings)[1].test_labels) == 100
    assert data_shape(settings) == ((1, 8, 8), 10, 210)
    simulated = run_local(tmp_path / "one", **TRIO | {"data.partition": "iid", "dataset": FEW})
    changes = {"data.partition": "iid", "dataset": "npz:few-digits.npz"}
    folders = nodes_of(tmp_path / "data")
    assert same(
        model_of(simulated), model_of(run_over(folders, tmp_path / "data" / "server", tmp_path / "two", **changes))
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"clients": 4}, r"exported with clients = 3, the run has clients = 4: export them again"),
        (
            {"data.partition": "iid"},
            r"exported with data\.partition = 'dirichlet', the run has data\.partition = 'iid'",
        ),
        (
            {"data__public_fraction": 0.1},
            r"exported with data.public-fraction = 0.0, the run has data.public-fraction = 0.1",
        ),
        (
            {"data__partition_alpha": 0.1},
            r"exported with data.partition-alpha = 0.5, the run has data.partition-alpha = 0.1",
        ),
        ({"dataset": "digits32"}, r"data-dir .*server holds a prepared 'digits', the run asks for 'digits32'"),
    ],
)
def test_the_server_refuses_an_export_for_another_run(exported: Path, changes: dict[str, object], told: str) -> None:
    settings = tiny_settings(**TRIO | {"data_dir": str(exported / "server")} | changes)
    with pytest.raises(DatasetError, match=told):
        preflight(settings)


def test_the_server_takes_its_own_part_only(exported: Path) -> None:
    with pytest.raises(DatasetError, match="those of client 2, not of the server: check data-dir"):
        preflight(tiny_settings(**TRIO | {"data_dir": str(exported / "node-2")}))
    preflight(tiny_settings(**TRIO | {"data_dir": str(exported / "server")}))
    # what the partition does not read may be anything
    preflight(tiny_settings(**TRIO | {"data_dir": str(exported / "server"), "data__partition_classes": 9}))


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ([0, 2, 1], "these exported data are those of client [12], not of client [12]: check data-dir"),
        ([0, 1, 2, 2], "exported with clients = 3, the run has clients = 4"),
    ],
)
def test_a_node_refuses_what_is_not_its_own(exported: Path, tmp_path: Path, order: list[int], told: str) -> None:
    """clients = 0: how many there are is known to the nodes only."""
    folders = [exported / f"node-{client}" for client in order]
    with pytest.raises(TooFewNodesError, match=told):
        run_over(folders, exported / "server", tmp_path, clients=0, messages__node_timeout=0.1)


def test_emulated_clients_cannot_train_on_the_servers_part(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(TooFewNodesError, match="is a part of an export, not the whole data set: give each node"):
        run_local(tmp_path, **TRIO | {"data_dir": str(exported / "server"), "messages__node_timeout": 0.1})


def test_a_damaged_part_is_named(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported / "server", tmp_path / "server")
    labels = tmp_path / "server" / "test-labels.npy"
    labels.write_bytes(labels.read_bytes()[:-8] + bytes(8))
    settings = tiny_settings(**TRIO | {"data_dir": str(tmp_path / "server")})
    with pytest.raises(DatasetError, match=r"test-labels\.npy is damaged \(its md5 differs\)"):
        preflight(settings)
    meta = tmp_path / "server" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"export": {"client": None}}))
    with pytest.raises(
        DatasetError, match=r"meta\.json is damaged \(its export = \{'client': None\} does not have all of"
    ):
        preflight(settings)


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_settings(**TRIO)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        DatasetError, match=r"cannot write .*data: .*No space left on device; choose an --out with room"
    ):
        export_data(settings, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_only_an_export_is_replaced_and_only_by_force(tmp_path: Path) -> None:
    out, settings = tmp_path / "data", tiny_settings(**TRIO)
    out.mkdir()  # an empty one is as good as none
    export_data(settings, out)
    with pytest.raises(
        DatasetError, match=r"data holds an export already: choose another folder, or replace it by --fo"
    ):
        export_data(settings, out)
    fewer = Settings.from_run_config(settings.to_run_config() | {"clients": 2})
    export_data(fewer, out, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["node-0", "node-1", "server"]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    (out / "thesis.txt").write_text("dear")
    for kept in (out, tmp_path):
        with pytest.raises(
            DatasetError, match="exists and is not an export of piecework: choose another folder, or remove"
        ):
            export_data(settings, kept, force=True)
    assert (out / "thesis.txt").read_text() == "dear"


def test_a_part_cannot_be_exported_again(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="is a part of an export; export the whole data set"):
        export_data(tiny_settings(**TRIO | {"data_dir": str(exported / "server")}), tmp_path / "again")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIECEWORK_DATA", raising=False)
    command = ["export-data", "--set", "data.partition=iid", "--nodes", "2", "--out", str(tmp_path / "data")]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.stderr
    answer = json.loads(done.stdout)
    folders = [tmp_path / "data" / name for name in ("node-0", "node-1", "server")]
    assert [row["folder"] for row in answer["folders"]] == [str(folder) for folder in folders]
    assert [row["examples"] for row in answer["folders"]] == [719, 719, 0]
    assert [row["test_examples"] for row in answer["folders"]] == [181, 178, 359]
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "replace it by --force" in again.stderr
    done = CliRunner().invoke(app, [*command, "--force"])
    assert done.exit_code == 0, done.stderr
    assert "719" in done.stdout
    # the environment's folder is where the server looks
    monkeypatch.setenv("PIECEWORK_DATA", str(tmp_path / "data" / "server"))
    assert len(preflight(settings_from("", ["data.partition=iid"], nodes=2))[1].test_labels) == 359
