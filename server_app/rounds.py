"""The one round loop: sample, send, aggregate as replies arrive, evaluate, record, checkpoint."""

import logging
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from piecework.device_profiles.clock import round_seconds
from piecework.device_profiles.fleet import Fleet, load_fleet
from piecework.federated_data.datasets import ArrayDataset, default_cache, load, prepare, set_name
from piecework.federation.autoattack import require_autoattack
from piecework.federation.evaluation import Evaluator, final_evaluation
from piecework.federation.faults import status_of
from piecework.federation.registry import ClientRegistry
from piecework.federation.transport import Transport
from piecework.models.cascade import Blueprint
from piecework.models.init_weights import account, pretrained
from piecework.models.partition import Piece
from piecework.models.trained_model import FORMAT
from piecework.server_app.rates import describe, require_rates
from piecework.server_app.records import Checkpoint, RunDir, newest_run
from piecework.server_app.recovery import Recovery, find_recovery, put_aside
from piecework.server_app.run_lock import run_lock
from piecework.server_app.served_model import ServedModel
from piecework.server_app.start import look_at
from piecework.server_app.summary import STOPPED, accuracy_by_device, stop_reason, summarise, why_empty
from piecework.strategies import find_strategy
from piecework.strategies.base import PieceStrategy
from piecework.strategies.state import Experiment
from piecework.training.settings import Settings, check_resume, too_many_asked
from piecework.training.setup import blueprint_for, check_augmentation, check_partition, image_attack, open_dataset

LOG = logging.getLogger("piecework")
OnRound = Callable[[dict[str, Any]], None]


class RunAbortedError(RuntimeError):
    """The run cannot go on; the message says why."""


def described(settings: Settings, data: ArrayDataset) -> dict[str, Any]:
    """What the file of a trained model says of the network and of its inputs, as JSON values."""
    return {
        "format": FORMAT,
        "model": {
            "name": settings.model,
            "width": settings.model_width,
            "options": settings.options(),
            "batch_norm": settings.norms,
            "input_shape": list(data.input_shape),
            "num_classes": data.num_classes,
        },
        "inputs": {
            "dataset": set_name(settings.dataset),
            "dtype": str(data.inputs.dtype),
            "mean": list(data.mean),
            "std": list(data.std),
            "vocabulary": data.vocabulary,
            "class_names": list(data.class_names),
        },
        "settings": settings.to_run_config(),
    }


def preflight(settings: Settings) -> tuple[Fleet, type[PieceStrategy], ArrayDataset, Blueprint]:
    """All that settings name, or a ValueError that says what is wrong with which: fleet, strategy, data set, model."""
    fleet, strategy = load_fleet(settings.fleet), find_strategy(settings.strategy)
    folder = prepare(
        settings.dataset, data_dir=settings.data_dir, cache_dir=default_cache(), download=settings.download
    )
    load(folder, verify=True)  # here once; clients trust what was verified
    data = open_dataset(settings.dataset, settings.data_dir)
    check_partition(settings, data)
    check_augmentation(settings, data)
    if strategy.policy_class.attacks(settings):
        image_attack(settings, data, settings.attack_steps)
    require_autoattack(settings, data)
    blueprint = blueprint_for(settings, data)
    if settings.init_weights:
        pretrained(Path(settings.init_weights), blueprint)
    return fleet, strategy, data, blueprint


class Run:
    """One run, new or resumed. `state_dir` is where emulated clients keep their stores."""

    def __init__(self, grid: Grid, settings: Settings, run_dir: RunDir) -> None:
        self.grid, self.settings, self.run_dir = grid, settings, run_dir
        fleet, strategy_class, self.data, blueprint = preflight(settings)
        self.recovery = find_recovery(run_dir) if settings.resume_from else Recovery(None)
        checkpoint = self.recovery.checkpoint
        self.values = self._first_values() if checkpoint is None else resumed_values(checkpoint, settings)
        self.registry = ClientRegistry(fleet, settings.seed, settings.clients, settings.reserve)
        self.transport = Transport(grid, settings.max_in_flight or default_in_flight(settings), settings.round_timeout)
        state_dir = settings.state_dir or str(run_dir.path / "clients")
        reference = blueprint_for(settings.model_copy(update={"model_width": 1.0}), self.data)
        # A resumed run may be longer; its learning rate goes on as it was planned at the first start.
        planned = settings.model_copy(update={"lr_rounds": self.values["lr-rounds"]})
        experiment = Experiment(planned, blueprint, reference, self.registry, self.values["experiment-id"], state_dir)
        self.strategy: PieceStrategy = strategy_class(experiment)
        if checkpoint is not None:
            self.strategy.state = type(self.strategy.state).from_values(self.values["strategy-state"])
        to_come = self.strategy.schedule(self.values["round"] + 1, settings.num_rounds)
        require_rates(planned, to_come, str(run_dir.path) if checkpoint is not None else "")
        self.arrays = checkpoint.arrays if checkpoint is not None else ArrayRecord()
        self.served = ServedModel(self.strategy)
        if checkpoint is not None:
            self.strategy.kept = self.served.restore(checkpoint.kept)
        attack, attacked = None, settings.evaluation_attack_examples
        if self.strategy.policy.attacks(settings):
            attack = image_attack(settings, self.data, settings.evaluation_attack_steps)
        self.evaluate = Evaluator(blueprint, self.data, settings.eval_batch_size, attack, attacked, settings.seed)

    def _first_values(self) -> dict[str, Any]:
        return {
            "experiment-id": uuid.uuid4().hex,
            "round": 0,
            "empty-rounds": 0,
            "best": None,
            "since-best": 0,
            "lr-rounds": self.settings.lr_rounds or self.settings.num_rounds,
        }

    def take_over(self) -> None:
        """The first change of the run's folder: what an earlier run, or rounds to be done again, left there goes."""
        put_aside(self.run_dir, self.recovery)
        if self.recovery.checkpoint is None:
            self.run_dir.forget()
        else:
            self.run_dir.forget_after(self.values["round"])
        self.run_dir.create(self.settings)
        self.run_dir.withdraw_results()

    def run(self, on_round: OnRound) -> str:
        """All rounds that are left. Returns `completed`; raises RunAbortedError or TooFewNodesError."""
        settings, strategy = self.settings, self.strategy
        self.gather()
        self.run_dir.write_coverage(look_at(strategy))
        for server_round in range(self.values["round"] + 1, settings.num_rounds + 1):
            if strategy.finished:
                break
            record = self.one_round(server_round)
            self._note(record)
            self.run_dir.append_round(record)
            on_round(record)
            if self.values["empty-rounds"] >= settings.max_empty_rounds:
                raise RunAbortedError(why_empty(record, settings))  # without a checkpoint: resumed, it is done again
            self._checkpoint(server_round)
            if self._finished_early(record):
                break
        if settings.resume_from and strategy.finished and self.values["round"] < settings.num_rounds:
            LOG.warning(
                "all stages ended after round %s of num-rounds = %s: their lengths were planned when the run began, and a "
                "longer run begins again",
                self.values["round"],
                settings.num_rounds,
            )
        if strategy.stage and not strategy.finished and self.values["round"] == settings.num_rounds:
            LOG.warning(
                "num-rounds = %s came before %s was over: the model is what has been trained so far",
                settings.num_rounds,
                strategy.stage,
            )
        self._leave()
        return "completed"

    def gather(self) -> None:
        """Wait for the clients; a new run's model depends on who they are. Raises TooFewNodesError."""
        self.registry.gather(self.grid, self.settings.node_timeout, self.settings.min_clients)
        if told := too_many_asked(self.settings, self.registry.clients):
            LOG.warning("%s; until then each round asks all of them", told)
        if self.strategy.personal and not any(member.test for member in self.registry.members.values()):
            raise ValueError(
                "evaluation is personal, and no client has a part of the test split: give the nodes some, as `piecework "
                "export-data` does"
            )
        self.strategy.begin()
        self.served.require_somebody()
        self.served.resume(self.arrays)
        self.evaluate.blueprint, self.evaluate.piece_class = self.served.blueprint, self.strategy.piece_class
        self.evaluate.prepare = self.strategy.prepare
        if not self.arrays:
            self.arrays = self._initial_arrays()

    def _initial_arrays(self) -> ArrayRecord:
        arrays = self.strategy.initial()
        if self.settings.init_weights:
            path = Path(self.settings.init_weights)
            taken, excluded = pretrained(path, self.strategy.blueprint)
            arrays |= taken
            self.values["init-weights"] = account(path, taken, excluded)
        return ArrayRecord({name: Array(value) for name, value in arrays.items()})

    def _leave(self) -> None:
        """Write the trained model; how it does, where attacks are of interest; and free what emulated clients cached."""
        settings, strategy = self.settings, self.strategy
        arrays, (atoms, head) = strategy.final(self.arrays), strategy.final_model()
        self._measure(self.values["round"], arrays, (atoms, head))
        if not self.served.is_of(arrays, atoms, head):
            raise RunAbortedError(
                "no client could measure the batch norms of the trained model (batch-norm = measured): "
                f"{strategy.dispatcher.silence()}"
            )
        arrays = self.served.complete(arrays)
        self.run_dir.save_model(
            arrays,
            {
                **described(settings, self.data),
                "experiment-id": self.values["experiment-id"],
                "atoms": list(atoms),
                "head": head,
                "variant": self.served.variant.to_values(),
                **strategy.model_details(),
            },
        )
        if strategy.policy.attacks(settings) or settings.autoattack_examples:
            if settings.autoattack_examples:
                LOG.warning("AutoAttack on %s images begins: minutes to an hour", settings.autoattack_examples)
            found = final_evaluation(self.evaluate, arrays, atoms, head, settings)
            self.run_dir.write_final(found | strategy.evaluation_details())
        for folder in Path(strategy.experiment.state_dir).glob(f"{self.values['experiment-id']}/*/features"):
            shutil.rmtree(folder, ignore_errors=True)

    def one_round(self, server_round: int) -> dict[str, Any]:
        """Pre-round query, train, aggregate, evaluate. Returns the round's record."""
        started = time.perf_counter()
        settings, strategy, config = self.settings, self.strategy, ConfigRecord()
        late = self._assemble()
        busy = self.registry.busy_clients()
        query, query_bytes = self._query_before_round(server_round)
        messages = strategy.configure_train(server_round, self.arrays, config, self.grid)
        self._deliver(server_round)
        replies = self.transport.exchange(server_round, messages)
        arrays, train_metrics = strategy.aggregate_train(server_round, replies)
        trained = time.perf_counter()
        self.arrays = arrays if arrays is not None else self.arrays
        due, personal, model = settings.evaluation_due(server_round), strategy.personal, strategy.trained_model()
        central = due and strategy.measurable and not personal
        measured, measured_bytes = self._measure(server_round, self.arrays, model) if central else (None, 0)
        questions = strategy.configure_evaluate(server_round, self.arrays, config, self.grid)
        self._deliver(server_round)
        answers = self.transport.exchange(server_round, questions)
        client_metrics = strategy.aggregate_evaluate(server_round, answers)
        known = central and self.served.is_of(self.arrays, *model)
        found = self.evaluate(self.served.complete(self.arrays), *model) if known else None
        accuracy, loss = (metric(client_metrics, key) for key in ("val-accuracy", "val-loss"))
        reports = list(strategy.reports.values())
        record = {
            "round": server_round,
            "stage": strategy.stage,
            "lr": strategy.rate(server_round),
            "lr_schedule": describe(strategy.settings),
            "init_weights": self.values.get("init-weights", "") if server_round == 1 else "",
            **strategy.details(),
            **strategy.evaluation_details(),
            "personal": personal,
            "accuracy": found.accuracy if found else accuracy if personal else None,
            "loss": found.loss if found else loss if personal else None,
            "adversarial_accuracy": found.adversarial_accuracy if found else None,
            "train_loss": metric(train_metrics, "train-loss"),
            "distillation_loss": metric(train_metrics, "distillation-loss"),
            "client_accuracy": None if personal else accuracy,
            "client_adversarial_accuracy": metric(client_metrics, "val-adversarial-accuracy"),
            "clients_evaluated": strategy.evaluated,
            "accuracy_by_device": accuracy_by_device(reports),
            "aggregated": arrays is not None,
            "examples": sum(member.examples for member in self.registry.members.values()),
            "trained": strategy.trained_rows(arrays is not None),
            "asked": len(reports),
            "answered": sum(report.status == "ok" for report in reports),
            "failed": sum(report.status != "ok" for report in reports),
            "late_replies": late,
            "busy": busy,
            "devices": self.registry.devices(),
            "unusable_nodes": self.registry.unusable(),
            "warning": too_many_asked(settings, self.registry.clients),
            "excluded": [{"client": c, "crashes": n} for c, n in sorted(strategy.excluded.items())],
            "bytes_down": sum(report.bytes_down for report in reports),
            "bytes_up": sum(report.bytes_up for report in reports) + self.registry.take_query_bytes(),
            "bytes_evaluation": measured_bytes + strategy.dispatcher.bytes(),
            "bytes_query": query_bytes,
            "batch_norm": self.served.recorded(personal),
            "statistics": measured,
            "evaluation": strategy.dispatcher.account() if strategy.dispatcher.log else None,
            "query": query,
            "enforced": strategy.policy.enforced,
            "seconds": time.perf_counter() - started,
            "train_seconds": trained - started,
            "simulated_seconds": round_seconds(report.simulated_seconds for report in reports),
            "clients": [asdict(report) for report in reports],
        }
        self.arrays = strategy.conclude(server_round, self.arrays, client_metrics)
        return record

    def _deliver(self, server_round: int) -> None:
        for batch in self.strategy.dispatcher.batches():
            self.strategy.delivered(self.transport.exchange(server_round, batch))

    def _query_before_round(self, server_round: int) -> tuple[dict[str, Any] | None, int]:
        """What the strategy has to know before the round: who answered, and bytes. Raises RunAbortedError if no client did."""
        questions = self.strategy.configure_query(server_round, self.arrays, self.grid)
        if questions is None:
            return None, 0
        self._deliver(server_round)
        if not self.strategy.aggregate_query(server_round, self.transport.exchange(server_round, questions)):
            raise RunAbortedError(
                f"no client could measure what {self.strategy.stage} starts from: {self.strategy.dispatcher.silence()}"
            )
        return self.strategy.dispatcher.account(), self.strategy.dispatcher.bytes()

    def _measure(
        self, server_round: int, arrays: ArrayRecord, model: tuple[Piece, str]
    ) -> tuple[dict[str, Any] | None, int]:
        """Have clients measure the batch norms of the model to be evaluated: who did, and bytes."""
        if self.served.is_of(arrays, *model):
            return None, 0
        messages = self.served.configure(server_round, arrays, model, self.grid)
        self._deliver(server_round)
        if not self.served.aggregate(server_round, self.transport.exchange(server_round, messages)):
            LOG.warning(
                "round %s: no client measured the batch norms of the model, which is not evaluated: %s",
                server_round,
                self.strategy.dispatcher.silence(),
            )
        return self.strategy.dispatcher.account(), self.strategy.dispatcher.bytes()

    def _assemble(self) -> list[dict[str, Any]]:
        """Take note of replies that came late, and wait, at most node-timeout, for clients that are free; the late replies."""
        late, deadline = [], time.monotonic() + self.settings.node_timeout
        while True:
            for sent, reply in self.transport.late():
                client = self.registry.client_of(sent.node_id)
                status = status_of(reply.error) if reply.has_error() else "ok"
                if client is not None:
                    self.strategy.note_error(client, sent.server_round, status)
                late.append({"client": client, "round": sent.server_round, "status": status})
            self.registry.busy = self.transport.busy()
            self.registry.update(self.grid)
            enough = len(self.registry.present(self.grid)) >= max(1, self.settings.min_clients)
            if (enough and not self.registry.expects()) or time.monotonic() > deadline:
                return late
            time.sleep(0.2)

    def _checkpoint(self, server_round: int) -> None:
        self.values |= {
            "round": server_round,
            "settings": self.settings.to_run_config(),
            "strategy-state": self.strategy.state.to_values(),
        }
        kept = ArrayRecord({**self.strategy.kept, **self.served.kept(self.arrays)})
        self.run_dir.save_checkpoint(self.arrays, self.values, kept)

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


def metric(metrics: MetricRecord | None, key: str) -> float | None:
    """A metric of a round; None where no client told it."""
    return float(metrics[key]) if metrics is not None and key in metrics else None  # type: ignore[arg-type]


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
    return RunDir(output_dir / f"{settings.strategy}-{short_name(settings.dataset)}-seed{settings.seed}-{now}")


def short_name(dataset: str) -> str:
    """A data set's name as part of a folder's: of one's own data what the file or folder is called."""
    _, colon, source = dataset.partition(":")
    name = Path(source).name.removesuffix(".npz") if colon else dataset
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def resumed_values(checkpoint: Checkpoint, settings: Settings) -> dict[str, Any]:
    """What a checkpoint remembers, for a run with these settings. Raises SettingsError where they do not go together."""
    check_resume(checkpoint.values["settings"], settings)
    return checkpoint.values | ({"lr-rounds": settings.lr_rounds} if settings.lr_rounds else {})


def run_experiment(grid: Grid, settings: Settings, run_dir: RunDir, on_round: OnRound = lambda _: None) -> None:
    """Run, and leave `summary.json` behind however it ends. Raises what went wrong, RunLockedError where another process
    writes this run.
    """
    started = time.perf_counter()
    with ExitStack() as held:
        if settings.resume_from:
            held.enter_context(run_lock(run_dir.path))  # no client may change what is read now
        run = Run(grid, settings, run_dir)  # refuses settings before anything is written
        if not settings.resume_from:
            held.enter_context(run_lock(run_dir.path))
        run.take_over()
        status, reason = "failed", ""
        try:
            status = run.run(on_round)
        except (KeyboardInterrupt, SystemExit):
            status, reason = STOPPED, stop_reason(run_dir)
            raise
        except BaseException as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            run_dir.write_summary(summarise(run_dir, status, reason, time.perf_counter() - started))
