"""What the trained model of a run gets right: overall, by class, and on the data of each class of devices."""

import logging
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from piecework.api.frames import choose_rows, make_frame
from piecework.api.plans import show_text
from piecework.device_profiles.fleet import device_of, load_fleet
from piecework.exports.client_model import client_model
from piecework.federated_data.catalogue import COLUMNAR
from piecework.federated_data.datasets import ArrayDataset, DatasetError, load, set_name
from piecework.federated_data.own_data import Expected, adopt
from piecework.models.model_file import description, find_file
from piecework.models.trained_model import TrainedModel, load_model
from piecework.report.read_records import read_rounds
from piecework.server_app.records import CheckpointError, RunDir
from piecework.training.scoring import predictions
from piecework.training.settings import Settings
from piecework.training.setup import all_client_test_rows, prepare_dataset

if TYPE_CHECKING:
    import pandas

LOG = logging.getLogger("piecework")
Record = dict[str, Any]
ADVICE = "choose data like those of the run"
WORDS = ("text", "imdb", "imdb-pooled", "hub")  # data sets that number the most frequent words of their own texts


@dataclass(frozen=True)
class Scores:
    """What a trained model gets right; `record` is the object that `piecework evaluate --json` prints."""

    record: Record

    @property
    def accuracy(self) -> float:
        """The fraction of the examples whose class is found."""
        found: float = self.record["accuracy"]
        return found

    def to_pandas(self, what: str = "classes") -> "pandas.DataFrame":
        """Return a frame with a line a class, or with `devices` a line a device class.

        Raises ValueError for another name, and ImportError without pandas.
        """
        return make_frame(choose_rows(what, {key: self.record[key] for key in ("classes", "devices")}))

    def __str__(self) -> str:
        from piecework.report.scores_view import score_tables

        return show_text(score_tables(self.record))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def score_run(path: Path, dataset: str = "", batch_size: int = 256, client: int | None = None) -> Scores:
    """Evaluate the trained model of a run on the test split of the run's own data set, or of another one.

    With `client` that client's own model is evaluated on the client's own part of the test split, as the run does it, or on all
    of another data set. Damaged records are warned about:
    they leave out the device classes alone, because the model's own scores need none.
    Raises DatasetError for data that are missing or of another kind than the run's, and ModelFileError and CheckpointError.
    """
    if batch_size < 1:
        raise ValueError(f"batch-size = {batch_size}: expected a number of examples, 1 or more")
    run = RunDir(path)
    settings = Settings.from_run_config(run.settings())
    described = description(find_file(run.path))
    with nullcontext(run.path) if client is None else client_model(run.path, client) as file:
        model = load_model(file)
    own = dataset in ("", settings.dataset)
    data = open_data(settings if own else settings_of(settings, dataset), described, own=own)
    if client is not None and own:
        data = of_client(data, run, settings, client)
    found = predict(model, data, batch_size)
    right = found == data.test_labels
    devices: list[Record] = []
    if client is not None:
        note = f"this is the model of client {client} alone" + " on its own test examples" * own
    elif own:
        devices, note = by_device(run, settings, right)
    else:
        note = "clients have parts of the run's own data set alone"
    return Scores(
        {
            "run_dir": str(run.path),
            "dataset": set_name(data.name),
            "examples": len(right),
            "correct": int(right.sum()),
            "accuracy": float(right.mean()),
            "classes": by_class(model.class_names, data.test_labels, found),
            "devices": devices,
            "devices_note": note,
            "models": run.models() if own else {},
        }
    )


def of_client(data: ArrayDataset, run: RunDir, settings: Settings, client: int) -> ArrayDataset:
    """Return a data set with a client's part of the test split. Raises DatasetError for a client without one."""
    clients = settings.clients or (run.coverage() or {}).get("clients", 0)
    parts = all_client_test_rows(settings, clients) if clients else []
    if client >= len(parts) or not len(parts[client]):
        raise DatasetError(
            f"client {client} of {run.path} has no test examples; it has {len(parts)} clients, from 0 on"
        )
    rows = parts[client]
    return replace(data, test_inputs=data.test_inputs[rows], test_labels=data.test_labels[rows])


def settings_of(settings: Settings, dataset: str) -> Settings:
    """Return a run's settings for another data set, for which the columns of the run's table count if it is one too."""
    kinds = [name.partition(":")[0] for name in (settings.dataset, dataset)]
    columns = ("data.input-columns", "data.label-column", "data.group-column")
    kept = kinds[0] in COLUMNAR and kinds[1] in COLUMNAR
    return settings.with_values({"dataset": dataset} | ({} if kept else dict.fromkeys(columns, "")))


def open_data(settings: Settings, described: Record, *, own: bool) -> ArrayDataset:
    """Return a data set with the classes of the run's. Raises DatasetError, which names both, for one of another kind."""
    data = load(prepare_dataset(settings))
    inputs, model = described["inputs"], described["model"]
    known = settings.dataset.partition(":")[0]
    if not own and data.vocabulary and known in WORDS:
        raise DatasetError(
            f"{settings.dataset} numbers the words of its own training texts, and the run's words are those of "
            f"{inputs['dataset']}: give the texts as token numbers of the run (npz:FILE)"
        )
    scaled = inputs["dtype"] == "uint8"  # pixels of 8 bits have one scale
    shape = tuple(inputs["resized_from"] or model["input_shape"])
    expected = Expected(
        dataset=inputs["dataset"],
        kind="images" if len(shape) == 3 else "tokens" if inputs["vocabulary"] else "feature vectors",
        dtype=inputs["dtype"],
        shape=shape,
        num_classes=model["num_classes"],
        class_names=tuple(inputs["class_names"]),
        mean=data.mean if scaled else tuple(inputs["mean"]),
        std=data.std if scaled else tuple(inputs["std"]),
        vocabulary=inputs["vocabulary"],
    )
    return adopt(data, expected, "the data of --dataset" if not own else "the run's data as they are now", ADVICE)


@torch.no_grad()
def predict(model: TrainedModel, data: ArrayDataset, batch_size: int) -> np.ndarray:
    """Return the predicted class of each test example, int64 [n].

    Where the prediction depends on the other examples of a batch, batches are mixed, always in the same way.
    """
    count = len(data.test_labels)
    order = np.random.default_rng(0).permutation(count) if model.depends_on_batch else np.arange(count)
    found = np.zeros(count, dtype=np.int64)
    for start in range(0, count, batch_size):
        rows = order[start : start + batch_size]
        x = torch.tensor(data.test_inputs[rows])
        found[rows] = predictions(model(x.movedim(-1, 1) if x.dim() == 4 else x)).numpy()
    return found


def by_class(names: tuple[str, ...], labels: np.ndarray, found: np.ndarray) -> list[Record]:
    """Return, for each class, its examples, how many are found, and the class that most of the others are taken for."""
    rows = []
    for number, name in enumerate(names):
        of_class = labels == number
        wrong = Counter(found[of_class & (found != number)].tolist())
        taken, times = min(wrong.items(), key=lambda each: (-each[1], each[0])) if wrong else (None, 0)
        examples, correct = int(of_class.sum()), int((found[of_class] == number).sum())
        rows.append(
            {
                "class": name,
                "examples": examples,
                "correct": correct,
                "recall": correct / examples if examples else None,
                "predicted": int((found == number).sum()),
                "most_taken_for": None if taken is None else names[taken],
                "times": times,
            }
        )
    return rows


def by_device(run: RunDir, settings: Settings, right: np.ndarray) -> tuple[list[Record], str]:
    """Return the accuracy on the test examples of each device class's clients, or why it is not known.

    A client's test examples are its part of the test split, which has the classes of its training examples. Records that
    cannot be read are warned about too.
    """
    try:
        clients = settings.clients or (run.coverage() or {}).get("clients", 0)
        if not clients:
            return [], "the run has no record of its clients"
        parts = all_client_test_rows(settings, clients)
        fleet = load_fleet(settings.fleet)
        recorded = {each["client"]: each["device"] for record in read_rounds(run) for each in record["clients"]}
        names = [recorded.get(n) or device_of(fleet, n, clients, settings.seed).name for n in range(clients)]
    except CheckpointError as error:  # the model's own scores need no records
        LOG.warning("the scores by device class are left out, for which the run's records are needed: %s", error)
        return [], f"the run's records cannot be read: {error}"
    except ValueError as error:
        return [], f"which client has which data is not known: {error}"
    rows = []
    for name in sorted({*names}):
        own = [part for part, device in zip(parts, names, strict=True) if device == name]
        held = np.concatenate(own)
        rows.append(
            {
                "device": name,
                "clients": len(own),
                "examples": len(held),
                "correct": int(right[held].sum()),
                "accuracy": float(right[held].mean()) if len(held) else None,
            }
        )
    return rows, ""
