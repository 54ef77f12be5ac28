"""The forms of SpaFL's step, masked and without pruned filters: what they take, what they execute, what they learn."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import a_client, few_digits, model_of, random_examples, run_local, tiny_settings
from model_helpers import initial
from spafl_helpers import SPAFL

from piecework.models.compact import layout
from piecework.models.masked import mask_model
from piecework.models.zoo import build_blueprint
from piecework.planning.step_cost import piece_cost
from piecework.strategies.sparse.spafl.client import THRESHOLDS
from piecework.strategies.sparse.spafl.forms import SparseModel, SparseTrainer, sparse_loss
from piecework.strategies.sparse.spafl.settings import SpaFLSettings
from piecework.training.loop import PieceModel, load_for_device
from piecework.training.setup import training_config_for

LOSS = sparse_loss(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "num_rounds", "optimiser"), [(0, 3, "sgd"), (1, 2, "sgd"), (3, 4, "sgd"), (3, 4, "adam")]
)
def test_forms_predict_what_they_take_and_count_what_they_execute(
    tmp_path: Path, every: int, num_rounds: int, optimiser: str
) -> None:
    changes = SPAFL | {
        "spafl__masked_every": every,
        "num_rounds": num_rounds,
        "training__optimiser": optimiser,
        "training__lr": 0.05,
        "spafl__sparsity": 0.1,
        "training__batch_size": 8,
    }
    records = run_local(tmp_path, **changes).rounds()
    for client in (c for record in records for c in record["clients"]):
        assert client["status"] == "ok"
        assert 0 < client["measured_peak"] <= client["predicted_peak"]
    if optimiser != "sgd":  # its thresholds prune too little in four rounds
        return
    flops = [sum(c["flops"] for c in record["clients"]) for record in records]
    pruned = np.mean([layer["density"] for layer in records[-1]["filters"].values()])
    assert pruned < 0.9
    assert (flops[-1] < 0.95 * flops[0]) == (every != 1)


@pytest.mark.parametrize(("batch_size", "optimiser"), [(2, "sgd"), (16, "sgd"), (2, "adamw")])
def test_going_from_form_to_form_takes_no_more_than_a_masked_step(
    tmp_path: Path, batch_size: int, optimiser: str
) -> None:
    """Where weights are nearly all that a step takes."""
    rate = {"training__optimiser": optimiser, "training__lr": 0.1 if optimiser == "sgd" else 1e-4}
    changes = {"model": "lenet5", "training__batch_size": batch_size} | rate
    settings = tiny_settings(**SPAFL | {"dataset": f"npz:{few_digits()}"} | changes)
    plain = build_blueprint("lenet5", num_classes=10, input_shape=(1, 32, 32))
    whole = mask_model(
        plain, settings.of(SpaFLSettings).straight_through, silent=settings.of(SpaFLSettings).silent_norms
    )
    cost = piece_cost(
        whole, (0, 1), "head", training_config_for(settings, 0.1), make_loss=LOSS, piece_class=SparseModel
    )

    def make(kept: float) -> Callable[[], list[PieceModel]]:
        def made() -> list[PieceModel]:
            model = SparseModel(whole, (0, 1), "head", load_for_device(whole, initial(whole)))
            with torch.no_grad():
                for layer in model.layers()[:-1]:
                    layer.tau[int(kept * len(layer.tau)) :] = 1.0
            return [model]

        return made

    examples, forms = random_examples(4 * batch_size, (1, 32, 32)), []
    for kept in (0.98, 0.85, 0.5, 0.2):
        client = a_client(tmp_path / str(kept), settings.with_values({"spafl.masked-every": 0}), blueprint=whole)
        trainer = SparseTrainer(client, client.training_config, make(kept), LOSS, None, layout(plain, whole))
        for _ in range(2):
            trainer.epoch(examples, client.rng("batches"), client.cap, "train")
        trainer.finish()
        assert 0 < client.cap.peak_bytes <= cost.peak_bytes
        forms.append(trainer.macs)
    assert forms == sorted(forms, reverse=True)
    assert forms[-1] < 0.2 * forms[0]
    assert client.cap.peak_bytes < 0.8 * cost.peak_bytes


@pytest.mark.slow
def test_the_forms_learn_alike(tmp_path: Path) -> None:
    """Behind ReLU a pruned filter has no gradient: what is excluded would not have moved but for momentum, which is 0 here."""
    runs = [
        run_local(
            tmp_path / str(n),
            **SPAFL | {"spafl__masked_every": n, "training__momentum": 0.0, "num_rounds": 2, "training__lr": 0.1},
        )
        for n in (1, 0)
    ]
    a, b = (model_of(run_dir)[THRESHOLDS] for run_dir in runs)
    assert np.abs(a - b).max() < 1e-4
    assert a.max() > 1e-3
