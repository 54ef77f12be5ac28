"""PriSM: clients train random low-rank sub-models of principal kernels, the server's side.

Yue Niu, Saurav Prakash, Souvik Kundu, Sunwoo Lee, Salman Avestimehr, "Overcoming Resource Constraints in Federated Learning:
Large Models Can Be Trained with only Weak Clients", TMLR 2023, https://openreview.net/forum?id=lx1WnkL9fk

    Algorithm 1, lines 1 and 10, SVD                models/kernels.py: decompose; prism.py: PriSM.kernels
    line 5, the size of I_c                         prism.py: PriSMPolicy.ratios; heterofl.py: HeteroFLPolicy.level_of
    line 6, I_c (section 3.2.1, Eq. 2)              models/kernels.py: sample; prism.py: PriSM.ask
    line 7, LocalTrain (lines 12 to 17, Eq. 6)      client_app/trainers/low_rank/prism.py: train, low_rank_loss
    line 9, aggregate (Eq. 5)                       prism.py: PriSM.combine, PriSM.finish

OrthDrop, a rival with FedHM's choice of kernels, is built on PriSM.

W = U S V^T: a layer's weight; u'_i = sqrt(sigma_i) u_i, v'_i = sqrt(sigma_i) v_i: its principal kernels, i < R; I_c: those of
client c, r = ceil(keep R) of them, drawn again for every round, client and layer with p_i = sigma_i^kappa / sum (Eq. 2).

A round: every layer that changed is decomposed again (orthogonal space refresh); a client gets I_c's kernels, of each u'_i the
first r entries, and whatever else its sub-model is made of (models/low_rank.py). Each entry of u'_i and v'_i becomes the mean
over the clients that had it, each counting the same (Eq. 5); the others are as they were. W = sum_i u'_i v'_i is the model.

Which keep ratio a device gets is not said: here the largest of `prism.keep-ratios` whose sub-model fits, or that of its fleet.
Everything else is averaged over its clients likewise. Weights alone are kept between rounds: kernels are a function of them.
With `prism.server-momentum` (authors' code) the clients' momentum of u', v' and norms is averaged in the same way, and handed
to those who train these entries next, though the kernels are others after their decomposition.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import Array, ArrayRecord

from piecework.client_app.momentum import MOMENTUM, averaged
from piecework.client_app.trainers.low_rank.prism import LowRankModel, PriSMTaskConfig, low_rank_loss
from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import CheckedUpdate, updated
from piecework.models.kernels import Sampling, compose, decompose, effective_rank, sample
from piecework.models.low_rank import Factors, computed, factors, is_place
from piecework.models.variant import Variant, vary
from piecework.models.width import Indices, shapes, take
from piecework.models.work_item import WorkItem
from piecework.planning.part import Part
from piecework.planning.partition_policy import PartitionPolicy
from piecework.strategies.state import Experiment
from piecework.strategies.width.heterofl import HeteroFL, HeteroFLPolicy
from piecework.training.messages import Task, TaskConfig
from piecework.training.randomness import generator


class PriSMPolicy(HeteroFLPolicy):
    """One stage; each device the largest sub-model it can train."""

    masks = False
    moving = True

    @cached_property
    def ratios(self) -> list[float]:
        """The keep ratios that there are, largest first."""
        return self.settings.prism.ratios()

    def require_model(self) -> None:
        """Raises ValueError for a model without anything to factorise, or with a chain that cannot be."""
        vary(self.blueprint, self.factorised(1.0))

    def variant_of(self, level: int) -> Variant:
        """The sub-model of a keep ratio."""
        return self.factorised(self.ratios[level])

    def factorised(self, keep: float) -> Variant:
        """The sub-model that keeps this fraction of the kernels, 1 = all."""
        return Variant(keep=keep, channels=self.channels_computed)

    @property
    def channels_computed(self) -> Literal["first", "random", "all"]:
        """Which output channels a sub-model computes."""
        return self.settings.prism.output_channels

    def values(self, parts: list[Part]) -> tuple[float, float]:
        """What the sub-model has."""
        return PartitionPolicy.values(self, parts)

    def part(self, item: WorkItem) -> Part:
        """All of a sub-model."""
        return Part(
            self.models[self.levels[item.variant]],
            item.atoms,
            make_loss=low_rank_loss(self.settings.training.weight_decay),
            name=f"sub-model {item.variant.keep:.4g}",
            piece_class=LowRankModel,
        )


class PriSM(HeteroFL):
    """Sub-models of sampled principal kernels."""

    name = "prism"
    policy_class = PriSMPolicy
    policy: PriSMPolicy
    sampling: ClassVar[Sampling | None] = None  # by `prism.kernel-sampling`

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        if self.settings.prism.server_momentum and not self.settings.training.momentum:
            raise ValueError(
                "prism.server-momentum = true averages clients' momentum, and training.momentum is 0.0: set it, or leave it off"
            )
        self.whole = vary(self.blueprint, self.policy.factorised(1.0))
        self.scattered = self.policy.channels_computed == "random"
        self.factors, self.full = factors(self.whole), shapes(self.whole)
        self.carried = averaged(self.whole) if self.settings.prism.server_momentum else []
        self.full |= {MOMENTUM + name: self.full[name] for name in self.carried}
        self.computed = computed(self.whole) if self.scattered else {}
        self._kernels: dict[str, tuple[Array, np.ndarray, Array, Array]] = {}  # of a weight: sigma, v', u'
        self.drawn: dict[int, dict[str, np.ndarray]] = {}  # by client and weight, I_c
        self.rows: dict[int, dict[str, np.ndarray]] = {}  # likewise, the output channels that are computed

    def task_config(self, level: int) -> TaskConfig:
        """What is said of a sub-model."""
        return PriSMTaskConfig(level)

    def kernels(self, layer: Factors, arrays: ArrayRecord) -> tuple[np.ndarray, Array, Array]:
        """sigma, v' and u' of a layer of the model; decomposed again where it changed."""
        weight = arrays[layer.weight]
        known = self._kernels.get(layer.weight)
        if known is None or known[0] is not weight:
            sigma, v, u = decompose(weight.numpy())
            known = self._kernels[layer.weight] = weight, sigma, Array(v), Array(u)
        return known[1:]

    def factored(self, arrays: ArrayRecord) -> ArrayRecord:
        """The model in its orthogonal space: the arrays of a sub-model with all kernels, and momentum that is averaged."""
        found = dict(arrays.items())
        for layer in self.factors:
            _, v, u = self.kernels(layer, arrays)
            del found[layer.weight]
            found |= {layer.v: v, layer.u: u}
            if layer.bias:
                found[layer.bias[0]] = found.pop(layer.bias[1])
        for name in filter(is_place, self.computed):
            found[name] = Array(np.arange(*self.full[name]))
        for name in (MOMENTUM + name for name in self.carried):
            found[name] = self.kept[name] if name in self.kept else Array(np.zeros(self.full[name], np.float32))
        return ArrayRecord(found)

    def ask(
        self, clients: Iterable[int], server_round: int, arrays: ArrayRecord
    ) -> dict[int, tuple[Task, DeviceState]]:
        """The tasks; for each, I_c of every layer is a function of (seed, round, client, layer) and of the model."""
        asked, settings = super().ask(clients, server_round, arrays), self.settings
        sampling = self.sampling or settings.prism.kernel_sampling
        self.drawn |= {client: {} for client in asked}
        self.rows |= {client: {} for client in asked}
        for client, (task, _) in asked.items():
            small = self.policy.shapes[PriSMTaskConfig.of(task).level]
            for layer in self.factors:
                rng = generator(settings.seed, server_round, client, "kernels", layer.weight)
                sigma = self.kernels(layer, arrays)[0]
                kept = small[layer.v][0]
                self.drawn[client][layer.weight] = sample(sigma, kept, settings.prism.kappa, rng, sampling)
                if self.scattered:
                    channels, kept = self.full[layer.u][0], small[layer.u][0]
                    self.rows[client][layer.weight] = np.sort(rng.choice(channels, kept, replace=False))
        return asked

    def indices(self, task: Task) -> dict[str, Indices]:
        """Where the arrays of a task's sub-model lie in the model with all kernels."""
        small = self.policy.shapes[PriSMTaskConfig.of(task).level]
        found: dict[str, Indices] = {name: tuple(map(np.arange, shape)) for name, shape in small.items()}
        client = PriSMTaskConfig.of(task).draw
        for name, made in self.computed.items():
            placed = [
                self.rows[client][weight] if weight else where for weight, where in zip(made, found[name], strict=False)
            ]
            found[name] = (*placed, *found[name][len(made) :])
        for layer in self.factors:
            chosen = self.drawn[client][layer.weight]
            found[layer.v] = (chosen, *found[layer.v][1:])
            found[layer.u] = (found[layer.u][0], chosen, *found[layer.u][2:])
        return found | {MOMENTUM + name: found[name] for name in self.carried}

    def travelling(self, task: Task, arrays: ArrayRecord) -> ArrayRecord:
        """The sub-model; to be trained, not evaluated, with its momentum."""
        whole, trained = self.factored(arrays), task.state_round < task.round
        where = {n: w for n, w in self.indices(task).items() if trained or not n.startswith(MOMENTUM)}
        return ArrayRecord({n: Array(take(whole[n].numpy(), w)) for n, w in where.items()})

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Add a sub-model, entry by entry."""
        arrays = {name: array for name, array in update.arrays.items() if not is_place(name)}
        self.coverage.add(arrays, self.indices(self._asked[client][0]), self.full, 1)

    def finish(self) -> ArrayRecord:
        """The new model, put together from its kernels (Eq. 5)."""
        new = updated(self.factored(self.dispatcher.arrays), self.coverage)
        self.kept = ArrayRecord({name: array for name, array in new.items() if name.startswith(MOMENTUM)})
        return self.composed(new)

    def composed(self, whole: ArrayRecord) -> ArrayRecord:
        """The model, from its kernels; weights none of whose kernels changed stay the very same objects."""
        found = dict(whole.items())
        for layer in self.factors:
            weight, _, v, u = self._kernels[layer.weight]
            new_v, new_u = found.pop(layer.v), found.pop(layer.u)
            changed = new_v is not v or new_u is not u
            found[layer.weight] = Array(compose(new_v.numpy(), new_u.numpy())) if changed else weight
            if layer.bias:
                found[layer.bias[1]] = found.pop(layer.bias[0])
        return ArrayRecord({name: found[name] for name in self.dispatcher.arrays})

    def details(self) -> dict[str, Any]:
        """The keep ratio of each client; of every layer the kernels it needs (2^entropy), and how often kernels were drawn:
        clients a kernel, the mean of each tenth of the kernels, those with the largest singular values first.
        """
        keeps = {str(client): task.variant.keep for client, (task, _) in self._asked.items()}
        counts = {layer.weight: np.zeros(self.full[layer.v][0]) for layer in self.factors}
        for client in self._asked:
            for name, kernels in self.drawn[client].items():
                counts[name][kernels] += 1
        layers = {
            name: {
                "rank": effective_rank(self._kernels[name][1]),
                "kernels": len(count),
                "drawn": [float(tenth.mean()) for tenth in np.array_split(count, min(10, len(count)))],
            }
            for name, count in counts.items()
        }
        return {"keep_ratios": keeps, "layers": layers}
