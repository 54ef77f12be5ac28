"""The round loop of all engines: sample, send, aggregate as replies arrive, evaluate, record, checkpoint."""

import logging
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from piecework.federation.errors import RunAbortedError
from piecework.federation.evaluation import Evaluator, final_evaluation
from piecework.federation.registry import ClientRegistry
from piecework.federation.reply_guard import ReplyGuard, reply_limit
from piecework.federation.transport import Transport, Watch, default_in_flight
from piecework.models.init_weights import account, read_pretrained
from piecework.models.partition import Piece
from piecework.server_app.assembly import Assembly
from piecework.server_app.deadlines import Deadlines
from piecework.server_app.device_models import evaluate_device_models
from piecework.server_app.model_description import describe_model
from piecework.server_app.moment import Moments, predict_seconds
from piecework.server_app.packages import packages_of_clients
from piecework.server_app.preflight import preflight
from piecework.server_app.rates import require_rates
from piecework.server_app.records import RunDir
from piecework.server_app.recovery import Recovery, find_recovery, quarantine
from piecework.server_app.round_record import ModelEvaluation, Opening, RoundRecord, TrainingPhase, record_of
from piecework.server_app.run_folder import COMPLETED
from piecework.server_app.run_values import (
    ends_early,
    first_values,
    is_spent,
    known_privacy,
    note_releases,
    note_round,
    resume_values,
)
from piecework.server_app.served_model import ServedModel
from piecework.server_app.start import check_coverage
from piecework.server_app.summary import describe_unpredicted, empty_round_message, stage_warnings
from piecework.strategies import find_method
from piecework.strategies.method import StagedMethod
from piecework.strategies.private_rounds import require_classes
from piecework.strategies.query import aggregate_query, configure_query
from piecework.strategies.server import MethodServer
from piecework.strategies.state import Experiment
from piecework.training.settings import Settings, too_many_asked
from piecework.training.setup import blueprint_for, expected_of, image_attack

LOG = logging.getLogger("piecework")
OnRound = Callable[[dict[str, Any]], None]
Messages = Iterable[Message]
Found = TypeVar("Found")


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
        self.values = first_values(settings) if checkpoint is None else resume_values(checkpoint, settings)
        needed = packages_of_clients(settings)
        self.registry = ClientRegistry(fleet, settings.seed, settings.clients, settings.memory, packages=needed)
        self.registry.expected = expected_of(settings)
        self.registry.bound = {int(client): name for client, name in self.values.get("node-names", {}).items()}
        in_flight = settings.messages.max_in_flight or self.grid.in_flight or default_in_flight(settings)
        self.transport = Transport(self.grid, in_flight, settings.messages.round_timeout)
        state_dir = settings.state_dir or str(run_dir.path / "clients")  # for the stores of emulated clients
        reference = blueprint_for(settings.with_values({"architecture.width": 1.0}), self.data)
        # A resumed run may have more rounds, but its learning rates follow the schedule of the first start.
        planned = settings.with_values({"training.lr-rounds": self.values["lr-rounds"]})
        known = known_privacy(self.values, run_dir, settings)
        self.registry.keeps_classes = settings.privacy.on
        self.registry.classes = {int(client): device for client, device in known.get("devices", {}).items()}
        experiment = Experiment(
            planned, blueprint, reference, self.registry, self.values["experiment-id"], state_dir, known
        )
        self.server: MethodServer = MethodServer(experiment, find_method(settings.strategy))
        self.method = self.server.method
        self.moments = Moments(run_dir.path, settings.num_rounds, self.server, parallel=settings.engine == "deployment")
        if checkpoint is not None:
            self.method.state = type(self.method.state).from_values(self.values["strategy-state"])
        self.deadlines = Deadlines(self.server, self.values["pace"])
        stragglers = self.values["stragglers"]
        self.assembly = Assembly(self.grid, self.transport, self.server, self.deadlines, stragglers)
        to_come = self.method.schedule(self.values["round"] + 1, settings.num_rounds)
        require_rates(planned, to_come, str(run_dir.path) if checkpoint is not None else "")
        self.arrays = checkpoint.arrays if checkpoint is not None else ArrayRecord()
        self.served = ServedModel(self.server)
        if checkpoint is not None:
            kept = self.server.late.restore(self.values["late"], checkpoint.kept)
            self.method.kept = self.served.restore(kept)
        attack, attacked = None, settings.evaluation.attack_examples
        if self.server.attacks:
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
        settings, server = self.settings, self.server
        self.moments.begin("waiting for the clients")
        self.wait_for_clients()
        self.run_dir.write_coverage(check_coverage(server))
        unpredicted = ""
        for server_round in range(self.values["round"] + 1, settings.num_rounds + 1):
            if self.method.progress.finished or is_spent(server.privacy, server_round):
                break
            record = self.one_round(server_round)
            values = record.to_values()
            note_round(self.values, record)
            note_releases(self.run_dir, server.privacy)
            self.run_dir.append_round(values)
            on_round(values)
            if not unpredicted and (unpredicted := describe_unpredicted(values)):
                LOG.warning("%s", unpredicted)
            if self.values["empty-rounds"] >= settings.faults.max_empty_rounds:
                # There is no checkpoint of it, so that resuming repeats it.
                raise RunAbortedError(empty_round_message(values, server))
            self._checkpoint(server_round)
            if ends_early(self.values, record, settings):
                break
        for warning in stage_warnings(server, settings, self.values["round"]):
            LOG.warning("%s", warning)
        self.finalize()
        return COMPLETED

    def wait_for_clients(self) -> None:
        """Wait for the clients, then set up the model, which may depend on them. Raises TooFewNodesError or ValueError."""
        self.registry.wait_for_clients(self.grid, self.settings.messages.node_timeout, self.settings.faults.min_clients)
        if warning := too_many_asked(self.settings, self.registry.clients):
            LOG.warning("%s; until then each round asks all of them", warning)
        if self.method.personal and not any(member.test for member in self.registry.members.values()):
            raise ValueError(
                "evaluation.mode is personal, but no client has a part of the test split: give them parts, as `piecework "
                "export-data` does"
            )
        if self.server.privacy is not None:
            require_classes(self.registry.auto)
        self.method.begin(self.server.resources)
        self.served.require_capable_client()
        self.served.resume(self.arrays)
        self.evaluate.piece_class = self.method.piece_class
        self.evaluate.prepare = self.method.prepare
        if not self.arrays:
            self.arrays = self._initial_arrays()

    def _initial_arrays(self) -> ArrayRecord:
        arrays = self.method.initial()
        if self.settings.training.init_weights:
            path = Path(self.settings.training.init_weights)
            taken, excluded = read_pretrained(path, self.method.cut.model)
            arrays |= taken
            self.values["init-weights"] = account(path, taken, excluded)
        return ArrayRecord({name: Array(value) for name, value in arrays.items()})

    def finalize(self) -> None:
        """Write the trained model, evaluate it if the last round did not, and delete cached features of emulated clients."""
        settings, server = self.settings, self.server
        self.moments.begin("writing the trained model")
        arrays, (atoms, head) = self.arrays, self.method.trained_model()
        if isinstance(self.method, StagedMethod):
            arrays, (atoms, head) = self.method.final(arrays), self.method.final_model()
        last = self.values["round"]
        again = last < settings.num_rounds and settings.norms == "static" and self.served.statistics
        measured_bytes = 0
        if again or not self.served.is_of(arrays, atoms, head):
            _, measured_bytes = self._measure(self.served, last, arrays, (atoms, head), last=True)
        if not self.served.is_of(arrays, atoms, head):
            raise RunAbortedError(
                "no client could measure the batch norms of the trained model (architecture.batch-norm = "
                f"{settings.norms}): {server.dispatcher.why_unanswered()}"
            )
        if not self.method.personal:
            self.moments.begin("evaluating the models that devices deploy")

            def measure(served: ServedModel) -> int:
                return self._measure(served, last, arrays, (atoms, head), last=False)[1]

            if found := evaluate_device_models(self.served, last, arrays, (atoms, head), self.evaluate, measure):
                self.run_dir.write_models(found)
        arrays = self.served.complete(arrays)
        self.run_dir.save_model(
            arrays,
            {
                **describe_model(settings, self.data),
                "experiment-id": self.values["experiment-id"],
                "atoms": list(atoms),
                "head": head,
                "variant": self.served.variant.to_values(),
                **self.method.model_details,
            },
        )
        self._evaluate_trained(arrays, atoms, head, measured_bytes)
        for folder in Path(server.experiment.state_dir).glob(f"{self.values['experiment-id']}/*/features"):
            shutil.rmtree(folder, ignore_errors=True)

    def _evaluate_trained(self, arrays: ArrayRecord, atoms: Piece, head: str, measured_bytes: int) -> None:
        """Evaluate the trained model if it is to be attacked, or if it is not the model that the last round evaluated.

        `measured_bytes` are those of messages in which clients measured its batch norms.
        """
        images = self.settings.evaluation.autoattack_examples
        known = measured_bytes == 0 and (rounds := self.run_dir.rounds()) and rounds[-1]["accuracy"] is not None
        if not (self.server.attacks or images) and (known or self.method.personal):
            return
        if images:
            LOG.warning("starting AutoAttack on %s images, which takes minutes to an hour", images)
        self.evaluate.show(self.served.blueprint)
        found = final_evaluation(self.evaluate, arrays, atoms, head, self.settings)
        self.run_dir.write_final(found | self.method.evaluation_details | {"bytes_measuring": measured_bytes})

    def one_round(self, server_round: int) -> RoundRecord:
        """Survey the clients, train, evaluate and record; then let the method conclude the round, e.g. end a stage."""
        started = time.perf_counter()
        self.moments.begin("choosing clients", server_round)
        model_bytes = sum(len(array.data) for array in self.arrays.values())
        self.grid.limit = reply_limit(self.settings.messages.max_bytes, model_bytes)
        opening = self._survey(server_round)
        training = self._train(server_round, started)
        self.moments.begin("evaluating", server_round)
        evaluation = self._evaluate(server_round)
        taken = self.values.get("init-weights", "") if server_round == 1 else ""
        seconds = time.perf_counter() - started
        record = record_of(
            self.server, server_round, opening, training, evaluation, init_weights=taken, seconds=seconds
        )
        self.arrays = self.server.conclude(self.arrays)
        return record

    def _exchange(
        self, server_round: int, messages: Messages, aggregate: Callable[[Messages], Found], watch: Watch | None = None
    ) -> Found:
        """Deliver frozen units, then send the messages that were configured. Returns what `aggregate` makes of the replies."""
        dispatcher = self.server.dispatcher
        for batch in dispatcher.batches():
            dispatcher.note_delivered(self.transport.exchange(server_round, batch, watch))
        seconds = predict_seconds(self.server)
        self.grid.expect({self.registry.members[client].node_id: each for client, each in seconds.items()})
        # A round may end before all have answered.
        with closing(self.transport.exchange(server_round, messages, watch)) as replies:
            return aggregate(self.moments.follow(replies))

    def _survey(self, server_round: int) -> Opening:
        """Wait for clients and send the pre-round query. Raises RunAbortedError if the answers do not suffice."""
        late, waited = self.assembly.assemble()
        server, busy = self.server, self.registry.busy_clients()
        questions = configure_query(server, server_round, self.arrays, self.grid)
        if questions is None:
            return Opening(late, busy, None, 0, waited)
        self.moments.begin("asking clients", server_round)
        if not self._exchange(server_round, questions, partial(aggregate_query, server)):
            raise RunAbortedError(
                f"no client could measure the features that {self.method.progress.stage} starts from: "
                f"{server.dispatcher.why_unanswered()}"
            )
        return Opening(late, busy, server.dispatcher.account(), server.dispatcher.bytes(), waited)

    def _train(self, server_round: int, started: float) -> TrainingPhase:
        """Have clients train in a round that `started` at this time, and take in the new model if that made one."""
        server, sent = self.server, self.arrays
        messages = server.configure_train(server_round, sent, ConfigRecord(), self.grid)
        self.deadlines.begin()
        self.moments.begin("training", server_round)
        watch = self.deadlines if not self.settings.simulated else None
        arrays, metrics = self._exchange(server_round, messages, partial(server.aggregate_train, server_round), watch)
        self.deadlines.finish()
        server.late.close(server.round, sent)
        self.arrays = arrays if arrays is not None else sent
        self.assembly.pass_time(server_round)
        return TrainingPhase(arrays is not None, metrics, time.perf_counter() - started)

    def _evaluate(self, server_round: int) -> ModelEvaluation:
        """Evaluate the new model if it is due: on the server, if its batch norms are known, and on clients."""
        server, model, personal = self.server, self.method.trained_model(), self.method.personal
        ends = self.server.privacy is not None and self.server.privacy.exhausted
        due = (ends or self.settings.evaluation_due(server_round)) and self.method.progress.measurable and not personal
        last, statistics, measured_bytes = server_round == self.settings.num_rounds, None, 0
        if due and not self.served.is_of(self.arrays, *model):
            statistics, measured_bytes = self._measure(self.served, server_round, self.arrays, model, last=last)
        questions = server.configure_evaluate(server_round, self.arrays, ConfigRecord(), self.grid)
        clients = self._exchange(server_round, questions, partial(server.aggregate_evaluate, server_round))
        known = due and self.served.is_of(self.arrays, *model)
        self.evaluate.show(self.served.blueprint)
        central = self.evaluate(self.served.complete(self.arrays), *model) if known else None
        answers = server.dispatcher.account() if server.dispatcher.log else None
        message_bytes, norms = measured_bytes + server.dispatcher.bytes(), self.served.statistics_name(personal)
        return ModelEvaluation(central, clients, answers, statistics, message_bytes, norms)

    def _measure(
        self, served: ServedModel, server_round: int, arrays: ArrayRecord, model: tuple[Piece, str], *, last: bool
    ) -> tuple[dict[str, Any], int]:
        """Have clients measure the batch norms of a model to be evaluated. `last` says that the run ends with this model.

        Returns which clients measured, and message bytes.
        """
        dispatcher = self.server.dispatcher
        self.moments.begin("measuring batch norms", server_round)
        questions = served.configure(server_round, arrays, model, self.grid, last=last)
        if not self._exchange(server_round, questions, served.aggregate):
            reason = "round %s: no client measured the batch norms of the model, which is not evaluated: %s"
            LOG.warning(reason, server_round, dispatcher.why_unanswered())
        return dispatcher.account(), dispatcher.bytes()

    def _checkpoint(self, server_round: int) -> None:
        self.values |= {
            "round": server_round,
            "settings": self.settings.to_run_config(),
            "node-names": {str(client): name for client, name in self.registry.bound.items()},
            "pace": self.deadlines.to_values(),
            "late": self.server.late.to_values(),
            "stragglers": self.assembly.stragglers.tasks,
            "strategy-state": self.method.state.to_values(),
            "seconds": self.seconds(),
        }
        if self.server.privacy is not None:
            devices = {str(client): device for client, device in self.registry.classes.items()}
            self.values["privacy"] = self.server.privacy.to_values() | {"devices": devices}
        kept = ArrayRecord({**self.method.kept, **self.server.late.to_arrays(), **self.served.to_arrays(self.arrays)})
        self.run_dir.save_checkpoint(self.arrays, self.values, kept)
