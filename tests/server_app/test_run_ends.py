"""How a run ends: aborted, with too few nodes or empty rounds, at its target, or when patience is over."""

import re
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message
from helpers import TRIO, RecordingGrid, clients_of, few_digits, fleet_json, run_local, tiny_settings

import piecework
from piecework.federation.errors import RunAbortedError, TooFewNodesError
from piecework.report.run_page import write_report
from piecework.server_app.experiment import run_experiment
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import RunDir, read_checkpoint

STAGED = {"strategy": "profl", "profl__stage_rounds": 1}


def test_fedavg_on_small_devices_aborts_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunAbortedError) as caught:
        run_local(tmp_path, strategy="fedavg", fleet="demo", clients_per_round=0)
    # the largest board has 0.95 of a step of 1,030,568 bytes
    first, second, fit, pieces, smaller = str(caught.value).splitlines()
    assert first == "no client trained in round 1: 20 asked, 20 refused for memory"
    assert "client 3 (board-d): training the whole model needs 1,030,568 bytes" in second
    assert "the budget allows 979,039" in second
    # The gentlest remedy comes first: whom it reaches, its bytes and its FLOPs on the poorest of them.
    assert fit.startswith(
        "try: memory.fit = auto (board-a, board-b, board-c, board-d can then train the whole model, in "
    )
    assert re.search(r"in [45]\d\d,\d{3} bytes instead of 1,030,568 .* for 1\.\d\d times the FLOPs: pages through", fit)
    assert pieces == "or: strategy = fedepth trains the whole model in pieces"
    assert smaller.startswith("or: training.batch-size")
    run = RunDir(tmp_path / "run")
    summary = run.summary()
    assert (summary["status"], summary["reason"]) == ("failed", str(caught.value))
    assert (summary["clients_asked"], summary["clients_failed"], summary["max_peak_over_budget"]) == (20, 20, None)
    assert {c["status"] for c in clients_of(run)} == {"memory"}
    assert run.load_checkpoint() is None  # resumed, the round is done again
    assert not (run.path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("devices", "settings", "fits"),
    [
        ({"a": 100_000}, {}, False),
        ({"a": 700_000}, {}, True),
        ({"a": 100_000, "b": 700_000}, {}, True),
        ({"a": 100_000, "b": 700_000}, {"memory__fit": "recompute"}, True),
        ({"a": 700_000}, {"architecture__batch_norm": "static"}, True),
        ({"a": 100_000}, {"training__adversarial": True}, False),
        ({"a": 100_000, "b": 900_000}, {"training__adversarial": True, "data__validation_fraction": 0.0}, False),
    ],
)
def test_pieces_are_a_remedy_only_where_they_fit(
    devices: dict[str, int], settings: dict[str, Any], fits: bool, tmp_path: Path
) -> None:
    with pytest.raises(RunAbortedError, match="no client trained in round 1") as caught:
        run_local(tmp_path, strategy="fedavg", fleet=fleet_json(**devices), **settings)
    assert (" trains the whole model in pieces" in str(caught.value)) == fits


def test_max_empty_rounds(tmp_path: Path) -> None:
    with pytest.raises(RunAbortedError, match="no client trained in round 3"):
        run_local(tmp_path, strategy="fedavg", fleet="demo", num_rounds=5, faults__max_empty_rounds=3)
    assert len(RunDir(tmp_path / "run").rounds()) == 3


def test_one_useful_reply_resets_the_empty_rounds(tmp_path: Path) -> None:
    class EveryOther(RecordingGrid):
        """All answers of rounds 1, 3 and 4 are errors."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = []
            for reply in super().pull_messages(message_ids):
                (task,) = [m for m in self.sent if m.metadata.message_id == reply.metadata.reply_to_message_id]
                lost = reply.metadata.message_type == "train" and task.metadata.group_id in ("1", "3", "4")
                replies.append(Message(Error(8, "gone"), reply_to=task) if lost else reply)
            return replies

    with pytest.raises(
        RunAbortedError, match="no client trained in round 4: 3 asked, 0 refused for memory\nclient 0: error 8"
    ):
        run_local(tmp_path, EveryOther, strategy="fedavg", num_rounds=9, faults__max_empty_rounds=2, **TRIO)
    assert [r["answered"] for r in RunDir(tmp_path / "run").rounds()] == [0, 3, 0, 0]


def test_target_accuracy_ends_a_run(tmp_path: Path) -> None:
    run = run_local(tmp_path, num_rounds=3, evaluation__target_accuracy=0.02, strategy="fedavg", **TRIO)
    assert (len(run.rounds()), run.summary()["status"]) == (1, "completed")
    assert (run.path / "model.safetensors").is_file()
    assert (
        len(
            run_local(
                tmp_path / "high", num_rounds=2, evaluation__target_accuracy=0.9999, strategy="fedavg", **TRIO
            ).rounds()
        )
        == 2
    )


def test_patience_ends_a_run(tmp_path: Path) -> None:
    run = run_local(
        tmp_path,
        num_rounds=6,
        evaluation__patience=2,
        training__lr=1e-30,
        strategy="fedavg",
        architecture__batch_norm="batch",
        **TRIO,
    )
    assert len({record["accuracy"] for record in run.rounds()}) == 1
    assert len(run.rounds()) == 3


def test_too_few_nodes(tmp_path: Path) -> None:
    settings = tiny_settings(clients=5, messages__node_timeout=0.01, output_dir=str(tmp_path))
    run_dir = RunDir(tmp_path / "run")
    with (
        LocalGrid(3, settings.to_run_config()) as grid,
        pytest.raises(TooFewNodesError, match=r"3 of 5 clients connected within 0\.01 s \(messages.node-timeout\)"),
    ):
        run_experiment(grid, settings, run_dir)
    assert run_dir.summary()["status"] == "failed"
    assert "3 of 5 clients" in run_dir.summary()["reason"]


def test_clients_0_takes_who_is_there(tmp_path: Path) -> None:
    settings = tiny_settings(clients=0, clients_per_round=0, data__validation_fraction=0.85, output_dir=str(tmp_path))
    run_dir = RunDir(tmp_path / "run")
    with LocalGrid(4, settings.to_run_config()) as grid:
        run_experiment(grid, settings, run_dir)
    assert [c["client"] for c in clients_of(run_dir)] == [0, 1, 2, 3]


def test_a_model_that_the_last_round_did_not_evaluate_is_evaluated_at_the_end(tmp_path: Path) -> None:
    """The stages end before num-rounds, which alone would be evaluated."""
    run = run_local(tmp_path, **TRIO | STAGED, num_rounds=40, evaluation__every=0)
    rounds, final = run.rounds(), run.final()
    assert len(rounds) < 40
    assert {record["accuracy"] for record in rounds} == {None}
    assert final is not None
    assert (final["adversarial_accuracy"], run.summary()["accuracy"]) == (None, final["accuracy"])
    few = np.load(few_digits())
    right = piecework.load(run.path).predict(few["x_test"]).classes.numpy() == few["y_test"]
    assert final["accuracy"] == pytest.approx(right.mean())
    page = write_report(run).read_text("utf-8")
    assert f"trained model {final['accuracy']:.2%}" in page
    assert "under attack" not in page


@pytest.mark.parametrize("settings", [{"strategy": "fedavg"}, STAGED | {"num_rounds": 40}], ids=["rounds", "stages"])
def test_a_model_that_the_last_round_evaluated_is_not_evaluated_again(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Nor are the batch norms of a staged model measured again, whose record is a new one with the same bytes."""
    run = run_local(tmp_path, RecordingGrid, **TRIO | settings)
    assert run.rounds()[-1]["accuracy"] is not None
    assert run.final() is None
    last = [m.metadata.message_type for m in RecordingGrid.last.sent if m.metadata.group_id == str(len(run.rounds()))]
    assert len(last) == len({*last}) * 3


def test_statistics_of_a_stage_that_has_ended_are_not_kept(tmp_path: Path) -> None:
    """Resumed, the next stage would take them for its own model's, of which they lack a block."""
    stages = {"profl__shrinking": False, "profl__stage_rounds": 2, "num_rounds": 4}
    run = run_local(tmp_path, **TRIO | STAGED | stages)
    assert [record["stage"] for record in run.rounds()] == ["growing, step 1"] * 2 + ["growing, step 2"] * 2
    kept = [any(name.startswith("served/") for name in read_checkpoint(path).kept) for path in run.checkpoint_paths()]
    assert [path.name for path in run.checkpoint_paths()] == ["round-00001", "round-00003", "round-00004"]
    assert kept == [True, True, False]


class DeadAtOnce:
    """A context of multiprocessing whose processes end as soon as they start, as those of a script without a guard do."""

    Pipe = staticmethod(Pipe)
    exitcode = 1

    def Process(self, **_: Any) -> "DeadAtOnce":
        return self

    def start(self) -> None: ...
    def join(self) -> None: ...
    def kill(self) -> None: ...


SCRIPT = """
import piecework
from torch import nn
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 10))  # more than a pipe holds
piecework.run(model=net, dataset="digits", num_rounds=1, workers=2, fleet="unlimited", strategy="fedavg", progress=False)
"""


@pytest.mark.slow
def test_a_module_is_no_reason_to_wait_for_a_dead_worker(tmp_path: Path) -> None:
    """A started process that dies does not read its arguments, which a module used to be among."""
    command = [sys.executable, "-"]
    done = subprocess.run(command, input=SCRIPT, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert "this one, <stdin>, is no file. Write it to a file, or run with workers = 1" in done.stderr


def test_workers_that_cannot_start_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for clients, and says which line may be missing."""
    monkeypatch.setattr("piecework.server_app.local_grid.multiprocessing.get_context", lambda _: DeadAtOnce())
    with pytest.raises(RunAbortedError, match=r'exit code 1 before it could train.*under `if __name__ == "__main__":`'):
        run_local(tmp_path, strategy="fedavg", workers=2, **TRIO)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "<stdin>"), raising=False)
    with pytest.raises(RunAbortedError, match=r"<stdin>, is no file. Write it to a file, or run with workers = 1"):
        run_local(tmp_path / "stdin", strategy="fedavg", workers=2, **TRIO)
