"""What HeteroFL, FjORD, OrigDrop and FedRolex leave behind: the widest trained net, and a net of each device's own ratio.

Let r be the largest ratio that any client can train when the run begins, or has trained since (`HeteroFLState.widest`). If
r = 1, the full model is served. If r < 1, nobody trains the channels from ceil(r C) on, and their random weights would only
disturb: the served model has the first ceil(r C) channels of every layer. With the Scaler, a layer of ratio r computes
(W x + b) / q in training, for the fraction q of its inputs that it has: W / q and b / q are served.

A device deploys the net of the ratio that it trains: its first channels, or after round t of FedRolex the window of round t,
which was trained last. FedDrop has no net of a ratio: as in dropout, its sub-models are a way to train the full model.
"""

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from flwr.app import Array, ArrayRecord

from piecework.models.nested_norms import own_name
from piecework.models.variant import Variant, vary
from piecework.models.width import Select, rolling, shapes, sub_indices, take, take_first
from piecework.strategies.serving import DeviceModel, Serving
from piecework.strategies.width.heterofl.client import scaled_arrays

if TYPE_CHECKING:
    from piecework.strategies.width.fjord.server import FjORD
    from piecework.strategies.width.heterofl.server import HeteroFL


class WidestServing(Serving):
    """Serves the widest trained net."""

    method: "HeteroFL"

    @property
    def level(self) -> int | None:
        """The number of the ratio whose net is served; None for the full model."""
        widest = self.method.state.widest
        return None if widest == 1 else self.method.cut.ratios.index(widest)

    @property
    def variant(self) -> Variant:
        """The variant of the net that is served."""
        cut = self.method.cut
        return cut.variant if self.level is None else cut.net_variant(self.level)

    def arrays(self, trained: ArrayRecord) -> ArrayRecord:
        """Return the arrays of the net that is served."""
        return trained if self.level is None else self.net(trained, self.level)

    def device_models(self, server_round: int) -> list[DeviceModel]:
        """Return the net of each ratio that a device trains."""
        cut, select = self.method.cut, self.select(server_round)
        fitting = [(cut.level_of(state), state.allowed_bytes) for state in self.device_states()]
        counts = Counter(level for level, allowed in fitting if cut.needed_bytes(cut.sub_model(level)) <= allowed)
        return [self._device_model(level, count, select) for level, count in sorted(counts.items())]

    def select(self, server_round: int) -> Select:
        """Return how the channels of a device's net are chosen after this round."""
        return take_first

    def _device_model(self, level: int, clients: int, select: Select) -> DeviceModel:
        ratio, cut = self.method.cut.ratios[level], self.method.cut
        name = "all channels" if ratio == 1 else f"{ratio:.4g} of the channels"
        if level == self.level or (ratio == 1 and self.level is None):
            return DeviceModel(name, clients, self.variant, self.arrays)
        return DeviceModel(name, clients, cut.net_variant(level), partial(self.net, level=level, select=select))

    def net(self, trained: ArrayRecord, level: int, select: Select = take_first) -> ArrayRecord:
        """Return the net of ratio number `level` as a model of its own: selected channels, with the Scaler in the weights."""
        method, cut = self.method, self.method.cut
        model = vary(cut.blueprint, cut.net_variant(level))
        indices = sub_indices(method.axes, method.full, shapes(model), select)
        found = {name: take(trained[name].numpy(), where) for name, where in indices.items()}
        if cut.scaled:
            found |= {name: found[name] / q for name, q in scaled_arrays(model, cut.blueprint).items()}
        return ArrayRecord({name: Array(array) for name, array in found.items()})


class NestedServing(WidestServing):
    """FjORD's: the norms of a net are its own."""

    method: "FjORD"

    def net(self, trained: ArrayRecord, level: int, select: Select = take_first) -> ArrayRecord:
        """Return the net of ratio number `level` as a model of its own, whose norms are plain ones."""
        found, cut = super().net(trained, level, select), self.method.cut
        for kind in ("weight", "bias") if cut.separate else ():
            own = own_name(kind, cut.ratios[level])
            for name in [name for name in trained if name.endswith(f".{own}")]:
                found[name.removesuffix(own) + kind] = trained[name]
        return found


class RollingServing(WidestServing):
    """FedRolex's: all channels are trained in time, so the full model is served."""

    @property
    def level(self) -> int | None:
        """None, which stands for the full model."""
        return None

    def select(self, server_round: int) -> Select:
        """Return the window of the round."""
        return rolling(server_round)
