"""SpaFL: clients keep personal sparse models and share pruning thresholds (the server's side). In `local` they share nothing.

Minsu Kim, Walid Saad, Merouane Debbah, Choong Seon Hong, "SpaFL: Communication-Efficient Federated Learning with Sparse Models
and Low Computational Overhead", NeurIPS 2024, https://arxiv.org/abs/2406.00431

    Algorithm 1, line 5, send tau(t + 1)            spafl/server.py: SpaFL.with_change
    line 6, move the weights (Eq. 13)               strategies/sparse/spafl/client.py: apply_thresholds
    lines 8 to 10, train (Eqs. 3 to 6, 9)           strategies/sparse/spafl/client.py: train; models/masked.py: Masked
    line 11, transmit thresholds                    strategies/sparse/spafl/client.py: train
    line 12, the new thresholds (Eq. 7)             spafl/server.py: SpaFL.combine

tau(t) are the thresholds, a float32 array, which is all that the server has: every client keeps, and evaluates, a personal
model. alpha is the weight of the sparsity regulariser.

Where it differs from the paper: thresholds are sent with their last change, because a client that missed the last round cannot
know it (the paper's clients calculate it themselves). Clients build w(0) from the seed, where the paper's server sends it. XOR
in Eq. 13 is read as a sign: weights with a positive sum move against the change, others along with it, which section 3.3.3
says in words. A filter whose mean equals its threshold is pruned too, and a layer restarts at 1 % too (the paper: below
these).

| | paper: default | authors' code |
|---|---|---|
| gradient through masks | identity, to the threshold (Eq. 9) | `spafl.straight-through = flowing` (FMNIST), `clipped` (CIFAR) |
| Eq. 13 divides by | the inputs of a filter | the kernel's size: `spafl.importance-update = authors` |
| alpha | constant | grows within the first rounds: `spafl.sparsity-ramp = true` |
| momentum between rounds | not stated: begins at 0 | kept on FMNIST: `spafl.client-momentum = true` |
| norms of pruned filters | not stated: masked too | shift the next layer's input: `spafl.silent-norms = false` |
| thresholds | in [0, 1], and weights in [-1, 1] | thresholds unbounded: `spafl.clamp-thresholds = false`; weights too |
| pixels | not stated: normalised | 0 to 255 on FMNIST and CIFAR-10: `data.pixel-scale = raw` |
| norm of the gradient | not stated: free | at most 3 on CIFAR-10, 15 on CIFAR-100: `training.clip-norm` |
| examples of each class | by Dirichlet | on CIFAR-100 at most a client's part: `data.partition-cap = true` |

With `flowing` the gradient also passes the mean into the weights, and with `clipped` only where the mean is more than 1 off the
threshold. The paper reports the best round; `accuracy` here is the last one's.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord

from piecework.federation.aggregation import CheckedUpdate, UpdateRejectedError, WeightedMean, replace_arrays
from piecework.federation.reports import ClientReport
from piecework.models.compact import layout
from piecework.models.layer_statistics import Layer, layer_statistics
from piecework.models.masked import Masks, thresholds
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context, everything, nothing
from piecework.planning.counts import sparse_flops
from piecework.planning.cut import Cut, Stage, Traffic
from piecework.planning.part import Part
from piecework.strategies.method import Method, Reading, Received, Round
from piecework.strategies.sparse.spafl.client import CHANGE, THRESHOLDS, SpaFLTaskConfig, from_words, initial_model
from piecework.strategies.sparse.spafl.forms import model_class, sparse_loss
from piecework.strategies.sparse.spafl.settings import SpaFLSettings
from piecework.strategies.state import StrategyState
from piecework.training.capabilities import Refusal
from piecework.training.methods import METHODS

BAND = 0.1  # width of the range of densities above `spafl.target-density` in which alpha falls to 0


class SpaFLCut(Cut):
    """One stage: each device trains the whole model with thresholds."""

    def require_model(self) -> None:
        """Raise ValueError for a model of which pruned filters cannot be removed, if they are to be (`spafl.masked-every`)."""
        if self.settings.of(SpaFLSettings).masked_every != 1:
            layout(self.blueprint, self.model)

    @property
    def variant(self) -> Variant:
        """The run's model with thresholds."""
        own = self.settings.of(SpaFLSettings)
        return Variant(changes=(Masks(own.straight_through, own.silent_norms, own.clamp_thresholds),))

    def plain_part(self, item: WorkItem) -> Part:
        """Return the masked model. Raises ValueError if no layer can be masked."""
        name = "the whole model, masked"
        return Part(
            self.model, item.atoms, make_loss=sparse_loss(1.0), name=name, piece_class=model_class(self.settings)
        )

    def min_budget(self) -> int:
        """Return the memory cost (bytes) of the masked model."""
        return self.needed_bytes(self.whole)

    @cached_property
    def stages(self) -> list[Stage]:
        """One stage, with the masked model."""
        return [Stage("training", (self._fit_part(self.whole, self.allowed),))]

    def traffic(self, parts: list[Part]) -> Traffic:
        """Return the thresholds: 8 bytes for each down, because their change comes with them, 4 up; 0 if nothing is shared."""
        count = sum(sum(thresholds(part.blueprint).values()) for part in parts) if self.method.shared else 0
        return Traffic((8 * count, 4 * count), (count, count))


@dataclass
class SpaFLState(StrategyState):
    """`trained` are the clients that have a model. `density` is the mean over layers and clients in the last round."""

    trained: list[int] = field(default_factory=list)
    density: float = 1.0


@dataclass
class Reported:
    """What the server collects in a round: the mean of thresholds, and the clients' masks, of those whose updates entered it.

    `restarted` are the clients that lost their models and began anew.
    """

    thresholds: WeightedMean = field(default_factory=WeightedMean)
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    restarted: list[int] = field(default_factory=list)


ONLY_PERSONAL = "{name} has only the personal models of the clients, which evaluate by evaluation.every; set it to 0"


class SpaFL(Method):
    """Clients train personal sparse models, and the server averages their thresholds."""

    name = "spafl"
    can = METHODS["spafl"].can
    refuses = (
        Refusal("evaluation.mode", "{name} has only the clients' personal models; set it to personal", ("central",)),
        Refusal("evaluation.on-clients-every", ONLY_PERSONAL),
        Refusal("evaluation.autoattack-examples", ONLY_PERSONAL),
        Refusal("training.init-weights", "{name}'s clients build their models from the seed"),
        Refusal(
            "training.optimiser-state",
            "{name} moves momentum between forms of a model, whose blocks of 256 values differ; use bfloat16",
            ("8-bit",),
        ),
        Refusal(
            "architecture.batch-norm",
            "{name} always keeps batch norms on the clients; set it to running",
            ("local",),
        ),
        Refusal(
            "spafl.client-momentum",
            "it keeps the clients' momentum, but training.momentum is 0: set it, or leave this off",
            when={"training.momentum": (0.0,), "training.optimiser": ("sgd",)},
        ),
        Refusal(
            "spafl.masked-every",
            "with spafl.silent-norms = false pruned filters change the features after their norms, so they cannot be removed; "
            "set it to 1",
            when={"spafl.silent-norms": (False,)},
        ),
        Refusal(
            "spafl.masked-every",
            "with spafl.frozen-weights = true no weights are trained that could be left out; set it to 1",
            when={"spafl.frozen-weights": (True,)},
        ),
    )
    cut_class = SpaFLCut
    cut: SpaFLCut
    state_class = SpaFLState
    state: SpaFLState
    evaluation_keys = ("val-loss", "val-accuracy", "density")
    shared: ClassVar[bool] = True

    def __init__(self, cut: SpaFLCut) -> None:
        super().__init__(cut)
        self.table = self.settings.of(SpaFLSettings)
        self.model_details = {"personal": True}  # the file has no global model, only thresholds
        self.layers = thresholds(cut.model)
        self.tau = self.initial()[THRESHOLDS]
        self._before: Array | None = None  # the thresholds of the previous round; `kept` already holds this round's

    @cached_property
    def digest(self) -> str:
        """The digest of the clients' initial model, which is built here once, one unit at a time."""
        return initial_model(self.cut.model, self.settings.seed)

    @cached_property
    def layer_statistics(self) -> dict[str, Layer]:
        """The statistics of the layers with thresholds, by name."""
        model = self.cut.model
        layers = [layer for unit in model.units() for layer in layer_statistics(model, unit).layers if layer.thresholds]
        return dict(zip(self.layers, layers, strict=True))

    @cached_property
    def macs(self) -> dict[str, int]:
        """The multiply-accumulates of one example in each layer with thresholds, by name."""
        return {name: layer.macs for name, layer in self.layer_statistics.items()}

    def by_layer(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Split an array with one value per threshold into layers, by name."""
        parts = np.split(values, np.cumsum([*self.layers.values()])[:-1])
        return dict(zip(self.layers, parts, strict=True))

    def initial(self) -> dict[str, np.ndarray]:
        """Return thresholds of 0, which are all the arrays of the server."""
        return {THRESHOLDS: np.zeros(sum(self.layers.values()), dtype=np.float32)}

    def alpha(self, server_round: int) -> float:
        """Return the weight of the sparsity regulariser in a round."""
        alpha = self.table.sparsity
        if self.table.sparsity_ramp:
            alpha /= 1 + math.exp(min(700, 5 - 10 * (server_round - 1)))
        if self.table.target_density:
            alpha *= min(1.0, max(0.0, (self.state.density - self.table.target_density) / BAND))
        return alpha

    def assign(self, ctx: Context) -> Assignment:
        """Return the masked model, with the regulariser's weight and the digest of the initial model.

        A plan needs no digest, for which the model would have to be built.
        """
        digest = self.digest if ctx.arrays is not None else ""
        config = SpaFLTaskConfig(self.alpha(ctx.round), digest, self.shared)
        sends = self.with_change if self.shared else nothing
        return self.work(self.cut.whole, sends=sends, expects=everything, config=config)

    def assign_evaluation(self, ctx: Context, assignment: Assignment, examples: int) -> Assignment:
        """Return the assignment, for which nothing is sent: clients evaluate their own models."""
        return replace(assignment, sends=nothing)

    def with_change(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the thresholds and their last change."""
        now = arrays[THRESHOLDS]
        if self._before is None:
            return ArrayRecord({THRESHOLDS: now})
        return ArrayRecord({THRESHOLDS: now, CHANGE: Array(now.numpy() - self._before.numpy())})

    def open(self, current: Round) -> None:
        """Begin a round. Norms of earlier rounds do not count, in which alpha was another."""
        current.mean = Reported()
        self.state.norms = {}
        self._before, self.kept = self.kept.get(THRESHOLDS), ArrayRecord({THRESHOLDS: current.arrays[THRESHOLDS]})
        self.tau = current.arrays[THRESHOLDS].numpy()

    def check(self, received: Received) -> CheckedUpdate:
        """Check the thresholds: clamped ones are from 0 to 1, which bounds their movement, so norms need no limits.

        Thresholds that are not clamped may leave [0, 1]. How far they move is compared with the other updates of the round.
        `maximum`, which is relative to the first thresholds, does not apply, because these are 0. Raises UpdateRejectedError.
        """
        self.mask(received.metrics)
        received = replace(received, maximum=lambda: math.inf)
        if not self.table.clamp_thresholds:
            return super().check(received)
        update = super().check(replace(received, limits={}))
        found = update.arrays[THRESHOLDS]
        if found.min() < 0 or found.max() > 1:
            raise UpdateRejectedError(
                f"thresholds from {found.min():.4g} to {found.max():.4g}: they must be from 0 to 1"
            )
        return replace(update, norms={})

    def mask(self, metrics: dict[str, Any]) -> np.ndarray:
        """Return the mask that a client reports, a bit for each threshold. Raises UpdateRejectedError if it is invalid."""
        try:
            return from_words(metrics["mask"], sum(self.layers.values()))
        except (ValueError, OverflowError) as error:
            raise UpdateRejectedError(f"mask: {error}") from error

    def read(self, current: Round, report: ClientReport, metrics: dict[str, Any]) -> Reading:
        """Read a client's mask, and the executed fraction of the masked layers' forward passes.

        Raises UpdateRejectedError if the fraction is invalid.
        """
        macs, dense = metrics.get("macs"), sum(self.macs.values()) * sum(metrics["seen"])
        if not isinstance(macs, int | float) or not 0 < macs <= 1.001 * dense:
            raise UpdateRejectedError(f"macs is {macs!r}: it must be above 0 and at most {dense}")
        executed = float(macs / dense)
        try:
            mask = current.memo[report.client] = self.mask(metrics)
        except UpdateRejectedError:
            return Reading(executed)  # the client has trained all the same; `check` refuses its update
        seen = sum(metrics["seen"])
        epochs = round(seen / max(1, report.examples))
        batches = max(1, epochs) * math.ceil(report.examples / self.settings.training.batch_size)
        density = {name: float(part.mean()) for name, part in self.by_layer(mask).items()}
        weights = sum(math.prod(layer.weight) for layer in self.layer_statistics.values())
        if metrics.get("fresh") and report.client in self.state.trained:
            report.add_note("its store no longer has its model: it restarted from the initial one")
            current.mean.restarted.append(report.client)
        self.state.trained = sorted({*self.state.trained, report.client})
        return Reading(executed, sparse_flops(self.macs, density, seen, batches, len(mask), weights))

    def combine(self, current: Round, client: int, update: CheckedUpdate) -> None:
        """Add a client's thresholds to the mean, with the same weight for every client."""
        current.mean.thresholds.add(update.arrays, 1)
        current.mean.masks[client] = current.memo[client]
        self.state.density = float(np.mean([*self.densities(current).values()]))  # also of a round that is discarded

    def finish(self, current: Round) -> ArrayRecord:
        """Return the new thresholds."""
        new = replace_arrays(current.arrays, current.mean.thresholds)
        self.tau = new[THRESHOLDS].numpy()
        return new

    def densities(self, current: Round) -> dict[str, float]:
        """Return the fraction of filters in each layer that are not pruned, as the mean over the round's clients."""
        kept = np.mean([*current.mean.masks.values()], axis=0)
        return {name: float(part.mean()) for name, part in self.by_layer(kept).items()}

    def details(self, current: Round) -> dict[str, Any]:
        """Return alpha, densities and thresholds for the round record.

        `density` is the mean over the evaluated models, or None. `open` is, for each filter of a layer, the percentage of the
        round's clients that do not prune it. `lost` are the clients that lost their models and evaluated the initial one.
        """
        masks = current.mean.masks
        kept = np.mean([*masks.values()], axis=0) if masks else np.zeros(sum(self.layers.values()))
        densities, taus = self.densities(current) if masks else {}, self.by_layer(self.tau)
        layers = {
            name: {
                "density": densities.get(name),
                "threshold": float(taus[name].mean()),
                "open": [round(100 * float(fraction)) for fraction in part],
            }
            for name, part in self.by_layer(kept).items()
        }
        alphas = {each.assignment.config.alpha for each in current.assigned.values()}
        answers, found = current.answers.items(), current.evaluation
        return {
            "alpha": max(alphas, default=None),
            "density": float(found["density"]) if found is not None else None,  # type: ignore[arg-type]
            "restarted": current.mean.restarted,
            "lost": [client for client, said in answers if said.get("fresh") and client in self.state.trained],
            "filters": layers,
        }


class Local(SpaFL):
    """SpaFL without communication: every client trains its weights and thresholds alone."""

    name = "local"
    can = METHODS["local"].can
    shared = False

    def check(self, received: Received) -> CheckedUpdate:
        """Check that there are no arrays, and a number of examples. Raises UpdateRejectedError."""
        self.mask(received.metrics)
        arrays, examples = received.arrays, received.metrics.get("num-examples")
        if arrays or not isinstance(examples, int) or examples <= 0:
            raise UpdateRejectedError(
                f"{len(arrays)} arrays of {examples!r} examples: a local client sends no arrays, and its examples"
            )
        return CheckedUpdate({}, examples, {})
