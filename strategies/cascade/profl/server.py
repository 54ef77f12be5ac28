"""ProFL: the model shrinks and grows block by block (the server's side).

Yebo Wu, Li Li, Cheng-zhong Xu, "Breaking the Memory Wall for Heterogeneous Federated Learning via Progressive Training", KDD
2025, https://arxiv.org/abs/2404.13349

    section 2.1, blocks and output modules          profl/cut.py: ProFLCut.step, ProFLCut.fit
    section 2.2, growing                            profl/phases.py: phases_of; profl/server.py: ProFL.conclude
    section 2.2, step 2, select clients by memory   profl/server.py: ProFL.assign; profl/cut.py: ProFLCut.unasked_budgets
    section 2.3, shrinking and Map                  profl/phases.py: phases_of; strategies/cascade/profl/client.py: integrate
    Eq. 1, aggregate theta_t and theta_op           profl/server.py: ProFL.combine
    section 2.4, effective movement and freezing    profl/freezing.py: effective_movement, slope, has_converged
    section 3.1, train the output layer alone       strategies/cascade/profl/client.py: train

theta_t is block t of T. theta_op is the output module of step t: the basic layers theta_{t+1,b} .. theta_{T,b}, which replace
the later blocks, and the output layer theta_L. theta_t^ini is a block as shrinking leaves it. F marks frozen blocks.

Shrinking (section 2.3), t = T .. 2: [theta_{1,F}, .., theta_t, theta_op] is trained until theta_t converges, which gives
theta_t^ini. Then (Map) theta_t is integrated into theta_{t,b} by distillation on the clients for `profl.distil-rounds` rounds.
Growing (section 2.2), t = 1 .. T, trains the same steps in reverse order, on top of the blocks that growing has frozen. Each
starts from theta_t^ini and the output module of its step in shrinking. With `profl.shrinking` = false, only growing takes
place, from random weights (Table 2). Eq. 1: theta_t and theta_op are averaged over the clients that trained them, weighted by
numbers of examples, and theta_L also over the clients that trained nothing else.

Where it differs from the paper: a round's clients are drawn from those that have memory for the step's block (section 2.2, step
2: "selects the client set S based on their available memory") and from those whose memory "is insufficient to train any block"
(section 3.1), which train the output layer alone. We read "any block" as that of any step: a client with memory for another
block only gets no task. Both groups are drawn together, because the paper does not say in which proportion (the authors' code
draws from the first alone). With `profl.cohort = all` (ours), all clients are drawn from, and those that cannot afford the step
train the output layer. Clients that cannot take part in a map are not drawn; with `profl.cohort = all` they refuse their task.

Where the paper is silent, the authors' code decides: in shrinking, the blocks before t are frozen with their random initial
weights; a basic layer is a 3x3 convolution of stride 2 without a norm (`profl.output-norm`, ours, adds one); maps have a rate
of 1e-5; a growing step's output module starts as its step in shrinking left it, and that of step 1 as the last map left it.
Ours: a block that keeps the shape of its features gets no basic layer. Frozen blocks run in evaluation mode (theirs:
`profl.frozen-mode = training`). Running statistics of random blocks are measured once, by the clients of a first round (theirs
follow the batches of each round), if `architecture.batch-norm` is `running` and `training.init-weights` has none. A step takes
at most `profl.stage-rounds` rounds. If one is too large for every client, all blocks are single atoms (the paper's "layer-wise
training"); with `profl.blocks = budget` they are as large as the poorest client can train. A movement is measured on at most
`profl.movement-scalars` parameters, which bounds checkpoints (theirs: 10,000). With `profl.freezing = parameters` (Table 3's
ParamAware), steps get rounds in proportion to their blocks' parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.federation.aggregation import CheckedUpdate
from piecework.models.basic_layers import cascade_at
from piecework.models.cascade import parameter_names, unit_of
from piecework.models.partition import Piece
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context, OfUnits
from piecework.planning.cut import label
from piecework.strategies.cascade.profl.client import OUTPUT_LAYER, ProFLTaskConfig
from piecework.strategies.cascade.profl.cut import ProFLCut
from piecework.strategies.cascade.profl.freezing import (
    Freezing,
    effective_movement,
    has_converged,
    slopes,
    threshold,
    times_below,
)
from piecework.strategies.cascade.profl.phases import Phase
from piecework.strategies.cascade.profl.settings import ProFLSettings
from piecework.strategies.method import Round, StagedMethod, streamed_evaluation
from piecework.strategies.resources import ClientResources
from piecework.strategies.state import Progress, StrategyState
from piecework.training.capabilities import Refusal
from piecework.training.methods import METHODS

BEFORE = "before/"  # prefix in `kept` of the output module as the last phase left it, until the next phase begins
MEASURED = ("running_mean", "running_var", "num_batches_tracked")
SCALARS = "scalars"  # in `kept`, float32 [rounds, scalars of the block]


@dataclass
class ProFLState(StrategyState):
    """The state of the run. `blocks` are the atoms of each block, and `maximum` the rounds that each phase may take.

    `phase` is the number of the present phase, from 0, and `phase_round` its rounds done. `movements` are the effective
    movements of its block, beginning with that of round H. `frozen` records in which round each phase ended, and whether its
    block converged.
    """

    blocks: list[list[int]] = field(default_factory=list)
    maximum: list[int] = field(default_factory=list)
    phase: int = 0
    phase_round: int = 0
    movements: list[float] = field(default_factory=list)
    frozen: list[dict[str, Any]] = field(default_factory=list)


OTHER_STEPS = "it compares the models of different steps: use profl.stage-rounds and profl.movement-times"


class ProFL(StagedMethod):
    """Trains the model step by step, first shrinking and then growing."""

    name = "profl"
    can = METHODS["profl"].can
    refuses = (
        Refusal("architecture.batch-norm", "profl averages whole blocks; use measured, running or batch", ("local",)),
        Refusal("evaluation.patience", OTHER_STEPS),
        Refusal("evaluation.target-accuracy", OTHER_STEPS),
    )
    cut_class = ProFLCut
    cut: ProFLCut
    state_class = ProFLState
    state: ProFLState

    def __init__(self, cut: ProFLCut) -> None:
        super().__init__(cut)
        self.table = self.settings.of(ProFLSettings)
        self.asks = "able" if self.table.cohort == "eligible" else "all"
        self.freezing = Freezing(self.table.movement_window, self.table.movement_fraction, self.table.movement_times)
        self.phases: list[Phase] = []
        self._costs: dict[Phase, dict[WorkItem, int]] = {}  # for the present cut

    def begin(self, fleet: ClientResources) -> None:
        """Cut the model and plan the phases, once per run. Raises ValueError if rounds are too few or no client can train."""
        state = self.state
        if not state.blocks:
            budgets = fleet.budgets()
            fitted = self.cut.fit(int(min(budgets)), int(max(budgets)))
            state.blocks = [list(block) for block in fitted.blocks]
        self.cut = self.cut.divide([tuple(block) for block in state.blocks])
        self.phases, self._costs = self.cut.phases, {}
        if not state.maximum:
            state.maximum = self.cut.rounds(self.settings.num_rounds)
        if len(state.maximum) != len(self.phases):
            raise ValueError(
                f"the run to resume has {len(state.maximum)} phases, this version plans {len(self.phases)} for these settings: "
                "finish it with the version that started it, or start a new run"
            )

    def combine(self, current: Round, client: int, update: CheckedUpdate) -> None:
        """Add a client's update; while statistics are measured, add nothing else. Raises UpdateRejectedError."""
        if self.phase.kind == "statistics":
            measured = {name: array for name, array in update.arrays.items() if name.endswith(MEASURED)}
            update = replace(update, arrays=measured)
        super().combine(current, client, update)

    @property
    def phase(self) -> Phase:
        """The present phase, or the last one if all are done."""
        return self.phases[min(self.state.phase, len(self.phases) - 1)]

    def costs(self, phase: Phase) -> dict[WorkItem, int]:
        """Return the bytes of the work items of a phase: the step and the output layer, the map, or the measurement."""
        if phase not in self._costs:
            needed = {"map": self.cut.needed_to_map, "statistics": self.cut.needed_to_measure}
            self._costs[phase] = needed.get(phase.kind, self.cut.needed_in_step)(phase.t)
        return self._costs[phase]

    def assign(self, ctx: Context) -> Assignment:
        """Return the work of a phase: in a step its block with its output module, or the output layer alone."""
        phase, allowed, refusal = ctx.stage, ctx.device.allowed_bytes, None
        needed = self.costs(phase)
        item = next(iter(needed))
        if phase.is_step and needed[item] > allowed:
            step, item = item, self.cut.item(OUTPUT_LAYER)
            if allowed in self.cut.unasked_budgets(phase.t) or needed[item] > allowed:
                doing = f"training {label(self.cut.part(step))}"
                refusal = MemoryBudgetExceededError(needed[step], ctx.device.budget_bytes, doing)
        before = [f"atoms.{atom}" for block in self.cut.blocks[: phase.t - 1] for atom in block]
        return Assignment(
            (item,),
            needed,
            sends=self.select_sent(phase),
            frozen=tuple(before) if phase.kind != "statistics" else (),  # they have no statistics before
            config=ProFLTaskConfig(phase.t, phase.kind),
            least=(lambda: needed[item]) if self.asks == "able" and phase.is_step and item.atoms else None,
            lr=self.table.distil_lr if phase.kind == "map" else None,
            refusal=refusal,
        )

    def select_sent(self, phase: Phase) -> OfUnits:
        """Return the block of the step and its output module, in a map also the basic layer that is to replace the block.

        For statistics, these are the blocks before that of the step.
        """
        if phase.kind == "statistics":
            atoms, heads = {atom for block in self.cut.blocks[: phase.t - 1] for atom in block}, set[str]()
        else:
            student = self.cut.student(phase.t) if phase.kind == "map" else ()
            atoms, heads = {*self.cut.step(phase.t), *student}, {"head"}
        return OfUnits(frozenset({f"atoms.{atom}" for atom in atoms} | heads))

    def assign_evaluation(self, ctx: Context, assignment: Assignment, examples: int) -> Assignment:
        """Return the evaluation of the blocks up to that of the step, and of the basic layers behind it."""
        atoms, _ = self._cascade(self.phase)
        return replace(assignment, steps=streamed_evaluation(self.cut, self.cut.model, atoms, ctx, examples))

    def schedule(self, first: int, last: int) -> Iterable[tuple[int, int]]:
        """Return the rounds until the last phase ends, if every phase has all its rounds; none for a new run."""
        left = sum(self.state.maximum[self.state.phase :]) - self.state.phase_round
        return super().schedule(first, min(last, first + left - 1))

    def open(self, current: Round) -> None:
        """Begin a round. Before the first round of a block, its scalars are stored, where its movement begins."""
        super().open(current)
        for name in [name for name in self.kept if name.startswith(BEFORE)]:
            del self.kept[name]
        if self.phase.is_step and SCALARS not in self.kept:
            self.kept[SCALARS] = Array(self._scalars(current.arrays)[None])
        # The loss of a map is a distance between logits.
        current.loss_name = {"map": "distillation-loss", "statistics": ""}.get(self.phase.kind, "train-loss")

    def finish(self, current: Round) -> ArrayRecord:
        """Return the new model, after measuring the movement of the block."""
        arrays = super().finish(current)
        if self.phase.is_step:
            self._note_movement(arrays)
        return arrays

    @property
    def _converged(self) -> bool:
        return self.table.freezing == "movement" and has_converged(self.state.movements, self.freezing)

    def _rounds_done(self, current: Round) -> int:
        """Return the rounds of the phase with this one, which counts for statistics only if there is a new model."""
        # all later phases need the statistics
        return self.state.phase_round + (current.trained or self.phase.kind != "statistics")

    def _is_over(self, rounds: int) -> bool:
        return self._converged or rounds >= self.state.maximum[min(self.state.phase, len(self.phases) - 1)]

    def conclude(self, current: Round, arrays: ArrayRecord) -> ArrayRecord:
        """End the phase if its block converged or its rounds are over. Returns the model for the next round."""
        state = self.state
        state.phase_round = self._rounds_done(current)
        if not self._is_over(state.phase_round):
            return arrays
        state.frozen = [*state.frozen, {"phase": self.stage, "round": current.number, "converged": self._converged}]
        return self._next_phase(arrays)

    def _note_movement(self, arrays: ArrayRecord) -> None:
        """Append the effective movement of the block. A round in which no client trained it does not count."""
        seen, now = self.kept[SCALARS].numpy(), self._scalars(arrays)
        if not np.array_equal(seen[-1], now):
            seen = np.vstack([seen, now])[-self.freezing.window - 1 :]
            self.kept[SCALARS] = Array(seen)
            if len(seen) > self.freezing.window:
                self.state.movements.append(effective_movement(list(seen)))

    def _scalars(self, arrays: ArrayRecord) -> np.ndarray:
        """Return the parameters of the step's block, or `profl.movement-scalars` of them, the same ones in all its rounds."""
        block = [f"atoms.{atom}" for atom in self.cut.blocks[self.phase.t - 1]]
        names = [name for unit in block for name in parameter_names(self.cut.model, unit)]
        values = np.concatenate([arrays[name].numpy().reshape(-1) for name in names])
        wanted = self.table.movement_scalars
        if not wanted or wanted >= len(values):
            return values
        rng = np.random.default_rng([self.settings.seed, self.state.phase])
        return values[np.sort(rng.choice(len(values), wanted, replace=False))]

    def _next_phase(self, arrays: ArrayRecord) -> ArrayRecord:
        """Begin the next phase, and return its model. Norms of updates and movements start again.

        Each output module is stored after its step in shrinking, and restored for its step in growing.
        """
        state, phase = self.state, self.phase
        self.kept.pop(SCALARS, None)
        if phase.kind == "shrinking":
            for name, array in self._output_module(phase.t, arrays).items():
                self.kept[f"step{phase.t}/{name}"] = array
        self.state = replace(state, phase=state.phase + 1, phase_round=0, movements=[], norms={})
        if self.finished or self.phase.kind != "growing":
            return arrays
        noted = self._list_noted(f"step{self.phase.t}/")
        for name in noted:
            self.kept[BEFORE + name] = arrays[name]
        return ArrayRecord({name: noted.get(name, array) for name, array in arrays.items()})

    def _list_noted(self, prefix: str) -> dict[str, Array]:
        return {name.removeprefix(prefix): array for name, array in self.kept.items() if name.startswith(prefix)}

    def final(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model; if the present phase has not begun, its output module is that with which the previous one ended."""
        before = self._list_noted(BEFORE)
        return ArrayRecord({name: before.get(name, array) for name, array in arrays.items()})

    def _output_module(self, t: int, arrays: ArrayRecord) -> dict[str, Array]:
        units = {f"atoms.{atom}" for atom in self.cut.step(t)[len(self.cut.blocks[t - 1]) :]} | {"head"}
        return {name: array for name, array in arrays.items() if unit_of(name) in units}

    @property
    def finished(self) -> bool:
        """Whether all phases are done."""
        return self.state.phase == len(self.phases)

    @property
    def progress(self) -> Progress:
        """The progress of the run. Before a block is trained, the model cannot be evaluated."""
        measurable = self.phase.kind != "statistics"
        return Progress(str(self.phase), self.finished, measurable, self.phase, self._cascade(self.phase))

    @property
    def stage(self) -> str:
        """The name of the phase."""
        return str(self.phase)

    def details(self, current: Round) -> dict[str, Any]:
        """Return the block's last movement, the slope through the last movements, the freezing criterion, and ended phases.

        These are entries of the round record. In a step, `block_clients` and `output_layer_clients` count the clients whose
        updates of the block, or of the output layer alone, were accepted.
        """
        movements = self.state.movements
        trained = [any(r.pieces) for r in current.reports.values() if r.status == "ok"] if self.phase.is_step else None
        return {
            "block_clients": None if trained is None else sum(trained),
            "output_layer_clients": None if trained is None else len(trained) - sum(trained),
            "effective_movement": movements[-1] if movements else None,
            "slope": next(reversed(slopes(movements, self.freezing.window)), None),
            "slope_threshold": threshold(movements, self.freezing),
            "times_below": times_below(movements, self.freezing),
            "block": self.phase.t,
            "blocks": len(self.cut.blocks),
            "ended": ("frozen" if self._converged else "rounds") if self._is_over(self._rounds_done(current)) else "",
            "frozen": self.state.frozen,
        }

    def final_model(self) -> tuple[Piece, str]:
        """Return the model of the present phase, or of the previous one if the present phase has not begun."""
        state = self.state
        return self._cascade(self.phases[state.phase - 1] if state.phase and not state.phase_round else self.phase)

    def _cascade(self, phase: Phase) -> tuple[Piece, str]:
        return cascade_at(self.cut.model, self.cut.blocks, phase.t - (phase.kind == "map")), "head"
