"""Ratios of kernels or channels that a fleet fixes: PriSM, OrthDrop, OrigDrop and HeteroFL."""

from pathlib import Path

import pytest
from helpers import (
    TRIO,
    clients_of,
    fleet_json,
    run_local,
)
from safetensors.numpy import load_file

SMALL = {"strategy": "prism", "training.lr": 0.05}


@pytest.mark.parametrize("name", ["prism", "orthdrop", "origdrop", "heterofl"])
def test_a_fleet_may_say_how_much_of_a_model_each_device_gets(tmp_path: Path, name: str) -> None:
    """And whose memory that does not fit cannot take part."""
    fleet = fleet_json({"half": 0.5, "quarter": 0.25, "poor": 0.5}, half=9.0, quarter=9.0, poor=0.2)
    ratios = {"prism__keep_ratios": "1,0.5,0.25", "heterofl__width_ratios": "1,0.5,0.25"}
    run = run_local(tmp_path, **TRIO | SMALL | {"strategy": name}, **ratios, fleet=fleet)
    (record,) = run.rounds()
    assert list(record["keep_ratios" if "keep_ratios" in record else "width_ratios"].values()) == [0.5, 0.25, 0.5]
    assert [client["status"] for client in clients_of(run)] == ["ok", "ok", "memory"]
    half, quarter, _ = clients_of(run)
    assert quarter["measured_peak"] == quarter["predicted_peak"] < half["measured_peak"] == half["predicted_peak"]


def test_origdrop_counts_no_ratio_that_its_device_has_no_memory_for(tmp_path: Path) -> None:
    fleet = fleet_json({"whole": 1.0, "half": 0.5, "quarter": 0.25}, whole=0.4, half=9.0, quarter=9.0)
    run = run_local(tmp_path, **TRIO | SMALL | {"strategy": "origdrop"}, prism__keep_ratios="1,0.5,0.25", fleet=fleet)
    assert load_file(run.path / "model.safetensors")["atoms.1.conv.weight"].shape[:2] == (8, 8)


def test_a_ratio_that_a_run_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"keep = 0\.3 of device 'odd' is not one of the run's width ratios: 0\.5, 0\.25"
    ):
        run_local(tmp_path, **TRIO | SMALL, prism__keep_ratios="0.5,0.25", fleet=fleet_json({"odd": 0.3}, odd=9.0))
