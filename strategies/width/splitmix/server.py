"""SplitMix (Junyuan Hong, Haotao Wang, Zhangyang Wang, Jiayu Zhou, "Efficient Split-Mix Federated Learning for On-Demand and
In-Situ Customization", ICLR 2022, https://arxiv.org/abs/2203.09747), the server's side.

The model is an ensemble of round(1 / a) narrow base nets, which share no weights; a is their width ratio
(`splitmix.width-ratio`). A client trains as many base nets as its budget allows, or as many as add up to the ratio that its
fleet sets (`keep`). One of them is assigned in turn, so that all nets are trained equally often, and the others are drawn at
random. Each net is averaged over the clients that trained it, weighted by examples. Nets that no client trained stay as they
were. The model predicts the mean of all nets' logits. Layers have HeteroFL's Scaler, and begin with weights of the full model's
size (models/mix.py; `splitmix.scaler = false`: neither).

Where it differs from the paper: the Scaler is part of the model, so it is also active in evaluation. In the authors' code it
is active only in training, where batch norms follow it.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from flwr.app import ArrayRecord

from piecework.device_profiles.profile import DeviceState
from piecework.models.cascade import Blueprint
from piecework.models.mix import Mix, net_of
from piecework.models.variant import Variant, vary
from piecework.models.width import require_narrower
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context
from piecework.planning.cut import Cut, Stage
from piecework.planning.part import Part
from piecework.strategies.method import Method, Round
from piecework.strategies.serving import DeviceModel, Serving
from piecework.strategies.width.splitmix.client import mixed_loss, nets_of
from piecework.strategies.width.splitmix.settings import SplitMixSettings
from piecework.training.capabilities import Refusal
from piecework.training.methods import METHODS
from piecework.training.randomness import generator


class SplitMixCut(Cut):
    """One stage: each device trains as many base nets as fit."""

    @property
    def count(self) -> int:
        """The number of base nets."""
        return max(1, round(1 / self.settings.of(SplitMixSettings).width_ratio))

    def require_model(self) -> None:
        """Raise ValueError if base nets would be as wide as the full model."""
        ratio = self.settings.of(SplitMixSettings).width_ratio
        require_narrower(self.blueprint, {ratio: vary(self.blueprint, Variant(width=ratio))})

    @property
    def variant(self) -> Variant:
        """The ensemble of all base nets."""
        return self.variant_of(range(self.count))

    def variant_of(self, nets: Iterable[int]) -> Variant:
        """Return the variant of the base nets with these numbers."""
        own = self.settings.of(SplitMixSettings)
        return Variant(width=own.width_ratio, changes=(Mix(tuple(nets), own.scaler),))

    @cached_property
    def mixes(self) -> list[Blueprint]:
        """The ensembles of one base net, of two, .. and of all, in this order."""
        return [vary(self.blueprint, self.variant_of(range(n))) for n in range(1, self.count + 1)]

    def mix(self, nets: Iterable[int]) -> WorkItem:
        """Return the work item of some base nets. Its memory cost depends only on their number."""
        variant = self.variant_of(nets)
        return WorkItem(tuple(range(len(self.mixes[len(nets_of(variant)) - 1].atoms))), variant=variant)

    def plain_part(self, item: WorkItem) -> Part:
        """Return the base nets of a work item."""
        count = len(nets_of(item.variant))
        return Part(self.mixes[count - 1], item.atoms, make_loss=mixed_loss, name=count_in_words(count))

    def nets(self, allowed: int) -> int:
        """Return how many base nets fit into `allowed` bytes; 1 if none does."""
        return next((n for n in range(self.count, 1, -1) if self.needed_bytes(self.mix(range(n))) <= allowed), 1)

    def nets_of(self, state: DeviceState) -> int:
        """Return how many base nets a device trains: as many as add up to its fleet's `keep`, else as many as fit."""
        if state.keep is None:
            return self.nets(state.allowed_bytes)
        return min(self.count, max(1, round(state.keep / self.settings.of(SplitMixSettings).width_ratio)))

    def min_budget(self) -> int:
        """Return the memory cost (bytes) of one base net."""
        return self.needed_bytes(self.mix([0]))

    @cached_property
    def stages(self) -> list[Stage]:
        """One stage, with the base nets of a device with the smallest budget."""
        return [Stage("training", (self._fit_part(self.mix(range(self.nets(self.allowed))), self.allowed),))]


class SplitMixServing(Serving):
    """Serves the ensemble of all base nets. A device deploys the first of them, as many as it trains in a round."""

    method: "SplitMix"

    def device_models(self, server_round: int) -> list[DeviceModel]:
        """Return the ensemble of each number of base nets that a device trains."""
        cut = self.method.cut
        fitting = [(cut.nets_of(state), state.allowed_bytes) for state in self.device_states()]
        counts = Counter(n for n, allowed in fitting if cut.needed_bytes(cut.mix(range(n))) <= allowed)
        return [
            DeviceModel(count_in_words(n), clients, cut.variant_of(range(n)), partial(of_nets, nets=range(n)))
            for n, clients in sorted(counts.items(), reverse=True)
        ]


def of_nets(arrays: ArrayRecord, nets: Collection[int]) -> ArrayRecord:
    """Return the arrays of these base nets."""
    return ArrayRecord({name: array for name, array in arrays.items() if net_of(name) in nets})


def count_in_words(nets: int) -> str:
    """Return a number of base nets in words."""
    return f"{nets} base nets" if nets > 1 else "a base net"


@dataclass(frozen=True)
class OfNets:
    """Selects the arrays of some base nets."""

    nets: tuple[int, ...]

    def __call__(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays of the nets, not copied."""
        return of_nets(arrays, self.nets)


OTHER_NETS = "it does not work with splitmix, whose clients train other nets in each round"


class SplitMix(Method):
    """An ensemble of narrow nets; each client trains as many as fit its budget."""

    name = "splitmix"
    can = METHODS["splitmix"].can
    refuses = (
        Refusal("architecture.batch-norm", OTHER_NETS, ("local",)),
        Refusal("training.init-weights", OTHER_NETS),
    )
    cut_class = SplitMixCut
    cut: SplitMixCut
    serving_class = SplitMixServing

    def assign(self, ctx: Context) -> Assignment:
        """Return the client's base nets of the round."""
        wanted = self.cut.nets_of(ctx.device)
        # The memory cost does not depend on which nets they are, and a plan has no round.
        nets = self.nets(ctx, wanted) if ctx.arrays is not None else list(range(wanted))
        item = self.cut.mix(nets)
        least = self.cut.min_budget if ctx.device.keep is None else None
        return self.work(item, variant=item.variant, sends=OfNets(tuple(nets)), least=least)

    def nets(self, ctx: Context, wanted: int) -> list[int]:
        """Return the numbers of the `wanted` base nets that a client trains.

        The first is assigned in turn, by the client's place in the round. The order of the nets is drawn again once all have
        had a turn. The others are random.
        """
        count, seed = self.cut.count, self.settings.seed
        done = (ctx.round - 1) * (self.settings.clients_per_round or ctx.clients)
        turn, number = divmod(done + ctx.place, count)
        first = int(generator(seed, turn, "turns").permutation(count)[number])
        others = generator(seed, ctx.round, ctx.client, "nets").permutation(
            [net for net in range(count) if net != first]
        )
        return sorted([first, *(int(net) for net in others[: wanted - 1])])

    def details(self, current: Round) -> dict[str, Any]:
        """Return the numbers of each client's nets for the round record."""
        return {"nets": {str(client): list(nets_of(each.task.variant)) for client, each in current.assigned.items()}}
