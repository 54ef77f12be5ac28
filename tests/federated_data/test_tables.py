"""`table:` reads feature vectors from .csv and .parquet, and says what is wrong with a file."""

from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from helpers import TRIO, clients_of, fleet_json, run_local

from piecework.federated_data.columns import Columns
from piecework.federated_data.datasets import ArrayDataset, DatasetError, load, prepare
from piecework.models.trained_model import load_model
from piecework.models.zoo import build_blueprint

ROWS = 120


def frame(classes: object = ("no", "yes")) -> pandas.DataFrame:
    """Two classes that differ in the first of three features, at different scales; the third is constant."""
    rng = np.random.default_rng(0)
    y = np.arange(ROWS) % 2
    columns = {
        "height": 1000 * y + rng.normal(size=ROWS),
        "label": np.asarray(classes)[y],
        "ready": rng.random(ROWS) < 0.5,
        "one": 1,
    }
    return pandas.DataFrame(columns)


def read(source: Path, tmp_path: Path):
    return load(prepare(f"table:{source}", data_dir="", cache_dir=tmp_path / "cache"), verify=True)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_is_read_as_vectors_and_named_classes(tmp_path: Path, suffix: str) -> None:
    table, file = frame(), tmp_path / f"mine.{suffix}"
    table.to_csv(file, index=False) if suffix == "csv" else table.to_parquet(file)
    data = read(file, tmp_path)
    assert (data.inputs.shape, data.inputs.dtype, data.input_shape) == ((96, 3), np.float32, (3,))
    assert (data.class_names, data.vocabulary, data.num_classes) == (("no", "yes"), 0, 2)
    assert len(data.test_labels) == 24
    both = np.concatenate([data.inputs, data.test_inputs])
    expected = table[["height", "ready", "one"]].to_numpy(np.float32)
    assert np.array_equal(np.sort(both[:, 0]), np.sort(expected[:, 0]))
    assert data.mean == pytest.approx(data.inputs.astype(np.float64).mean(0), rel=1e-6)
    assert data.std == pytest.approx([*data.inputs.astype(np.float64).std(0)[:2], 1.0], rel=1e-5)  # 1: of a constant


def test_spaces_around_names_and_classes_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("\nheight , label \n" + "1, yes\n2,no \n3,yes \n4, no\n" * 10)
    data = read(file, tmp_path)
    assert (data.class_names, len(data.labels)) == (("no", "yes"), 32)
    assert set(zip(data.inputs[:, 0], data.labels, strict=True)) == {(1, 1), (2, 0), (3, 1), (4, 0)}


def test_a_folder_has_its_own_test_part(tmp_path: Path) -> None:
    table = frame((3, 7)).assign(group=["a", "b", "c"] * 40)
    table[:80].to_csv(tmp_path / "train.csv", index=False)
    table[80:][["one", "ready", "label", "height"]].to_parquet(tmp_path / "test.parquet")  # in another order
    data = read(tmp_path, tmp_path)
    assert data.class_names == ("3", "7")
    assert np.array_equal(data.test_inputs[:, 0], table["height"].to_numpy(np.float32)[80:])
    assert data.test_labels.tolist() == [0, 1] * 20
    assert data.groups is not None
    assert data.groups.tolist() == ([0, 1, 2] * 40)[:80]


def test_columns_that_the_user_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    frame().assign(y=1, farm=["a", "b", "c"] * 40).to_csv(file, index=False)
    cache = tmp_path / "cache"

    def named(*columns: object) -> ArrayDataset:
        return load(prepare(f"table:{file}", data_dir="", cache_dir=cache, columns=Columns(*columns)))

    data = named((), "label", "farm")
    assert (data.input_shape, data.class_names) == ((4,), ("no", "yes"))
    assert data.groups is not None
    assert len(np.unique(data.groups)) == 3
    few = named(("one", "height"), "farm")
    assert (few.input_shape, few.class_names, few.groups) == ((2,), ("a", "b", "c"), None)
    assert few.inputs[0, 0] == 1
    for columns, said in (
        (
            ((), "kind"),
            r"has no column 'kind' \(data.label-column = 'kind'\); it has height, label, ready, one, y, farm",
        ),
        (
            (("y",), "y"),
            r"data.input-columns = 'y', data.label-column = 'y' name the column of classes 'y', or another one, twice",
        ),
        (((), "y", "y"), r"name the column of classes 'y', or another one, twice"),
    ):
        with pytest.raises(DatasetError, match=said):
            named(*columns)
    with pytest.raises(DatasetError, match=r"data.label-column = 'y': the data set 'digits' has no columns; table"):
        prepare("digits", data_dir="", cache_dir=cache, columns=Columns(label="y"))


def test_a_class_may_be_called_na_and_a_file_csv_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "train.CSV").write_text("a, label, group\n1, yes, NA\n2, NA, b\n", "utf-8-sig")
    (tmp_path / "test.csv").write_text("a,label\n3,NA\n")
    data = read(tmp_path, tmp_path)
    assert (data.class_names, data.labels.tolist(), data.test_labels.tolist()) == (("NA", "yes"), [1, 0], [0])
    assert data.groups is not None
    assert data.groups.tolist() == [0, 1]


WRONG = {
    "a,b\n1,2\n": "expected one column of classes, called label, target, class or y; it has none, of a, b",
    "label,y\n1,2\n": "it has label and y, of label, y: name it by data.label-column",
    "label\n1\n": "has no columns besides the classes",
    "a,label\n": "has no rows",
    "": "cannot be read as a table: No columns to parse",
    ",a,label\n0,1,2\n": "column 1 has no name, as pandas writes an index: write the file with index=False",
    "a,a,label\n0,1,2\n": "has several columns 'a': give each its own name",
    "a,label\n0,0.5\n1,1\n": "column 'label' holds 0.5: classes are whole numbers or words; there is no regression yet",
    "a,label\n0,x\n1,\n": "row 2 has no 'label': fill it or drop it",
    "a,label\nred,0\n": "column 'a' holds 'red' in row 1, which is no number: drop it, or encode it",
    "a,label\n1,0\n?,1\n2,1\n": r"column 'a' holds '\?' in row 2, which is no number",
    "a,label\n1,0\n2,NA\n": "row 2 has no 'label'",
    "a;label\n1,5;0\n": "separated by semicolons, expected commas: write it so, as by pandas.read_csv.'mine.csv', sep=';'",
    "a\tlabel\n1\t0\n": "separated by tabs, expected commas",
    "a,label\n1,0\n,1\n": "row 2 has a = nan: fill missing values",
    "a,label\n1e39,0\n": "row 1 has a = 1e.39: fill missing values, and leave out what is no number up to 1e.30",
    "a,label\n1e30,0\n-2e30,1\n": "row 2 has a = -2e.30: fill missing values",
    "a,label\n1,0\n1,2,3\n": "cannot be read as a table: Error tokenizing data",
    "a,label\n1,0\n": "1 examples are too few to hold out a test set",
    "a,label\n1,2,0\n3,4,1\n": "row 1 has 3 values, and the header 2 columns: name each column",
    "a,label\n1,0\n2,inf\n": "row 2 has the class inf, which is no whole number",
    "a,label,group\n1,0,\n": "row 1 has no 'group'",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_with_a_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(DatasetError, match=WRONG[text]):
        read(tmp_path / "mine.csv", tmp_path)


def test_what_is_wrong_with_files(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "b.csv").write_bytes(b"a,label\n\xff\xfe,1\n")
    (tmp_path / "u.csv").write_text("a,label\n", "utf-16")
    (tmp_path / "c.txt").write_text("a,label\n")
    folder = tmp_path / "both"
    folder.mkdir()
    for name, said in (
        ("a.parquet", "a.parquet cannot be read as a table"),
        ("b.csv", "b.csv is no text in UTF-8 .byte 9 is 0xff., .* save it as CSV in UTF-8"),
        ("u.csv", "u.csv is text in UTF-16: save it as CSV in UTF-8"),
        ("c.txt", "c.txt is neither a .csv nor a .parquet file"),
        ("d.csv", "d.csv does not exist; write table:<file or folder>"),
        ("both", "has to hold one of train.csv and train.parquet"),
    ):
        with pytest.raises(DatasetError, match=said):
            read(tmp_path / name, tmp_path)
    (folder / "train.csv").write_text("a,label\n1,0\n2,1\n")
    for text, said in (
        ("a,label\n1,2\n", "class '2' is none of train.csv, which has 0, 1"),
        ("b,label\n1,1\n", "has no column 'a', as train.csv has"),
        ("a,b,label\n1,1,1\n", "has a column 'b' that train.csv does not have"),
    ):
        (folder / "test.csv").write_text(text)
        with pytest.raises(DatasetError, match=said):
            read(folder, tmp_path)


def test_a_parquet_file_that_would_not_fit_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million equal values take some hundred bytes of the file."""
    file = tmp_path / "ones.parquet"
    pandas.DataFrame({"a": np.ones(10**6), "label": 1}).to_parquet(file)
    assert file.stat().st_size < 10**5
    monkeypatch.setattr("piecework.federated_data.tables.available_memory", lambda: 10**6)
    with pytest.raises(
        DatasetError, match=r"has 1,000,000 rows of 2 columns, 16,000,000 bytes, and 1,000,000 are available"
    ):
        read(file, tmp_path)


def test_a_torch_module_reads_tokens_only_if_no_other_layer_gets_them(tmp_path: Path) -> None:
    """A table's whole numbers may enter an embedding beside a linear layer, which gets the other features."""
    (tmp_path / "both_nets.py").write_text(BOTH_NETS, encoding="utf-8")
    found = {}
    for name in ("tabular", "text"):
        blueprint = build_blueprint(f"{tmp_path / 'both_nets.py'}:{name}", num_classes=2, input_shape=(3,))
        found[name] = blueprint.reads, blueprint.vocabulary
    assert found == {"tabular": ("feature vectors", 0), "text": ("tokens", 9)}


BOTH_NETS = """
import torch
from torch import nn


class Tabular(nn.Module):
    def __init__(self, classes, features):
        super().__init__()
        self.kind, self.rest = nn.Embedding(9, 4), nn.Linear(features - 1, 4)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(torch.cat([self.kind(x[:, 0].long()), self.rest(x[:, 1:])], 1))


def tabular(num_classes, input_shape):
    return Tabular(num_classes, input_shape[0])


def text(num_classes, input_shape):
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(4 * input_shape[0], num_classes))
"""
OWN = Path(__file__).parents[1] / "models" / "own_modules.py"


@pytest.mark.parametrize(
    ("strategy", "model", "fleet"),
    [
        ("fedavg", f"{OWN}:vector", {"rich": 2.0}),
        ("fedepth", f"{OWN}:vector", {"rich": 2.0, "poor": 0.9}),
        ("fedepth", "mlp", {"rich": 2.0, "poor": 0.6}),
        ("heterofl", "mlp", {"rich": 1.2, "poor": 0.5}),
    ],
)
def test_vectors_are_trained_within_budgets_and_predicted(
    tmp_path: Path, strategy: str, model: str, fleet: dict
) -> None:
    frame().to_csv(tmp_path / "mine.csv", index=False)
    changes = {"dataset": f"table:{tmp_path / 'mine.csv'}", "fleet": fleet_json(**fleet), "num_rounds": 3}
    run = run_local(tmp_path, **TRIO | changes | {"strategy": strategy, "model": model, "training__batch_size": 8})
    for client in clients_of(run):
        assert client["status"] == "ok", client["reason"]
        assert 0 < client["measured_peak"] == client["predicted_peak"]
    assert run.rounds()[-1]["accuracy"] > 0.9
    found = load_model(run.path).predict([[1000.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    assert found.names == ["yes", "no"]
    with pytest.raises(ValueError, match=r"images have shape \(1, 2\): this model takes \[B, 3\]"):
        load_model(run.path).predict(torch.zeros(1, 2))
