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

As in FedProphet's comparison, clients with too little memory for an adversarial step train on clean examples. If they cannot do
that either, they swap, which costs only simulated time. Budgets are therefore not enforced, and FedRBN runs only on emulated
budgets. The model is tested with the set of statistics that belongs to each kind of example
(`fedrbn.evaluation-branch = oracle`). FedRBN's own test learns a detector. Ours (`detector`) is a support vector machine with
an RBF kernel on the clean logits of public examples and of attacks on them; it is fitted again for each evaluation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord

from piecework.client_app.trainers.whole.fedrbn import DualPiece, FedRBNTaskConfig, adversarial_loss, learner
from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import CheckedUpdate, WeightedMean, require_all, updated
from piecework.federation.public_data import public_examples
from piecework.models.cascade import has_statistics
from piecework.models.dual_norm import COUNT, PREFIX, STATISTICS, begin_adversarial, is_adversarial
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.planning.part import Part
from piecework.planning.partition_policy import Stage, Swapping
from piecework.strategies.base import PieceStrategy
from piecework.strategies.client_evaluation import EvaluationAsTrained
from piecework.strategies.state import Experiment
from piecework.strategies.whole.fedrbn_detector import branch_of, fit_detector
from piecework.training.examples import Examples
from piecework.training.loop import PieceModel
from piecework.training.messages import Task

Statistics = Mapping[str, np.ndarray]  # by array name
TEMPERATURE = 0.01


class FedRBNPolicy(Swapping):
    """One stage: every device trains the whole model, on adversarial examples if it has memory for that, else on clean ones."""

    adversarial = "always"

    def plain_part(self, item: WorkItem) -> Part:
        """Return the whole model, which a `clean` item trains on clean examples and others on adversarial ones."""
        weight = self.settings.fedrbn.clean_weight
        if item.clean:
            return Part(self.model, item.atoms, name="the whole model, clean", piece_class=DualPiece, clean=True)
        loss, name = adversarial_loss(weight), "the whole model, adversarially"
        return Part(self.model, item.atoms, make_loss=loss, name=name, piece_class=learner(weight))

    @property
    def variant(self) -> Variant:
        """The model whose batch norms have two sets of statistics."""
        return Variant(dual_norms=True)

    def require_model(self) -> None:
        """Raise ValueError if the model has no batch norms, or if they keep no running statistics."""
        if self.settings.batch_statistics:
            raise ValueError(
                f"architecture.batch-norm = {self.settings.architecture.batch_norm!r}: fedrbn needs running statistics to "
                f"propagate; use running or local"
            )
        if not any(has_statistics(self.blueprint, unit) for unit in self.blueprint.units()):
            raise ValueError(
                f"model {self.settings.model!r} has no batch norms, but fedrbn propagates their statistics"
            )

    def robust(self, state: DeviceState) -> bool:
        """Return whether a device has enough memory to train adversarially."""
        return self.bytes(self.whole) <= state.allowed_bytes

    @cached_property
    def stages(self) -> list[Stage]:
        """One stage, with the whole model on adversarial examples."""
        return [Stage("training", (self.part(self.whole),))]

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """Return the whole model, on adversarial or clean examples as the device's memory allows."""
        return [self.part(replace(self.whole, clean=not self.robust(state)))]


class FedRBN(PieceStrategy):
    """Federated averaging that propagates adversarial batch-norm statistics.

    `kept` has each client's adversarial statistics, by `<client>/<array>`.
    """

    name = "fedrbn"
    policy_class = FedRBNPolicy
    evaluation_class = EvaluationAsTrained
    policy: FedRBNPolicy
    measures = False
    evaluation_keys = ("val-loss", "val-accuracy", "val-adversarial-accuracy")

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        settings = self.settings
        if settings.attack.warmup >= settings.num_rounds:
            raise ValueError(
                f"attack.warmup = {settings.attack.warmup} leaves no adversarial round in num-rounds = {settings.num_rounds}"
            )
        branch = settings.fedrbn.evaluation_branch
        if branch == "detector" and (self.personal or settings.evaluation.on_clients_every):
            raise ValueError(
                "fedrbn.evaluation-branch = 'detector' needs the server's public data, but here clients evaluate the model"
            )
        self.public: Examples | None = public_examples(settings) if branch == "detector" else None
        self.piece_class, self.prepare = branch_of(branch), self._prepare
        self.evaluation_details = self.model_details = {
            "evaluation_branch": branch
        }  # the statistics that evaluation uses
        self._mean, self._found = WeightedMean(), dict[int, tuple[Statistics, int]]()

    def begin(self) -> None:
        """Raise ValueError if a client measures its own memory, so that swapping cannot be simulated."""
        self.resources.require_emulated()

    def costs_for(self, allowed: int) -> dict[WorkItem, int]:
        """Return no costs: `task` adds the one that the client looks up."""
        return {}

    def task(self, server_round: int, state: DeviceState) -> Task:
        """Return the client's task, which is adversarial after the warm-up if the device has enough memory."""
        robust = server_round > self.settings.attack.warmup and self.policy.robust(state)
        item = replace(self.policy.whole, clean=not robust)
        return replace(super().task(server_round, state), adversarial=robust, costs={item: self.policy.bytes(item)})

    def ask(
        self, clients: Iterable[int], server_round: int, arrays: ArrayRecord
    ) -> dict[int, tuple[Task, DeviceState]]:
        """Return the tasks, each with its client's number."""
        asked = super().ask(clients, server_round, arrays)
        return {c: (replace(task, own=FedRBNTaskConfig(c).to_values()), state) for c, (task, state) in asked.items()}

    def travelling(self, task: Task, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model, with the client's own adversarial statistics if the server keeps some."""
        prefix = f"{FedRBNTaskConfig.of(task).client}/"
        return ArrayRecord({name: self.kept.get(prefix + name, array) for name, array in arrays.items()})

    def untrained(self, task: Task) -> ArrayRecord:
        """Return the model as the client starts to train it; in an adversarial task, unused adversarial sets copy the clean."""
        sent = self.travelling(task, self.dispatcher.arrays)
        return begun(sent) if task.adversarial else sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies. Statistics are kept until the last reply, because they propagate between clients."""
        self._mean, self._found = WeightedMean(), {}
        return super().aggregate_train(server_round, replies)

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Add an update; `finish` adds its adversarial statistics. Raises UpdateRejectedError if arrays are missing."""
        require_all(update, self.dispatcher.arrays)
        self._mean.add({n: a for n, a in update.arrays.items() if not is_adversarial(n)}, update.examples)
        sets = {n: a for n, a in update.arrays.items() if is_adversarial(n) or n.endswith(STATISTICS)}
        self._found[client] = sets, update.examples

    def finish(self) -> ArrayRecord:
        """Return the new model, with the adversarial statistics after propagation."""
        robust = {client for client, (task, _) in self._asked.items() if task.adversarial}
        sources = [sets for client, (sets, _) in self._found.items() if client in robust]
        kept = dict(self.kept)
        for client, (sets, examples) in self._found.items() if sources else ():
            own = adversarial(sets) if client in robust else propagated(sets, sources)
            self._mean.add(own, examples)
            kept |= {f"{client}/{name}": Array(array) for name, array in own.items()}
        if self.settings.norms == "local":
            self.kept = ArrayRecord(kept)
        return updated(self.dispatcher.arrays, self._mean)

    def details(self) -> dict[str, Any]:
        """Return the clients with an adversarial task for the round record."""
        return {"adversarial_clients": [c for c, (task, _) in self._asked.items() if task.adversarial]}

    def _prepare(self, piece: PieceModel) -> None:
        """Initialise unused adversarial statistics, select the clean ones, and fit the detector if evaluation uses one."""
        begin_adversarial(piece.units().values())
        piece.set_attacked(False)
        if self.public is not None:
            fit_detector(piece, self.public, self.settings)


def begun(arrays: ArrayRecord) -> ArrayRecord:
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


def propagated(own: Statistics, sources: list[Statistics]) -> dict[str, np.ndarray]:
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
