"""Data sets of the Hugging Face hub: saved on disk by these tests, or on a server that answers as the hub."""

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value
from helpers import TRIO, run_local, tiny_settings
from hub_server import serve
from huggingface_hub import constants
from PIL import Image as Picture

from piecework import load as load_model
from piecework.commands.options import readable_anywhere
from piecework.federated_data.columns import NO_COLUMNS, Columns
from piecework.federated_data.datasets import ArrayDataset, DatasetError, load, prepare
from piecework.federated_data.sources import WHERE

CLASSES = ("ant", "bee")


def read(name: Path | str, tmp_path: Path, columns: Columns = NO_COLUMNS) -> ArrayDataset:
    return load(prepare(f"hub:{name}", data_dir="", cache_dir=tmp_path / "cache", columns=columns), verify=True)


def saved(found: Dataset | DatasetDict, tmp_path: Path, name: str = "saved") -> Path:
    shards = dict.fromkeys(found, 1) if isinstance(found, DatasetDict) else 1  # without rows it divides by their number
    found.save_to_disk(str(tmp_path / name), num_shards=shards)
    return tmp_path / name


def pictures(rows: int, mode: str = "L") -> Dataset:
    """Images of one value each, the row's number; the label is its parity."""
    images = [Picture.new(mode, (4, 3), n if mode == "L" else (n, 0, 0)) for n in range(rows)]
    features = Features(
        {"picture": Image(), "kind": ClassLabel(names=list(CLASSES)), "caption": Value("string"), "by": Value("string")}
    )
    columns = {
        "picture": images,
        "kind": [n % 2 for n in range(rows)],
        "caption": ["a"] * rows,
        "by": ["ann", "bob", "cat"] * (rows // 3),
    }
    return Dataset.from_dict(columns, features=features)


def test_images_and_their_classes(tmp_path: Path) -> None:
    """The image column is found beside texts, and so are the label and the test split."""
    path = saved(DatasetDict(train=pictures(12), test=pictures(6)), tmp_path)
    data = read(path, tmp_path, Columns(group="by"))
    assert (data.input_shape, data.inputs.dtype) == ((1, 3, 4), np.uint8)
    assert data.inputs[:, 0, 0, 0].tolist() == list(range(12))
    assert data.labels.tolist() == [0, 1] * 6
    assert data.test_inputs[:, 2, 3, 0].tolist() == list(range(6))
    assert (data.class_names, data.num_classes) == (CLASSES, 2)
    assert data.groups is not None
    assert data.groups.tolist() == [0, 1, 2] * 4


def test_one_split_is_divided_and_colour_is_kept(tmp_path: Path) -> None:
    data = read(saved(pictures(30, "RGB"), tmp_path), tmp_path)
    assert (data.input_shape, len(data.labels), len(data.test_labels)) == ((3, 3, 4), 24, 6)
    assert np.bincount(data.test_labels).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("names", "used"), [(("train", "test", "validation"), 9), (("train", "validation"), 9), (("train", "test"), 0)]
)
def test_a_test_split_without_labels_is_not_used(names: tuple[str, ...], used: int, tmp_path: Path) -> None:
    rows = {"train": 30, "validation": 9, "test": 12}
    parts = {name: pictures(rows[name]) for name in names}
    if "test" in parts:
        features = parts["test"].features
        parts["test"] = parts["test"].map(lambda row: {"kind": -1}, features=features)
    data = read(saved(DatasetDict(parts), tmp_path), tmp_path)
    assert (len(data.labels), len(data.test_labels)) == ((30, 9) if used else (24, 6))


def test_texts_become_tokens(tmp_path: Path) -> None:
    columns = {"idx": list(range(10)), "sentence": ["great film", "dull plot"] * 5, "label": [1, 0] * 5}
    data = read(saved(Dataset.from_dict(columns), tmp_path), tmp_path)
    assert (data.vocabulary, data.class_names, len(data.labels)) == (1001, ("0", "1"), 8)
    assert {tuple(data.inputs[data.labels == k][0, -2:].tolist()) for k in (0, 1)} == {(1, 4), (3, 2)}
    assert all(len(np.unique(data.inputs[data.labels == k], axis=0)) == 1 for k in (0, 1))


def test_numbers_and_lists_become_vectors_that_train(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    columns = {
        "embedding": (rng.normal(size=(60, 3)) + 4 * y[:, None]).tolist(),
        "age": y * 50.0,
        "label": [CLASSES[k] for k in y],
    }
    features = Features({"embedding": List(Value("float32")), "age": Value("float64"), "label": Value("string")})
    path = saved(Dataset.from_dict(columns, features=features), tmp_path)
    data = read(path, tmp_path)
    assert (data.input_shape, data.class_names) == ((4,), CLASSES)
    assert set(data.inputs[data.labels == 1, 3]) == {50.0}
    changes = {
        "dataset": f"hub:{path}",
        "model": "mlp",
        "fleet": "unlimited",
        "num_rounds": 3,
        "training__local_epochs": 8,
        "strategy": "fedavg",
    }
    run = run_local(tmp_path, **TRIO | changes)
    assert run.rounds()[-1]["accuracy"] > 0.9
    assert load_model(run.path).predict(data.test_inputs).names[0] in CLASSES


def one_column(name: str, values: list[Any], **features: Any) -> Dataset:
    columns = {name: values, "label": [n % 2 for n in range(len(values))]}
    return Dataset.from_dict(
        columns, features=Features({name: features["kind"], "label": Value("int64")}) if features else None
    )


def test_what_is_wrong_with_a_data_set(tmp_path: Path) -> None:
    def said(found: Dataset | DatasetDict, columns: Columns = NO_COLUMNS) -> str:
        path = saved(found, tmp_path, f"wrong-{len(list(tmp_path.iterdir()))}")
        with pytest.raises(DatasetError) as caught:
            read(path, tmp_path, columns)
        return str(caught.value).replace(str(path), "SET")

    few = pictures(6)
    two = few.add_column("title", ["a"] * 6)
    assert (
        said(two.remove_columns("picture"))
        == "SET has several columns of texts, caption, by, title: name one by data.input-columns"
    )
    assert "has no column 'x' (data.input-columns = 'x'); it has picture, kind, caption, by" in said(
        few, Columns(("x",))
    )
    assert "data.input-columns has picture (Image(mode=None, decode=True)), caption (Value('string'))" in said(
        few, Columns(("picture", "caption"))
    )
    assert "expected one column of classes, called label, target, class or y" in said(few.remove_columns("kind"))
    assert said(DatasetDict(a=few, b=few)) == "SET has no split 'train': it has a, b"
    assert "its training split has no rows" in said(few.select([]))
    assert "has no column of images, texts or numbers besides the label: it has kind (ClassLabel" in said(
        few.select_columns(["kind"])
    )
    assert "row 2 has no 'sentence'" in said(one_column("sentence", ["good film", None]))
    assert "row 2 has x = nan: fill missing values" in said(one_column("x", [1.0, None]))
    assert "column 'x' has lists of 1 to 2 numbers; vectors have one length" in said(
        one_column("x", [[1.0], [1.0, 2.0]])
    )
    regression = one_column("x", [1.0, 2.0]).rename_column("label", "n").add_column("label", [0.5, 1.5])
    assert "column 'label' holds 0.5: classes are whole numbers or words; there is no regression yet" in said(
        regression
    )
    sizes = [{"bytes": png(Picture.new("L", (n + 1, 3))), "path": None} for n in range(2)]
    assert "SET, row 2 is 2x3, SET, row 1 is 1x3; make all images one size" in said(
        one_column("image", sizes, kind=Image())
    )
    broken = [{"bytes": b"no image", "path": None}] * 2
    assert "SET, row 1 cannot be read as an image" in said(one_column("image", broken, kind=Image()))
    assert "SET, row 1 has no 'image': drop it" in said(one_column("image", [None, None], kind=Image()))
    without = DatasetDict(train=few, test=few.rename_column("picture", "photo"))
    assert "its split 'test' has no column 'picture', as 'train' has" in said(without)
    nested = one_column("pixels", [[[1.0, 2.0]], [[3.0, 4.0]]]).add_column("row", [0, 1])
    assert "columns that are no numbers, pixels (List(List(Value('float64')))): name those that are the input" in said(
        nested
    )
    swapped = few.cast_column("kind", ClassLabel(names=list(reversed(CLASSES))))
    assert (
        "column 'kind' is ClassLabel(names=['ant', 'bee']) in the training split, and ClassLabel(names=['bee', 'ant']) in that"
        in said(DatasetDict(train=few, test=swapped))
    )


def png(picture: Picture.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "png")
    return stream.getvalue()


@pytest.mark.parametrize("damage", ["dataset_info.json", "state.json", "data-00000-of-00001.arrow"])
def test_damaged_files(damage: str, tmp_path: Path) -> None:
    path = saved(pictures(6), tmp_path)
    (path / damage).write_bytes(b"\x00 damaged")
    with pytest.raises(
        DatasetError, match=r"saved cannot be read as a data set: .*a folder is one that datasets.save_to_disk wrote"
    ):
        read(path, tmp_path)


def test_a_name_of_the_hub_is_not_taken_for_a_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    found = [
        readable_anywhere(tiny_settings(dataset=f"hub:{name}", data_dir=str(tmp_path))) for name in ("mine", "a/b:c")
    ]
    assert [values["dataset"] for values in found] == [f"hub:{tmp_path / 'mine'}", "hub:a/b:c"]


def test_a_folder_is_looked_for_in_data_dir_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name where the command was started is another one."""
    saved(pictures(6), tmp_path)
    monkeypatch.chdir(tmp_path)
    wrong = {
        "saved": rf"^hub:saved: `datasets` would read {tmp_path}/saved instead of one of the hub: start in another",
        "./saved": rf"^no folder {tmp_path}/other/saved; write hub:<folder>, .*, or hub:<name>",
    }
    for name, error in wrong.items():
        assert read(name, tmp_path).num_classes == 2
        with pytest.raises(DatasetError, match=error):
            prepare(f"hub:{name}", data_dir=str(tmp_path / "other"), cache_dir=tmp_path / "cache")


CARD = b"""---
configs:
- config_name: small
  data_files:
  - split: train
    path: train.parquet
  - split: test
    path: test.parquet
---
"""


def test_the_hub_is_asked_only_with_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)  # by another server
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "files"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    files = {"README.md": CARD}
    for part, rows in (("train", 10), ("test", 4)):
        stream = io.BytesIO()
        one_column("x", [0.0, 1.0] * (rows // 2)).to_parquet(stream)
        files[f"{part}.parquet"] = stream.getvalue()
    with serve("who/what", files) as (address, asked):
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

        def said(name: str, download: bool) -> str:
            with pytest.raises(DatasetError) as caught:
                prepare(f"hub:{name}", data_dir="", cache_dir=tmp_path / "cache", download=download)
            return str(caught.value)

        assert "only what the cache of `datasets` holds is read without data.download = true" in said("who/what", False)
        assert not asked
        path = prepare("hub:who/what:small", data_dir="", cache_dir=tmp_path / "cache", download=True)
        assert any(each.endswith("/test.parquet") for each in asked)
        data = load(path)
        assert (data.input_shape, data.num_classes, len(data.labels), len(data.test_labels)) == ((1,), 2, 10, 4)
        assert "who/else is no folder, and cannot be read as a name: DatasetNotFoundError" in said("who/else", True)
        assert "who/what:large is no folder, and cannot be read as a name: ValueError: BuilderC" in said(
            "who/what:large", True
        )
        del asked[:]
        assert np.array_equal(read("who/what:small", tmp_path / "anew").inputs, data.inputs)
        for name in ("/no/such/folder", "a/b/c"):
            assert f"/{name.lstrip('/')}; write hub:<folder>, {WHERE}" in said(name, False)
        assert not asked
