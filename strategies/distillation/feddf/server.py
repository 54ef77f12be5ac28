"""FedDF (Tao Lin, Lingjing Kong, Sebastian U. Stich, Martin Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated
Learning", NeurIPS 2020, https://arxiv.org/abs/2006.07242), the server's side, as FedProphet compares with it.

There is a family of architectures, of which `model` is the largest. Each client trains the largest that its budget allows. The
server has a prototype w_p of each architecture p. After a round, with D_p the clients that trained p, n_k client k's number of
examples and s_k the logits of its model:

  w_p <- sum_{k in D_p} n_k w_k / sum_{k in D_p} n_k                       (Algorithm 3; without clients that trained nothing)
  w_p <- steps on KL(softmax(mean_k s_k(x)) || softmax(s_p(x))), x public  (Algorithm 3, AVGLOGITS)

The second step runs over the public examples, also for a p that no client trained. The model of the run is the prototype of
the largest architecture.

Where it differs from the paper: as in the code of FedProphet's authors, the server takes 128 batches of 64, with SGD, momentum
0.9 and a constant rate, and uses clean examples even if clients train on adversarial ones. FedDF itself uses Adam
(`feddf.server-optimiser`), a cosine schedule, and 10,000 batches, ended early on a validation set.

Clients' models compute their logits in evaluation mode, and prototypes average batch norms with everything else, as in FedDF's
own code. In FedProphet's code clients' models are in training mode here, and each client and each prototype keeps its batch
norms. With `architecture.batch-norm = measured`, FedDF's default, or `batch`, norms take the statistics of each public batch,
which is the first of these. With `running`, FedET's default, they take their own.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from torch import Tensor

from piecework.federation.aggregation import (
    CheckedUpdate,
    UpdateRejectedError,
    WeightedMean,
    first_limit,
    replace_arrays,
    require_all,
)
from piecework.models.cascade import Blueprint, initial_state, num_logits
from piecework.models.variant import Variant, vary
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context
from piecework.planning.cut import Cut, Stage
from piecework.planning.part import Part
from piecework.strategies.distillation.feddf.client import FedDFTaskConfig
from piecework.strategies.distillation.feddf.server_training import (
    AdamPiece,
    Ensemble,
    average_logits,
    distil,
    likeness_loss,
    logits_of,
    teachers_accuracy,
)
from piecework.strategies.distillation.feddf.settings import FedDFSettings
from piecework.strategies.method import Method, Received, Round
from piecework.strategies.resources import ClientResources
from piecework.training.capabilities import Refusal
from piecework.training.examples import Examples
from piecework.training.loop import MakeLoss, PieceModel
from piecework.training.memory_cap import MemoryCap
from piecework.training.methods import METHODS
from piecework.training.randomness import generator
from piecework.training.sgd import TrainingConfig

LOG = logging.getLogger("piecework")
FAMILIES = {"vgg16": "vgg13,vgg11,cnn3", "resnet34": "resnet18,resnet10,cnn4"}  # FedProphet, appendix B.2


class FamilyCut(Cut):
    """One stage: each device trains the largest model of the family that fits. A `level` is a model's place in the family."""

    @cached_property
    def names(self) -> list[str]:
        """The names of the family, the run's model first. Raises ValueError if the settings name no other."""
        text = self.settings.of(FedDFSettings).family or FAMILIES.get(self.settings.model, "")
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
        return Part(model, item.atoms, name=model.name, covers=None if model is self.blueprint else ())

    def level(self, allowed: int) -> int:
        """Return the level of the model with the most parameters that fits `allowed` bytes, or of the cheapest if none fits."""
        levels = range(len(self.names))
        fitting = [level for level in levels if self.needed_bytes(self.member(level)) <= allowed]
        if not fitting:
            return min(levels, key=lambda level: self.needed_bytes(self.member(level)))
        return max(fitting, key=lambda level: self.part(self.member(level)).parameters)

    def min_budget(self) -> int:
        """Return the memory cost (bytes) of the cheapest model."""
        return min(self.needed_bytes(self.member(level)) for level in range(len(self.names)))

    @cached_property
    def stages(self) -> list[Stage]:
        """One stage, with the model of a device with the smallest budget."""
        return [Stage("training", (self._fit_part(self.member(self.level(self.allowed)), self.allowed),))]


class Distillation:
    """What the server collects in a round: the mean of each architecture's clients, and the logits of each client's model.

    `members` are the clients whose logits the ensemble has, `distrusted` those that are excluded again. `accuracy` is that of
    the ensemble on the public examples, None if their labels are of another data set.
    """

    def __init__(self) -> None:
        self.means: dict[int, WeightedMean] = {}
        self.ensemble, self.cap = Ensemble(), MemoryCap(0, enforced=False)
        self.members, self.distrusted = list[int](), list[int]()
        self.accuracy: float | None = None


class FedDF(Method):
    """One prototype per architecture, each distilled from all clients' models.

    `kept` has the prototypes of the smaller architectures, by `<architecture>/<array>`.
    """

    name = "feddf"
    can = METHODS["feddf"].can
    refuses = (
        Refusal(
            "architecture.batch-norm",
            "clients of {name} can change their architecture; use measured, running or batch",
            ("local",),
        ),
    )
    cut_class = FamilyCut
    cut: FamilyCut
    public: Examples

    def begin(self, fleet: ClientResources) -> None:
        """Initialise the prototypes that are missing, which are all those of a new run."""
        for level, (name, model) in enumerate(zip(self.cut.names, self.cut.models, strict=True)):
            if level and not any(key.startswith(f"{name}/") for key in self.kept):
                first = initial_state(model, self.settings.seed)
                self.keep(level, ArrayRecord({key: Array(value.numpy()) for key, value in first}))

    def prototype(self, level: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return the prototype of an architecture; `arrays` is the model of the run, which is the prototype of level 0."""
        prefix = f"{self.cut.names[level]}/"
        found = {key.removeprefix(prefix): array for key, array in self.kept.items() if key.startswith(prefix)}
        return ArrayRecord(found) if found else arrays

    def keep(self, level: int, arrays: Mapping[str, Array]) -> None:
        """Store a prototype in `kept`, in place of the architecture's former one."""
        self.kept = ArrayRecord(
            {**self.kept, **{f"{self.cut.names[level]}/{name}": array for name, array in arrays.items()}}
        )

    def assign(self, ctx: Context) -> Assignment:
        """Return the model of the family for the device, with its prototype."""
        level = self.cut.level(ctx.device.allowed_bytes)
        item = self.cut.member(level)
        sends = partial(self.prototype, level)
        return self.work(
            item, variant=item.variant, sends=sends, config=FedDFTaskConfig(level), least=self.cut.min_budget
        )

    def open(self, current: Round) -> None:
        """Begin a round: updates are collected by architecture, with the logits of each client's model."""
        current.mean = Distillation()

    def check(self, received: Received) -> CheckedUpdate:
        """Check an update. Each architecture has its own history of unit norms. Raises UpdateRejectedError."""
        assignment, limits = received.assignment, received.limits
        prefix = f"{self.cut.names[assignment.config.level]}/"
        own = {unit.removeprefix(prefix): limit for unit, limit in limits.items() if unit.startswith(prefix)}
        maximum = partial(first_limit, self.settings.faults.update_norm_limit, assignment.sends(received.model))
        update = super().check(replace(received, limits=own, maximum=maximum))
        return replace(update, norms={prefix + unit: norm for unit, norm in update.norms.items()})

    def combine(self, current: Round, client: int, update: CheckedUpdate) -> None:
        """Add a client's weights and logits. Raises UpdateRejectedError if weights are missing or logits are not finite."""
        assignment, found, settings = current.assigned[client].assignment, current.mean, self.settings
        level = assignment.config.level
        require_all(update, assignment.sends(current.arrays))
        arrays = {name: Array(array) for name, array in update.arrays.items()}
        logits = logits_of(
            self.cut.models[level],
            arrays,
            self.public,
            settings.evaluation.batch_size,
            found.cap,
            settings.training.torch_threads,
        )
        if not logits.isfinite().all():
            raise UpdateRejectedError("the model's logits of the public examples are not finite")
        found.means.setdefault(level, WeightedMean()).add(update.arrays, self.weight(update))
        found.ensemble.add(logits)
        found.members.append(client)

    def weight(self, update: CheckedUpdate) -> int:
        """Return the weight of an update in its architecture's mean: its examples."""
        return update.examples

    def merge(self, level: int, current: Round) -> ArrayRecord:
        """Return the mean of an architecture's clients, or its prototype if it had none in this round."""
        prototype, means = self.prototype(level, current.arrays), current.mean.means
        return replace_arrays(prototype, means[level]) if level in means else prototype

    def finish(self, current: Round) -> ArrayRecord:
        """Distil all prototypes, store the smaller ones, and return the largest, which is the new model."""
        self.drop_outlier_teachers(current)
        targets = average_logits(current.mean.ensemble)
        self.rate_teachers(current, targets)
        model = self.distil(current, 0, self.merge(0, current), targets, likeness_loss)
        for level in range(1, len(self.cut.names)):
            self.keep(level, self.distil(current, level, self.merge(level, current), targets, likeness_loss))
        return model

    def drop_outlier_teachers(self, current: Round) -> None:
        """Exclude clients with far larger logits than the others from the ensemble: forged batch-norm variances cause such."""
        found = current.mean
        found.distrusted = [found.members[n] for n in found.ensemble.distrust(self.settings.faults.update_norm_limit)]

    def rate_teachers(self, current: Round, targets: Tensor) -> None:
        """Store the accuracy of the ensemble's targets [N, C] if the public examples have the classes of the run."""
        if not self.settings.data.public and self.public.labels.ndim == 1:
            current.mean.accuracy = teachers_accuracy(targets, self.public.labels)

    def distil(
        self, current: Round, level: int, arrays: ArrayRecord, targets: Tensor, make_loss: MakeLoss
    ) -> ArrayRecord:
        """Return a model trained on the public examples; if it diverged, the given model.

        The loss of level 0 is the round's `distillation-loss`.
        """
        settings = self.settings
        training_config = TrainingConfig(
            settings.of(FedDFSettings).server_lr,
            0.9,
            0.0,
            settings.of(FedDFSettings).server_batch_size,
            1,
            iterations=settings.of(FedDFSettings).server_iterations,
        )
        rng = generator(settings.seed, current.number, "distil", level)
        piece_class = AdamPiece if settings.of(FedDFSettings).server_optimiser == "adam" else PieceModel
        model, threads = self.cut.models[level], settings.training.torch_threads
        new, loss = distil(
            model, arrays, self.public, targets, make_loss, training_config, rng, current.mean.cap, piece_class, threads
        )
        if not (math.isfinite(loss) and all(np.isfinite(array.numpy()).all() for array in new.values())):
            LOG.warning(
                "distillation of %s in round %s diverged, so its result was discarded: lower feddf.server-lr = %s",
                self.cut.names[level],
                current.number,
                settings.of(FedDFSettings).server_lr,
            )
            return arrays
        if not level:
            current.metrics["distillation-loss"] = loss
        return new

    def details(self, current: Round) -> dict[str, Any]:
        """Return the architecture of each client and the clients with excluded logits, for the round record.

        `server_peak` is the maximum bytes that distillation held on the server, by the accounting; `teachers_accuracy` is the
        share of public examples on which the ensemble is right.
        """
        chosen = {str(c): self.cut.names[each.assignment.config.level] for c, each in current.assigned.items()}
        found = current.mean
        details = {"architectures": chosen, "distrusted": found.distrusted, "teachers_accuracy": found.accuracy}
        return details | {"server_peak": found.cap.peak_bytes, "public_examples": len(self.public)}
