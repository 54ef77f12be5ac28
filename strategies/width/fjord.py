"""FjORD (Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout",
NeurIPS 2021, https://arxiv.org/abs/2102.13451), the server's side.

p_max: of `heterofl.width-ratios` the largest whose step fits a client, or that which its fleet gives it (`keep`). The client is
sent the first p_max C channels of every layer, and trains all nets of smaller ratios within them (in its trainer). Each
entry is averaged over the clients that had it, weighted by examples: the slices of FjORD's nested aggregation.

`fjord.sampling = round` is what SpaFL compares with: one ratio is drawn for each client and round, and only that is sent and
trained. There is no Scaler. Self-distillation: `fjord.distillation`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from flwr.app import ArrayRecord

from piecework.client_app.trainers.width.fjord import FjORDTaskConfig, nested_loss
from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import UpdateRejectedError
from piecework.models.work_item import WorkItem
from piecework.planning.part import Part
from piecework.planning.partition_policy import require_no_statistics
from piecework.strategies.width.heterofl import HeteroFL, HeteroFLPolicy
from piecework.training.messages import Task, TaskConfig
from piecework.training.randomness import generator


class FjORDPolicy(HeteroFLPolicy):
    """As HeteroFL's; a step may run two nets."""

    masks = False
    scales = False

    def require_model(self) -> None:
        """Raises ValueError for norms with statistics, too."""
        require_no_statistics(self.blueprint, self.settings, "fjord's nets have different statistics")
        super().require_model()

    @property
    def distils(self) -> bool:
        """Whether a client's widest net teaches the others."""
        return self.settings.fjord.distillation and self.settings.fjord.sampling == "batch"

    def nested(self, level: int) -> int:
        """How many narrower nets a client with this ratio trains."""
        return len(self.ratios) - level - 1 if self.settings.fjord.sampling == "batch" else 0

    def part(self, item: WorkItem) -> Part:
        """A sub-model when all of it is trained."""
        return self.step(self.levels[item.variant], 0)

    def step(self, level: int, drawn: int) -> Part:
        """The model with a ratio when the net of number `drawn` is trained in it: 0 is all of it, the next ones narrower."""
        widths = tuple(self.models[level + 1 :][: self.nested(level)])
        loss = nested_loss(widths, self.distils, drawn)
        return replace(super().part(self.sub_model(level)), make_loss=loss)

    def bytes(self, item: WorkItem) -> int:
        """The cost of the largest step: a narrow net needs less for itself, and copies of parts of the model's arrays."""
        if item not in self._bytes:
            level = self.levels[item.variant]
            steps = range(1 + self.nested(level))
            self._bytes[item] = max(self.cost_model.bytes(self.step(level, drawn)) for drawn in steps)
        return self._bytes[item]


class FjORD(HeteroFL):
    """Ordered dropout."""

    name = "fjord"
    policy_class = FjORDPolicy
    policy: FjORDPolicy
    orders_class = FjORDTaskConfig
    by_examples: ClassVar[bool] = True

    def task_config(self, level: int) -> TaskConfig:
        """What is said of a ratio."""
        ratios = self.policy.ratios
        nested = ratios[level + 1 :][: self.policy.nested(level)]
        return FjORDTaskConfig(level, nested, self.policy.distils)

    def _executed(self, task: Task, metrics: dict[str, Any]) -> float:
        """By the nets that were drawn, of which the client says on how many examples each was trained."""
        task_config, seen = FjORDTaskConfig.of(task), sum(int(n) for n in metrics["seen"])
        counted, nets = metrics.get("widths"), 1 + len(task_config.nested)
        if not isinstance(counted, list) or len(counted) != nets or sum(counted) != seen or min(counted) < 0:
            raise UpdateRejectedError(f"widths is {counted!r:.100}: {seen} examples of {nets} nets")
        flops = [
            self.policy.cost_model.traced(self.policy.step(task_config.level, n)).flops for n in range(len(counted))
        ]
        return float(sum(a * b for a, b in zip(flops, counted, strict=True)) / (flops[0] * seen))

    def ask(
        self, clients: Iterable[int], server_round: int, arrays: ArrayRecord
    ) -> dict[int, tuple[Task, DeviceState]]:
        """The tasks; where one ratio is drawn for a round, any that fits, by (seed, round, client)."""
        asked = super().ask(clients, server_round, arrays)
        if self.settings.fjord.sampling == "batch":
            return asked
        drawn = {}
        for client, (task, state) in asked.items():
            widest = FjORDTaskConfig.of(task).level
            rng = generator(self.settings.seed, server_round, client, "width")
            level = int(rng.integers(widest, len(self.policy.ratios)))
            own = self.task_config(level).to_values() | {"draw": client}
            item = self.policy.sub_model(level)
            drawn[client] = replace(task, own=own, variant=item.variant, costs={item: self.policy.bytes(item)}), state
        return drawn
