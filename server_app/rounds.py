"""The round loop of all engines: sample, send, aggregate as replies arrive, evaluate, record, checkpoint."""

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from piecework.client_app.disk import StorageError
from piecework.federation.errors import RunAbortedError
from piecework.federation.evaluation import Evaluator, final_evaluation
from piecework.federation.registry import ClientRegistry
from piecework.federation.reply_guard import ReplyGuard, reply_limit
from piecework.federation.transport import Transport, Watch
from piecework.models.init_weights import account, pretrained
from piecework.models.partition import Piece
from piecework.planning.now import doing
from piecework.server_app.assembly import Assembly
from piecework.server_app.deadlines import Deadlines
from piecework.server_app.device_models import evaluate_device_models
from piecework.server_app.model_description import describe_model
from piecework.server_app.preflight import preflight
from piecework.server_app.rates import require_rates
from piecework.server_app.records import RunDir
from piecework.server_app.recovery import Recovery, find_recovery, quarantine
from piecework.server_app.round_record import ModelEvaluation, Opening, RoundRecord, TrainingPhase, record_of
from piecework.server_app.run_folder import COMPLETED, nothing_left, require_new
from piecework.server_app.run_lock import run_lock
from piecework.server_app.run_values import ends_early, first_values, note_round, resumed_values
from piecework.server_app.served_model import ServedModel
from piecework.server_app.start import check_coverage
from piecework.server_app.summary import empty_round_message, how_stopped, stage_warnings, summarise
from piecework.strategies import find_method
from piecework.strategies.method import StagedMethod
from piecework.strategies.query import aggregate_query, configure_query
from piecework.strategies.server import MethodServer
from piecework.strategies.state import Experiment
from piecework.training.settings import Settings, too_many_asked
from piecework.training.setup import blueprint_for, image_attack

LOG = logging.getLogger("piecework")
OnRound = Callable[[dict[str, Any]], None]


class Run:
    """One run, new or resumed. Creating it checks the settings and writes no file."""

    def __init__(self, grid: Grid, settings: Settings, run_dir: RunDir) -> None:
        self.started = time.perf_counter()
        self.earlier = run_dir.seconds() if settings.resume_from else 0.0  # of earlier processes
        self.settings, self.run_dir = settings, run_dir
        self.grid = ReplyGuard(grid, reply_limit(settings.messages.max_bytes, 0), settings.messages.round_timeout)
        fleet, self.data, blueprint = preflight(settings)
        self.recovery = find_recovery(run_dir) if settings.resume_from else Recovery(None)
        checkpoint = self.recovery.checkpoint
        self.values = first_values(settings) if checkpoint is None else resumed_values(checkpoint, settings)
        self.registry = ClientRegistry(fleet, settings.seed, settings.clients, settings.memory)
        self.registry.bound = {int(client): name for client, name in self.values.get("node-names", {}).items()}
        self.transport = Transport(
            self.grid, settings.messages.max_in_flight or default_in_flight(settings), settings.messages.round_timeout
        )
        state_dir = settings.state_dir or str(run_dir.path / "clients")  # for the stores of emulated clients
        reference = blueprint_for(settings.changed({"architecture.width": 1.0}), self.data)
        # A resumed run may have more rounds, but its learning rates follow the schedule of the first start.
        planned = settings.changed({"training.lr-rounds": self.values["lr-rounds"]})
        experiment = Experiment(planned, blueprint, reference, self.registry, self.values["experiment-id"], state_dir)
        self.strategy: MethodServer = MethodServer(experiment, find_method(settings.strategy))
        if checkpoint is not None:
            self.strategy.method.state = type(self.strategy.method.state).from_values(self.values["strategy-state"])
        self.deadlines = Deadlines(self.strategy, self.values["pace"])
        stragglers = self.values["stragglers"]
        self.assembly = Assembly(self.grid, self.transport, self.strategy, self.deadlines, stragglers)
        to_come = self.strategy.method.schedule(self.values["round"] + 1, settings.num_rounds)
        require_rates(planned, to_come, str(run_dir.path) if checkpoint is not None else "")
        self.arrays = checkpoint.arrays if checkpoint is not None else ArrayRecord()
        self.served = ServedModel(self.strategy)
        if checkpoint is not None:
            kept = self.strategy.late.restore(self.values["late"], checkpoint.kept)
            self.strategy.method.kept = self.served.restore(kept)
        attack, attacked = None, settings.evaluation.attack_examples
        if self.strategy.attacks:
            attack = image_attack(settings, self.data, settings.evaluation.attack_steps)
        self.evaluate = Evaluator(blueprint, self.data, settings.evaluation.batch_size, attack, attacked, settings.seed)

    def seconds(self) -> float:
        """Return the seconds that all processes of the run have taken so far."""
        return self.earlier + time.perf_counter() - self.started

    def prepare_run_dir(self) -> None:
        """Prepare the run's folder: delete the files of an earlier run, or of rounds to be repeated, and write the settings.

        This is the first time that the run changes the folder.
        """
        quarantine(self.run_dir, self.recovery)
        if self.recovery.checkpoint is None:
            if self.run_dir.has_begun():
                LOG.warning("%s: its run ended before its first checkpoint, and begins again", self.run_dir.path)
            self.run_dir.forget()
        else:
            self.run_dir.forget_after(self.values["round"])
        self.run_dir.create(self.settings)
        self.run_dir.withdraw_results()

    def run(self, on_round: OnRound) -> str:
        """Run all remaining rounds and write the model. Returns "completed". Raises RunAbortedError or TooFewNodesError."""
        settings, strategy = self.settings, self.strategy
        doing("waiting for the clients")
        self.wait_for_clients()
        self.run_dir.write_coverage(check_coverage(strategy))
        for server_round in range(self.values["round"] + 1, settings.num_rounds + 1):
            if strategy.method.progress.finished:
                break
            record = self.one_round(server_round)
            values = record.to_values()
            note_round(self.values, record)
            self.run_dir.append_round(values)
            on_round(values)
            if self.values["empty-rounds"] >= settings.faults.max_empty_rounds:
                raise RunAbortedError(
                    empty_round_message(values, strategy)
                )  # without a checkpoint, so that resuming repeats it
            self._checkpoint(server_round)
            if ends_early(self.values, record, settings):
                break
        for warning in stage_warnings(strategy, settings, self.values["round"]):
            LOG.warning("%s", warning)
        self.finalize()
        return COMPLETED

    def wait_for_clients(self) -> None:
        """Wait for the clients, then set up the model, which may depend on them. Raises TooFewNodesError or ValueError."""
        self.registry.wait_for_clients(self.grid, self.settings.messages.node_timeout, self.settings.faults.min_clients)
        if warning := too_many_asked(self.settings, self.registry.clients):
            LOG.warning("%s; until then each round asks all of them", warning)
        if self.strategy.method.personal and not any(member.test for member in self.registry.members.values()):
            raise ValueError(
                "evaluation.mode is personal, but no client has a part of the test split: give them parts, as `piecework "
                "export-data` does"
            )
        self.strategy.method.begin(self.strategy.resources)
        self.served.require_capable_client()
        self.served.resume(self.arrays)
        self.evaluate.piece_class = self.strategy.method.piece_class
        self.evaluate.prepare = self.strategy.method.prepare
        if not self.arrays:
            self.arrays = self._initial_arrays()

    def _initial_arrays(self) -> ArrayRecord:
        arrays = self.strategy.method.initial()
        if self.settings.training.init_weights:
            path = Path(self.settings.training.init_weights)
            taken, excluded = pretrained(path, self.strategy.method.cut.model)
            arrays |= taken
            self.values["init-weights"] = account(path, taken, excluded)
        return ArrayRecord({name: Array(value) for name, value in arrays.items()})

    def finalize(self) -> None:
        """Write the trained model, evaluate it if it is to be attacked, and delete the cached features of emulated clients."""
        settings, strategy = self.settings, self.strategy
        doing("writing the trained model")
        arrays, (atoms, head) = self.arrays, strategy.method.trained_model()
        if isinstance(strategy.method, StagedMethod):
            arrays, (atoms, head) = strategy.method.final(arrays), strategy.method.final_model()
        early = self.values["round"] < settings.num_rounds
        self._measure(
            self.values["round"], arrays, (atoms, head), last=True, again=early and settings.norms == "static"
        )
        if not self.served.is_of(arrays, atoms, head):
            raise RunAbortedError(
                "no client could measure the batch norms of the trained model (architecture.batch-norm = "
                f"{settings.norms}): "
                f"{strategy.dispatcher.why_unanswered()}"
            )
        if not strategy.method.personal:
            self._evaluate_device_models(arrays, (atoms, head))
        arrays = self.served.complete(arrays)
        self.run_dir.save_model(
            arrays,
            {
                **describe_model(settings, self.data),
                "experiment-id": self.values["experiment-id"],
                "atoms": list(atoms),
                "head": head,
                "variant": self.served.variant.to_values(),
                **strategy.method.model_details,
            },
        )
        if strategy.attacks or settings.evaluation.autoattack_examples:
            if settings.evaluation.autoattack_examples:
                LOG.warning(
                    "starting AutoAttack on %s images, which takes minutes to an hour",
                    settings.evaluation.autoattack_examples,
                )
            self.evaluate.show(self.served.blueprint)
            found = final_evaluation(self.evaluate, arrays, atoms, head, settings)
            self.run_dir.write_final(found | strategy.method.evaluation_details)
        for folder in Path(strategy.experiment.state_dir).glob(f"{self.values['experiment-id']}/*/features"):
            shutil.rmtree(folder, ignore_errors=True)

    def _evaluate_device_models(self, arrays: ArrayRecord, model: tuple[Piece, str]) -> None:
        """Evaluate the models that devices deploy, if there are any but the served one, and write the result."""
        doing("evaluating the models that devices deploy")
        last = self.values["round"]
        found = evaluate_device_models(
            self.served,
            last,
            arrays,
            model,
            self.evaluate,
            lambda served: self._ask_to_measure(served, last, arrays, model, last=False),
        )
        if found:
            self.run_dir.write_models(found)

    def one_round(self, server_round: int) -> RoundRecord:
        """Query clients, train, aggregate, evaluate and record; then let the strategy conclude the round, e.g. end a stage."""
        started = time.perf_counter()
        doing("round %s: training", server_round)
        model_bytes = sum(len(array.data) for array in self.arrays.values())
        self.grid.limit = reply_limit(self.settings.messages.max_bytes, model_bytes)
        opening = self._open(server_round)
        aggregated, metrics = self._train(server_round)
        self.assembly.pass_time(server_round)
        training = TrainingPhase(aggregated, metrics, time.perf_counter() - started)
        doing("round %s: evaluating", server_round)
        evaluation = self._evaluate(server_round)
        record = record_of(
            self.strategy,
            server_round,
            opening,
            training,
            evaluation,
            init_weights=self.values.get("init-weights", "") if server_round == 1 else "",
            seconds=time.perf_counter() - started,
        )
        self.arrays = self.strategy.conclude(self.arrays)
        return record

    def _open(self, server_round: int) -> Opening:
        """Wait for clients and send the pre-round query. Raises RunAbortedError if the answers do not suffice."""
        late, waited = self.assembly.assemble()
        busy = self.registry.busy_clients()
        strategy = self.strategy
        questions = configure_query(strategy, server_round, self.arrays, self.grid)
        if questions is None:
            return Opening(late, busy, None, 0, waited)
        self._deliver(server_round)
        if not aggregate_query(strategy, server_round, self.transport.exchange(server_round, questions)):
            raise RunAbortedError(
                f"no client could measure the features that {strategy.method.progress.stage} starts from: "
                f"{strategy.dispatcher.why_unanswered()}"
            )
        return Opening(late, busy, strategy.dispatcher.account(), strategy.dispatcher.bytes(), waited)

    def _train(self, server_round: int) -> tuple[bool, MetricRecord | None]:
        """Have clients train. Returns whether that made a new model, and the aggregated metrics."""
        messages = self.strategy.configure_train(server_round, self.arrays, ConfigRecord(), self.grid)
        watch = self.deadlines if not self.settings.simulated else None
        self.deadlines.begin()
        self._deliver(server_round, watch)
        # A round may end before all have answered.
        with closing(self.transport.exchange(server_round, messages, watch)) as replies:
            arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        self.deadlines.finish()
        self.strategy.late.close(server_round)
        self.arrays = arrays if arrays is not None else self.arrays
        return arrays is not None, metrics

    def _evaluate(self, server_round: int) -> ModelEvaluation:
        """Evaluate the new model if it is due: on the server, if its batch norms are known, and on clients."""
        strategy, model = self.strategy, self.strategy.method.trained_model()
        due = (
            self.settings.evaluation_due(server_round)
            and strategy.method.progress.measurable
            and not strategy.method.personal
        )
        last = server_round == self.settings.num_rounds
        statistics, measured_bytes = self._measure(server_round, self.arrays, model, last=last) if due else (None, 0)
        questions = strategy.configure_evaluate(server_round, self.arrays, ConfigRecord(), self.grid)
        self._deliver(server_round)
        clients = strategy.aggregate_evaluate(server_round, self.transport.exchange(server_round, questions))
        known = due and self.served.is_of(self.arrays, *model)
        self.evaluate.show(self.served.blueprint)
        central = self.evaluate(self.served.complete(self.arrays), *model) if known else None
        answers = strategy.dispatcher.account() if strategy.dispatcher.log else None
        message_bytes, norms = (
            measured_bytes + strategy.dispatcher.bytes(),
            self.served.statistics_name(strategy.method.personal),
        )
        return ModelEvaluation(central, clients, answers, statistics, message_bytes, norms)

    def _deliver(self, server_round: int, watch: Watch | None = None) -> None:
        for batch in self.strategy.dispatcher.batches():
            self.strategy.gate.delivered(self.transport.exchange(server_round, batch, watch))

    def _measure(
        self, server_round: int, arrays: ArrayRecord, model: tuple[Piece, str], *, last: bool, again: bool = False
    ) -> tuple[dict[str, Any] | None, int]:
        """Have clients measure the batch norms of the model to be evaluated, unless they have (or, with `again`, even then).

        `last` says that the run ends with this model. Returns which clients measured, and message bytes.
        """
        if self.served.is_of(arrays, *model) and not (again and self.served.statistics):
            return None, 0
        self._ask_to_measure(self.served, server_round, arrays, model, last=last)
        return self.strategy.dispatcher.account(), self.strategy.dispatcher.bytes()

    def _ask_to_measure(
        self, served: ServedModel, server_round: int, arrays: ArrayRecord, model: tuple[Piece, str], *, last: bool
    ) -> None:
        """Have clients measure the batch norms of a model."""
        messages = served.configure(server_round, arrays, model, self.grid, last=last)
        self._deliver(server_round)
        if not served.aggregate(server_round, self.transport.exchange(server_round, messages)):
            LOG.warning(
                "round %s: no client measured the batch norms of the model, which is not evaluated: %s",
                server_round,
                self.strategy.dispatcher.why_unanswered(),
            )

    def _checkpoint(self, server_round: int) -> None:
        self.values |= {
            "round": server_round,
            "settings": self.settings.to_run_config(),
            "node-names": {str(client): name for client, name in self.registry.bound.items()},
            "pace": self.deadlines.to_values(),
            "late": self.strategy.late.to_values(),
            "stragglers": self.assembly.stragglers.tasks,
            "strategy-state": self.strategy.method.state.to_values(),
            "seconds": self.seconds(),
        }
        kept = ArrayRecord({**self.strategy.method.kept, **self.strategy.late.kept(), **self.served.kept(self.arrays)})
        self.run_dir.save_checkpoint(self.arrays, self.values, kept)


def default_in_flight(settings: Settings) -> int:
    """Return how many messages may be unanswered: enough for all workers; for real devices, in effect all."""
    return max(4, 2 * settings.workers) if settings.engine != "deployment" else 2**16


def run_experiment(grid: Grid, settings: Settings, run_dir: RunDir, on_round: OnRound = lambda _: None) -> None:
    """Run all rounds, and write `summary.json` however the run ends.

    A resumed run of which nothing is left stays as it is. Raises the error that ended the run, or RunLockedError if another
    process is writing this run, and ValueError if a new run's name is taken.
    """
    with ExitStack() as held:
        if settings.resume_from:
            held.enter_context(run_lock(run_dir.path))  # no other process may change the files that are read now
        run = Run(grid, settings, run_dir)  # rejects settings before any file is written
        if not settings.resume_from:
            held.enter_context(run_lock(run_dir.path))
            require_new(run_dir)  # only now: a run of this name may have completed since the first look
        if settings.resume_from and nothing_left(run_dir, settings, run.recovery):
            return
        run.prepare_run_dir()
        status, reason = "failed", ""
        try:
            status = run.run(on_round)
        except (KeyboardInterrupt, SystemExit):
            status, reason = how_stopped(run_dir)
            raise
        except BaseException as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            try:
                run_dir.write_summary(summarise(run_dir, status, reason, run.seconds()))
            except StorageError as unwritten:
                if status == COMPLETED:
                    raise
                LOG.warning("%s", unwritten)  # what ended the run is told instead
