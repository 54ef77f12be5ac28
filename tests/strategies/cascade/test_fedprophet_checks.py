"""What FedProphet's clients measure, what of that the server does not believe, and input that it refuses."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedprophet_helpers import SMALL, boards
from flwr.app import Message
from helpers import RecordingGrid, run_local
from torch import nn

from piecework.federation.errors import RunAbortedError
from piecework.models.zoo import MODELS, build_blueprint
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.training.settings import SettingsError


@pytest.mark.slow
def test_everybody_measures_within_the_smallest_budget(tmp_path: Path) -> None:
    """All have just what the largest module takes: the pre-round query and validation take no more."""
    settings = SMALL | {"num_rounds": 3, "fedprophet__stage_rounds": 1}
    rich = run_local(tmp_path / "rich", **settings | {"fleet": boards(rich=(10**9, 1e9)), "fedprophet.dma": False})
    needed = max(client["predicted_peak"] for record in rich.rounds() for client in record["clients"])
    run_dir = run_local(tmp_path / "poor", **settings | {"fleet": boards(all=(needed, 1e9)), "fedprophet__r_min": ""})
    queries = [record["query"] for record in run_dir.rounds() if record["query"]]
    assert len(queries) >= 2
    for found in (*queries, *(record["evaluation"] for record in run_dir.rounds())):
        assert (found["asked"], found["answered"], found["others"]) == (3, 3, [])
        assert 0 < found["peak_over_budget"] <= 1


class Lying(RecordingGrid):
    """Client 1's verdict on the model, or its measurement, is not what it found."""

    kind: str
    lies: dict[str, float]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in super().pull_messages(message_ids):
            metrics = reply.content.metric_records.get("metrics") if reply.has_content() else None
            hit = reply.metadata.message_type == self.kind and metrics is not None
            if hit and reply.metadata.src_node_id == FIRST_NODE + 1:
                for key, value in self.lies.items():
                    metrics[key] = value  # type: ignore[index]
            yield reply


@pytest.mark.parametrize(
    ("lies", "reason"),
    [
        ({"val-accuracy": 1e300}, "val-accuracy is 1e+300: it must be less than or equal to 1"),
        ({"val-adversarial-accuracy": -0.5}, "val-adversarial-accuracy is -0.5: it must be"),
        ({"val-loss": float("nan")}, "val-loss is nan: it must be a finite number"),
        ({"val-examples": 10**7}, "val-examples is 10000000: the client has 21"),
    ],
)
def test_a_lie_about_the_model_does_not_count(tmp_path: Path, lies: dict[str, float], reason: str) -> None:
    run_dir = run_local(
        tmp_path, type("Here", (Lying,), {"kind": "evaluate", "lies": lies}), **SMALL | {"num_rounds": 1}
    )
    (record,) = run_dir.rounds()
    assert (record["evaluation"]["answered"], record["clients_evaluated"]) == (2, 2)
    ((other,),) = [record["evaluation"]["others"]]
    assert (other["client"], other["status"]) == (1, "rejected")
    assert other["reason"].startswith(reason)


@pytest.mark.parametrize("distance", [1e5, 1e300])
def test_a_measurement_far_from_all_others_does_not_count(tmp_path: Path, distance: float) -> None:
    grid = type("Here", (Lying,), {"kind": "query.query", "lies": {"perturbation": distance}})
    record = run_local(tmp_path, grid, **SMALL | {"fedprophet__stage_rounds": 1, "num_rounds": 2}).rounds()[1]
    assert record["query"]["answered"] == 2
    assert record["distance"] < 100


def test_one_image_is_enough_to_validate(tmp_path: Path) -> None:
    (record,) = run_local(tmp_path, **SMALL | {"data__validation_fraction": 0.01, "num_rounds": 1}).rounds()
    assert record["clients_evaluated"] == 3
    assert record["client_accuracy"] is not None


# ---- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fedprophet__r_min": "0.3x"},
            r"setting fedprophet.r-min = '0.3x' is [\d,]+ bytes, and atom 'conv\d' alone needs [\d,]+: set at least",
        ),
        (
            {"fedprophet__r_min": "lots"},
            r"setting fedprophet.r-min = 'lots': expected bytes as 60MB or 57MiB, or a fraction",
        ),
        ({"attack__warmup": 2}, r"attack.warmup = 2 leaves no adversarial round in stages of 2"),
        (
            {"evaluation.patience": 3},
            r"patience = 3: it compares the accuracies of different modules: use fedprophet.stage-patience",
        ),
        (
            {"training__init_weights": "none.safetensors"},
            r"training.init-weights = none.safetensors: there is no such file",
        ),
        ({"data__validation_fraction": 0.0}, r"data.validation-fraction = 0.0: fedprophet is steered"),
        ({"attack__epsilon": 1.5}, r"setting attack.epsilon = 1.5: should be less than or equal to 1"),
        ({"attack__epsilon": 0.0}, r"setting attack.epsilon = 0.0: should be greater than 0"),
        ({"fedprophet__apa_margin": 1.0}, r"setting fedprophet.apa-margin = 1.0: should be less than 1"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, SettingsError), match=message):
        run_local(tmp_path, **SMALL | changes)
    assert not (tmp_path / "run").exists()


def test_images_of_unknown_range_cannot_be_attacked(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"x_{part}": rng.normal(size=(60, 8, 8)).astype(np.float32) for part in ("train", "test")}
    np.savez(tmp_path / "float.npz", **arrays, y_train=np.arange(60) % 3, y_test=np.arange(60) % 3)
    with pytest.raises(
        ValueError, match=r"float32 .*: an attack changes pixels within \[0, 1\] and needs 8-bit images"
    ):
        run_local(tmp_path, **SMALL | {"dataset": f"npz:{tmp_path / 'float.npz'}"})


def test_a_model_that_is_no_cascade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "plain", lambda num_classes, input_shape, width, batch_norm: nn.Linear(64, num_classes))
    with pytest.raises(
        ValueError, match="model 'plain' is a Linear, not a cascade: its function has to return a Blueprint"
    ):
        build_blueprint("plain", num_classes=10, input_shape=(1, 8, 8))


def test_nobody_can_measure_the_next_stage(tmp_path: Path) -> None:
    class Silent(RecordingGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            kept = [m for m in messages if m.metadata.message_type != "query.query"]
            return super().push_messages(kept)

    short = {"messages__round_timeout": 2.0, "fedprophet__stage_rounds": 1, "num_rounds": 2}
    with pytest.raises(
        RunAbortedError, match="no client could measure the features that module 2 starts from: no answer within"
    ):
        run_local(tmp_path, Silent, **SMALL | short)
    resumed = run_local(tmp_path, **SMALL | short, resume_from=str(tmp_path / "run"))
    assert resumed.summary()["status"] == "completed"  # type: ignore[index]
