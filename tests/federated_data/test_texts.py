"""Tokens: how texts become them, and how they go through a run."""

import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TRIO, run_local, tiny_settings

from piecework import load as load_model
from piecework.commands.export_data import export_data
from piecework.federated_data.datasets import PUBLISHED, ArrayDataset, DatasetError, load, prepare
from piecework.federated_data.texts import LENGTH, WORDS, text_files, tokenise
from piecework.models.zoo import build_blueprint
from piecework.server_app.preflight import preflight
from piecework.training import loop
from piecework.training.examples import as_inputs
from piecework.training.loop import train_step
from piecework.training.setup import blueprint_for, open_dataset

REAL = Path(os.environ.get("PIECEWORK_DATA", "/nonexistent")) / "compact"


def prepared(name: str, cache: Path, data_dir: Path | str = "") -> ArrayDataset:
    return load(prepare(name, data_dir=str(data_dir), cache_dir=cache), verify=True)


def write_texts(root: Path, **texts: list[str]) -> Path:
    for name, entries in texts.items():
        folder = root / name.replace("_", "/")
        folder.mkdir(parents=True)
        for number, entry in enumerate(entries):
            (folder / f"{number}.txt").write_text(entry, encoding="utf-8")
    return root


def ends(row: np.ndarray) -> list[int]:
    return [int(token) for token in row if token]


def test_tokens_by_hand() -> None:
    """Numbers by frequency in the training texts: film 3, dull and great 2 (by the alphabet), plot 1. Others go."""
    train = ["The film was great, a GREAT film!", "Dull film; dull plot"]
    tokens, test = tokenise(train, ["A plot of zombies", ""])
    assert tokens.shape == (2, LENGTH)
    assert tokens.dtype == np.uint16
    assert tokens[0].tolist() == [0] * (LENGTH - 4) + [1, 3, 3, 1]
    assert ends(tokens[1]) == [2, 1, 2, 4]
    assert ends(test[0]) == [4]
    assert not test[1].any()


def test_as_many_words_and_tokens_as_there_is_room_for() -> None:
    """Of 1,002 words the two least frequent are excluded; of a long text the beginning counts."""
    words = [f"w{n:04}" for n in range(WORDS + 2)]
    tokens, _ = tokenise([" ".join(words), " ".join(words[:WORDS])], [])
    assert ends(tokens[0]) == list(range(1, LENGTH + 1))
    assert tokenise([" ".join(words), " ".join(words[:WORDS])], [f"{words[-1]} {words[5]}"])[1][0, -2:].tolist() == [
        0,
        6,
    ]


def test_a_folder_of_texts(tmp_path: Path) -> None:
    root = write_texts(
        tmp_path / "reviews", train_bad=["dull plot", "dull"], train_good=["great"], test_bad=["plot"], test_good=["x"]
    )
    data = prepared(f"text:{root}", tmp_path / "cache")
    assert (data.input_shape, data.num_classes, data.vocabulary, data.mean) == ((LENGTH,), 2, WORDS + 1, ())
    assert [ends(row) for row in data.inputs] == [[1, 3], [1], [2]]
    assert data.labels.tolist() == [0, 0, 1]
    assert [ends(row) for row in data.test_inputs] == [[3], []]
    assert [file.name for file in text_files(root)] == ["0.txt", "0.txt", "0.txt", "1.txt", "0.txt"]


def test_without_test_texts_a_fifth_is_held_out_before_words_are_counted(tmp_path: Path) -> None:
    texts = [f"word{n} common" for n in range(10)]
    data = prepared(f"text:{write_texts(tmp_path / 'texts', a=texts, b=texts)}", tmp_path / "cache")
    assert (len(data.labels), data.test_labels.tolist()) == (16, [0, 0, 1, 1])
    known = int(data.inputs.max())
    assert known == len({row[-2] for row in data.inputs}) + 1  # of words that only test texts have there is no number


@pytest.mark.parametrize(("opener", "suffix"), [(open, ""), (gzip.open, ".gz"), (lzma.open, ".xz")])
def test_imdb_from_lines(tmp_path: Path, opener: Any, suffix: str) -> None:
    (tmp_path / "imdb").mkdir()
    for part, entries in (("train", [("A great <br /><br />film", 1), ("dull film", 0)]), ("test", [("br great", 1)])):
        with opener(tmp_path / "imdb" / f"{part}.jsonl{suffix}", "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps({"id": 1, "text": text, "label": label}) + "\n" for text, label in entries)
    data = prepared("imdb", tmp_path / "cache", tmp_path)
    assert [ends(row) for row in data.inputs] == [[3, 1], [2, 1]]
    assert data.labels.tolist() == [1, 0]
    assert [ends(row) for row in data.test_inputs] == [[3]]  # br was a tag


def test_imdb_from_its_archive(tmp_path: Path) -> None:
    """What is not reviewed, `unsup`, is not read."""
    parts = {
        "train_neg": ["dull"],
        "train_pos": ["great"],
        "train_unsup": ["odd"],
        "test_neg": ["odd"],
        "test_pos": ["great"],
    }
    write_texts(tmp_path / "aclImdb", **parts)
    data = prepared("imdb", tmp_path / "cache", tmp_path)
    assert [ends(row) for row in data.inputs] == [[1], [2]]
    assert (data.labels.tolist(), data.test_labels.tolist()) == ([0, 1], [0, 1])
    assert PUBLISHED["imdb"][:2] == (data.input_shape, data.num_classes)


def test_imdbs_reviews_divided_anew(tmp_path: Path) -> None:
    """A quarter of each class is held out, of the published training and test reviews together."""
    parts = {
        f"{part}_{kind}": [f"{kind} {part}{n}" for n in range(4)]
        for part in ("train", "test")
        for kind in ("neg", "pos")
    }
    write_texts(tmp_path / "aclImdb", **parts)
    data = prepared("imdb-pooled", tmp_path / "cache", tmp_path)
    assert sorted(data.labels.tolist()) == 6 * [0] + 6 * [1]
    assert sorted(data.test_labels.tolist()) == [0, 0, 1, 1]
    assert PUBLISHED["imdb-pooled"][2] == 50_000 * 3 / 4 == 100 * 375  # PriSM's examples of 100 clients


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "imdb").is_dir(), reason="IMDB's reviews are not there (PIECEWORK_DATA)")
def test_the_real_reviews(tmp_path: Path) -> None:
    data = prepared("imdb", tmp_path, REAL)
    assert data.inputs.shape == data.test_inputs.shape == (25_000, LENGTH)
    assert np.bincount(data.labels).tolist() == np.bincount(data.test_labels).tolist() == [12_500, 12_500]
    assert (data.inputs.max(), data.vocabulary) == (WORDS, WORDS + 1)
    assert build_blueprint("lstm-imdb", num_classes=2, input_shape=(LENGTH,)).vocabulary == WORDS + 1


@pytest.mark.parametrize(
    ("name", "prepare_files", "message"),
    [
        ("imdb", {}, r"imdb: no .*aclImdb.train; set data-dir"),
        ("text:none", {}, r"no folder .*none; write text:<dir>"),
        ("text:empty", {"empty/train/a/readme.md": b"x"}, r"no \.txt in .*train.a"),
        ("text:odd", {"odd/a/1.txt": b"\xff\xfe\xff"}, r"1\.txt cannot be read as a text: .*store it as UTF-8"),
        (
            "imdb",
            {"imdb/train.jsonl": b'{"text": "x", "label": 2}\n', "imdb/test.jsonl": b""},
            r"after line 0: ValueError",
        ),
        (
            "imdb",
            {"imdb/train.jsonl.xz": b"no xz", "imdb/test.jsonl": b""},
            r"train\.jsonl\.xz, after line 0: LZMAError",
        ),
    ],
)
def test_texts_that_cannot_be_read(tmp_path: Path, name: str, prepare_files: dict[str, bytes], message: str) -> None:
    for file, content in prepare_files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        prepare(name, data_dir=str(tmp_path), cache_dir=tmp_path / "cache")


# ---- tokens of one's own, and a run with them


def some_tokens(folder: Path, vocabulary: int = 1001, length: int = 12) -> Path:
    """Sixty sequences; those of class 1 have large numbers."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = rng.integers(1, 20, (60, length)) + y[:, None] * (vocabulary - 20)
    path = folder / "tokens.npz"
    np.savez(path, x_train=x[:48], y_train=y[:48], x_test=x[48:], y_test=y[48:], group_train=np.arange(48) // 4)
    return path


def test_tokens_in_a_file(tmp_path: Path) -> None:
    data = prepared(f"npz:{some_tokens(tmp_path)}", tmp_path / "cache")
    assert (data.input_shape, data.inputs.dtype, data.vocabulary) == ((12,), np.uint16, 1001)
    assert data.groups is not None
    assert data.groups.tolist() == [n // 4 for n in range(48)]
    read = as_inputs(data.inputs[:3], data)
    assert read.dtype == torch.int64
    assert read.tolist() == data.inputs[:3].tolist()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.full((4, 3), -1), r"x_train in .* has tokens from -1 to -1, shape \(4, 3\); tokens are 0 to 65535"),
        (np.full((4, 3), 70_000), r"tokens from 70000 to 70000"),
        (np.full((4, 3), np.nan), r"x_train in .* has nan at \[0, 0\]"),
        (np.zeros((4, 0), dtype=int), r"tokens of no values, shape \(4, 0\)"),
    ],
)
def test_tokens_that_cannot_be_read(tmp_path: Path, x: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "x.npz", x_train=x, y_train=np.zeros(4, dtype=int))
    with pytest.raises(DatasetError, match=message):
        prepare(f"npz:{tmp_path / 'x.npz'}", data_dir="", cache_dir=tmp_path / "cache")


def test_groups_are_one_an_example(tmp_path: Path) -> None:
    x = np.zeros((4, 2, 2), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x_train=x, y_train=np.zeros(4, dtype=int), group_train=np.zeros(3, dtype=int))
    with pytest.raises(
        DatasetError, match=r"group_train in .* is int64 of shape \(3,\); groups are integers of shape \(4,\)"
    ):
        prepare(f"npz:{tmp_path / 'x.npz'}", data_dir="", cache_dir=tmp_path / "cache")


TOKENS: dict[str, Any] = TRIO | {
    "model": "lstm-imdb",
    "architecture__width": 0.25,
    "training__batch_size": 8,
    "training__local_epochs": 4,
}
TOKENS |= {
    "strategy": "prism",
    "prism__keep_ratios": "0.5",
    "training__lr": 0.5,
    "training__momentum": 0.5,
    "num_rounds": 4,
    "training__clip_norm": 5.0,
}


@pytest.mark.slow
def test_prism_learns_tokens(tmp_path: Path) -> None:
    """Each client holds a half of the recurrent kernels; what the classes are is plain from the numbers."""
    changes = TOKENS | {
        "dataset": f"npz:{some_tokens(tmp_path)}",
        "data__partition": "natural",
        "data__validation_fraction": 0.25,
    }
    changes |= {"training__lr_rounds": 4, "faults__update_norm_limit": 0.0}  # after a plateau updates are much longer
    whole = run_local(tmp_path / "whole", **changes)
    assert whole.rounds()[-1]["accuracy"] == 1.0
    for record in whole.rounds():
        assert record["answered"] == 3
        for client in record["clients"]:
            assert 0 < client["measured_peak"] <= client["predicted_peak"] <= client["budget"]
    assert load_model(whole.path)(torch.ones(2, 12, dtype=torch.int64)).shape == (2, 1)


def test_numbers_near_zero_are_zero_in_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vanishing gradients become would make every operation slow."""
    seen = []

    def product() -> float:
        return float(torch.tensor([1e-38]) * 1e-3)

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(product())
        return train_step(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", noted)
    run_local(
        tmp_path, **TOKENS | {"dataset": f"npz:{some_tokens(tmp_path)}", "num_rounds": 1, "training__local_epochs": 1}
    )
    assert len(seen) >= 3
    assert not any(seen)
    assert product() > 0


def test_exported_tokens_know_their_vocabulary(tmp_path: Path) -> None:
    settings = tiny_settings(
        **TOKENS
        | {"dataset": f"npz:{some_tokens(tmp_path)}", "data__partition": "natural", "data__partition_groups": 2}
    )
    export_data(settings, tmp_path / "out")
    whole = open_dataset(settings.dataset, "")
    parts = [load(tmp_path / "out" / name) for name in ("node-0", "node-1", "node-2", "server")]
    assert [len(part.labels) for part in parts] == [8, 8, 8, 0]
    assert {part.vocabulary for part in parts} == {whole.vocabulary}
    assert all(np.isin(part.inputs, whole.inputs).all() for part in parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.augment": True}, r"augment = true flips and crops images, and data set npz:.* holds tokens"),
        ({"model": "convnet"}, r"convnet reads images: expected an input shape of \(C, H, W\), got \(12,\)"),
        (
            {"data__partition": "natural", "data__partition_groups": 5},
            r"data.partition-groups is 5: 3 clients need 15 groups, .* have 12",
        ),
        ({"strategy": "fedprophet"}, r"an attack changes pixels within \[0, 1\] and needs 8-bit images"),
    ],
)
def test_settings_that_do_not_go_with_tokens(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    settings = tiny_settings(**TOKENS | {"dataset": f"npz:{some_tokens(tmp_path)}"} | changes)
    with pytest.raises(ValueError, match=message):
        preflight(settings)


def test_tokens_that_the_model_does_not_know(tmp_path: Path) -> None:
    settings = tiny_settings(**TOKENS | {"dataset": f"npz:{some_tokens(tmp_path, 2000)}"})
    with pytest.raises(DatasetError, match=r"has tokens up to 1999, but lstm-imdb knows them only up to 1000"):
        blueprint_for(settings, open_dataset(settings.dataset, ""))
