"""`piecework evaluate`: what a trained model gets right, by hand; and which data it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TRIO, few_digits, fleet_json, run_local
from typer.testing import CliRunner

import piecework
from piecework.api.scores import by_class
from piecework.cli import app
from piecework.server_app.records import RunDir
from piecework.training.settings import Settings
from piecework.training.setup import all_client_test_rows, open_dataset

FLEET = fleet_json(rich=3.0, poor=2.0)  # clients 0 and 2 are rich


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    changes = {"training__local_epochs": 2, "fleet": FLEET, "data__partition": "dirichlet"}
    return run_local(tmp_path_factory.mktemp("evaluated"), strategy="fedavg", **TRIO | changes)


def evaluate(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["evaluate", *words, "--json"])
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"exit": done.exit_code}


def test_the_accuracy_is_the_one_that_the_run_recorded(run: RunDir) -> None:
    found = evaluate(str(run.path))
    assert (found["exit"], found["examples"], found["dataset"]) == (0, 100, "npz:few-digits.npz")
    assert found["accuracy"] == run.rounds()[-1]["accuracy"] == found["correct"] / 100
    assert evaluate(str(run.path), "--batch-size", "7") == found
    assert piecework.Run(run.path).evaluate().record | {"exit": 0} == found


def test_classes_and_devices_add_up(run: RunDir) -> None:
    """Each is counted from the model's predictions by hand."""
    data, found = open_dataset(str(run.settings()["dataset"]), ""), evaluate(str(run.path))
    classes = piecework.load(run.path).predict(data.test_inputs[:]).classes.numpy()
    right = classes == data.test_labels
    for digit, row in enumerate(found["classes"]):
        own = data.test_labels == digit
        assert (row["class"], row["examples"], row["correct"]) == (str(digit), own.sum(), right[own].sum())
        assert row["predicted"] == (classes == digit).sum()
    parts = all_client_test_rows(Settings.from_run_config(run.settings()), 3)
    assert [(row["device"], row["clients"]) for row in found["devices"]] == [("poor", 1), ("rich", 2)]
    for row, rows in zip(found["devices"], (parts[1], np.concatenate([parts[0], parts[2]])), strict=True):
        assert (row["examples"], row["correct"]) == (len(rows), right[rows].sum())
        assert row["accuracy"] == right[rows].mean()
    assert sum(row["examples"] for row in found["devices"]) == 100


def test_what_a_class_is_taken_for() -> None:
    """Of 5 cats, 2 are taken for dogs, one for a bird; of two that are as frequent, the first class is named."""
    labels, found = np.array([0, 0, 0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 2, 1, 2, 0])
    cat, dog, bird = by_class(("cat", "dog", "bird"), labels, found)
    assert cat == {
        **{"class": "cat", "examples": 5, "correct": 2, "recall": 0.4, "predicted": 3},
        **{"most_taken_for": "dog", "times": 2},
    }
    assert (dog["recall"], dog["most_taken_for"], dog["times"]) == (1 / 3, "cat", 1)
    assert (bird["recall"], bird["most_taken_for"], bird["predicted"]) == (None, None, 2)


def test_a_reader_sees_classes_devices_and_models(tmp_path: Path) -> None:
    run = run_local(
        tmp_path, strategy="heterofl", **TRIO | {"heterofl__width_ratios": "1,0.5", "fleet": fleet_json(a=3.0, b=1.1)}
    )
    shown = CliRunner().invoke(app, ["evaluate", str(run.path)]).stdout
    lines = [line.split() for line in shown.splitlines()]
    correct = round(run.rounds()[-1]["accuracy"] * 100)
    assert lines[0][:4] == [f"{correct:.2f}%", "of", "100", "test"]
    assert ["class", "examples", "found", "predicted", "most", "taken", "for"] in lines
    assert {line[0] for line in lines if line[1:2] in (["1"], ["2"]) and len(line) == 4} == {"a", "b"}
    for name, model in run.models().items():
        assert [*name.split(), str(model["clients"]), f"{100 * model['accuracy']:.2f}%"] in lines


def other(folder: Path, **arrays: Any) -> str:
    with np.load(few_digits()) as few:
        np.savez(folder / "other.npz", **{key: few[key] for key in few} | arrays)
    return f"npz:{folder / 'other.npz'}"


def test_other_data_like_those_of_the_run(run: RunDir, tmp_path: Path) -> None:
    """The first 20 test examples: the same model is asked, and no device has them."""
    with np.load(few_digits()) as few:
        x, y = few["x_test"][:20], few["y_test"][:20]
    found = evaluate(str(run.path), "--dataset", other(tmp_path, x_test=x, y_test=y))
    assert found["accuracy"] == (piecework.load(run.path).predict(x).classes.numpy() == y).mean()
    assert (found["dataset"], found["examples"], found["devices"]) == ("npz:other.npz", 20, [])
    assert found["devices_note"] == "clients have parts of the run's own data set alone"


def test_data_of_another_kind_are_refused_with_both_named(run: RunDir, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cases = {
        "images of uint8 and shape 1x5x5, and the run's, npz:few-digits.npz, images of uint8 and shape 1x8x8": {
            part: rng.integers(0, 255, (40, 5, 5), dtype=np.uint8) for part in ("x_train", "x_test")
        }
        | {part: np.arange(40) % 10 for part in ("y_train", "y_test")},
        "labels up to 10, and the run's, npz:few-digits.npz, 10 classes": {
            "y_test": np.arange(100) % 11,
        },
    }
    for says, arrays in cases.items():
        found = evaluate(str(run.path), "--dataset", other(tmp_path, **arrays))
        assert found["exit"] == 2
        assert "the data of --dataset, npz:other.npz, h" in found["reason"]
        assert says in found["reason"]


@pytest.mark.slow
def test_words_of_other_texts_are_other_words(tmp_path: Path) -> None:
    """Two folders number their own most frequent words, so that the same number is another word."""
    for name, words in (("one", "good bad"), ("two", "well ill")):
        for part in ("train", "test"):
            for label, word in zip(("pos", "neg"), words.split(), strict=True):
                folder = tmp_path / name / part / label
                folder.mkdir(parents=True)
                for number in range(30):
                    (folder / f"{number}.txt").write_text(f"{word} film {number % 3}")
    texts = {"dataset": f"text:{tmp_path / 'one'}", "model": "lstm-imdb", "fleet": "unlimited"}
    run = run_local(tmp_path, strategy="fedavg", **TRIO | texts)
    assert evaluate(str(run.path))["accuracy"] == run.rounds()[-1]["accuracy"]
    found = evaluate(str(run.path), "--dataset", f"text:{tmp_path / 'two'}")
    assert "numbers the words of its own training texts, and the run's words are those of text:one" in found["reason"]


def test_a_batch_has_an_example(run: RunDir) -> None:
    with pytest.raises(ValueError, match="batch-size = 0: expected a number of examples"):
        piecework.Run(run.path).evaluate(batch_size=0)


@pytest.mark.parametrize("line", ["{not json", '{"round":2}'])
def test_damaged_records_are_warned_about(run: RunDir, tmp_path: Path, line: str) -> None:
    """The model's own scores need no records, and stay; who has which device is in the records."""
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    with (copy / "rounds.jsonl").open("a") as file:
        file.write(f"{line}\n")
    whole = CliRunner().invoke(app, ["evaluate", str(run.path), "--json"])
    done = CliRunner().invoke(app, ["evaluate", str(copy), "--json"])
    assert (done.exit_code, whole.stderr) == (0, "")
    expected, found = json.loads(whole.stdout), json.loads(done.stdout)
    assert [found[key] for key in ("accuracy", "classes")] == [expected[key] for key in ("accuracy", "classes")]
    assert found["devices"] == []
    assert f"{copy / 'rounds.jsonl'}, line 2, is damaged" in found["devices_note"]
    said = done.stderr
    assert said.startswith("the scores by device class are left out, for which the run's records are needed: ")
    assert f"{copy / 'rounds.jsonl'}, line 2, is damaged" in said
    for form in ("csv", "tensorboard"):
        refused = CliRunner().invoke(app, ["export", str(copy), "--format", form, "--out", str(tmp_path / form)])
        assert refused.exit_code == 2
        assert f"{copy / 'rounds.jsonl'}, line 2, is damaged" in refused.stderr
        assert not (tmp_path / form).exists()
