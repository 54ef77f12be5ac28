"""SLT: layers are trained in full width one after another, each with a narrow head behind it (the server's side).

Kilian Pfeiffer, Ramin Khalili, Joerg Henkel, "Aggregating Capacity in FL through Successive Layer Training for
Computationally-Constrained Devices", NeurIPS 2023, https://arxiv.org/abs/2305.17005

    W_1 .. W_K_F, W_K_T, W^{1,s} .. W^{s,s}   models/wide_prefix.py: WidePrefix, widen_input; slt/cut.py: indices_of
    the configuration {K_F, K_T, s}            slt/steps.py: choose_ratios; slt/cut.py: SLTCut.choose, SLTCut.needed_of
    rounds of the steps                        slt/steps.py: round_weights, allot; slt/server.py: SLT.conclude
    local training of a configuration          slt/client.py: train
    averaging of what clients trained          slt/server.py: SLT.combine
    devices of several constraints             slt/server.py: SLT.assign; slt/client.py: widest

The network has the layers 1 .. K. In step n the first K_F = n - 1 layers are frozen, layer K_T = n is trained with all its
channels, and the layers behind it, the head, are trained with the first fraction s_n of theirs: W^{1,s} of layer K_T + 1 reads
all channels of W_K_T, and later kernels are W^{s,s}. Before the first step the whole network, narrowed to s_1, is pretrained.
s_n is the largest fraction whose training fits the poorest client, and at most s_{n + 1}, so that the head never loses channels
that were trained. The last step N is the first with s = 1: it trains all layers that are left, and then the model is full. All
clients train the same configuration; one with more memory than the poorest (the paper's heterogeneous constraints) trains more
layers in full width at once, K_F < n - 1, with the same K_T and s. An entry of the full model becomes the mean over the clients
that trained it, and keeps its value if none did. Entries that no step has reached yet are the initial ones.

The rounds of a step are in proportion to the parameters that it adds to the network. With `slt.rounds` = trained, as in the
authors' code, they are in proportion to those that it trains, after the fraction s_1 of all rounds for pretraining.

Where it differs from the paper: we had the authors' code and the paper's figures, and decided what they leave open. A layer is
an atom, so a residual block is one (there each convolution is). Where a block adds its narrow output to its wide input, the
first channels of the input are added, as there. s is a multiple of 1/64 (there 0.001). Clients are weighted by their numbers of
examples (there equally). Each step has at least one round. The last layer has a step of its own if that fits (there it stays
narrow unless s is 1 before). Frozen layers run one at a time, in evaluation mode, and their features are stored; there they are
held and use the statistics of each batch, as ours do by default (`architecture.batch-norm` = measured). The network of the step
that was trained last is evaluated, measured and saved.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Array, ArrayRecord

from piecework.federation.aggregation import CheckedUpdate
from piecework.models.cascade import Shape, unit_of
from piecework.models.partition import Piece
from piecework.models.variant import Variant
from piecework.models.width import Indices, shapes, take
from piecework.planning.assignment import Assignment, Context, OfEntries
from piecework.strategies.cascade.slt.client import SLTTaskConfig
from piecework.strategies.cascade.slt.cut import SLTCut, indices_of
from piecework.strategies.cascade.slt.settings import SLTSettings
from piecework.strategies.cascade.slt.steps import Step, allot
from piecework.strategies.method import Round, StagedMethod
from piecework.strategies.resources import ClientResources
from piecework.strategies.serving import Serving
from piecework.strategies.state import Progress, StrategyState
from piecework.training.capabilities import Refusal
from piecework.training.methods import METHODS

OTHER_STEPS = "it compares the networks of different steps, so let the steps end by their rounds"


@dataclass
class SLTState(StrategyState):
    """The state of the run. `ratios` are s_1 .. s_N for the `smallest` budget in bytes, and `rounds` those of each step.

    `step` is the number of the present step, 0 for pretraining, and `step_round` its rounds done. `served` is the step whose
    network was trained last.
    """

    ratios: list[float] = field(default_factory=list)
    smallest: int = 0
    rounds: list[int] = field(default_factory=list)
    step: int = 0
    step_round: int = 0
    served: int = 0


class SLTServing(Serving):
    """Serves the network of the step that was trained last."""

    method: "SLT"

    @property
    def variant(self) -> Variant:
        """The network of the step."""
        return self.method.cut.item_of(self.method.served_step, 0).variant

    def arrays(self, trained: ArrayRecord) -> ArrayRecord:
        """Return its arrays, cut out of the full model's."""
        step = self.method.served_step
        if step.ratio == 1:
            return trained
        places = self.method.places(step).items()
        return ArrayRecord({name: _taken(trained[name], where) for name, where in places})


def _taken(array: Array, where: Indices) -> Array:
    """Return the entries at these indices; an array of which all are taken is not copied."""
    whole = all(len(places) == size for places, size in zip(where, array.shape, strict=True))
    return array if whole else Array(take(array.numpy(), where))


class SLT(StagedMethod):
    """Trains layer after layer in full width, with a narrow head behind it that grows to the full one."""

    name = "slt"
    can = METHODS["slt"].can
    refuses = (
        Refusal(
            "architecture.batch-norm", "slt averages layers of all clients; use measured, running or batch", ("local",)
        ),
        Refusal("evaluation.patience", OTHER_STEPS),
        Refusal("evaluation.target-accuracy", OTHER_STEPS),
    )
    cut_class = SLTCut
    cut: SLTCut
    state_class = SLTState
    state: SLTState
    serving_class = SLTServing

    def __init__(self, cut: SLTCut) -> None:
        super().__init__(cut)
        self._places: dict[Step, dict[str, Indices]] = {}  # for the present cut
        self._full: Mapping[str, Shape] = {}

    def begin(self, fleet: ClientResources) -> None:
        """Choose the steps for the poorest client and divide the rounds, once a run. Raises ValueError if it cannot."""
        state = self.state
        if not state.ratios:
            budgets = fleet.budgets()
            fitted = self.cut.fit(int(min(budgets)), int(max(budgets)))
            state.ratios, state.smallest = list(fitted.chosen), fitted.smallest
        self.cut = self.cut.with_smallest(state.smallest).having(chosen=tuple(state.ratios))
        self._places, self._full = {}, shapes(self.cut.model)
        if not state.rounds:
            state.rounds = allot(self.cut.weights, self.settings.num_rounds)

    @property
    def step(self) -> Step:
        """The present step, or the last one if all are done."""
        return self.cut.steps[min(self.state.step, len(self.cut.steps) - 1)]

    @property
    def served_step(self) -> Step:
        """The step whose network was trained last."""
        return self.cut.steps[self.state.served]

    def places(self, step: Step) -> Mapping[str, Indices]:
        """Return the indices of the arrays of a step's network in the full model's, by name."""
        if step not in self._places:
            network = self.cut.network(self.cut.item_of(step, 0).variant)
            self._places[step] = indices_of(self.cut.model, network)
        return self._places[step]

    def assign(self, ctx: Context) -> Assignment:
        """Return the step's network behind as few frozen layers as fit; the poorest client trains one layer in full width."""
        cut, step, allowed = self.cut, self.cut.steps[ctx.stage], ctx.device.allowed_bytes
        choices = cut.choices(step)
        if self.settings.of(SLTSettings).depth == "one" or allowed <= cut.allowed:
            choices = choices[-1:]
        items = [cut.item_of(step, frozen) for frozen in choices]
        first = next((n for n, item in enumerate(items) if cut.needed_bytes(item) <= allowed), len(items) - 1)
        frozen = choices[first]
        return Assignment(
            (items[first],),
            cut.needs(*items[first:]),
            sends=OfEntries(lambda: self.sent(step, frozen)),
            variant=items[first].variant,
            frozen=tuple(f"atoms.{atom}" for atom in range(frozen)),
            config=SLTTaskConfig(choices[first:]),
        )

    def sent(self, step: Step, frozen: int) -> Mapping[str, Indices]:
        """Return the indices of the arrays that are trained behind the first `frozen` atoms."""
        known = {f"atoms.{atom}" for atom in range(frozen)}
        return {name: where for name, where in self.places(step).items() if unit_of(name) not in known}

    def combine(self, current: Round, client: int, update: CheckedUpdate) -> None:
        """Add a client's update to the means of the entries that it trained, weighted by its number of examples."""
        current.mean.add(update.arrays, update.examples, self.places(self.step), self._full)

    def finish(self, current: Round) -> ArrayRecord:
        """Return the new model, whose step is the one that is served from now on."""
        self.state.served = self.step.number
        return super().finish(current)

    def conclude(self, current: Round, arrays: ArrayRecord) -> ArrayRecord:
        """Begin the next step if the rounds of this one are over."""
        state = self.state
        state.step_round += 1
        if state.step < len(state.rounds) and state.step_round >= state.rounds[state.step]:
            self.state = replace(state, step=state.step + 1, step_round=0, norms={})
        return arrays

    def final(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model."""
        return arrays

    def final_model(self) -> tuple[Piece, str]:
        """Return all atoms and the head, of the network that is served."""
        return self.trained_model()

    @property
    def progress(self) -> Progress:
        """The progress of the run, with the present step."""
        return Progress(str(self.step), self.state.step == len(self.cut.steps), key=self.step.number)

    def details(self, current: Round) -> dict[str, Any]:
        """Return the step, K_T, s, and the number of frozen atoms of each client, for the round record."""
        frozen = {str(client): each.assignment.items[0].atoms[0] for client, each in current.assigned.items()}
        return {
            "steps": len(self.cut.steps) - 1,
            "full_atoms": self.step.full,
            "width": self.step.ratio,
            "frozen_atoms": frozen,
        }
