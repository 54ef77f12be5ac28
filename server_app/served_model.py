"""The served model: the model that is evaluated and saved. A strategy may compose it from the trained one (`serving`). With
`architecture.batch-norm = measured` or `static`, clients measure the statistics of its batch norms after training.

This is static batch norm (Diao et al., "HeteroFL", ICLR 2021, section 3). Let m_k and v_k be the mean and variance of a batch
norm channel's inputs on the training data of client k, which has n_k examples:

    m = sum_k n_k m_k / sum_k n_k
    v = sum_k n_k (v_k + m_k^2) / sum_k n_k - m^2

These are the mean and variance over all clients' data together. The clients of a round measure whenever its model is evaluated,
and at the end of the run. With `architecture.batch-norm = static`, all clients measure after the last round, as in that paper.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp import Grid

from piecework.device_profiles.dispatch import without_data
from piecework.federation.aggregation import (
    CheckedUpdate,
    UpdateRejectedError,
    add_norm_limits,
    check_update,
    require_all,
    require_within,
    share_bytes,
    spec_of,
)
from piecework.federation.reports import ClientReport
from piecework.models.cascade import Blueprint, unit_of
from piecework.models.partition import Piece
from piecework.models.static_norms import has_batch_norms, is_statistic, with_statistics
from piecework.models.variant import Variant, vary
from piecework.models.work_item import WorkItem
from piecework.strategies.server import MethodServer
from piecework.strategies.serving import DeviceModel
from piecework.training.answers import Answer
from piecework.training.messages import Task
from piecework.training.settings import learning_rate

LARGEST = 1e18  # maximum of a mean or a variance
KEPT = "served/"  # prefix of the names of statistics in a checkpoint


class ServedModel:
    """The strategy's model as it is evaluated and saved, or a device's: with the `statistics` of batch norms, if measured."""

    def __init__(self, server: MethodServer, model: DeviceModel | None = None) -> None:
        self.server, self.serving = server, model or server.serving
        self.statistics = ArrayRecord()
        self._of: tuple[ArrayRecord, Piece, str] | None = None
        self._weights: tuple[ArrayRecord, ArrayRecord] | None = None  # of the trained arrays, the served ones
        self._blueprints: dict[Variant, Blueprint] = {}

    @property
    def measured(self) -> bool:
        """Whether clients measure the statistics of batch norms."""
        return self.server.settings.measures_norms

    @cached_property
    def norms(self) -> str:
        """The kind of batch norm for the records: the resolved setting, or `none` if the model has no batch norms."""
        return self.server.settings.norms if has_batch_norms(self.server.method.cut.model) else "none"

    def statistics_name(self, personal: bool) -> str:
        """Return the statistics that evaluation used, for the records: with `personal`, clients use those of their batches."""
        return "batch" if personal and self.norms in ("measured", "static") else self.norms

    @property
    def variant(self) -> Variant:
        """The variant of the run's model that is evaluated."""
        return replace(self.serving.variant, statistics=self.measured)

    @property
    def blueprint(self) -> Blueprint:
        """The blueprint of the model that is evaluated."""
        server, variant = self.server, self.serving.variant
        if variant not in self._blueprints:
            trained = variant == server.method.cut.variant
            plain = server.method.cut.model if trained else vary(server.method.cut.blueprint, variant)
            self._blueprints[variant] = with_statistics(plain) if self.measured else plain
        return self._blueprints[variant]

    def complete(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays that are served, together with the statistics that were measured last."""
        weights = self.weights(arrays)
        return ArrayRecord({**weights, **self.statistics}) if self.statistics else weights

    def weights(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays that the strategy serves for a trained model, composed once for each model."""
        if self._weights is None or not share_bytes(self._weights[0], arrays):
            self._weights = arrays, self.serving.arrays(arrays)
        return self._weights[1]

    def is_of(self, arrays: ArrayRecord, atoms: Piece, head: str) -> bool:
        """Return whether this model can be evaluated: its statistics are known, or it needs none."""
        if self._of is not None and share_bytes(self._of[0], arrays) and self._of[1:] == (atoms, head):
            return True
        return not (self.measured and empty_statistics(self.blueprint, [*units(atoms), head]))

    def needed_bytes(self, atoms: Piece, head: str) -> int:
        """Return the bytes for measuring, atom by atom: the forward pass of the largest atom; the head runs with the last."""
        cost, model = self.server.method.cut.cost_model.trace_inference, self.blueprint
        found: int = max(cost(model, atom, head if atom == atoms[-1] else None, measured=True) for atom in atoms)
        return found

    def require_capable_client(self) -> None:
        """Raise ValueError if clients cannot measure: they do not hold the served model, or none has enough memory."""
        if self.measured and not self.server.method.can.measures:
            raise ValueError(
                f"architecture.batch-norm = {self.norms!r}: clients of {self.server.method.name} do not hold the model that "
                "is served, so they cannot measure it; use running or batch"
            )
        atoms, head = self.server.method.trained_model()
        if not self.is_of(ArrayRecord(), atoms, head):
            needed, richest = self.needed_bytes(atoms, head), self.server.resources.richest
            # If no client can even train, the first round reports that instead.
            if needed > richest.allowed_bytes >= self.server.min_budget(1):
                raise ValueError(
                    f"architecture.batch-norm = {self.norms!r}: measuring the batch norms of the served model, one atom at a "
                    f"time, needs {needed:,} bytes, and the richest client has {richest.budget_bytes:,}; lower "
                    "training.batch-size, or use running or batch"
                )

    def configure(
        self, server_round: int, arrays: ArrayRecord, model: tuple[Piece, str], grid: Grid, *, last: bool
    ) -> Iterable[Message]:
        """Return the messages that ask clients to measure, if they have enough memory for it. `last`: the run ends here."""
        server, (atoms, head) = self.server, model
        self.statistics, self._of = ArrayRecord(), (arrays, atoms, head)
        needed, weights = self.needed_bytes(atoms, head), self.weights(arrays)
        sent = ArrayRecord({name: array for name, array in weights.items() if unit_of(name) in {*units(atoms), head}})
        frozen, tasks = server.frozen_units(server_round), {}
        for client in self.clients(server_round, grid, last=last):
            if server.resources.affords(client, server_round, needed):
                task = self.task(client, server_round, model, needed)
                tasks[client] = server.weight_cache.with_frozen_hashes(task, sent, frozen)
        return server.dispatcher.configure("query.statistics", tasks, sent, {})

    def clients(self, server_round: int, grid: Grid, *, last: bool) -> list[int]:
        """Return the reachable clients that trained in the round, or a new sample for the round if there are none.

        With `static`, these are all reachable clients at the end of the run (`last`).
        """
        if last and self.server.settings.norms == "static":
            return self.server.registry.present(grid)
        return self.server.reachable or self.server.draw(server_round, grid)

    def task(self, client: int, server_round: int, model: tuple[Piece, str], needed: int) -> Task:
        """Return the task with which a client measures; `needed` is its memory cost in bytes."""
        server = self.server
        experiment, state = server.experiment, server.resources.state(client, server_round)
        item = WorkItem(*model, self.variant, measured=True)
        return Task(
            experiment_id=experiment.experiment_id,
            round=server_round,
            state_round=server_round,
            strategy=server.settings.strategy,
            budget=state.budget_bytes,
            reference=server.resources.reference_bytes,
            lr=learning_rate(server.settings, server_round),
            state_dir=experiment.state_dir,
            enforced=server.enforced,
            costs={item: needed},
            atoms=list(item.atoms),
            head=item.head,
            variant=item.variant,
        )

    def aggregate(self, replies: Iterable[Message]) -> bool:
        """Pool the statistics that clients measured. Returns whether there are any."""
        server, moments = self.server, Moments()
        valid = server.dispatcher.answers(replies, self.check_statistics)
        for report, update, limits in add_norm_limits(valid, server.settings.faults.update_norm_limit, ()):
            try:
                require_within(update.norms, limits)
            except UpdateRejectedError as error:
                report.end("rejected", str(error))
                continue
            moments.add(update.arrays, update.examples)
        self.statistics = moments.pool()
        if not self.statistics:
            self._of = None
        return bool(self.statistics)

    def check_statistics(self, report: ClientReport, answer: Answer) -> CheckedUpdate:
        """Return a client's statistics and number of examples. They are compared with other clients' later.

        Raises UpdateRejectedError if they are invalid on their own.
        """
        atoms, head = self._of[1:] if self._of else ((), "head")
        blank = empty_statistics(self.blueprint, [*units(atoms), head])
        expected = ArrayRecord({name: Array(array) for name, array in blank.items()})
        update = check_update(answer.arrays, answer.metrics.get("num-examples"), expected, spec_of(expected))
        require_all(update, expected)
        if update.examples > (known := self.server.registry.members[report.client].examples):
            raise UpdateRejectedError(f"num-examples is {update.examples}: the client has {known}")
        for name, array in update.arrays.items():
            if (maximum := float(np.abs(array).max(initial=0))) > LARGEST:
                raise UpdateRejectedError(f"array {name!r} holds {maximum:.4g}: its square would not be a float32")
        return update

    def to_arrays(self, arrays: ArrayRecord) -> dict[str, Array]:
        """Return the statistics for a checkpoint with these arrays; none if they belong to another model than is trained."""
        trained = self.server.method.trained_model()
        if self._of is None or not share_bytes(self._of[0], arrays) or self._of[1:] != trained:
            return {}
        return {KEPT + name: array for name, array in self.statistics.items()}

    def restore(self, kept: ArrayRecord) -> ArrayRecord:
        """Restore the statistics that `to_arrays` put into a checkpoint. Returns the other arrays, which are the strategy's."""
        found = {name.removeprefix(KEPT): array for name, array in kept.items() if name.startswith(KEPT)}
        self.statistics = ArrayRecord(found)
        return ArrayRecord({name: array for name, array in kept.items() if not name.startswith(KEPT)})

    def resume(self, arrays: ArrayRecord) -> None:
        """Assign the restored statistics to the model of the checkpoint, which has these arrays."""
        if self.statistics:
            self._of = arrays, *self.server.method.trained_model()


class Moments:
    """Pools clients' means and variances as they arrive, by the equations at the top of this file."""

    def __init__(self) -> None:
        self.examples, self.batches = 0, dict[str, np.ndarray]()
        self.first, self.second = dict[str, np.ndarray](), dict[str, np.ndarray]()

    def add(self, arrays: Mapping[str, np.ndarray], examples: int) -> None:
        """Add a client's statistics of each batch norm, by global names, with its number of examples."""
        self.examples += examples
        for name in arrays:
            norm, _, kind = name.rpartition(".")
            if kind == "running_mean":
                mean, variance = (arrays[f"{norm}.{k}"].astype(np.float64) for k in ("running_mean", "running_var"))
                self.first[norm] = self.first.get(norm, 0) + examples * mean
                self.second[norm] = self.second.get(norm, 0) + examples * (variance + mean**2)
                self.batches[norm] = np.maximum(self.batches.get(norm, 0), arrays[f"{norm}.num_batches_tracked"])

    def pool(self) -> ArrayRecord:
        """Return the statistics over all clients' data; no arrays if no client was added."""
        found: dict[str, Array] = {}
        for norm, first in self.first.items():
            mean = first / self.examples
            variance = np.maximum(self.second[norm] / self.examples - mean**2, 0)
            found[f"{norm}.running_mean"] = Array(mean.astype(np.float32))
            found[f"{norm}.running_var"] = Array(variance.astype(np.float32))
            found[f"{norm}.num_batches_tracked"] = Array(np.asarray(self.batches[norm]))
        return ArrayRecord(found)


def units(atoms: Piece) -> list[str]:
    """Return the unit names of atoms."""
    return [f"atoms.{atom}" for atom in atoms]


def empty_statistics(blueprint: Blueprint, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return the initial statistics of units, by global names: means of 0, variances of 1."""
    found: dict[str, np.ndarray] = {}
    for unit in names:
        with without_data():
            state = blueprint.build_unit(unit).state_dict()
        for name, value in state.items():
            if is_statistic(name):
                dtype = np.int64 if name.endswith("num_batches_tracked") else np.float32
                fill = 1 if name.endswith("running_var") else 0
                found[f"{unit}.{name}"] = np.full(tuple(value.shape), fill, dtype)
    return found
