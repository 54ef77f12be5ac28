"""FedProphet's cut: how it cuts a model (Algorithm 1) and assigns modules to clients (Eqs. 14 and 15).

w_m is module m: consecutive atoms with the auxiliary head theta_m; the last module has the model's own head. R_min is the
smallest memory reserved on a client. R_k and P_k are the memory and the performance (FLOP/s) of client k in a round.

Algorithm 1: atoms are appended to a module while MemReq(w_m + theta_m) stays within R_min. Differentiated Module Assignment
(Eqs. 14 and 15): a client in stage m trains w_m .. w_M together, with the largest M for which memory, MemReq <= R_k, and time,
FLOPs(w_m .. w_M + theta_M) <= P_k / P_min FLOPs(w_m), suffice. P_min is the smallest P_k among the clients of the round.

Ours: the memory cost of the last module includes its own head; the authors add an auxiliary head there too.
"""

from functools import cached_property

from piecework.device_profiles.profile import DeviceState
from piecework.models.layer_statistics import layer_statistics
from piecework.models.partition import Piece, atom_names, greedy_partition
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.planning.cut import Cut, Stage
from piecework.planning.part import Part
from piecework.strategies.cascade.fedprophet.client import module_item, module_loss


class FedProphetCut(Cut):
    """One stage per module."""

    @property
    def variant(self) -> Variant:
        """The run's model with the pooling before its auxiliary heads."""
        return Variant(pooling=self.settings.fedprophet.aux_pool)

    def item(self, atoms: Piece) -> WorkItem:
        """Return the work item that trains these atoms with their auxiliary head, or at the end with the model's own head."""
        return module_item(self.model, atoms)

    def plain_part(self, item: WorkItem) -> Part:
        """Return the modules that a work item trains, with the strongly convex loss (Eq. 9)."""
        return Part(self.model, item.atoms, item.head, make_loss=module_loss(self.settings.fedprophet.convexity))

    def min_budget(self) -> int:
        """Return the memory cost (bytes) of the largest atom."""
        return max(self.needed(self.item((atom,))) for atom in range(len(self.blueprint.atoms)))

    @cached_property
    def stages(self) -> list[Stage]:
        """A stage for each module w_1, w_2, ... Raises AtomTooLargeError if an atom alone does not fit R_min."""
        modules = greedy_partition(
            range(len(self.blueprint.atoms)),
            lambda atoms: self.needed(self.item(atoms)),
            self.allowed,
            atom_names(self.blueprint),
        )
        rounds = self.settings.fedprophet.stage_rounds or self.settings.num_rounds // len(modules)
        return [
            Stage(
                f"module {m + 1}",
                (self._fitted_part(self.item(module), self.allowed),),
                key=m,
                place=1 if self.settings.restarts_rates else 1 + m * rounds,
            )
            for m, module in enumerate(modules)
        ]

    def assigned(self, stage: int, state: DeviceState, slowest: float) -> Piece:
        """Return the atoms of w_m .. w_M: always those of w_m, and those of later modules that Eqs. 14 and 15 allow."""
        assigned = self.stages[stage].parts[0].atoms
        flops = (
            sum(layer_statistics(self.blueprint, f"atoms.{atom}").flops for atom in assigned)
            * state.flops_per_second
            / slowest
        )
        for later in self.stages[stage + 1 :] if self.settings.fedprophet.dma else []:
            longer = (*assigned, *later.parts[0].atoms)
            item = self.item(longer)
            if self.part(item).forward_flops > flops or self.needed(item) > state.allowed_bytes:
                break
            assigned = longer
        return assigned
