"""A method: what it assigns to a client in a round, how it combines what comes back, and what it tells of it.

A method knows no transport, no clock and no files. Plans call `assign` alone. The server (server.py) calls the rest, in
this order: `begin` once, then in each round `open`, `assign` for each client, `check`, `read` and `combine` for each answer,
`finish`, `assign_evaluation`, `details`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import ArrayRecord, MetricRecord

from piecework.device_profiles.profile import DeviceState, allowance
from piecework.federation.aggregation import (
    CheckedUpdate,
    Norms,
    UpdateRejectedError,
    WeightedMean,
    check_update,
    replace_arrays,
    spec_of,
)
from piecework.federation.private_mean import Entries
from piecework.federation.reports import ClientReport
from piecework.models.cascade import Blueprint, initial_state
from piecework.models.partition import Piece
from piecework.models.variant import vary
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context, fitting_parts
from piecework.planning.costs import CostModel
from piecework.planning.cut import Cut
from piecework.planning.evaluation_cost import evaluation_steps
from piecework.planning.part import Part
from piecework.strategies.resources import ClientResources
from piecework.strategies.serving import Serving
from piecework.strategies.state import Progress, StrategyState
from piecework.training.capabilities import Capabilities, Refusal
from piecework.training.evaluation_step import EvaluationStep
from piecework.training.examples import Examples
from piecework.training.loop import PieceModel
from piecework.training.messages import Task
from piecework.training.settings import Settings
from piecework.training.settings.table import Table


@dataclass
class Assigned:
    """A client's assignment in a round, the task that was made of it, and the state of the client's device."""

    assignment: Assignment
    task: Task
    device: DeviceState


@dataclass
class Round:
    """What the server knows of a round. `arrays` is the model that its clients get, and `mean` what `combine` adds to."""

    number: int
    arrays: ArrayRecord
    assigned: dict[int, Assigned] = field(default_factory=dict)
    reports: dict[int, ClientReport] = field(default_factory=dict)
    mean: Any = None
    new_mean: Callable[[ArrayRecord], WeightedMean] = lambda model: (
        WeightedMean()
    )  # for updates of a model that was sent
    entries: Mapping[int, Entries] | None = None  # that each client's update may move, if the mean is private
    memo: dict[int, Any] = field(default_factory=dict)  # what `read` notes of a client for `combine`
    excluded: dict[int, int] = field(default_factory=dict)  # clients whose processes died, with their crashes in a row
    updates: dict[int, CheckedUpdate] = field(default_factory=dict)  # that the gate holds, on the simulated clock
    closed_at: float = inf  # simulated seconds of the update with which the round ended, if enough had answered
    trained: bool = False  # whether there is a new model
    loss_name: str = "train-loss"  # of the clients' mean loss in the records; empty: there is none
    metrics: dict[str, float] = field(default_factory=dict)  # the method's own, beside the clients' mean loss
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)  # the metrics of each client that evaluated
    evaluation: MetricRecord | None = None  # the mean of these


@dataclass(frozen=True)
class Received:
    """A client's answer before its check, its assignment, and the model of the round (`limits`, `maximum`: check_update)."""

    arrays: ArrayRecord
    metrics: dict[str, Any]
    assignment: Assignment
    model: ArrayRecord
    limits: Norms
    maximum: Callable[[], float]


@dataclass(frozen=True)
class Reading:
    """What a method reads from a client's answer: the fraction of its FLOPs that were executed, and SpaFL's count of them."""

    executed: float = 1.0
    counted_flops: float | None = None


class Method:
    """Base of all methods.

    `cut` is the model, as the method cuts it for the fleet. A checkpoint holds the model, `state` and the arrays in `kept`.
    `public` are the server's public examples, if the method can use some (`can.public`). `piece_class` runs the model in an
    evaluation, and the server calls `prepare` with it before. `evaluation_keys` are the metrics that clients report in an
    evaluation. `evaluation_details` describe the evaluation in the records, and `model_details` a trained model in its file;
    both are JSON values.
    """

    name: ClassVar[str]
    can: ClassVar[Capabilities] = Capabilities()
    refuses: ClassVar[tuple[Refusal, ...]] = ()
    settings_class: ClassVar[type[Table] | None] = (
        None  # of a method of one's own; training/methods.py has those of the others
    )
    cut_class: ClassVar[type[Cut]] = Cut
    state_class: ClassVar[type[StrategyState]] = StrategyState
    serving_class: ClassVar[type[Serving]] = Serving
    validates: Literal["by settings", "asked", "all"] = "by settings"  # who evaluates the model of each round
    piece_class: type[PieceModel] = PieceModel
    public: Examples | None = None
    evaluation_keys: ClassVar[tuple[str, ...]] = ("val-loss", "val-accuracy")

    cut: Any  # a `cut_class`

    def __init__(self, cut: Any) -> None:
        self.cut = cut
        self.settings: Settings = cut.settings
        self.state = self.state_class()
        self.kept = ArrayRecord()
        self.asks: str = self.can.asks
        self.personal: bool = self.can.personal or self.settings.evaluation.mode == "personal"
        self.evaluation_details: dict[str, Any] = {}
        self.model_details: dict[str, Any] = {}
        self.prepare: Callable[[PieceModel], None] = lambda _: None

    @classmethod
    def make_cut(cls, blueprint: Blueprint, costs: CostModel, settings: Settings, smallest: int = 0) -> Cut:
        """Return the method's cut of a model for devices with at least `smallest` bytes of memory."""
        return cls.cut_class(blueprint, costs, settings, smallest, method=cls)

    def assign(self, ctx: Context) -> Assignment:
        """Return what a client is to do, a function of the context, the cut and the method's state alone."""
        raise NotImplementedError

    def work(self, *items: WorkItem, others: Iterable[WorkItem] = (), **fields: Any) -> Assignment:
        """Return the assignment of these items, with their costs; `others` are less work that the client may do instead."""
        return Assignment(items, self.cut.needs(*items, *others), **fields)

    def begin(self, fleet: ClientResources) -> None:
        """Set up what depends on the clients: before the first round, and after each resume.

        Raises ValueError if the method cannot run with these clients.
        """

    def initial(self) -> dict[str, np.ndarray]:
        """Return the arrays of the server's model before the first round."""
        units = self.cut.model.units(exits=self.can.exits)
        state = initial_state(self.cut.model, self.settings.seed, units=units)
        return {name: value.numpy() for name, value in state}

    def open(self, current: Round) -> None:
        """Begin a round, before its assignments: make what `combine` adds to."""
        current.mean = current.new_mean(current.arrays)

    def check(self, received: Received) -> CheckedUpdate:
        """Return the update if it may enter the model. Raises UpdateRejectedError."""
        arrays, examples, assignment = received.arrays, received.metrics.get("num-examples"), received.assignment
        previous = (assignment.expects or assignment.sends)(received.model)
        if strange := [name for name in arrays if name in received.model and name not in previous]:
            raise UpdateRejectedError(f"array {strange[0]!r} was not sent for training")
        return check_update(arrays, examples, previous, spec_of(previous), received.limits, received.maximum)

    def read(self, current: Round, report: ClientReport, metrics: dict[str, Any]) -> Reading:
        """Read the method's own metrics of a client that did its task. Raises UpdateRejectedError if they are invalid."""
        return Reading()

    def weight(self, update: CheckedUpdate) -> int:
        """Return the weight of an update in the mean: its number of examples."""
        return update.examples

    def combine(self, current: Round, client: int, update: CheckedUpdate) -> None:
        """Add a client's update to the round, with its weight. Raises UpdateRejectedError."""
        current.mean.add(update.arrays, self.weight(update))

    def finish(self, current: Round) -> ArrayRecord:
        """Return the new model. Arrays that no client trained are not copied."""
        return replace_arrays(current.arrays, current.mean)

    def assign_evaluation(self, ctx: Context, assignment: Assignment, examples: int) -> Assignment:
        """Return what a client does in an evaluation on that many examples, from its assignment in training.

        By default the whole model runs, one atom after another.
        """
        if self.can.evaluates == "as trained":
            return assignment
        blueprint = vary(self.cut.blueprint, assignment.variant or self.cut.variant)
        atoms = tuple(range(len(blueprint.atoms)))
        return replace(assignment, steps=streamed_evaluation(self.cut, blueprint, atoms, ctx, examples))

    def details(self, current: Round) -> dict[str, Any]:
        """Return the method's own entries of a round's record, as JSON values."""
        return {}

    @property
    def progress(self) -> Progress:
        """The progress of the run; without stages, a run is never finished before its last round."""
        return Progress()

    def trained_model(self) -> tuple[Piece, str]:
        """Return the atoms and the head of the round's model: all, or those of the part that is trained so far."""
        return self.progress.model or (tuple(range(len(self.cut.model.atoms))), "head")

    def schedule(self, first: int, last: int) -> Iterable[tuple[int, int]]:
        """Return pairs of a round from `first` to `last` and its position in the learning-rate schedule, before `begin`.

        A method with stages counts each remaining stage at its maximum length in a resumed run, and cannot know the rounds of a
        new run.
        """
        return ((server_round, server_round) for server_round in range(first, last + 1))

    def parts(
        self, stage: int, state: DeviceState, slowest: float = inf, round: int = 1, client: int = 0
    ) -> list[Part]:
        """Return the parts that a device trains in a round of a stage, for a plan (Planner.parts)."""
        key = self.cut.stages[stage].key if self.can.stages else 0
        ctx = Context(state, slowest, key, round, client, clients=self.settings.clients)
        return fitting_parts(self.cut, self.assign(ctx), state)


class StagedMethod(Method, ABC):
    """A method that trains one part of the model after another, and decides when a stage ends."""

    @abstractmethod
    def conclude(self, current: Round, arrays: ArrayRecord) -> ArrayRecord:
        """End the stage if it is due, after the round and its evaluation. Returns the model for the next round."""

    @abstractmethod
    def final(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model of the run, which may be from an earlier round than the last."""

    @abstractmethod
    def final_model(self) -> tuple[Piece, str]:
        """Return the atoms and the head of the run's model if the run ends now."""


class QueryingMethod(StagedMethod):
    """A method that asks all clients something before the first round of a stage."""

    @property
    @abstractmethod
    def queries(self) -> bool:
        """Whether all clients are asked something before the next round."""

    @abstractmethod
    def assign_query(self, ctx: Context, assignment: Assignment, examples: int) -> Assignment:
        """Return what a client does for the query, with that many training examples; `assignment` is its next one."""

    @abstractmethod
    def read_query(self, metrics: dict[str, Any], examples: int) -> Any:
        """Return a client's answer to the query, not None. Raises UpdateRejectedError if it is invalid."""

    @abstractmethod
    def conclude_query(self, answers: dict[int, Any]) -> dict[int, str]:
        """Take in the answers by client. Returns those that do not count, and why; if all do not, the round cannot begin."""


def streamed_evaluation(
    cut: Cut, blueprint: Blueprint, atoms: Piece, ctx: Context, examples: int
) -> list[EvaluationStep]:
    """Return the ways to evaluate atoms and the head that a client may choose from: one atom after another."""
    allowed = allowance(ctx.device.budget_bytes, cut.settings.memory.excess)
    # A client that measures its memory may have less when it evaluates: the smallest step is listed too.
    limits = [allowed, *([0] if ctx.measures_itself else [])]
    return [step for limit in limits for step in evaluation_steps(cut, blueprint, atoms, "head", limit, examples)]
