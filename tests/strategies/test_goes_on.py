"""Every system that keeps something on the server or its clients goes on as if it had not stopped, to the bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import TRIO, clients_of, fleet_json, model_of, numpy_of, run_local, same
from safetensors.numpy import load_file

from piecework.server_app.records import RunDir
from piecework.training.methods import METHODS

WIDTHS = {"heterofl__width_ratios": "1,0.5,0.25", "fleet": fleet_json(rich=1.2, some=0.6, poor=0.3)}
PUBLIC: dict[str, Any] = {
    "model": "resnet10",
    "architecture__width": 0.125,
    "architecture__batch_norm": "running",
    "feddf__family": "cnn3",
    "data__public_fraction": 0.2,
    "feddf__server_iterations": 3,
    "feddf__server_batch_size": 8,
    "fleet": fleet_json(rich=2_000_000, poor=300_000),
}
ATTACK = {"attack__steps": 2, "evaluation__attack_steps": 2, "evaluation__attack_examples": 40}
RUNS: dict[str, dict[str, Any]] = {
    "heterofl": WIDTHS | {"fleet": fleet_json(some=0.6, poor=0.3)},  # serves the widest net
    "feddrop": WIDTHS,  # draws its channels
    "splitmix": {"splitmix__width_ratio": 0.25, "fleet": fleet_json(rich=0.85, some=0.65, poor=0.45)},
    "depthfl": {"depthfl__feddyn_alpha": 0.1, "fleet": fleet_json(rich=1.8, some=1.45, poor=1.2)},  # h of FedDyn
    "prism": {"prism__server_momentum": True, "fleet": fleet_json(rich=2.0, middle=0.7, poor=0.6)},
    "feddf": PUBLIC,  # prototypes
    "fedet": PUBLIC,
    "fedrbn": ATTACK | {"architecture__batch_norm": "local", "fleet": fleet_json(rich=2.2, poor=0.3)},
    "fedpm": {"fleet": "spafl", "training__weight_decay": 0.0},  # Adam's moments
}

ELSEWHERE = (
    "cocofl",
    "fedepth",
    "fedprophet",
    "jfat",
    "local",
    "m-fedepth",
    "profl",
    "slt",
    "spafl",
)  # in their own tests
KEEP_NOTHING = ("allsmall", "exclusivefl", "fedavg", "fedprox", "fedrolex", "fjord", "origdrop", "orthdrop")


def test_every_system_is_looked_at() -> None:
    assert {*RUNS, *ELSEWHERE, *KEEP_NOTHING} == set(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", RUNS)
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, strategy: str) -> None:
    """A copy of the run loses its end and its last checkpoint, and makes the second round again."""
    settings = TRIO | RUNS[strategy] | {"strategy": strategy, "num_rounds": 2, "training__local_iterations": 2}
    whole = run_local(tmp_path, **settings)
    for client in clients_of(whole, 2):
        assert 0 < client["measured_peak"] <= client["predicted_peak"]
    served = load_file(whole.path / "model.safetensors")
    part = RunDir(shutil.copytree(whole.path, tmp_path / "part"))
    shutil.rmtree(part.checkpoint_paths()[-1])
    for name in ("summary.json", "model.safetensors"):
        (part.path / name).unlink()
    assert not same(model_of(part), model_of(whole))
    resumed = run_local(tmp_path, **settings, resume_from=str(part.path))
    assert same(model_of(resumed), model_of(whole))
    assert same(load_file(resumed.path / "model.safetensors"), served)
    one, other = (run.load_checkpoint() for run in (whole, resumed))
    assert one is not None and other is not None
    if one.kept:
        assert same(numpy_of(one.kept), numpy_of(other.kept))
