"""The one round loop: sample, send, aggregate as replies arrive, evaluate, record, checkpoint."""

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from client_app.setup import blueprint_for, check_shares, open_dataset
from device_profiles.clock import round_seconds
from device_profiles.fleet import Fleet, load_fleet
from federated_data.datasets import ArrayDataset, default_cache, load, prepare
from models.cascade import Blueprint, initial_state
from server_app.evaluation import Evaluator
from server_app.mail import Mail
from server_app.records import Checkpoint, RunDir, newest_run
from server_app.roster import Roster
from server_app.settings import Settings, check_resume
from server_app.summary import accuracy_by_device, summarise, why_empty
from strategies import find_strategy
from strategies.base import PieceStrategy
from strategies.faults import status_of
from strategies.state import Experiment

OnRound = Callable[[dict[str, Any]], None]


class RunAbortedError(RuntimeError):
    """The run cannot go on; the message says why."""


def preflight(settings: Settings) -> tuple[Fleet, type[PieceStrategy], ArrayDataset, Blueprint]:
    """All that settings name, or a ValueError that says what is wrong with which: fleet, strategy, data set, model."""
    fleet, strategy = load_fleet(settings.fleet), find_strategy(settings.strategy)
    folder = prepare(
        settings.dataset, data_dir=settings.data_dir, cache_dir=default_cache(), download=settings.download
    )
    load(folder, verify=True)  # here once; clients trust what was verified
    data = open_dataset(settings.dataset, settings.data_dir)
    check_shares(settings, data)
    return fleet, strategy, data, blueprint_for(settings, data)


class Run:
    """One run, new or resumed. `state_dir` is where emulated clients keep their stores."""

    def __init__(self, grid: Grid, settings: Settings, run_dir: RunDir) -> None:
        self.grid, self.settings, self.run_dir = grid, settings, run_dir
        fleet, strategy_class, self.data, blueprint = preflight(settings)
        checkpoint = run_dir.load_checkpoint() if settings.resume_from else None
        self.values = self._begin(checkpoint)
        self.roster = Roster(fleet, settings.seed, settings.clients, settings.reserve)
        self.mail = Mail(grid, settings.max_in_flight or default_in_flight(settings), settings.round_timeout)
        state_dir = settings.state_dir or str(run_dir.path / "clients")
        reference = blueprint_for(settings.model_copy(update={"model_width": 1.0}), self.data)
        # A resumed run may be longer; its learning rate goes on as it was planned at the first start.
        planned = settings.model_copy(update={"lr_rounds": self.values["lr-rounds"]})
        experiment = Experiment(planned, blueprint, reference, self.roster, self.values["experiment-id"], state_dir)
        self.strategy: PieceStrategy = strategy_class(experiment)
        if checkpoint is not None:
            self.strategy.state = type(self.strategy.state).from_values(self.values["strategy-state"])
            self.arrays = checkpoint.arrays
        else:
            state = initial_state(blueprint, settings.seed, exits=self.strategy.rule.exits)
            self.arrays = ArrayRecord({name: Array(value.numpy()) for name, value in state})
        self.evaluate = Evaluator(blueprint, self.data, settings.eval_batch_size)

    def _begin(self, checkpoint: Checkpoint | None) -> dict[str, Any]:
        if checkpoint is None:
            self.run_dir.forget()
            return {
                "experiment-id": uuid.uuid4().hex,
                "round": 0,
                "empty-rounds": 0,
                "best": None,
                "since-best": 0,
                "lr-rounds": self.settings.lr_rounds or self.settings.num_rounds,
            }
        check_resume(checkpoint.values["settings"], self.settings)
        self.run_dir.forget_after(checkpoint.values["round"])
        return checkpoint.values

    def run(self, on_round: OnRound) -> str:
        """All rounds that are left. Returns `completed`; raises RunAbortedError or TooFewNodesError."""
        self.roster.gather(self.grid, self.settings.node_timeout, self.settings.min_clients)
        for server_round in range(self.values["round"] + 1, self.settings.num_rounds + 1):
            record = self.one_round(server_round)
            self._note(record)
            self.run_dir.append_round(record)
            on_round(record)
            if self.values["empty-rounds"] >= self.settings.max_empty_rounds:
                raise RunAbortedError(
                    why_empty(record, self.settings)
                )  # without a checkpoint: resumed, it is done again
            self._checkpoint(server_round)
            if self._finished_early(record):
                break
        description = {"settings": self.settings.to_run_config(), "experiment-id": self.values["experiment-id"]}
        self.run_dir.save_model(self.arrays, description)
        return "completed"

    def one_round(self, server_round: int) -> dict[str, Any]:
        """Train, aggregate, evaluate. Returns the round's record."""
        started = time.perf_counter()
        settings, strategy, config = self.settings, self.strategy, ConfigRecord()
        late = self._assemble()
        busy = self.roster.busy_clients()
        messages = strategy.configure_train(server_round, self.arrays, config, self.grid)
        for wave in strategy.deliver():
            strategy.delivered(self.mail.exchange(server_round, wave))
        replies = self.mail.exchange(server_round, messages)
        arrays, train_metrics = strategy.aggregate_train(server_round, replies)
        trained = time.perf_counter()
        self.arrays = arrays if arrays is not None else self.arrays
        questions = strategy.configure_evaluate(server_round, self.arrays, config, self.grid)
        answers = self.mail.exchange(server_round, questions)
        client_metrics = strategy.aggregate_evaluate(server_round, answers)
        last = server_round == settings.num_rounds
        due = last or (settings.evaluate_every and server_round % settings.evaluate_every == 0)
        loss, accuracy = self.evaluate(self.arrays) if due else (None, None)
        reports = list(strategy.reports.values())
        return {
            "round": server_round,
            "stage": "",
            "accuracy": accuracy,
            "loss": loss,
            "train_loss": float(train_metrics["train-loss"]) if train_metrics is not None else None,  # type: ignore[arg-type]
            "client_accuracy": float(client_metrics["val-accuracy"]) if client_metrics is not None else None,  # type: ignore[arg-type]
            "clients_evaluated": strategy.evaluated,
            "accuracy_by_device": accuracy_by_device(reports),
            "aggregated": arrays is not None,
            "asked": len(reports),
            "answered": sum(report.status == "ok" for report in reports),
            "failed": sum(report.status != "ok" for report in reports),
            "late_replies": late,
            "busy": busy,
            "unusable_nodes": self.roster.unusable(),
            "left_out": [{"client": c, "crashes": n} for c, n in sorted(strategy.left_out.items())],
            "bytes_down": sum(report.bytes_down for report in reports),
            "bytes_up": sum(report.bytes_up for report in reports) + self.roster.take_query_bytes(),
            "bytes_evaluation": strategy.evaluation_bytes,
            "enforced": settings.enforced,
            "seconds": time.perf_counter() - started,
            "train_seconds": trained - started,
            "simulated_seconds": round_seconds(report.simulated_seconds for report in reports),
            "clients": [asdict(report) for report in reports],
        }

    def _assemble(self) -> list[dict[str, Any]]:
        """Take note of replies that came late, and wait, at most node-timeout, for clients that are free; the late replies."""
        late, deadline = [], time.monotonic() + self.settings.node_timeout
        while True:
            for sent, reply in self.mail.late():
                client = self.roster.client_of(sent.node_id)
                status = status_of(reply.error) if reply.has_error() else "ok"
                if client is not None:
                    self.strategy.note_error(client, sent.server_round, status)
                late.append({"client": client, "round": sent.server_round, "status": status})
            self.roster.busy = self.mail.busy()
            self.roster.update(self.grid)
            enough = len(self.roster.present(self.grid)) >= max(1, self.settings.min_clients)
            if (enough and not self.roster.expects()) or time.monotonic() > deadline:
                return late
            time.sleep(0.2)

    def _checkpoint(self, server_round: int) -> None:
        self.values |= {
            "round": server_round,
            "settings": self.settings.to_run_config(),
            "strategy-state": self.strategy.state.to_values(),
        }
        self.run_dir.save_checkpoint(self.arrays, self.values)

    def _note(self, record: dict[str, Any]) -> None:
        """What decides when to stop is part of the checkpoint."""
        self.values["empty-rounds"] = 0 if record["aggregated"] else self.values["empty-rounds"] + 1
        accuracy, best = record["accuracy"], self.values["best"]
        if accuracy is not None:
            better = best is None or accuracy > best
            self.values["best"] = accuracy if better else best
            self.values["since-best"] = 0 if better else self.values["since-best"] + 1

    def _finished_early(self, record: dict[str, Any]) -> bool:
        accuracy: float = record["accuracy"] or 0.0
        return 0 < self.settings.target_accuracy <= accuracy or 0 < self.settings.patience <= self.values["since-best"]


def default_in_flight(settings: Settings) -> int:
    """Enough to keep every worker busy; real devices all work at once."""
    return max(4, 2 * settings.workers) if settings.engine != "deployment" else 2**16


def resolve_run_dir(settings: Settings) -> RunDir:
    """The folder of this run: a new one, or that of the run to resume. Raises ValueError where there is none."""
    output_dir = Path(settings.output_dir)
    if settings.resume_from == "auto":
        found = newest_run(output_dir, settings.hash())
        if found is None:
            raise ValueError(f"resume-from = 'auto': no run with these settings in {output_dir.resolve()}")
        return RunDir(found)
    if settings.resume_from:
        if not (Path(settings.resume_from) / "settings.toml").is_file():
            raise ValueError(f"resume-from = {settings.resume_from!r}: not the folder of a run")
        return RunDir(Path(settings.resume_from))
    if settings.run_name:
        if (output_dir / settings.run_name / "settings.toml").exists():
            raise ValueError(
                f"run-name = {settings.run_name!r}: {output_dir.resolve()} has a run of this name; choose another name, or go "
                "on with it by resume-from"
            )
        return RunDir(output_dir / settings.run_name)
    now = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    return RunDir(output_dir / f"{settings.strategy}-{safe_name(settings.dataset)}-{now}")


def safe_name(text: str) -> str:
    """A data set's name as part of a folder's."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)


def run_experiment(grid: Grid, settings: Settings, run_dir: RunDir, on_round: OnRound = lambda _: None) -> None:
    """Run, and leave `summary.json` behind however it ends. Raises what went wrong."""
    started = time.perf_counter()
    run = Run(grid, settings, run_dir)  # refuses settings before anything is written
    run_dir.create(settings)
    run_dir.withdraw_results()
    status, reason = "failed", ""
    try:
        status = run.run(on_round)
    except BaseException as error:
        reason = str(error) or type(error).__name__
        raise
    finally:
        run_dir.write_summary(summarise(run_dir, status, reason, time.perf_counter() - started))
