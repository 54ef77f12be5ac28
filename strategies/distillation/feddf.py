"""FedDF (Tao Lin, Lingjing Kong, Sebastian U. Stich, Martin Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated
Learning", NeurIPS 2020, https://arxiv.org/abs/2006.07242), the server's side, as FedProphet compares with it.

There is a family of architectures, of which `model` is the largest. Each client trains the largest that its budget allows. The
server has a prototype w_p of each architecture p. After a round, with D_p the clients that trained p, n_k client k's number of
examples and s_k the logits of its model:

  w_p <- sum_{k in D_p} n_k w_k / sum_{k in D_p} n_k                       (Algorithm 3; without clients that trained nothing)
  w_p <- steps on KL(softmax(mean_k s_k(x)) || softmax(s_p(x))), x public  (Algorithm 3, AVGLOGITS)

The second step runs over the public examples, also for a p that no client trained. The model of the run is the prototype of
the largest architecture. As in the code of FedProphet's authors, the server takes 128 batches of 64, with SGD, momentum 0.9
and a constant rate, and uses clean examples even if clients train on adversarial ones. FedDF itself uses Adam
(`feddf.server-optimiser`), a cosine schedule, and 10,000 batches, ended early on a validation set.

Clients' models compute their logits in evaluation mode, and prototypes average batch norms with everything else, as in FedDF's
own code. In FedProphet's code clients' models are in training mode here, and each client and each prototype keeps its batch
norms. With `architecture.batch-norm = measured`, FedDF's default, or `batch`, norms take the statistics of each public batch,
which is the first of these. With `running`, FedET's default, they take their own.
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
from piecework.training.loop import MakeLoss, PieceModel
from piecework.training.memory_cap import MemoryCap
from piecework.training.messages import Task
from piecework.training.randomness import generator
from piecework.training.sgd import TrainingConfig

LOG = logging.getLogger("piecework")
FAMILIES = {"vgg16": "vgg13,vgg11,cnn3", "resnet34": "resnet18,resnet10,cnn4"}  # FedProphet, appendix B.2


class FamilyPolicy(PartitionPolicy):
    """One stage: each device trains the largest model of the family that fits. A `level` is a model's place in the family."""

    adversarial = "optional"
    adapts = True
    caveat = "small devices train other models; needs public data"
    untrained = "distilled"

    @cached_property
    def names(self) -> list[str]:
        """The names of the family, the run's model first. Raises ValueError if the settings name no other."""
        text = self.settings.feddf.family or FAMILIES.get(self.settings.model, "")
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise ValueError(
                f"feddf.family is empty: name smaller models to train beside {self.settings.model}, such as "
                f"feddf.family=cnn3; only {' and '.join(FAMILIES)} have a default family, that of FedProphet"
            )
        return list(dict.fromkeys([self.settings.model, *names]))

    @cached_property
    def models(self) -> list[Blueprint]:
        """The models of the family. Raises ValueError if one cannot be built, or they cannot learn from each other."""
        try:
            rest = [vary(self.blueprint, self.variant_of(level)) for level in range(1, len(self.names))]
        except ValueError as error:
            raise ValueError(f"feddf.family = {','.join(self.names[1:])!r}: {error}; name other models") from error
        models = [self.blueprint, *rest]
        self.require_alike(models)
        return models

    def variant_of(self, level: int) -> Variant:
        """Return the variant of a model of the family; level 0 is the run's own model."""
        return Variant(architecture=self.names[level]) if level else Variant()

    def require_model(self) -> None:
        """Raise ValueError if the family cannot be built, or if the model has one logit, which cannot be distilled."""
        if num_logits(self.models[0]) < 2:
            raise ValueError(
                f"model {self.settings.model!r} has one logit: {self.settings.strategy} can distil only models with two or more"
            )

    def require_alike(self, models: list[Blueprint]) -> None:
        """Raise ValueError for models that cannot learn from each other; here all can."""

    def member(self, level: int) -> WorkItem:
        """Return the work item that trains all of a model of the family."""
        return WorkItem(tuple(range(len(self.models[level].atoms))), variant=self.variant_of(level))

    def plain_part(self, item: WorkItem) -> Part:
        """Return all of a model of the family."""
        model = self.models[self.names.index(item.variant.architecture or self.names[0])]
        return Part(model, item.atoms, name=model.name)

    def covered(self, part: Part) -> list[str]:
        """Return all units of the run's model, or none if the part is of another architecture."""
        return super().covered(part) if part.blueprint is self.blueprint else []

    def level(self, allowed: int) -> int:
        """Return the level of the model with the most parameters that fits `allowed` bytes, or of the cheapest if none fits."""
        levels = range(len(self.names))
        fitting = [level for level in levels if self.needed(self.member(level)) <= allowed]
        if not fitting:
            return min(levels, key=lambda level: self.needed(self.member(level)))
        return max(fitting, key=lambda level: self.part(self.member(level)).parameters)

    def min_budget(self) -> int:
        """Return the memory cost (bytes) of the cheapest model."""
        return min(self.needed(self.member(level)) for level in range(len(self.names)))

    @cached_property
    def stages(self) -> list[Stage]:
        """One stage, with the model of a device with the smallest budget."""
        return [Stage("training", (self._fitted_part(self.member(self.level(self.allowed)), self.allowed),))]

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """Return the device's model. Raises MemoryBudgetExceededError if it does not fit."""
        return [self.within(self.member(self.level(state.allowed_bytes)), state)]


class FedDF(PieceStrategy):
    """One prototype per architecture, each distilled from all clients' models.

    `kept` has the prototypes of the smaller architectures, by `<architecture>/<array>`.
    """

    name = "feddf"
    policy_class = FamilyPolicy
    policy: FamilyPolicy

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        if self.settings.norms == "local":
            raise ValueError(
                f"architecture.batch-norm = 'local': clients of {self.name} can change their architecture; use measured, "
                f"running or batch"
            )
        self.models = self.policy.models
        self.public = public_examples(self.settings)
        self.means: dict[int, WeightedMean] = {}
        self.ensemble, self.cap = Ensemble(), MemoryCap(0, enforced=False)
        self.round, self.loss = 0, 0.0
        self.members, self.distrusted = list[int](), list[int]()

    def begin(self) -> None:
        """Initialise the prototypes that are missing, which are all those of a new run."""
        for level, (name, model) in enumerate(zip(self.policy.names, self.models, strict=True)):
            if level and not any(key.startswith(f"{name}/") for key in self.kept):
                first = initial_state(model, self.settings.seed)
                self.keep(level, ArrayRecord({key: Array(value.numpy()) for key, value in first}))

    def prototype(self, level: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return the prototype of an architecture; `arrays` is the model of the run, which is the prototype of level 0."""
        prefix = f"{self.policy.names[level]}/"
        found = {key.removeprefix(prefix): array for key, array in self.kept.items() if key.startswith(prefix)}
        return ArrayRecord(found) if found else arrays

    def keep(self, level: int, arrays: Mapping[str, Array]) -> None:
        """Store a prototype in `kept`, in place of the architecture's former one."""
        self.kept = ArrayRecord(
            {**self.kept, **{f"{self.policy.names[level]}/{name}": array for name, array in arrays.items()}}
        )

    def costs_for(self, allowed: int) -> dict[WorkItem, int]:
        """Return no costs: `task` adds the cost of the client's own model."""
        return {}

    def task(self, server_round: int, state: DeviceState) -> Task:
        """Return the client's task, with the model for its device and the memory cost of that."""
        level = self.policy.level(state.allowed_bytes)
        item = self.policy.member(level)
        own = FedDFTaskConfig(level).to_values()
        costs = self.policy.costs({item: self.policy.needed(item)}, state.allowed_bytes)
        return replace(super().task(server_round, state), own=own, variant=item.variant, costs=costs)

    def architecture(self, task: Task) -> str:
        """Return the name of a task's architecture."""
        return self.policy.names[FedDFTaskConfig.of(task).level]

    def travelling(self, task: Task, arrays: ArrayRecord) -> ArrayRecord:
        """Return the prototype of the task's architecture."""
        return self.prototype(FedDFTaskConfig.of(task).level, arrays)

    def untrained(self, task: Task) -> ArrayRecord:
        """Return the prototype as it was sent to the client."""
        return self.travelling(task, self.dispatcher.arrays)

    def check(
        self, arrays: ArrayRecord, metrics: dict[str, Any], task: Task, limits: Norms, maximum: Callable[[], float]
    ) -> CheckedUpdate:
        """Check an update. Each architecture has its own history of unit norms. Raises UpdateRejectedError."""
        prefix = f"{self.architecture(task)}/"
        own = {unit.removeprefix(prefix): limit for unit, limit in limits.items() if unit.startswith(prefix)}
        factor, sent = self.settings.faults.update_norm_limit, self.untrained(task)
        update = super().check(arrays, metrics, task, own, partial(first_limit, factor, sent))
        return replace(update, norms={prefix + unit: norm for unit, norm in update.norms.items()})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies by architecture, and collect the logits of each client's model for the public examples."""
        self.means, self.ensemble, self.round, self.loss = {}, Ensemble(), server_round, math.nan
        self.members, self.distrusted = [], []
        self.cap = MemoryCap(0, enforced=False)
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None and math.isfinite(self.loss):
            metrics["distillation-loss"] = self.loss
        return arrays, metrics

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Add a client's weights and logits. Raises UpdateRejectedError if weights are missing or logits are not finite."""
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
        self.means.setdefault(level, WeightedMean()).add(update.arrays, self.weight(update))
        self.ensemble.add(logits)
        self.members.append(client)

    def weight(self, update: CheckedUpdate) -> int:
        """Return the weight of an update in its architecture's mean: its examples."""
        return update.examples

    def merged(self, level: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return the mean of an architecture's clients, or its prototype if it had none in this round."""
        prototype = self.prototype(level, arrays)
        return updated(prototype, self.means[level]) if level in self.means else prototype

    def finish(self) -> ArrayRecord:
        """Distil all prototypes, store the smaller ones, and return the largest, which is the new model."""
        self.doubt()
        targets = averaged(self.ensemble)
        model, self.loss = self.distil(0, self.merged(0, self.dispatcher.arrays), targets, likeness_loss)
        for level in range(1, len(self.policy.names)):
            self.keep(level, self.distil(level, self.merged(level, self.dispatcher.arrays), targets, likeness_loss)[0])
        return model

    def doubt(self) -> None:
        """Exclude clients with far larger logits than the others from the ensemble: forged batch-norm variances cause such."""
        self.distrusted = [self.members[n] for n in self.ensemble.distrust(self.settings.faults.update_norm_limit)]

    def distil(
        self, level: int, arrays: ArrayRecord, targets: Tensor, make_loss: MakeLoss
    ) -> tuple[ArrayRecord, float]:
        """Return a model trained on the public examples and its mean loss; if it diverged, the given model and NaN."""
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
            "distillation of %s in round %s diverged, so its result was discarded: lower feddf.server-lr = %s",
            self.policy.names[level],
            self.round,
            settings.feddf.server_lr,
        )
        return arrays, math.nan

    def details(self) -> dict[str, Any]:
        """Return the architecture of each client and the clients with excluded logits, for the round record.

        `server_peak` is the maximum bytes that distillation held on the server, by the accounting.
        """
        chosen = {str(client): self.architecture(task) for client, (task, _) in self._asked.items()}
        details = {"architectures": chosen, "distrusted": self.distrusted}
        return details | {"server_peak": self.cap.peak_bytes, "public_examples": len(self.public)}
