"""FedDF (Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
https://arxiv.org/abs/2006.07242), the server's side, as FedProphet compares with it.

A family of architectures, of which `model` is the largest: each client trains the largest that its budget allows. For each
architecture p the server has a prototype w_p, and after a round, with D_p the clients that trained p and s_k client k's logits:

  w_p <- sum_{k in D_p} n_k w_k / sum_{k in D_p} n_k                      (Algorithm 3; who trained nothing is not in it)
  w_p <- steps on KL(softmax(mean_k s_k(x)) || softmax(s_p(x))), x public    (Algorithm 3, AVGLOGITS)

over the public examples, also for a p that no client trained. The model of the run is the largest one's prototype. Here as in
FedProphet's authors' code: 128 batches of 64, SGD with momentum 0.9 at a constant rate, clean examples also where clients train
on adversarial ones. FedDF's own: Adam (`feddf.server-optimiser`), a cosine, and 10,000 batches, ended early on a validation
set.

Clients' models make their logits in evaluation mode. With `architecture.batch-norm = measured`, FedDF's default, or `batch`,
their norms take the statistics of each public batch, as in FedProphet's code, which leaves them in training mode; with
`running`, FedET's default, their own. Ours: prototypes average batch norms with everything else (theirs belong to the clients).
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from torch import Tensor

from piecework.client_app.trainers.distillation.feddf import FedDFTaskConfig
from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import (
    CheckedUpdate,
    Norms,
    UpdateRejectedError,
    WeightedMean,
    first_limit,
    require_all,
    updated,
)
from piecework.federation.public_data import public_examples
from piecework.models.cascade import Blueprint, initial_state, num_logits
from piecework.models.variant import Variant, vary
from piecework.models.work_item import WorkItem
from piecework.planning.part import Part
from piecework.planning.partition_policy import PartitionPolicy, Stage
from piecework.strategies.base import PieceStrategy
from piecework.strategies.distillation.server_training import (
    AdamPiece,
    Ensemble,
    averaged,
    distilled,
    likeness_loss,
    logits_of,
)
from piecework.strategies.state import Experiment
from piecework.training.loop import MakeLoss, PieceModel, TrainingConfig
from piecework.training.memory_cap import MemoryCap
from piecework.training.messages import Task
from piecework.training.randomness import generator

LOG = logging.getLogger("piecework")
FAMILIES = {"vgg16": "vgg13,vgg11,cnn3", "resnet34": "resnet18,resnet10,cnn4"}  # FedProphet, appendix B.2


class FamilyPolicy(PartitionPolicy):
    """One stage: each device trains the largest model of the family that fits."""

    adversarial = "optional"
    adapts = True
    caveat = "small devices train other models; needs public data"
    untrained = "distilled"

    @cached_property
    def names(self) -> list[str]:
        """The family, largest first. Raises ValueError where the settings name none."""
        text = self.settings.feddf.family or FAMILIES.get(self.settings.model, "")
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise ValueError(
                f"feddf.family is empty: name the smaller models beside {self.settings.model}, as feddf.family=cnn3; only "
                f"{' and '.join(FAMILIES)} have one of FedProphet's"
            )
        return list(dict.fromkeys([self.settings.model, *names]))

    @cached_property
    def models(self) -> list[Blueprint]:
        """The models of the family. Raises ValueError."""
        try:
            rest = [vary(self.blueprint, self.variant_of(level)) for level in range(1, len(self.names))]
        except ValueError as error:
            raise ValueError(f"feddf.family = {','.join(self.names[1:])!r}: {error}; name other models") from error
        models = [self.blueprint, *rest]
        self.require_alike(models)
        return models

    def variant_of(self, level: int) -> Variant:
        """A model of the family: the first one is the run's own."""
        return Variant(architecture=self.names[level]) if level else Variant()

    def require_model(self) -> None:
        """Raises ValueError for a family that is none, and for models of one logit."""
        if num_logits(self.models[0]) < 2:
            raise ValueError(
                f"model {self.settings.model!r} has one logit: {self.settings.strategy} distils two or more"
            )

    def require_alike(self, models: list[Blueprint]) -> None:
        """Raises ValueError for models that cannot learn from each other: all can."""

    def member(self, level: int) -> WorkItem:
        """The work item of the n-th model of the family, from 0."""
        return WorkItem(tuple(range(len(self.models[level].atoms))), variant=self.variant_of(level))

    def part(self, item: WorkItem) -> Part:
        """A model of the family."""
        model = self.models[self.names.index(item.variant.architecture or self.names[0])]
        return Part(model, item.atoms, name=model.name)

    def covered(self, part: Part) -> list[str]:
        """All of the run's model, or nothing of it where the part is another one."""
        return super().covered(part) if part.blueprint is self.blueprint else []

    def level(self, allowed: int) -> int:
        """Return the number of the model with most parameters that takes at most so many bytes, or else of the cheapest."""
        levels = range(len(self.names))
        fitting = [level for level in levels if self.bytes(self.member(level)) <= allowed]
        if not fitting:
            return min(levels, key=lambda level: self.bytes(self.member(level)))
        return max(fitting, key=lambda level: self.part(self.member(level)).parameters)

    def min_budget(self) -> int:
        """The cost of the cheapest model."""
        return min(self.bytes(self.member(level)) for level in range(len(self.names)))

    @cached_property
    def stages(self) -> list[Stage]:
        """The model of the poorest device."""
        return [Stage("training", (self.part(self.member(self.level(self.allowed))),))]

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """The device's model. Raises MemoryBudgetExceededError."""
        return [self.within(self.part(self.member(self.level(state.allowed_bytes))), state)]


class FedDF(PieceStrategy):
    """Prototypes that learn from all clients' models. `kept` has those besides the model, by `<architecture>/<array>`."""

    name = "feddf"
    policy_class = FamilyPolicy
    policy: FamilyPolicy

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        if self.settings.architecture.batch_norm == "local":
            raise ValueError(
                f"architecture.batch-norm = 'local': clients of {self.name} change architectures, use measured, running or "
                f"batch"
            )
        self.models = self.policy.models
        self.public = public_examples(self.settings)
        self.means: dict[int, WeightedMean] = {}
        self.ensemble, self.cap = Ensemble(), MemoryCap(0, enforced=False)
        self.round, self.loss = 0, 0.0
        self.members, self.distrusted = list[int](), list[int]()

    def begin(self) -> None:
        """Make the prototypes of a new run. Raises ValueError."""
        for level, (name, model) in enumerate(zip(self.policy.names, self.models, strict=True)):
            if level and not any(key.startswith(f"{name}/") for key in self.kept):
                first = initial_state(model, self.settings.seed)
                self.keep(level, ArrayRecord({key: Array(value.numpy()) for key, value in first}))

    def prototype(self, level: int, arrays: ArrayRecord) -> ArrayRecord:
        """The prototype of an architecture; `arrays` is the model of the run."""
        prefix = f"{self.policy.names[level]}/"
        found = {key.removeprefix(prefix): array for key, array in self.kept.items() if key.startswith(prefix)}
        return ArrayRecord(found) if found else arrays

    def keep(self, level: int, arrays: Mapping[str, Array]) -> None:
        """Put a prototype beside the model."""
        self.kept = ArrayRecord(
            {**self.kept, **{f"{self.policy.names[level]}/{name}": array for name, array in arrays.items()}}
        )

    def costs_for(self, allowed: int) -> dict[WorkItem, int]:
        """None yet: what a client looks up depends on its device."""
        return {}

    def task(self, server_round: int, state: DeviceState) -> Task:
        """The model of the client's device, and its cost."""
        level = self.policy.level(state.allowed_bytes)
        item = self.policy.member(level)
        own = FedDFTaskConfig(level).to_values()
        return replace(
            super().task(server_round, state), own=own, variant=item.variant, costs={item: self.policy.bytes(item)}
        )

    def architecture(self, task: Task) -> str:
        """The name of a task's model."""
        return self.policy.names[FedDFTaskConfig.of(task).level]

    def travelling(self, task: Task, arrays: ArrayRecord) -> ArrayRecord:
        """The prototype of the task's architecture."""
        return self.prototype(FedDFTaskConfig.of(task).level, arrays)

    def untrained(self, task: Task) -> ArrayRecord:
        """The prototype, as it was sent."""
        return self.travelling(task, self.dispatcher.arrays)

    def check(
        self, arrays: ArrayRecord, metrics: dict[str, Any], task: Task, limits: Norms, maximum: Callable[[], float]
    ) -> CheckedUpdate:
        """As usual; units of different architectures have histories of their own."""
        prefix = f"{self.architecture(task)}/"
        own = {unit.removeprefix(prefix): limit for unit, limit in limits.items() if unit.startswith(prefix)}
        factor, sent = self.settings.faults.update_norm_limit, self.untrained(task)
        update = super().check(arrays, metrics, task, own, partial(first_limit, factor, sent))
        return replace(update, norms={prefix + unit: norm for unit, norm in update.norms.items()})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As usual; beside each mean, the logits that a client's model gives the public examples."""
        self.means, self.ensemble, self.round, self.loss = {}, Ensemble(), server_round, math.nan
        self.members, self.distrusted = [], []
        self.cap = MemoryCap(0, enforced=False)
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None and math.isfinite(self.loss):
            metrics["distillation-loss"] = self.loss
        return arrays, metrics

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Take in a client's weights and logits. Raises UpdateRejectedError for a model that has not all of them."""
        task = self._asked[client][0]
        level = FedDFTaskConfig.of(task).level
        require_all(update, self.untrained(task))
        arrays = {name: Array(array) for name, array in update.arrays.items()}
        model, settings = self.models[level], self.settings
        logits = logits_of(
            model, arrays, self.public, settings.evaluation.batch_size, self.cap, settings.training.torch_threads
        )
        if not logits.isfinite().all():
            raise UpdateRejectedError("the model's logits of the public examples are not finite")
        self.means.setdefault(level, WeightedMean()).add(update.arrays, update.examples)
        self.ensemble.add(logits)
        self.members.append(client)

    def merged(self, level: int, arrays: ArrayRecord) -> ArrayRecord:
        """The mean of an architecture's clients; its prototype, where it had none."""
        prototype = self.prototype(level, arrays)
        return updated(prototype, self.means[level]) if level in self.means else prototype

    def finish(self) -> ArrayRecord:
        """The new prototypes; the largest one is the model."""
        self.doubt()
        targets = averaged(self.ensemble)
        model, self.loss = self.distil(0, self.merged(0, self.dispatcher.arrays), targets, likeness_loss)
        for level in range(1, len(self.policy.names)):
            self.keep(level, self.distil(level, self.merged(level, self.dispatcher.arrays), targets, likeness_loss)[0])
        return model

    def doubt(self) -> None:
        """Leave out of the ensemble who is much surer than the others: batch norms whose variances are made small do that."""
        self.distrusted = [self.members[n] for n in self.ensemble.distrust(self.settings.faults.update_norm_limit)]

    def distil(
        self, level: int, arrays: ArrayRecord, targets: Tensor, make_loss: MakeLoss
    ) -> tuple[ArrayRecord, float]:
        """What a model learns of the public examples, and its mean loss; where that is not finite, the model as it was."""
        settings = self.settings
        training_config = TrainingConfig(
            settings.feddf.server_lr,
            0.9,
            0.0,
            settings.feddf.server_batch_size,
            1,
            iterations=settings.feddf.server_iterations,
        )
        rng = generator(settings.seed, self.round, "distil", level)
        piece_class = AdamPiece if settings.feddf.server_optimiser == "adam" else PieceModel
        model, threads = self.models[level], settings.training.torch_threads
        new, loss = distilled(
            model, arrays, self.public, targets, make_loss, training_config, rng, self.cap, piece_class, threads
        )
        if math.isfinite(loss) and all(np.isfinite(array.numpy()).all() for array in new.values()):
            return new, loss
        LOG.warning(
            "distillation of %s in round %s diverged, and was excluded: lower feddf.server-lr = %s",
            self.policy.names[level],
            self.round,
            settings.feddf.server_lr,
        )
        return arrays, math.nan

    def details(self) -> dict[str, Any]:
        """The architecture of each client, and whose logits were excluded; the most bytes (by the accounting) that distillation
        held on the server.
        """
        chosen = {str(client): self.architecture(task) for client, (task, _) in self._asked.items()}
        details = {"architectures": chosen, "distrusted": self.distrusted}
        return details | {"server_peak": self.cap.peak_bytes, "public_examples": len(self.public)}
