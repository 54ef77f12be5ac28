"""What HeteroFL, FjORD and OrigDrop leave behind: the widest trained net.

Let r be the largest ratio that any client can train when the run begins, or has trained since (`HeteroFLState.widest`). If
r = 1, the full model is served. If r < 1, nobody trains the channels from ceil(r C) on, and their random weights would only
disturb: the served model has the first ceil(r C) channels of every layer. With the Scaler, a layer of ratio r computes
(W x + b) / q in training, for the fraction q of its inputs that it has: W / q and b / q are served.
"""

from typing import TYPE_CHECKING

from flwr.app import Array, ArrayRecord

from piecework.client_app.trainers.width.heterofl import scaled_arrays
from piecework.models.nested_norms import own_name
from piecework.models.variant import Variant, vary
from piecework.models.width import ordered, shapes, sub_indices, take
from piecework.strategies.serving import Serving

if TYPE_CHECKING:
    from piecework.strategies.width.fjord import FjORD
    from piecework.strategies.width.heterofl import HeteroFL


class WidestServing(Serving):
    """Serves the widest trained net, or the full model if all of its channels are trained in time."""

    strategy: "HeteroFL"

    @property
    def level(self) -> int | None:
        """The number of the ratio whose net is served; None for the full model."""
        widest, policy = self.strategy.state.widest, self.strategy.policy
        return None if policy.moving or widest == 1 else policy.ratios.index(widest)

    @property
    def variant(self) -> Variant:
        """The variant of the net that is served."""
        policy = self.strategy.policy
        return policy.variant if self.level is None else policy.net_variant(self.level)

    def arrays(self, trained: ArrayRecord) -> ArrayRecord:
        """Return the arrays of the net that is served."""
        return trained if self.level is None else self.net(trained, self.level)

    def net(self, trained: ArrayRecord, level: int) -> ArrayRecord:
        """Return the net of ratio number `level` as a model of its own: the first channels, with the Scaler in the weights."""
        strategy, policy = self.strategy, self.strategy.policy
        model = vary(policy.blueprint, policy.net_variant(level))
        indices = sub_indices(strategy.axes, strategy.full, shapes(model), ordered)
        found = {name: take(trained[name].numpy(), where) for name, where in indices.items()}
        if policy.scaled:
            found |= {name: found[name] / q for name, q in scaled_arrays(model, policy.blueprint).items()}
        return ArrayRecord({name: Array(array) for name, array in found.items()})


class NestedServing(WidestServing):
    """FjORD's: the norms of a net are its own."""

    strategy: "FjORD"

    def net(self, trained: ArrayRecord, level: int) -> ArrayRecord:
        """Return the net of ratio number `level` as a model of its own, whose norms are plain ones."""
        found, policy = super().net(trained, level), self.strategy.policy
        for kind in ("weight", "bias") if policy.separate else ():
            own = own_name(kind, policy.ratios[level])
            for name in [name for name in trained if name.endswith(f".{own}")]:
                found[name.removesuffix(own) + kind] = trained[name]
        return found
