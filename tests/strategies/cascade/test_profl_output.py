"""ProFL with batch norms in its output modules (`profl.output-norm`), on the in-process grid."""

from pathlib import Path

import pytest
import torch
from helpers import TRIO, RecordingGrid, arrays_of, fleet_json, model_of, run_local, training

from piecework import load

RUNNING = ("running_mean", "running_var", "num_batches_tracked")
SMALL = TRIO | {
    "strategy": "profl",
    "profl__output_norm": True,
    "profl__stage_rounds": 1,
    "profl__distil_rounds": 1,
    "profl__distil_lr": 0.01,
    "training__local_iterations": 2,
    "fleet": fleet_json(rich=1.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["running", "measured"])
def test_norms_are_trained_sent_and_paid_for(tmp_path: Path, kind: str) -> None:
    """Basic layers 5 and 6 stand for blocks 2 and 3. Each is trained in its map, then 6 in step 2, and both in step 1."""
    statistics = kind == "running"
    run_dir = run_local(
        tmp_path, RecordingGrid, **SMALL | {"architecture__batch_norm": kind, "num_rounds": 7 + statistics}
    )
    rounds, grid = run_dir.rounds(), RecordingGrid.last
    assert [record["stage"] for record in rounds] == ["statistics"] * statistics + [
        *("shrinking, step 3", "map, block 3", "shrinking, step 2", "map, block 2"),
        *(f"growing, step {t}" for t in (1, 2, 3)),
    ]
    for record in rounds:
        for client in record["clients"]:
            assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]
    norms = {"bn.weight", "bn.bias"} | ({f"bn.{name}" for name in RUNNING} if statistics else set())
    for number, basic in ((2, "6"), (3, "6"), (4, "5"), (5, "56"), (6, "6")):
        for messages in (training(grid.sent), training(grid.received)):
            arrays = next(arrays_of(m) for m in messages if m.metadata.group_id == str(number + statistics))
            expected = {f"atoms.{n}.{name}" for n in basic for name in (*norms, "conv.weight")}
            assert expected <= set(arrays)
    model = load(run_dir.path)
    assert len(model.network.atoms) == 5
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_a_run_stopped_in_an_early_step_serves_its_norms(tmp_path: Path) -> None:
    """With growing alone, the model of step 1 ends in both basic layers, whose statistics the clients measured."""
    run_dir = run_local(tmp_path, **SMALL | {"profl__shrinking": False, "num_rounds": 1})
    arrays = model_of(run_dir)
    assert arrays["atoms.5.bn.weight"].shape == (32,)
    assert arrays["atoms.6.bn.weight"].shape == (64,)
    assert run_dir.rounds()[0]["accuracy"] is not None
    assert [len(list(atom.modules())) for atom in load(run_dir.path).network.atoms][-2:] == [3, 3]


@pytest.mark.parametrize(("norm", "status"), [(False, "rejected"), (True, "ok")])
def test_a_rate_at_which_plain_convolutions_diverge(tmp_path: Path, norm: bool, status: str) -> None:
    """At rate 2, plain basic layers send every update's norm above a million; with norms all updates are accepted."""
    hot = SMALL | {"profl__shrinking": False, "num_rounds": 1, "training__lr": 2.0, "training__local_iterations": 4}
    hot |= {"evaluation__every": 0, "faults__max_empty_rounds": 2, "profl__output_norm": norm}
    (record,) = run_local(tmp_path, **hot).rounds()
    assert [client["status"] for client in record["clients"]] == [status] * 3
