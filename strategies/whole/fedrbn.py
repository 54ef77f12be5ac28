"""FedRBN (Hong et al., "Federated Robustness Propagation: Sharing Adversarial Robustness in Heterogeneous Federated Learning",
AAAI 2023, https://arxiv.org/abs/2106.10196), the server's side, as FedProphet compares with it.

Weights are averaged by numbers of examples. Of the statistics of batch norms, mu_l and v_l of layer l are of clean examples,
mu'_l and v'_l of adversarial ones. S: the clients that trained adversarially in a round; t: one that trained plainly.
Robustness propagates:

  (mu'_t, v'_t) <- sum_{s in S} a_ts (mu'_s, v'_s),   a_t = softmax over s of c_ts / 0.01
  c_ts = mean over layers of [cos(mu_t, mu_s) + cos(v_t, v_s)] / 2

and nothing where S is empty. With `architecture.batch-norm = local`, FedRBN's own setting, clean statistics, scales and shifts
stay with the clients, and the server keeps each client's adversarial statistics for it; with `running`, they are averaged over
the clients of the round, propagated ones included, like everything else.

As FedProphet runs it: clients with less memory than an adversarial step takes train plainly, and swap where they cannot do that
either, at the cost of simulated time alone; so budgets are not enforced, and FedRBN runs only where they are emulated. The
model is tested with the statistics that are for what an example is (`fedrbn.evaluation-branch = oracle`). FedRBN's own test
learns a detector; ours (`detector`) is a support vector machine with an RBF kernel on the clean logits of public examples and
of attacks on them, again for each evaluation.
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
from piecework.strategies.state import Experiment
from piecework.strategies.whole.fedrbn_detector import branch_of, fit_detector
from piecework.training.examples import Examples
from piecework.training.loop import PieceModel
from piecework.training.messages import Task

Statistics = Mapping[str, np.ndarray]  # by array name
TEMPERATURE = 0.01


class FedRBNPolicy(Swapping):
    """One stage: the whole model, adversarially where there is memory for that, else plainly, whatever memory there is."""

    adversarial = "always"

    def part(self, item: WorkItem) -> Part:
        """The whole model, on adversarial examples or on clean ones."""
        weight = self.settings.fedrbn.clean_weight
        if item.clean:
            return Part(self.model, item.atoms, name="the whole model, clean", piece_class=DualPiece, clean=True)
        loss, name = adversarial_loss(weight), "the whole model, attacked"
        return Part(self.model, item.atoms, make_loss=loss, name=name, piece_class=learner(weight))

    @property
    def variant(self) -> Variant:
        """The model with two sets of statistics."""
        return Variant(dual_norms=True)

    def require_model(self) -> None:
        """Raises ValueError where there are no statistics."""
        if self.settings.batch_statistics:
            raise ValueError(
                f"architecture.batch-norm = {self.settings.architecture.batch_norm!r}: fedrbn propagates running statistics, "
                f"use running or local"
            )
        if not any(has_statistics(self.blueprint, unit) for unit in self.blueprint.units()):
            raise ValueError(
                f"model {self.settings.model!r} has no batch norm, whose statistics fedrbn would propagate"
            )

    def robust(self, state: DeviceState) -> bool:
        """Whether a device has memory to train adversarially."""
        return self.bytes(self.whole) <= state.allowed_bytes

    @cached_property
    def stages(self) -> list[Stage]:
        """The whole model, attacked."""
        return [Stage("training", (self.part(self.whole),))]

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """The whole model."""
        return [self.part(replace(self.whole, clean=not self.robust(state)))]


class FedRBN(PieceStrategy):
    """Federated averaging whose adversarial statistics propagate. `kept` has a client's, by `<client>/<array>`."""

    name = "fedrbn"
    policy_class = FedRBNPolicy
    policy: FedRBNPolicy
    measures = False
    evaluation_keys = ("val-loss", "val-accuracy", "val-adversarial-accuracy")

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        settings = self.settings
        if settings.attack.warmup >= settings.num_rounds:
            raise ValueError(
                f"attack.warmup = {settings.attack.warmup} leaves no adversarial round of num-rounds = {settings.num_rounds}"
            )
        branch = settings.fedrbn.evaluation_branch
        if branch == "detector" and (self.personal or settings.evaluation.on_clients_every):
            raise ValueError(
                "fedrbn.evaluation-branch = 'detector': it learns from the server's public data, and clients evaluate"
            )
        self.public: Examples | None = public_examples(settings) if branch == "detector" else None
        self.piece_class, self.prepare = branch_of(branch), self._prepare
        self.evaluation_details = self.model_details = {
            "evaluation_branch": branch
        }  # which statistics the model has then
        self._mean, self._found = WeightedMean(), dict[int, tuple[Statistics, int]]()

    def begin(self) -> None:
        """Raises ValueError for clients that cannot pretend to swap."""
        self.resources.require_emulated()

    def costs_for(self, allowed: int) -> dict[WorkItem, int]:
        """None yet: what a client looks up depends on its device."""
        return {}

    def task(self, server_round: int, state: DeviceState) -> Task:
        """The whole model; adversarially where there is memory, after the warm-up."""
        robust = server_round > self.settings.attack.warmup and self.policy.robust(state)
        item = replace(self.policy.whole, clean=not robust)
        return replace(super().task(server_round, state), adversarial=robust, costs={item: self.policy.bytes(item)})

    def ask(
        self, clients: Iterable[int], server_round: int, arrays: ArrayRecord
    ) -> dict[int, tuple[Task, DeviceState]]:
        """The tasks, each with its client's number."""
        asked = super().ask(clients, server_round, arrays)
        return {c: (replace(task, own=FedRBNTaskConfig(c).to_values()), state) for c, (task, state) in asked.items()}

    def travelling(self, task: Task, arrays: ArrayRecord) -> ArrayRecord:
        """The model; with the client's own adversarial statistics, where the server keeps them for it."""
        prefix = f"{FedRBNTaskConfig.of(task).client}/"
        return ArrayRecord({name: self.kept.get(prefix + name, array) for name, array in arrays.items()})

    def untrained(self, task: Task) -> ArrayRecord:
        """The model, as the client begins with it: for who trains adversarially, a second set never used is the clean one."""
        sent = self.travelling(task, self.dispatcher.arrays)
        return begun(sent) if task.adversarial else sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As usual; statistics are looked at together, when all are there."""
        self._mean, self._found = WeightedMean(), {}
        return super().aggregate_train(server_round, replies)

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Add an update; its adversarial statistics wait. Raises UpdateRejectedError where it lacks some."""
        require_all(update, self.dispatcher.arrays)
        self._mean.add({n: a for n, a in update.arrays.items() if not is_adversarial(n)}, update.examples)
        sets = {n: a for n, a in update.arrays.items() if is_adversarial(n) or n.endswith(STATISTICS)}
        self._found[client] = sets, update.examples

    def finish(self) -> ArrayRecord:
        """The new model, with what has propagated."""
        robust = {client for client, (task, _) in self._asked.items() if task.adversarial}
        sources = [sets for client, (sets, _) in self._found.items() if client in robust]
        kept = dict(self.kept)
        for client, (sets, examples) in self._found.items() if sources else ():
            own = adversarial(sets) if client in robust else propagated(sets, sources)
            self._mean.add(own, examples)
            kept |= {f"{client}/{name}": Array(array) for name, array in own.items()}
        if self.settings.architecture.batch_norm == "local":
            self.kept = ArrayRecord(kept)
        return updated(self.dispatcher.arrays, self._mean)

    def details(self) -> dict[str, Any]:
        """Who was to train adversarially."""
        return {"adversarial_clients": [c for c, (task, _) in self._asked.items() if task.adversarial]}

    def _prepare(self, piece: PieceModel) -> None:
        """Choose a model's statistics; let it learn what attacks look like, where that is asked for."""
        begin_adversarial(piece.units().values())
        piece.set_attacked(False)
        if self.public is not None:
            fit_detector(piece, self.public, self.settings)


def begun(arrays: ArrayRecord) -> ArrayRecord:
    """The arrays of a model whose adversarial set begins as the clean one, where it was never used."""
    found, count = dict(arrays), PREFIX + COUNT
    for layer in (name.removesuffix(count) for name in arrays if name.endswith(count) and not arrays[name].numpy()):
        found |= {layer + PREFIX + name: arrays[layer + name] for name in STATISTICS}
    return ArrayRecord(found)


def adversarial(sets: Statistics) -> dict[str, np.ndarray]:
    """The second set of a model's statistics."""
    return {name: array for name, array in sets.items() if is_adversarial(name)}


def similarity(one: Statistics, other: Statistics) -> float:
    """c_ts of two models' clean statistics: the mean over layers of the cosines of means and of variances."""
    clean = [name for name in one if name.endswith(STATISTICS) and not is_adversarial(name)]
    return float(np.mean([cosine(one[name], other[name]) for name in clean]))


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine of two vectors; 0 where one has no length."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / max(lengths, 1e-8)


def propagated(own: Statistics, sources: list[Statistics]) -> dict[str, np.ndarray]:
    """What a client that trained plainly gets of those that trained adversarially: a_ts weighs them. Counts are the largest."""
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
