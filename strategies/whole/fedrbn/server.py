"""FedRBN (Junyuan Hong, Haotao Wang, Zhangyang Wang, Jiayu Zhou, "Federated Robustness Propagation: Sharing Adversarial
Robustness in Heterogeneous Federated Learning", AAAI 2023, https://arxiv.org/abs/2106.10196), the server's side, as FedProphet
compares with it.

Weights are averaged by numbers of examples. Batch norms have two sets of statistics: the mean mu_l and variance v_l of layer l
over clean examples, and mu'_l and v'_l over adversarial ones. S are the clients that trained adversarially in a round, and t is
one that trained on clean examples. Robustness propagates from S to t:

  (mu'_t, v'_t) <- sum_{s in S} a_ts (mu'_s, v'_s),   a_t = softmax over s of c_ts / 0.01
  c_ts = mean over layers of [cos(mu_t, mu_s) + cos(v_t, v_s)] / 2

If S is empty, nothing propagates. With `architecture.batch-norm = local`, the default here, clean statistics, scales and shifts
stay with the clients, and the server keeps each client's adversarial statistics for it. With `running`, all of these are
averaged over the clients of the round like everything else, propagated ones included.

Where it differs from the paper: as in FedProphet's comparison, clients with too little memory for an adversarial step train on
clean examples. If they cannot do that either, they swap, which costs only simulated time. Budgets are therefore not enforced,
and FedRBN runs only on emulated budgets. The model is tested with the set of statistics that belongs to each kind of example
(`fedrbn.evaluation-branch = oracle`). FedRBN's own test learns a detector. Ours (`detector`) is a support vector machine with
an RBF kernel on the clean logits of public examples and of attacks on them; it is fitted again for each evaluation.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import CheckedUpdate, WeightedMean, replace_arrays, require_all
from piecework.models.cascade import has_statistics
from piecework.models.dual_norm import COUNT, PREFIX, STATISTICS, DualNorms, begin_adversarial, is_adversarial
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context
from piecework.planning.cut import Cut
from piecework.planning.part import Part
from piecework.strategies.method import Method, Round
from piecework.strategies.resources import ClientResources
from piecework.strategies.whole.fedrbn.client import Clean, DualPiece, FedRBNTaskConfig, adversarial_loss, learner
from piecework.strategies.whole.fedrbn.detector import branch_of, fit_detector
from piecework.strategies.whole.fedrbn.settings import FedRBNSettings
from piecework.training.capabilities import Refusal
from piecework.training.loop import PieceModel
from piecework.training.methods import METHODS

Statistics = Mapping[str, np.ndarray]  # by array name
TEMPERATURE = 0.01


class FedRBNCut(Cut):
    """One stage: every device trains the whole model, on adversarial examples if it has memory for that, else on clean ones."""

    def plain_part(self, item: WorkItem) -> Part:
        """Return the whole model, which a `Clean` item trains on clean examples and others on adversarial ones."""
        weight = self.settings.of(FedRBNSettings).clean_weight
        if isinstance(item.mode, Clean):
            return Part(self.model, item.atoms, name="the whole model, clean", piece_class=DualPiece, clean=True)
        loss, name = adversarial_loss(weight), "the whole model, adversarially"
        return Part(self.model, item.atoms, make_loss=loss, name=name, piece_class=learner(weight))

    @property
    def variant(self) -> Variant:
        """The model whose batch norms have two sets of statistics."""
        return Variant(changes=(DualNorms(True),))

    def require_model(self) -> None:
        """Raise ValueError if the model has no batch norms with running statistics, or no round is adversarial."""
        if self.settings.batch_statistics:
            raise ValueError(
                f"architecture.batch-norm = {self.settings.architecture.batch_norm!r}: fedrbn needs running statistics to "
                f"propagate; use running or local"
            )
        if not any(has_statistics(self.blueprint, unit) for unit in self.blueprint.units()):
            raise ValueError(
                f"model {self.settings.model!r} has no batch norms, but fedrbn propagates their statistics"
            )
        if self.settings.attack.warmup >= self.settings.num_rounds:
            raise ValueError(
                f"attack.warmup = {self.settings.attack.warmup} leaves no adversarial round in num-rounds = "
                f"{self.settings.num_rounds}"
            )

    def robust(self, state: DeviceState) -> bool:
        """Return whether a device has enough memory to train adversarially."""
        return self.bytes(self.whole) <= state.allowed_bytes


class Propagated:
    """What the server collects in a round: the mean of all arrays but adversarial statistics, and the clients' statistics.

    Statistics are kept until the last reply, because they propagate between clients.
    """

    def __init__(self) -> None:
        self.mean, self.found = WeightedMean(), dict[int, tuple[Statistics, int]]()


DETECTOR = {"fedrbn.evaluation-branch": ("detector",)}
NO_DETECTOR = (
    "the detector of fedrbn.evaluation-branch needs the server's public data, but here clients evaluate the model"
)


class FedRBN(Method):
    """Federated averaging that propagates adversarial batch-norm statistics.

    `kept` has each client's adversarial statistics, by `<client>/<array>`.
    """

    name = "fedrbn"
    can = METHODS["fedrbn"].can
    refuses = (
        Refusal("evaluation.mode", NO_DETECTOR, ("personal",), DETECTOR),
        Refusal("evaluation.on-clients-every", NO_DETECTOR, when=DETECTOR),
    )
    cut_class = FedRBNCut
    cut: FedRBNCut
    evaluation_keys = ("val-loss", "val-accuracy", "val-adversarial-accuracy")

    def __init__(self, cut: FedRBNCut) -> None:
        super().__init__(cut)
        branch = self.settings.of(FedRBNSettings).evaluation_branch
        self.piece_class, self.prepare = branch_of(branch), self._prepare
        # the statistics that evaluation uses
        self.evaluation_details = self.model_details = {"evaluation_branch": branch}

    def begin(self, fleet: ClientResources) -> None:
        """Raise ValueError if a client measures its own memory, so that swapping cannot be simulated."""
        fleet.require_emulated()

    def assign(self, ctx: Context) -> Assignment:
        """Return the whole model, with adversarial examples after the warm-up if they fit the device, else with clean ones."""
        robust = self.cut.robust(ctx.device) and (ctx.arrays is None or ctx.round > self.settings.attack.warmup)
        item = self.cut.whole if robust else replace(self.cut.whole, mode=Clean(True))
        sends = partial(self.with_own_statistics, ctx.client)
        return Assignment(
            (item,),
            {item: self.cut.bytes(item)},
            sends=sends,
            expects=(lambda arrays: begin_statistics(sends(arrays))) if robust else None,
            adversarial=robust,
            config=FedRBNTaskConfig(ctx.client),
        )

    def with_own_statistics(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model, with the client's own adversarial statistics if the server keeps some."""
        return ArrayRecord({name: self.kept.get(f"{client}/{name}", array) for name, array in arrays.items()})

    def open(self, current: Round) -> None:
        """Begin a round."""
        current.mean = Propagated()

    def combine(self, current: Round, client: int, update: CheckedUpdate) -> None:
        """Add an update; `finish` adds its adversarial statistics. Raises UpdateRejectedError if arrays are missing."""
        require_all(update, current.arrays)
        current.mean.mean.add({n: a for n, a in update.arrays.items() if not is_adversarial(n)}, update.examples)
        sets = {n: a for n, a in update.arrays.items() if is_adversarial(n) or n.endswith(STATISTICS)}
        current.mean.found[client] = sets, update.examples

    def finish(self, current: Round) -> ArrayRecord:
        """Return the new model, with the adversarial statistics after propagation."""
        robust, found, mean = self.robust(current), current.mean.found, current.mean.mean
        sources = [sets for client, (sets, _) in found.items() if client in robust]
        kept = dict(self.kept)
        for client, (sets, examples) in found.items() if sources else ():
            own = adversarial(sets) if client in robust else propagate(sets, sources)
            mean.add(own, examples)
            kept |= {f"{client}/{name}": Array(array) for name, array in own.items()}
        if self.settings.norms == "local":
            self.kept = ArrayRecord(kept)
        return replace_arrays(current.arrays, mean)

    def robust(self, current: Round) -> list[int]:
        """Return the clients with an adversarial task."""
        return [client for client, each in current.assigned.items() if each.task.adversarial]

    def details(self, current: Round) -> dict[str, Any]:
        """Return the clients with an adversarial task for the round record."""
        return {"adversarial_clients": self.robust(current)}

    def _prepare(self, piece: PieceModel) -> None:
        """Initialise unused adversarial statistics, select the clean ones, and fit the detector if evaluation uses one."""
        begin_adversarial(piece.units().values())
        piece.set_attacked(False)
        if self.public is not None:
            fit_detector(piece, self.public, self.settings)


def begin_statistics(arrays: ArrayRecord) -> ArrayRecord:
    """Return a model's arrays, in which adversarial statistics that were never used are copies of the clean ones."""
    found, count = dict(arrays), PREFIX + COUNT
    for layer in (name.removesuffix(count) for name in arrays if name.endswith(count) and not arrays[name].numpy()):
        found |= {layer + PREFIX + name: arrays[layer + name] for name in STATISTICS}
    return ArrayRecord(found)


def adversarial(sets: Statistics) -> dict[str, np.ndarray]:
    """Return the adversarial set of a model's statistics."""
    return {name: array for name, array in sets.items() if is_adversarial(name)}


def similarity(one: Statistics, other: Statistics) -> float:
    """Return c_ts of two models' clean statistics: the mean over layers of the cosines of means and of variances."""
    clean = [name for name in one if name.endswith(STATISTICS) and not is_adversarial(name)]
    return float(np.mean([cosine(one[name], other[name]) for name in clean]))


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Return the cosine of two vectors, 0 if one of them is zero."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / max(lengths, 1e-8)


def propagate(own: Statistics, sources: list[Statistics]) -> dict[str, np.ndarray]:
    """Return the adversarial statistics that a client with clean training gets: those of `sources`, weighted by a_ts.

    Integer counts are the maximum over the sources.
    """
    scores = np.array([similarity(own, source) for source in sources]) / TEMPERATURE
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    found = {}
    for name, array in adversarial(sources[0]).items():
        held = [source[name] for source in sources]
        if np.issubdtype(array.dtype, np.floating):
            found[name] = np.asarray(
                sum(w * a.astype(np.float64) for w, a in zip(weights, held, strict=True)), array.dtype
            )
        else:
            found[name] = np.asarray(np.max(held, axis=0))
    return found
