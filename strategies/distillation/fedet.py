"""FedET (Cho et al., "Heterogeneous Ensemble Knowledge Transfer for Training Large Models in Federated Learning", IJCAI 2022,
https://arxiv.org/abs/2204.12703), the server's side, as FedProphet compares with it.

Clients as in FedDF. The server's model W, of the largest architecture, is no client's: it learns from the ensemble alone. For
client k's logits s_k, v_k(x) their variance over the classes, and phi the last linear layer, which all models have alike:

  1. phi of W <- sum_k n_k phi_k / sum_k n_k
  2. pseudo-label y(x): the largest class of sum_k v_k s_k / sum_k v_k, the weighted consensus
  3. diversity logits d(x): the same over those k whose own largest class is not y(x)
  4. W <- steps on CE(s_W(x), y(x)) + lambda KL(softmax(d(x)) || softmax(s_W(x))), x public; lambda is `fedet.diversity`
  5. w_p <- sum_{k in D_p} n_k w_k / sum_{k in D_p} n_k, with phi of W, for each architecture p

Where an example has no k that disagrees, its loss is the cross-entropy alone. Batches, rate and momentum as in FedDF.
"""

from functools import cached_property

from flwr.app import Array, ArrayRecord

from piecework.federation.aggregation import WeightedMean
from piecework.models.cascade import Blueprint
from piecework.models.width import last_layer
from piecework.planning.part import Part
from piecework.strategies.distillation.feddf import FamilyPolicy, FedDF
from piecework.strategies.distillation.server_training import consensus, consensus_loss


class SharedLastPolicy(FamilyPolicy):
    """A family whose models have their last linear layer in common."""

    def covered(self, part: Part) -> list[str]:
        """The last layer, which all models have in common: the server's model is otherwise trained by none of them."""
        return ["head"]

    def require_alike(self, models: list[Blueprint]) -> None:
        """Raises ValueError where last layers have other shapes."""
        first, *rest = map(last_layer, models)
        for name, last in zip(self.names[1:], rest, strict=True):
            if list(last.values()) != list(first.values()):
                raise ValueError(
                    f"family: the last layers of {self.names[0]} and {name} have the shapes {list(first.values())} and "
                    f"{list(last.values())}, and fedet shares it: use models with as many features before it"
                )


class FedET(FedDF):
    """A model that learns from an ensemble of smaller ones, with a last layer that all share."""

    name = "fedet"
    policy_class = SharedLastPolicy

    @cached_property
    def last(self) -> list[list[str]]:
        """The names of the last linear layer's arrays, of each architecture: they correspond."""
        return [list(last_layer(model)) for model in self.models]

    def finish(self) -> ArrayRecord:
        """The server's model has learnt from the ensemble; the prototypes are means of their clients, with its last layer."""
        self.doubt()
        head = WeightedMean()
        for level, mean in self.means.items():
            names = dict(zip(self.last[level], self.last[0], strict=True))
            head.add({names[name]: mean[name] for name in names}, mean.weight(self.last[level][0]))
        server = {
            name: Array(head.over(name, array.numpy())) if name in head else array
            for name, array in self.dispatcher.arrays.items()
        }
        loss = consensus_loss(self.settings.fedet.diversity)
        model, self.loss = self.distil(0, ArrayRecord(server), consensus(self.ensemble), loss)
        for level in range(len(self.policy.names)):
            names = dict(zip(self.last[level], self.last[0], strict=True))
            self.keep(
                level,
                {**self.merged(level, self.dispatcher.arrays), **{own: model[name] for own, name in names.items()}},
            )
        return model
