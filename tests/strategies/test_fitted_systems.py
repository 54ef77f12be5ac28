"""`memory.fit` in every system: larger pieces and wider sub-models for the same budget, within it to the byte."""

from pathlib import Path
from typing import Any

import pytest
from helpers import TRIO, fleet_json, run_local

from piecework.federation.errors import RunAbortedError
from piecework.server_app.records import RunDir

BOTH = "micro-batch,recompute"
CHEAP = "recomputes norms and activations"


def figures(record: dict[str, Any], client: dict[str, Any]) -> Any:
    """What a client trained, as the strategy records it."""
    for key in ("width_ratios", "keep_ratios", "depths", "nets"):
        if key in record:
            return record[key][str(client["client"])]
    return record.get("width", client["pieces"])


def trained(run: RunDir) -> list[Any]:
    """What each client trained in each round; every one within its budget, and as predicted."""
    found = []
    for record in run.rounds():
        for client in record["clients"]:
            assert client["status"] == "ok"
            assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]
            assert client["evaluation_peak"] <= client["budget"]
            found.append(figures(record, client))
    return found


# The ratio of each device's budget to a step of the whole model, the ways, and what a client trains without and with them.
CASES: dict[str, tuple[float, str, Any, Any]] = {
    "allsmall": (0.6, "recompute", 0.671875, 0.859375),
    "heterofl": (0.95, "recompute", 0.5, 1.0),
    "fedrolex": (0.95, "micro-batch", 0.5, 1.0),
    "origdrop": (0.6, "micro-batch", 0.6, 0.8),
    "prism": (0.6, "recompute", 0.2, 0.6),
    "orthdrop": (0.9, BOTH, 0.2, 0.8),
    "depthfl": (0.95, "step-in-backward,recompute-cheap", 1, 2),
    "fedepth": (0.6, BOTH, [[0, 1], [2, 3], [4]], [[0, 1, 2, 3], [4]]),
}


def settings_of(strategy: str, memory: float, **further: Any) -> dict[str, Any]:
    fleet = fleet_json(small=memory)
    return TRIO | {"strategy": strategy, "fleet": fleet, "faults__allow_untrained": True} | further


def steps(run: RunDir) -> set[str]:
    return {client["step"] for record in run.rounds() for client in record["clients"]}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CASES)
def test_more_fits_the_same_budget(tmp_path: Path, strategy: str) -> None:
    memory, fit, before, after = CASES[strategy]
    settings = settings_of(strategy, memory)
    plain = run_local(tmp_path / "plain", **settings)
    assert trained(plain) == 3 * [before]
    assert steps(plain) == {""}
    fitted = run_local(tmp_path / "fitted", **settings | {"memory__fit": fit})
    assert trained(fitted) == 3 * [after]
    assert steps(fitted) != {""}


@pytest.mark.slow
def test_splitmix_trains_all_nets(tmp_path: Path) -> None:
    settings = settings_of("splitmix", 0.6)
    assert set(map(len, trained(run_local(tmp_path / "plain", **settings)))) == {5}
    fitted = run_local(tmp_path / "fitted", **settings | {"memory__fit": "micro-batch"})
    assert set(map(len, trained(fitted))) == {8}
    assert steps(fitted) == {"micro-batches of 8"}


def test_feddf_trains_the_largest_model(tmp_path: Path) -> None:
    family = {"model": "cnn3", "feddf__family": "convnet", "data__public_fraction": 0.1, "feddf__server_iterations": 2}
    settings = settings_of("feddf", 0.95, **family)
    assert trained(run_local(tmp_path / "plain", **settings)) == 3 * [[[0, 1, 2, 3, 4]]]
    fitted = run_local(tmp_path / "fitted", **settings | {"memory__fit": "recompute"})
    assert trained(fitted) == 3 * [[[0, 1]]]
    assert steps(fitted) == {"recomputes 1 atom"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "memory", "fit", "step"),
    [
        ("spafl", 0.95, "micro-batch", "micro-batches of 4"),
        ("spafl", 1.0, "step-in-backward,recompute-cheap", CHEAP),
        ("local", 0.95, "micro-batch", "micro-batches of 4"),
        ("fedpm", 1.5, "recompute", "recomputes 1 atom"),
        ("fedpm", 1.5, "step-in-backward,recompute-cheap", CHEAP),
    ],
)
def test_a_whole_model_that_did_not_fit(tmp_path: Path, strategy: str, memory: float, fit: str, step: str) -> None:
    """SpaFL's layers count what they execute, so segments do not run again; FedPM draws one mask a step, so it cuts none."""
    settings = settings_of(strategy, memory)
    with pytest.raises(RunAbortedError, match="3 asked, 3 refused for memory"):
        run_local(tmp_path / "plain", **settings)
    fitted = run_local(tmp_path / "fitted", **settings | {"memory__fit": fit})
    assert trained(fitted) == 3 * [[[0, 1, 2, 3, 4]]]
    assert steps(fitted) == {step}


@pytest.mark.slow
@pytest.mark.parametrize("fit", ["micro-batch", "recompute"])
def test_fedprophet_has_fewer_modules(tmp_path: Path, fit: str) -> None:
    """Later stages read features behind the modules before; clients measure how far attacks move these, and validate."""
    attack = {"attack__steps": 2, "evaluation__attack_steps": 2, "fedprophet__stage_rounds": 1, "num_rounds": 3}
    settings = settings_of("fedprophet", 0.6, **attack)
    plain = trained(run_local(tmp_path / "plain", **settings))
    assert plain == [*3 * [[[0, 1, 2]]], *3 * [[[3]]], *3 * [[[4]]]]
    fitted = run_local(tmp_path / "fitted", **settings | {"memory__fit": fit})
    assert trained(fitted) == [*3 * [[[0, 1, 2, 3]]], *3 * [[[4]]]]
    assert steps(fitted) == {"", "micro-batches of 8" if fit == "micro-batch" else "recomputes 2 atoms"}


@pytest.mark.slow
def test_profl_keeps_its_blocks(tmp_path: Path) -> None:
    """Without the ways its steps are too large for every client, and each atom becomes a block."""
    settings = settings_of("profl", 0.78, profl__stage_rounds=1, profl__shrinking=False, num_rounds=3)
    plain = trained(run_local(tmp_path / "plain", **settings))
    assert plain == [*3 * [[[0, 5, 6]]], *3 * [[[1, 5, 6]]], *3 * [[[2, 6]]]]
    fitted = run_local(tmp_path / "fitted", **settings | {"memory__fit": "recompute"})
    assert trained(fitted) == [*3 * [[[0, 1, 5, 6]]], *3 * [[[2, 3, 6]]], *3 * [[[4]]]]
    assert steps(fitted) == {"", "recomputes 1 atom"}


@pytest.mark.slow
def test_jfat_does_not_swap_what_fits(tmp_path: Path) -> None:
    settings = settings_of("jfat", 0.75, attack__steps=2, evaluation__attack_steps=2)
    swapped = run_local(tmp_path / "plain", **settings).rounds()[0]["clients"]
    fitted = run_local(tmp_path / "fitted", **settings | {"memory__fit": BOTH}).rounds()[0]["clients"]
    for before, after in zip(swapped, fitted, strict=True):
        assert before["measured_peak"] > before["budget"] >= after["measured_peak"] == after["predicted_peak"]
        assert (before["step"], after["step"]) == ("", "micro-batches of 4, recomputes 2 atoms")
        assert before["flops"] < after["flops"]
        assert before["simulated_seconds"] > after["simulated_seconds"]
    (none,) = run_local(tmp_path / "none", **settings_of("jfat", 0.5, attack__steps=2, memory__fit=BOTH)).rounds()
    assert {(client["step"], client["flops"]) for client in none["clients"]} == {("", swapped[0]["flops"])}
