"""Golden runs: every figure that changed is named, and nothing else."""

from pathlib import Path

import pytest

from benchmarks import golden
from benchmarks.golden import cases, differences, run_case
from piecework.training.methods import METHODS


def test_only_what_differs_is_named() -> None:
    before = {
        "fedavg": {"model": "a", "round 1: accuracy": 0.5, "round 1: loss": None},
        "jfat": {"ended by": "ValueError"},
    }
    assert list(differences(before, before)) == []
    now = {
        "fedavg": {"model": "b", "round 1: accuracy": 0.5},
        "jfat": {"model": "c"},
        "local": {"ended by": "ValueError", "message": "it may change"},
    }
    assert list(differences(before, now)) == [
        "fedavg: model: a before, b now",
        "jfat: ended by: ValueError before, None now",
        "jfat: model: None before, c now",
        "local: ended by: None before, ValueError now",
    ]
    assert list(differences({"fedavg": {"round 1: loss": 1.0}}, {"fedavg": {"round 1: loss": 2.0}}, ["loss"])) == []


def test_a_case_gives_the_same_figures_again_and_others_for_another_model() -> None:
    known = cases()
    assert {name.split()[0] for name in known} == set(METHODS)
    runs = [
        dict([run_case(("fedavg", known["fedavg"] | {"num-rounds": 1, "clients-per-round": 1, "seed": seed}))])
        for seed in (1, 1, 2)
    ]
    assert list(differences(runs[0], runs[1])) == []
    assert any(line.startswith("fedavg: model: ") for line in differences(runs[0], runs[2]))
    assert {"round 1: accuracy", "round 1: bytes_evaluation"} <= runs[0]["fedavg"].keys()
    assert any(key.endswith(": measured_peak") for key in runs[0]["fedavg"])


def test_a_system_that_does_not_train_ends_a_record_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Comparing two records of it would compare nothing."""
    found = {"fedavg": {"ended by": "RunAbortedError", "message": "no client trained"}, "prism": {"model": "a"}}
    monkeypatch.setattr(golden, "run_all", lambda _: found)
    monkeypatch.setattr("sys.argv", ["golden", "record", str(tmp_path / "golden.json")])
    with pytest.raises(
        SystemExit, match=r"^fedavg did not train, so that nothing is compared: add what it needs to NEEDED$"
    ):
        golden.main()
    assert "fedavg: RunAbortedError: no client trained" in capsys.readouterr().out


def test_what_a_system_does_not_do_is_recorded_as_refused() -> None:
    _, found = run_case(("fedepth adversarial", cases()["fedepth adversarial"]))
    assert found["ended by"] == "ValueError"
    assert "fedepth" in found["message"]
