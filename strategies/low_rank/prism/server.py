"""PriSM: clients train random low-rank sub-models of principal kernels (the server's side).

Yue Niu, Saurav Prakash, Souvik Kundu, Sunwoo Lee, Salman Avestimehr, "Overcoming Resource Constraints in Federated Learning:
Large Models Can Be Trained with only Weak Clients", TMLR 2023, https://openreview.net/forum?id=lx1WnkL9fk

    Algorithm 1, lines 1 and 10, SVD                models/kernels.py: decompose; prism/server.py: PriSM.kernels
    line 5, the size of I_c                         prism/cut.py: PriSMCut.ratios; heterofl/server.py: HeteroFLCut.level_of
    line 6, I_c (section 3.2.1, Eq. 2)              models/kernels.py: sample; prism/server.py: PriSM.draw
    line 7, LocalTrain (lines 12 to 17, Eq. 6)      strategies/low_rank/prism/client.py: train, low_rank_loss
    line 9, aggregate (Eq. 5)                       prism/server.py: PriSM.combine, PriSM.finish

OrthDrop, a baseline with FedHM's choice of kernels, is built on PriSM.

W = U S V^T is a layer's weight. Its principal kernels are u'_i = sqrt(sigma_i) u_i and v'_i = sqrt(sigma_i) v_i, i < R. I_c are
the r = ceil(keep R) kernels of client c, drawn again for every round, client and layer with p_i = sigma_i^kappa / sum (Eq. 2).

In a round, every layer that changed is decomposed again (orthogonal space refresh). A client gets the kernels I_c, with the
first r entries of each u'_i, and the other arrays of its sub-model (models/low_rank.py). Each entry of u'_i and v'_i becomes
the unweighted mean over the clients that had it (Eq. 5), and other entries keep their values. The model is W = sum_i u'_i v'_i.

Layers that are decomposed are the k x k convolutions behind the first atom, the MLPs of a transformer and the gates of an LSTM.
A sub-model has the outputs and gradients of a full model in which the kernels that were not drawn are zero and, after their
norm, the channels that are not computed. All arrays that are no kernels are averaged over their clients in the same way.
Weights are kept between rounds and kernels are not, because they are a function of the weights.

Where it differs from the paper: the paper does not say which keep ratio a device gets. Here it is the largest of
`prism.keep-ratios` whose sub-model fits, or the one that the fleet sets. Residual sums, 1 x 1 shortcuts and the head are whole.
In the paper's Table 1 they are narrow too, and sub-models are smaller: 0.5 M parameters at keep ratio 0.2, here 1.45 M. Norms
measure statistics by default; the paper's always use those of the batch (`architecture.batch-norm = batch`).

No client ever has all channels at once, and the paper does not say how the model is evaluated. Ours (`serve`): what clients
have only at times is multiplied by the probability that they have it. Clients of several keep ratios count with their mean,
factor by factor.

- First channels: the channels beyond the largest sub-model that a client of the fleet can have are off. Their norm has
  gamma = beta = 0. Where no norm follows, their rows of W and their bias are 0.
- Random channels: gamma and beta, or W and its bias, are multiplied by the mean probability that a client computes the
  channel: its keep ratio, averaged over the clients.
- Kernels: a norm takes the scale out of a sum of kernels. Where none follows (the gates of an LSTM, the MLPs of a transformer,
  the last layer of a pre-activation block), or one with running statistics of sub-models (`architecture.batch-norm = running`),
  `W = sum_i pi_i u'_i v'_i`, with `pi_i` the mean probability that a client has kernel i (models/kernels.py: inclusion). Like
  sampling itself, it depends on all rows of W.

The trained model is kept apart: it has all rows of W, because rows of zeros could never be sampled. Clients that evaluate get
sub-models of it. The saved model is the served one, and no start for another run of PriSM (`training.init-weights`), which
would scale it again.

So with the first channels, the paper's choice and the default, the served network is *narrow*: of each factorised layer it has
the channels of the largest sub-model, 40 % of them where all clients keep 0.4. The other rows of W never learn. Remark 3.2 says
that PriSM obtains a global model of full capacity. This holds for its kernels, but for its channels only if some client keeps
them all, or with `prism.output-channels = random` or `all`.

The authors' code (preset `prism-cifar10-authors`) cuts gradients at 5 (`training.clip-norm`), starts from Kaiming's normal
distribution (`training.initialisation`), draws kernels by a softmax (`prism.kernel-sampling`) and averages momentum. With
`prism.server-momentum`, the clients' momentum of u', v' and norms is averaged, and sent to the clients that train these entries
next, although the decomposition changes kernels; messages are twice as large. There, sub-models of every ratio compute 40 % of
the channels, and rows that are not computed get gradients, which is not offered.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import Array, ArrayRecord

from piecework.client_app.momentum import MOMENTUM, averaged_names
from piecework.federation.aggregation import CheckedUpdate, replace_arrays
from piecework.federation.reports import ClientReport
from piecework.models.cascade import Blueprint, Shape
from piecework.models.kernels import Sampling, compose, decompose, effective_rank, inclusion, sample
from piecework.models.low_rank import Factors, LowRank, factors, find_computed, is_place, norms
from piecework.models.variant import vary
from piecework.models.width import Indices, shapes
from piecework.planning.assignment import Assignment, Context
from piecework.strategies.low_rank.prism.client import PriSMTaskConfig
from piecework.strategies.low_rank.prism.cut import PriSMCut
from piecework.strategies.low_rank.prism.settings import PriSMSettings
from piecework.strategies.low_rank.prism.sub_model import Drawn, SubModel
from piecework.strategies.method import Reading, Round
from piecework.strategies.serving import Serving
from piecework.strategies.width.heterofl.server import NO_NORMS_OF_THEIR_OWN, HeteroFL
from piecework.training.capabilities import Refusal
from piecework.training.messages import TaskConfig
from piecework.training.methods import METHODS
from piecework.training.randomness import generator


class ComposedServing(Serving):
    """Serves the composed model."""

    method: "PriSM"

    def arrays(self, trained: ArrayRecord) -> ArrayRecord:
        """Return the served arrays of a trained model."""
        return self.method.serve(trained)


class PriSM(HeteroFL):
    """Sub-models of principal kernels that are drawn in every round.

    `sampling` is how I_c is drawn, and `computes` which output channels a sub-model computes; None = as the settings say.
    """

    name = "prism"
    can = METHODS["prism"].can
    refuses = (
        NO_NORMS_OF_THEIR_OWN,
        Refusal(
            "prism.server-momentum",
            "it averages momentum, but training.momentum is 0: set it, or leave this off",
            when={"training.momentum": (0.0,), "training.optimiser": ("sgd",)},
        ),
        Refusal(
            "prism.server-momentum",
            "it averages the momentum of SGD, which Adam does not have: set training.optimiser to sgd, or leave this off",
            when={"training.optimiser": ("adam", "adamw")},
        ),
    )
    cut_class = PriSMCut
    cut: PriSMCut
    serving_class = ComposedServing
    masks = False
    sampling: ClassVar[Sampling | None] = None
    computes: ClassVar[Literal["first", "random", "all"] | None] = None

    def __init__(self, cut: PriSMCut) -> None:
        super().__init__(cut)
        self._kernels: dict[
            str, tuple[bytes, np.ndarray, Array, Array]
        ] = {}  # by weight name: its bytes, sigma, v', u'
        self._sigma: dict[str, np.ndarray] = {}  # of the model that the round trains, by weight name

    @cached_property
    def whole(self) -> Blueprint:
        """The sub-model that keeps all kernels."""
        return vary(self.cut.blueprint, self.cut.factorise(1.0))

    @cached_property
    def factors(self) -> list[Factors]:
        """The factorised layers."""
        return factors(self.whole)

    @cached_property
    def carried(self) -> list[str]:
        """The names of the arrays whose momentum is averaged."""
        return averaged_names(self.whole) if self.settings.of(PriSMSettings).server_momentum else []

    @cached_property
    def full(self) -> dict[str, Shape]:
        """The shapes of the arrays of the model with all kernels, and of their momentum, by name."""
        found = dict(shapes(self.whole))
        return found | {MOMENTUM + name: found[name] for name in self.carried}

    @cached_property
    def scattered(self) -> bool:
        """Whether sub-models compute random output channels."""
        return self.cut.channels_computed == "random"

    @cached_property
    def computed(self) -> Mapping[str, Any]:
        """The places of random channels (models/low_rank.py: find_computed)."""
        return find_computed(self.whole) if self.scattered else {}

    @cached_property
    def norms(self) -> Mapping[str, str]:
        """The norm behind each layer, by the layer's weight."""
        return norms(self.whole)

    def task_config(self, ctx: Context, level: int) -> TaskConfig:
        """Return the method's own fields of a task for keep ratio number `level`."""
        return PriSMTaskConfig(level, ctx.client)

    def assign_level(self, ctx: Context, level: int) -> Assignment:
        """Return the sub-model of keep ratio number `level`, with I_c of every layer, unless there is no model to draw from."""
        item, config = self.cut.sub_model(level), self.task_config(ctx, level)
        if ctx.arrays is None:
            return self.work(item, variant=item.variant, config=config, least=self.least(ctx))
        drawn = self.draw(ctx, level, ctx.arrays)
        sends = SubModel(self, lambda: self.drawn_indices(level, drawn))
        return self.work(item, variant=item.variant, sends=sends, config=config, memo=drawn, least=self.least(ctx))

    def assign_evaluation(self, ctx: Context, assignment: Assignment, examples: int) -> Assignment:
        """Return the assignment of an evaluation, for which no momentum is sent."""
        without = replace(assignment, sends=replace(assignment.sends, momentum=False))  # type: ignore[type-var]
        return super().assign_evaluation(ctx, without, examples)

    def open(self, current: Round) -> None:
        """Begin a round, and note the spectra of the model that it trains."""
        self._sigma = {layer.weight: self.kernels(layer, current.arrays)[0] for layer in self.factors}
        current.mean = current.new_mean(self.factor(current.arrays))

    def read(self, current: Round, report: ClientReport, metrics: dict[str, Any]) -> Reading:
        """Return that all FLOPs were executed."""
        return Reading()

    def kernels(self, layer: Factors, arrays: ArrayRecord) -> tuple[np.ndarray, Array, Array]:
        """Return sigma, v' and u' of a layer of the model, which is decomposed again if it changed."""
        weight = arrays[layer.weight]
        known = self._kernels.get(layer.weight)
        if known is None or known[0] is not weight.data:
            sigma, v, u = decompose(weight.numpy())
            known = self._kernels[layer.weight] = weight.data, sigma, Array(v), Array(u)
        return known[1:]

    def factor(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model in its orthogonal space: the arrays of a sub-model with all kernels, and the averaged momentum."""
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

    def draw(self, ctx: Context, level: int, arrays: ArrayRecord) -> Drawn:
        """Draw a client's I_c of every layer: a function of seed, round, client, layer and model."""
        small, settings = self.cut.shapes[level], self.settings
        kernels, rows = dict[str, np.ndarray](), dict[str, np.ndarray]()
        for layer in self.factors:
            rng = generator(settings.seed, ctx.round, ctx.client, "kernels", layer.weight)
            sigma, kept = self.kernels(layer, arrays)[0], small[layer.v][0]
            sampling = self.sampling or settings.of(PriSMSettings).kernel_sampling
            kernels[layer.weight] = sample(sigma, kept, settings.of(PriSMSettings).kappa, rng, sampling)
            if self.scattered:
                channels, kept = self.full[layer.u][0], small[layer.u][0]
                rows[layer.weight] = np.sort(rng.choice(channels, kept, replace=False))
        return Drawn(kernels, rows)

    def drawn_indices(self, level: int, drawn: Drawn) -> dict[str, Indices]:
        """Return the indices of a sub-model's arrays in the model with all kernels, by name."""
        found: dict[str, Indices] = {
            name: tuple(map(np.arange, shape)) for name, shape in self.cut.shapes[level].items()
        }
        for name, made in self.computed.items():
            placed = [drawn.rows[weight] if weight else where for weight, where in zip(made, found[name], strict=False)]
            found[name] = (*placed, *found[name][len(made) :])
        for layer in self.factors:
            chosen = drawn.kernels[layer.weight]
            found[layer.v] = (chosen, *found[layer.v][1:])
            found[layer.u] = (found[layer.u][0], chosen, *found[layer.u][2:])
        return found | {MOMENTUM + name: found[name] for name in self.carried}

    def combine(self, current: Round, client: int, update: CheckedUpdate) -> None:
        """Add a client's sub-model to the mean of each of its entries."""
        arrays = {name: array for name, array in update.arrays.items() if not is_place(name)}
        sends = current.assigned[client].assignment.sends
        assert isinstance(sends, SubModel)
        current.mean.add(arrays, 1, sends.indices(), self.full)

    def finish(self, current: Round) -> ArrayRecord:
        """Return the new model, composed of the averaged kernels (Eq. 5), and store the averaged momentum."""
        new = replace_arrays(self.factor(current.arrays), current.mean)
        self.kept = ArrayRecord({name: array for name, array in new.items() if name.startswith(MOMENTUM)})
        return self.compose(new, list(current.arrays))

    def compose(self, whole: ArrayRecord, names: Sequence[str]) -> ArrayRecord:
        """Return the arrays of these names, composed of kernels."""
        found = dict(whole.items())
        for layer in self.factors:
            v, u = found.pop(layer.v), found.pop(layer.u)
            found[layer.weight] = Array(compose(v.numpy(), u.numpy()))
            if layer.bias:
                found[layer.bias[1]] = found.pop(layer.bias[0])
        return ArrayRecord({name: found[name] for name in names})

    def serve(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the full model as it is evaluated: each layer's output is multiplied by `active`, its kernels by `portions`.

        A norm is scaled if one follows the layer, otherwise the layer itself.
        """
        found = dict(arrays.items())
        counts = Counter(self.fitting)
        for layer in self.factors:
            norm, active = self.norms.get(layer.weight), self.active(layer, counts)
            if (portions := self.portions(layer, arrays, counts)) is not None:
                _, v, u = self.kernels(layer, arrays)
                found[layer.weight] = Array(compose(scale_rows(v.numpy(), portions), u.numpy()))
            scale = (f"{norm}.weight", f"{norm}.bias") if norm else (layer.weight, *(layer.bias or ())[1:])
            for name in scale if (active < 1).any() else ():
                found[name] = Array(scale_rows(found[name].numpy(), active))
        return ArrayRecord(found)

    def active(self, layer: Factors, counts: Mapping[int, int]) -> np.ndarray:
        """Return the factor of each output channel of a layer: the probability that a client computes it.

        The first channels are trained by all clients, or by those with large sub-models: the factor is 1, as in OrigDrop.
        `counts` are the clients by the number of their ratio.
        """
        channels, computed = self.full[layer.u][0], {n: self.cut.shapes[n][layer.u][0] for n in counts}
        if not self.scattered:
            return (np.arange(channels) < max(computed.values())).astype(np.float64)
        mean = sum(count * computed[n] for n, count in counts.items()) / sum(counts.values())
        return np.full(channels, mean / channels)

    def portions(self, layer: Factors, arrays: ArrayRecord, counts: Mapping[int, int]) -> np.ndarray | None:
        """Return the factor of each kernel of a layer, the probability that a client has it; None = 1 before a norm."""
        if layer.weight in self.norms and self.settings.norms != "running":
            return None
        sigma, settings = self.kernels(layer, arrays)[0], self.settings.of(PriSMSettings)
        found = [
            count * inclusion(sigma, self.cut.shapes[n][layer.v][0], settings.kappa, settings.kernel_sampling)
            for n, count in counts.items()
        ]
        return np.asarray(sum(found) / sum(counts.values()))

    def details(self, current: Round) -> dict[str, Any]:
        """Return each client's keep ratio, each layer's effective rank (2^entropy) and use of kernels, for the round record.

        `drawn` is the mean number of clients per kernel in each tenth of the kernels, largest singular values first.
        """
        keeps = {str(client): each.task.variant.find(LowRank).keep for client, each in current.assigned.items()}
        counts = {layer.weight: np.zeros(self.full[layer.v][0]) for layer in self.factors}
        for each in current.assigned.values():
            for name, kernels in each.assignment.memo.kernels.items():
                counts[name][kernels] += 1
        layers = {
            name: {
                "rank": effective_rank(self._sigma[name]),
                "kernels": len(count),
                "drawn": [float(tenth.mean()) for tenth in np.array_split(count, min(10, len(count)))],
            }
            for name, count in counts.items()
        }
        return {"keep_ratios": keeps, "layers": layers}


def scale_rows(array: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the array with its first dimension multiplied by these factors, in its own precision."""
    return np.asarray(array * factors.astype(array.dtype).reshape(-1, *(1,) * (array.ndim - 1)))
