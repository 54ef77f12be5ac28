"""How FedProphet cuts a model and deals it out: Algorithm 1, Eqs. 14 and 15, and its authors' memory and FLOPs.

w_m: module m, consecutive atoms with the auxiliary head theta_m; the last module has the model's own head. R_min: the
smallest memory reserved on a client; R_k, P_k: memory and performance of client k in a round.

Algorithm 1: atoms are appended to a module while MemReq(w_m + theta_m) stays within R_min. Differentiated Module Assignment
(Eqs. 14 and 15): a client of stage m trains w_m .. w_M as one, with M as large as memory, MemReq <= R_k, and time,
FLOPs(w_m .. w_M + theta_M) <= P_k / P_min FLOPs(w_m), allow; P_min is of the clients of the round.

Ours: the last module is priced with its own head; the authors add an auxiliary one there too.
"""

from functools import cached_property

from piecework.client_app.trainers.cascade.fedprophet import module_item, module_loss
from piecework.device_profiles.profile import DeviceState
from piecework.models.layer_statistics import layer_statistics
from piecework.models.partition import Piece, atom_names, greedy_partition
from piecework.models.work_item import WorkItem
from piecework.planning.part import Part
from piecework.planning.partition_policy import PartitionPolicy, Stage


class FedProphetPolicy(PartitionPolicy):
    """One stage a module."""

    cuts = True
    adversarial = "always"

    @property
    def swaps(self) -> bool:
        """By the paper's own memory, a device that lacks some for the first module swaps."""
        return self.settings.memory.model == "fedprophet"

    def item(self, atoms: Piece) -> WorkItem:
        """Atoms with the auxiliary head behind them, or with the model's own head at the end."""
        return module_item(self.blueprint, atoms)

    def part(self, item: WorkItem) -> Part:
        """Modules with the strongly convex loss."""
        return Part(self.blueprint, item.atoms, item.head, make_loss=module_loss(self.settings.fedprophet.convexity))

    def min_budget(self) -> int:
        """The largest atom's cost."""
        return max(self.bytes(self.item((atom,))) for atom in range(len(self.blueprint.atoms)))

    @cached_property
    def stages(self) -> list[Stage]:
        """w_1, w_2, ... Raises AtomTooLargeError where an atom does not fit R_min alone."""
        modules = greedy_partition(
            range(len(self.blueprint.atoms)),
            lambda atoms: self.bytes(self.item(atoms)),
            self.allowed,
            atom_names(self.blueprint),
        )
        return [Stage(f"module {m}", (self.part(self.item(module)),)) for m, module in enumerate(modules, start=1)]

    @property
    def stage_count(self) -> int:
        """As many as there are modules."""
        return len(self.stages)

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """The module of the stage and, where memory and time allow, those behind it.

        Raises MemoryBudgetExceededError where that module does not fit.
        """
        if not self.swaps:
            self.within(self.stages[stage].parts[0], state)
        return [self.part(self.item(self.assigned(stage, state, slowest)))]

    def trainable(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """The module of the stage; those behind it have stages of their own."""
        part = self.stages[stage].parts[0]
        return [part] if self.swaps or self.bytes(self.item(part.atoms)) <= state.allowed_bytes else []

    def assigned(self, stage: int, state: DeviceState, slowest: float) -> Piece:
        """The atoms of w_m .. w_M: of w_m always, of others as Eqs. 14 and 15 allow."""
        assigned = self.stages[stage].parts[0].atoms
        flops = (
            sum(layer_statistics(self.blueprint, f"atoms.{atom}").flops for atom in assigned)
            * state.flops_per_second
            / slowest
        )
        for later in self.stages[stage + 1 :] if self.settings.fedprophet.dma else []:
            longer = (*assigned, *later.parts[0].atoms)
            item = self.item(longer)
            if self.part(item).forward_flops > flops or self.bytes(item) > state.allowed_bytes:
                break
            assigned = longer
        return assigned
