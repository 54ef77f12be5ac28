"""Communication and FLOPs by the rules of SpaFL's Table 2, from the code that counts real runs."""

from pathlib import Path

import numpy as np
import pytest
from helpers import TRIO, few_digits, run_local, tiny_settings
from settings_helpers import settings_with

from piecework.models.layer_statistics import layer_statistics
from piecework.models.masked import mask_model
from piecework.models.zoo import build_blueprint
from piecework.planning.costs import cost_model_for
from piecework.planning.counts import bits, dense_flops, entries, sparse_flops
from piecework.strategies import find_method
from piecework.training.setup import blueprint_for, open_dataset


@pytest.mark.parametrize(
    ("values", "rounds", "printed"),
    [
        (580, 500, "0.1856"),
        (1418, 500, "0.4538"),  # the paper prints 0.4537: cut off
        (4800, 1500, "4.6080"),
        (430_500 / 2, 500, "68.8800"),
        (807_366 / 2, 500, "129.1786"),  # 129.178
        (11_159_232 / 2, 1500, "5356.4314"),  # 5356.4
    ],
)
def test_table_2s_communication(values: float, rounds: int, printed: str) -> None:
    assert f"{bits(values, values) * 10 * rounds / 1e9:.4f}" == printed


def test_a_dense_layer_is_counted_whole_and_a_sparse_one_at_its_density() -> None:
    assert dense_flops(100, 7) == 2100
    assert sparse_flops({"a": 100, "b": 50}, {"a": 0.5, "b": 0.2}, 10, 4, 30, 900) == 3 * 60 * 10 + 30 * 4 + 900


def test_entries_are_parameters_and_what_norms_remember() -> None:
    model = build_blueprint("conv4", num_classes=10, input_shape=(3, 32, 32), batch_norm="running")
    assert sum(entries(model, unit) for unit in model.units()) == 807_366


@pytest.mark.parametrize(("strategy", "share"), [("fedavg", 1.0), ("heterofl", 0.5)])
def test_records_count_values_both_ways(tmp_path: Path, strategy: str, share: float) -> None:
    changes = TRIO | {"strategy": strategy, "heterofl__width_ratios": "0.5", "architecture__batch_norm": "running"}
    (record,) = run_local(tmp_path, **changes).rounds()
    settings = tiny_settings(**changes | {"dataset": f"npz:{few_digits()}"})
    model = blueprint_for(settings, open_dataset(settings.dataset, ""))
    values = sum(entries(model, unit) for unit in model.units())
    for client in record["clients"]:
        assert client["counted_bits"] == 64 * share * values
    if strategy == "fedavg":
        macs = sum(layer.macs for unit in model.units() for layer in layer_statistics(model, unit).layers)
        assert record["clients"][0]["counted_flops"] == pytest.approx(3 * macs * record["clients"][0]["examples"])


def test_spafls_records_count_thresholds_and_densities(tmp_path: Path) -> None:
    changes = TRIO | {"strategy": "spafl", "fleet": "spafl", "clients": 1, "spafl__sparsity": 0.1, "num_rounds": 4}
    last = run_local(tmp_path, **changes).rounds()[-1]
    (client,) = last["clients"]
    settings = tiny_settings(**changes | {"dataset": f"npz:{few_digits()}"})
    model = mask_model(blueprint_for(settings, open_dataset(settings.dataset, "")))
    layers = [layer for unit in model.units() for layer in layer_statistics(model, unit).layers if layer.thresholds]
    densities = [layer["density"] for layer in last["filters"].values()]
    assert min(densities) < 1
    kept = sum(density * layer.macs for density, layer in zip(densities, layers, strict=True))
    weights = sum(int(np.prod(layer.weight)) for layer in layers)
    batches = -(-client["examples"] // settings.training.batch_size)
    assert client["counted_bits"] == 64 * 160
    expected = 3 * kept * client["examples"] + 160 * batches + weights
    assert client["counted_flops"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("model", "shape", "sparse", "dense"),
    [
        ("lenet5", (1, 28, 28), 580, 430_500),
        ("conv4", (3, 32, 32), 650, 807_366),  # the paper counts 1,418 thresholds
        ("resnet18-preact", (3, 32, 32), 4800, 11_224_373),  # the paper counts weights of convolutions: 11,159,232
    ],
)
def test_rules_count_as_real_runs_do(model: str, shape: tuple[int, ...], sparse: int, dense: int) -> None:
    settings = settings_with(model=model, heterofl__width_ratios="0.5", architecture__batch_norm="running")
    classes = 100 if model == "resnet18-preact" else 10
    blueprint = build_blueprint(model, num_classes=classes, input_shape=shape, batch_norm="running")
    for strategy, values in (("spafl", sparse), ("fedavg", dense), ("heterofl", dense / 2)):
        cut = find_method(strategy).make_cut(blueprint, cost_model_for(settings, blueprint), settings)
        assert cut.traffic(list(cut.stages[0].parts)).values == (values, values)
