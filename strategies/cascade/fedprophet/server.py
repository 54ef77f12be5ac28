"""FedProphet: clients train a cascade of modules adversarially (the server's side).

Minxue Tang, Yitu Wang, Jingyang Zhang, Louis DiValentin, Aolin Ding, Amin Hass, Yiran Chen, Hai Li, "FedProphet:
Memory-Efficient Federated Adversarial Training via Robust and Consistent Cascade Learning", MLSys 2025,
https://arxiv.org/abs/2409.08372

    Algorithm 1, partition by R_min                 fedprophet/cut.py: FedProphetCut.stages
    Algorithm 2, the server adjusts epsilon         fedprophet/adjustment.py: adjust_alpha, FedProphetState.epsilon
        (Eqs. 11, 12)
    the server assigns M_k (Eqs. 14, 15)            fedprophet/cut.py: FedProphetCut.choose_atoms
    clients train {m .. M_k} (Eqs. 9, 13)           strategies/cascade/fedprophet/client.py: train, module_loss
    the server aggregates modules (Eqs. 16, 17)     fedprophet/server.py: FedProphet.select_sent; method.py: Method.combine
    until w_m converges                             fedprophet/server.py: FedProphet.conclude
    collect max ||Delta z_m||                       fedprophet/server.py: FedProphet.assign_query, FedProphet.conclude_query

w_m is module m, theta_m its auxiliary head, and R_min the smallest memory reserved on a client. C_m and A_m are the clean and
adversarial validation accuracy of w_1 .. w_m with theta_m. C*_m and A*_m are their values when module m was fixed.

Adaptive Perturbation Adjustment: epsilon_{m-1} = alpha E[max ||Delta z_{m-1}||] (Eq. 11), where the mean is over the training
examples of all clients that are connected when module m - 1 is fixed; alpha follows C_m / A_m (Eq. 12). Partial average (Eqs.
16 and 17): a module is averaged over the clients that trained it, and theta_n over those whose last module was n, weighted by
numbers of examples.

A stage begins with a query to all clients (Eq. 11); an answer of more than `faults.update-norm-limit` times the median is
dropped. Attack, query and validation take no more memory than training: where there is no room for all weights, one module is
in memory at a time.

Where it differs from the paper: where the paper's wording does not work, the default is what the authors' code does, and the
wording is an option. By Eq. 12 alpha may fall to 0. Then no attack moves the output of the module, and all later modules train
on clean features (`clean_round` in the records): alpha does not fall below its start (`fedprophet.apa-bound = none` lets it).
Over all rounds, 0.994^t leaves later stages no learning rate, 7e-10 of the first after 3,500: it restarts in each stage
(`fedprophet.lr-restart = false`: it does not). The auxiliary head's linear layer on all features (Eq. 9: `fedprophet.aux-pool =
none`) takes much memory. The authors pool the features to as many as there are classes (`authors`), which is few for narrow
modules; here they are pooled to 256.

Where the paper is silent, we follow the authors' code. All clients validate (`fedprophet.validation-clients`). A round's score
is `C_m + rho A_m` with `rho = C*_{m-1} / A*_{m-1}` (1 in the first stage). A stage ends with the weights of its best round.
Images are attacked in L-infinity, features in an L2 ball. The mixing weight psi is 1, as in all the authors' runs. Ours: if
`fedprophet.r-min` is not set, `R_min` is the smallest budget of the clients, but at least the memory cost of the largest atom;
clients with less refuse their tasks.

| | paper: default | authors' code: presets `fedprophet-...-authors` |
|---|---|---|
| alpha is adjusted | in every round, by its ratio | `fedprophet.apa-every = 50`, `apa-after = 25`, `apa-window = 5` |
| clean rounds first | none | `attack.warmup = 100`, in every stage |
| batch norm | averaged | `architecture.batch-norm = local`; a stage restores its best round's |
| limits in Eqs. 14 and 15 | at most the limit | less than it; the stage's module counts with its head |
| the stage's head | averaged if a client's last (Eq. 17) | averaged over all; in the others it only decayed (not offered) |
| initial weights | random | ImageNet's: `training.init-weights` |
| performance left | U(0, 1) | one of six fractions: fleets `...-authors` |
| memory left | U(0, 0.2) | the same, but at least `R_min`: fleets `...-authors` |
| accuracy is of | not stated | the clients' held-out data (`client_accuracy`), by their norms |
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from statistics import median_low
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord

from piecework.models.cascade import initial_state, unit_of
from piecework.models.partition import Piece
from piecework.planning.assignment import Assignment, Context, OfUnits
from piecework.planning.cut import Cut
from piecework.strategies.cascade.fedprophet.adjustment import (
    BestRound,
    FedProphetState,
    FixedModule,
    adjust_alpha,
    measurement,
)
from piecework.strategies.cascade.fedprophet.client import FedProphetTaskConfig, head_behind
from piecework.strategies.cascade.fedprophet.cut import FedProphetCut
from piecework.strategies.cascade.fedprophet.evaluation import query_steps, validation_steps
from piecework.strategies.cascade.fedprophet.settings import FedProphetSettings
from piecework.strategies.method import QueryingMethod, Round
from piecework.strategies.resources import ClientResources
from piecework.strategies.state import Progress
from piecework.training.capabilities import Refusal
from piecework.training.methods import METHODS
from piecework.training.settings import learning_rate

LOG = logging.getLogger("piecework")


class FedProphet(QueryingMethod):
    """Trains the cascade one module per stage."""

    name = "fedprophet"
    can = METHODS["fedprophet"].can
    refuses = (
        Refusal("evaluation.mode", "{name} controls training by clients' validation data; use central", ("personal",)),
        Refusal("data.validation-fraction", "{name} is steered by the accuracy on clients' validation data", (0.0,)),
        Refusal(
            "evaluation.patience", "it compares the accuracies of different modules: use fedprophet.stage-patience"
        ),
    )
    cut_class: ClassVar[type[Cut]] = FedProphetCut
    cut: FedProphetCut
    state_class = FedProphetState
    state: FedProphetState
    evaluation_keys = ("val-loss", "val-accuracy", "val-adversarial-accuracy")
    first_rho = 1.0

    def __init__(self, cut: FedProphetCut) -> None:
        super().__init__(cut)
        self.table = self.settings.of(FedProphetSettings)
        self.validates = "all" if self.table.validation_clients == "all" else "asked"

    def begin(self, fleet: ClientResources) -> None:
        """Cut the model; R_min is chosen once per run. Raises ValueError if settings, clients and modules do not match."""
        state, settings = self.state, self.settings
        if settings.batch_statistics and settings.training.batch_size < 3:
            raise ValueError(
                f"training.batch-size = {settings.training.batch_size}: {self.name} measures features in half "
                "batches, and one example has no statistics; use 3 or more, or architecture.batch-norm = running"
            )
        fleet.require_emulated()
        if not state.r_min:
            state.r_min = self.cut.reserve().smallest or max(int(min(fleet.budgets())), self.cut.min_budget())
        self.cut = self.cut.with_smallest(state.r_min)
        self._check_modules(fleet)
        if not state.stage_rounds:
            state.stage_rounds = self.cut.rounds_of_stages(len(self.cut.stages))
        self.cut.require_adversarial_rounds(state.stage_rounds)

    def _check_modules(self, fleet: ClientResources) -> None:
        if self.cut.swaps:
            return
        largest = max(self.cut.needed_bytes(self.cut.item(stage.parts[0].atoms)) for stage in self.cut.stages)
        richest = fleet.richest
        if largest > richest.allowed_bytes:
            raise ValueError(
                f"R_min of {self.state.r_min:,} bytes (fedprophet.r-min = {self.table.r_min!r}) makes a "
                f"module of {largest:,} bytes, and the richest client has {richest.budget_bytes:,}: no client could train "
                "it; lower fedprophet.r-min"
            )

    @property
    def modules(self) -> list[Piece]:
        """The atoms of each module."""
        return [stage.parts[0].atoms for stage in self.cut.stages]

    def initial(self) -> dict[str, np.ndarray]:
        """Return the initial arrays of the model and of the auxiliary heads."""
        units = [*self.cut.model.units(), *(f"aux.{module[-1]}" for module in self.modules[:-1])]
        return {name: value.numpy() for name, value in initial_state(self.cut.model, self.settings.seed, units=units)}

    def task_config(self, stage: int, last: int) -> FedProphetTaskConfig:
        """Return the task config of a stage for a client that trains up to module `last`, both counted from 0."""
        state, modules = self.state, [list(module) for module in self.modules]
        return FedProphetTaskConfig(modules, stage, last, state.epsilon, state.nonnegative, self.cut.swaps)

    def assign(self, ctx: Context) -> Assignment:
        """Return a client's modules, with the cost of every smaller number of them to which it may fall back."""
        assigned = self.cut.choose_atoms(ctx.stage, ctx.device, ctx.slowest)
        last = next(n for n in range(ctx.stage, len(self.modules)) if self.modules[n][-1] == assigned[-1])
        config = self.task_config(ctx.stage, last)
        pieces = [config.atoms(n) for n in range(ctx.stage, last + 1)]
        ordered = self._assign_pieces(config, pieces)
        return replace(ordered, lr=self.rate(ctx.round), least=lambda: self.cut.needed_bytes(self.cut.item(pieces[0])))

    def _assign_pieces(self, config: FedProphetTaskConfig, pieces: list[Piece]) -> Assignment:
        """Return the assignment of these pieces, the last of which the client is to train if it can."""
        state, items = self.state, tuple(self.cut.item(piece) for piece in pieces[-1:])
        if self.settings.memory.ways:  # the steps of all modules that the client runs
            pieces = [*pieces, *config.before(), config.atoms(config.stage)]
        return Assignment(
            items,
            self.cut.needs(*map(self.cut.item, pieces)),
            sends=self.select_sent(config),
            frozen=tuple(f"atoms.{atom}" for module in config.fixed_modules() for atom in module),
            adversarial=state.stage_round >= self.settings.attack.warmup,  # every stage has its own warmup
            config=config,
            discarded_rounds=state.void,
            kept_round=state.best.round if state.best else 0,
        )

    def select_sent(self, config: FedProphetTaskConfig) -> OfUnits:
        """Return the assigned modules and the head of each, because a client may have memory for fewer of them."""
        numbers = range(config.stage, config.last + 1)
        heads = {head_behind(self.cut.model, self.modules[n][-1]) for n in numbers}
        return OfUnits(frozenset({f"atoms.{atom}" for atom in config.atoms(config.last)} | heads))

    def rate(self, server_round: int) -> float:
        """Return the learning rate of a round; with `fedprophet.lr-restart` the schedule restarts in each stage."""
        place = self.state.stage_round + 1 if self.table.lr_restart else server_round
        return learning_rate(self.settings, place)

    def schedule(self, first: int, last: int) -> Iterable[tuple[int, int]]:
        """Yield the rounds until the last stage ends, if every stage has all its rounds; none for a new run."""
        state, maximum = self.state, self.state.stage_rounds
        if not maximum:
            return
        self.cut = self.cut.with_smallest(state.r_min)
        left = (len(self.modules) - state.stage) * maximum - state.stage_round
        for n, server_round in enumerate(range(first, min(last, first + left - 1) + 1)):
            restarted = (state.stage_round + n) % maximum + 1
            yield server_round, restarted if self.table.lr_restart else server_round

    @property
    def queries(self) -> bool:
        """Whether all clients are asked, before a stage's first round, how far attacks move the features it starts from."""
        return self.state.fixed is not None and self.state.distance is None

    def assign_query(self, ctx: Context, assignment: Assignment, examples: int) -> Assignment:
        """Return the measurement of features behind the module before, under the attack with which that was trained."""
        state, fixed = self.state, self.state.fixed
        assert fixed is not None
        before = self.task_config(state.stage - 1, state.stage - 2)
        before = replace(before, epsilon=fixed.epsilon, nonnegative=fixed.nonnegative)
        asked, allowed = replace(self._assign_pieces(before, []), lr=assignment.lr), ctx.device.allowed_bytes
        listed = self.cut.costs(asked.needed, allowed)
        return replace(asked, steps=query_steps(self.cut, listed, before, allowed, examples))

    def read_query(self, metrics: dict[str, Any], examples: int) -> tuple[float, float, int]:
        """Return a client's measurement. Raises UpdateRejectedError if it is invalid."""
        return measurement(metrics, examples)

    def conclude_query(self, answers: dict[int, Any]) -> dict[int, str]:
        """Store E[max ||Delta z||] over all examples (Eq. 11). Returns the clients whose measurements do not count, and why."""
        factor = self.settings.faults.update_norm_limit
        maximum = factor * median_low([distance for distance, _, _ in answers.values()]) if answers and factor else inf
        rejected = {
            client: f"perturbation is {distance:.4g}, above the limit {maximum:.4g} (faults.update-norm-limit)"
            for client, (distance, _, _) in answers.items()
            if distance > maximum
        }
        if accepted := [answer for client, answer in answers.items() if client not in rejected]:
            self.state.distance = sum(d * n for d, _, n in accepted) / sum(n for _, _, n in accepted)
            self.state.nonnegative = min(lowest for _, lowest, _ in accepted) >= 0
            if not self.state.distance:
                LOG.warning(
                    "%s trains on clean features, because no attack moves the output of the module before", self.stage
                )
        return rejected

    def assign_evaluation(self, ctx: Context, assignment: Assignment, examples: int) -> Assignment:
        """Return the measurement of C_m and A_m of the new model."""
        stage = self.state.stage
        config, modules = self.task_config(stage, stage), self.modules[: stage + 1]
        steps = validation_steps(self.cut, modules, ctx.device.allowed_bytes, examples)
        return replace(assignment, config=config, sends=self.select_sent(config), steps=steps)

    def conclude(self, current: Round, arrays: ArrayRecord) -> ArrayRecord:
        """Score the round, adjust alpha, and end the stage if it is due. Returns the model for the next round."""
        state, metrics, server_round = self.state, current.evaluation, current.number
        state.stage_round += 1
        if metrics is None:
            LOG.warning(
                "no client validated round %s: neither alpha nor the end of the stage can be determined", server_round
            )
        else:
            clean, adversarial = (float(metrics[key]) for key in self.evaluation_keys[1:])  # type: ignore[arg-type]
            self._score(server_round, arrays, clean, adversarial)
        stale = self.table.stage_patience and state.since_best >= self.table.stage_patience
        return self._next_stage(server_round, arrays) if stale or state.stage_round >= state.stage_rounds else arrays

    def _score(self, server_round: int, arrays: ArrayRecord, clean: float, adversarial: float) -> None:
        state, settings = self.state, self.settings
        # alpha has no effect in clean rounds
        kept = state.recent if state.stage_round > settings.attack.warmup + 1 else []
        state.recent = [*kept, [clean, adversarial]][-self.table.apa_window :]
        if state.stage_round <= settings.attack.warmup + self.table.apa_after:
            return
        fixed = state.fixed
        rho = fixed.clean / fixed.adversarial if fixed and fixed.adversarial else self.first_rho
        score = clean + rho * adversarial
        state.since_best += 1
        if not state.best or score > state.best.score:
            state.best = BestRound(score, clean, adversarial, state.alpha, server_round)
            state.since_best = 0
            self.kept = self._in_training(arrays)
        if state.stage and fixed and self.table.apa and state.stage_round % self.table.apa_every == 0:
            before, state.alpha = state.alpha, adjust_alpha(state.alpha, state.recent, fixed, settings)
            if before and not state.alpha:
                LOG.warning("alpha is 0 after round %s: %s trains on clean features", server_round, self.stage)

    def _in_training(self, arrays: ArrayRecord) -> ArrayRecord:
        fixed = {f"atoms.{atom}" for module in self.modules[: self.state.stage] for atom in module}
        return ArrayRecord({name: array for name, array in arrays.items() if unit_of(name) not in fixed})

    def _next_stage(self, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        """Fix the module with the weights of the best round, or of the last if none was scored, and begin the next stage."""
        state = self.state
        last = state.recent[-1] if state.recent else [0.0, 0.0]
        best = state.best or BestRound(0.0, last[0], last[1], state.alpha, server_round)
        if best.round < server_round:
            state.void = [*state.void, [best.round + 1, server_round]]
        arrays = self.final(arrays)
        self.kept = ArrayRecord()
        self.state = replace(
            state,
            stage=state.stage + 1,
            stage_round=0,
            alpha=self.table.apa_start,
            distance=None,
            recent=[],
            fixed=FixedModule(
                best.clean,
                best.adversarial,
                epsilon=best.alpha * (state.distance or 0.0),
                nonnegative=state.nonnegative,
            ),
            best=None,
            since_best=0,
            norms={},  # the first updates of the next module differ in size from the last ones of this module
        )
        return arrays

    def final(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model with the weights of the stage's best round, as far as they are kept."""
        return ArrayRecord({name: self.kept.get(name, array) for name, array in arrays.items()})

    @property
    def progress(self) -> Progress:
        """The progress of the run: it is finished when the last module is fixed."""
        number = self.state.stage
        key = min(number, len(self.modules) - 1)
        return Progress(self.stage, number == len(self.modules), key=key, model=self._cascade(number + 1))

    @property
    def stage(self) -> str:
        """The name of the present stage: `module 1`, `module 2`, ..."""
        return self.cut.stages[min(self.state.stage, len(self.modules) - 1)].name

    def details(self, current: Round) -> dict[str, Any]:
        """Return the stage's epsilon, its factors (Eq. 11), and C* and A* of the previous module, for the round record."""
        state = self.state
        return {
            "modules": len(self.modules),
            "epsilon": state.epsilon if state.stage else self.settings.attack.epsilon,
            "alpha": state.alpha,
            "distance": state.distance,
            "clean_round": state.stage_round < self.settings.attack.warmup or (state.stage > 0 and not state.epsilon),
            "fixed_accuracy": state.fixed.clean if state.fixed else None,
            "fixed_adversarial_accuracy": state.fixed.adversarial if state.fixed else None,
        }

    def final_model(self) -> tuple[Piece, str]:
        """Return the modules trained so far, without that of a stage that has not begun, and the head after them."""
        return self._cascade(self.state.stage + (self.state.stage_round > 0))

    def _cascade(self, count: int) -> tuple[Piece, str]:
        atoms = tuple(atom for module in self.modules[:count] for atom in module)
        return atoms, head_behind(self.cut.model, atoms[-1])
