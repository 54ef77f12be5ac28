"""FedET (Yae Jee Cho, Andre Manoel, Gauri Joshi, Robert Sim, Dimitrios Dimitriadis, "Heterogeneous Ensemble Knowledge Transfer
for Training Large Models in Federated Learning", IJCAI 2022, https://arxiv.org/abs/2204.12703), the server's side, as
FedProphet compares with it.

Clients train as in FedDF. The server's model W, of the largest architecture, learns from the ensemble of clients' models alone;
no client trains it. K clients took part in the round, K_p of them with architecture p. s_k are the logits of client k's model,
v_k(x) their variance over the classes, and phi is the last linear layer, which has the same shape in all models:

  1. phi of W <- sum_k phi_k / K
  2. pseudo-label y(x): the largest class of sum_k v_k s_k / sum_k v_k, the weighted consensus
  3. diversity logits d(x): the weighted mean of step 2 over those k alone whose own largest class is not y(x)
  4. W <- steps on CE(s_W(x), y(x)) + lambda KL(softmax(d(x)) || softmax(s_W(x))), x public; lambda is `fedet.diversity`
  5. w_p <- sum_{k in D_p} w_k / K_p, with phi of W, for each architecture p

Where it differs from the paper: it follows the code of FedProphet's authors. If all k agree on an example, d(x) = 0: the KL is
that to the uniform distribution. Clients have equal weights in steps 1 and 5. Batches, rate and momentum are those of FedDF.
"""

from dataclasses import replace
from functools import cached_property

from flwr.app import Array, ArrayRecord

from piecework.federation.aggregation import CheckedUpdate, WeightedMean
from piecework.models.cascade import Blueprint
from piecework.models.width import last_layer
from piecework.models.work_item import WorkItem
from piecework.planning.part import Part
from piecework.strategies.distillation.feddf.server import FamilyCut, FedDF
from piecework.strategies.distillation.feddf.server_training import consensus, consensus_loss
from piecework.strategies.distillation.fedet.settings import FedETSettings
from piecework.strategies.method import Round
from piecework.training.methods import METHODS


class SharedLastCut(FamilyCut):
    """A family whose models share the weights of their last linear layer."""

    def plain_part(self, item: WorkItem) -> Part:
        """Return all of a model. Of the server's it trains the head alone, whose last layer is shared."""
        return replace(super().plain_part(item), covers=("head",))

    def require_alike(self, models: list[Blueprint]) -> None:
        """Raise ValueError unless all last layers have the same shapes."""
        first, *rest = map(last_layer, models)
        for name, last in zip(self.names[1:], rest, strict=True):
            if list(last.values()) != list(first.values()):
                raise ValueError(
                    f"feddf.family: the last layers of {self.names[0]} and {name} have the shapes {list(first.values())} and "
                    f"{list(last.values())}, but fedet shares the last layer: use models with as many features before it"
                )


class FedET(FedDF):
    """A large server model, distilled from the clients' smaller models, with a last layer that all share."""

    name = "fedet"
    can = METHODS["fedet"].can
    cut_class = SharedLastCut

    @cached_property
    def last(self) -> list[list[str]]:
        """The names of the last linear layer's arrays for each architecture, in corresponding order."""
        return [list(last_layer(model)) for model in self.cut.models]

    def weight(self, update: CheckedUpdate) -> int:
        """Return the weight of an update in its architecture's mean, and of its last layer: 1."""
        return 1

    def finish(self, current: Round) -> ArrayRecord:
        """Return the server's model, distilled from the ensemble; store prototypes: client means with its last layer."""
        self.drop_outlier_teachers(current)
        head = WeightedMean()
        for level, mean in current.mean.means.items():
            names = dict(zip(self.last[level], self.last[0], strict=True))
            head.add({names[name]: mean[name] for name in names}, mean.weight(self.last[level][0]))
        server = {
            name: Array(head.over(name, array.numpy())) if name in head else array
            for name, array in current.arrays.items()
        }
        targets = consensus(current.mean.ensemble)
        self.rate_teachers(current, targets.chunk(2, dim=1)[0])
        loss = consensus_loss(self.settings.of(FedETSettings).diversity)
        model = self.distil(current, 0, ArrayRecord(server), targets, loss)
        for level in range(len(self.cut.names)):
            names = dict(zip(self.last[level], self.last[0], strict=True))
            own = {own: model[name] for own, name in names.items()}
            self.keep(level, {**self.merge(level, current), **own})
        return model
