"""FedProphet's cut: how it cuts a model (Algorithm 1) and assigns modules to clients (Eqs. 14 and 15).

w_m is module m: consecutive atoms with the auxiliary head theta_m; the last module has the model's own head. R_min is the
smallest memory reserved on a client. R_k and P_k are the memory and the performance (FLOP/s) of client k in a round.

Algorithm 1: atoms are appended to a module while MemReq(w_m + theta_m) stays within R_min. Differentiated Module Assignment
(Eqs. 14 and 15): a client in stage m trains w_m .. w_M together, with the largest M for which memory, MemReq <= R_k, and time,
FLOPs(w_m .. w_M + theta_M) <= P_k / P_min FLOPs(w_m), suffice. P_min is the smallest P_k among the clients of the round.

Ours: the memory cost of the last module includes its own head; the authors add an auxiliary head there too.
"""

from functools import cached_property
from typing import Any, Self

from piecework.device_profiles.profile import DeviceState
from piecework.models.auxiliary_pooling import AuxiliaryPooling
from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import layer_statistics
from piecework.models.partition import AtomTooLargeError, Piece, atom_names, greedy_partition
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.planning.costs import CostModel, fraction_or_bytes
from piecework.planning.cut import Cut, Stage
from piecework.planning.part import Part, whole_model
from piecework.strategies.cascade.fedprophet.client import module_item, module_loss
from piecework.strategies.cascade.fedprophet.evaluation import validation_steps
from piecework.strategies.cascade.fedprophet.settings import FedProphetSettings
from piecework.training.settings import Settings


class FedProphetCut(Cut):
    """One stage per module."""

    def __init__(self, blueprint: Blueprint, cost_model: CostModel, settings: Settings, *rest: Any, **own: Any) -> None:
        self.table = settings.of(FedProphetSettings)
        self.reserves = self.table.r_min
        super().__init__(blueprint, cost_model.having(feature_norm=self.table.feature_norm), settings, *rest, **own)

    def require_model(self) -> None:
        """Raise ValueError for a model that cannot be attacked, or settings that leave no module or no adversarial round."""
        if self.model.reads != "images":
            raise ValueError(
                f"{self.settings.model} reads {self.model.reads}, and attacks change images: {self.method.name} needs a model "
                "of those"
            )
        if self.table.stage_rounds:
            self.require_adversarial_rounds(self.table.stage_rounds)
        self.reserve()

    def require_adversarial_rounds(self, stage_rounds: int) -> None:
        """Raise ValueError if `attack.warmup` takes all rounds of a stage."""
        if self.settings.attack.warmup >= stage_rounds:
            raise ValueError(
                f"attack.warmup = {self.settings.attack.warmup} leaves no adversarial round in stages of {stage_rounds} "
                "(fedprophet.stage-rounds): lower it, or raise fedprophet.stage-rounds"
            )

    def reserve(self) -> Self:
        """Return the cut for `fedprophet.r-min`, if set. Raises ValueError if it is malformed or too small for an atom."""
        r_min, cut = self.table.r_min, self
        if not r_min:
            return self
        try:
            cut = self.with_smallest(fraction_or_bytes(r_min, self.cost_model.bytes(whole_model(self.model))))
            _ = cut.stages
        except AtomTooLargeError as error:
            raise ValueError(
                f"setting fedprophet.r-min = {r_min!r} is {cut.smallest:,} bytes, and atom {error.name!r} alone needs "
                f"{error.needed:,}: set at least {self.min_budget():,} bytes, for the largest atom, or lower "
                "training.batch-size"
            ) from None
        except ValueError as error:
            raise ValueError(f"setting fedprophet.r-min = {r_min!r}: {error}") from None
        return cut

    def evaluation_bytes(self, examples: int) -> int:
        """Return the fewest bytes in which a client attacks all modules in a validation on so many examples."""
        modules = [stage.parts[0].atoms for stage in self.stages]
        return validation_steps(self, modules, 0, examples)[0].bytes

    @property
    def variant(self) -> Variant:
        """The run's model with the pooling before its auxiliary heads."""
        pooling = self.table.aux_pool
        return Variant(changes=(AuxiliaryPooling(pooling),) if pooling != self.blueprint.auxiliary_pool else ())

    def item(self, atoms: Piece) -> WorkItem:
        """Return the work item that trains these atoms with their auxiliary head, or at the end with the model's own head."""
        return module_item(self.model, atoms)

    def plain_part(self, item: WorkItem) -> Part:
        """Return the modules that a work item trains, with the strongly convex loss (Eq. 9)."""
        return Part(self.model, item.atoms, item.head, make_loss=module_loss(self.table.convexity))

    def min_budget(self) -> int:
        """Return the memory cost (bytes) of the largest atom."""
        return max(self.needed_bytes(self.item((atom,))) for atom in range(len(self.blueprint.atoms)))

    @cached_property
    def stages(self) -> list[Stage]:
        """A stage for each module w_1, w_2, ... Raises AtomTooLargeError if an atom alone does not fit R_min."""
        modules = greedy_partition(
            range(len(self.blueprint.atoms)),
            lambda atoms: self.needed_bytes(self.item(atoms)),
            self.allowed,
            atom_names(self.blueprint),
        )
        rounds = self.rounds_of_stages(len(modules))
        return [
            Stage(
                f"module {m + 1}",
                (self._fit_part(self.item(module), self.allowed),),
                key=m,
                place=1 if self.table.lr_restart else 1 + m * rounds,
            )
            for m, module in enumerate(modules)
        ]

    def rounds_of_stages(self, modules: int) -> int:
        """Return the most rounds of each module, if the model has so many modules."""
        return self.table.stage_rounds or max(1, self.settings.num_rounds // modules)

    def choose_atoms(self, stage: int, state: DeviceState, slowest: float) -> Piece:
        """Return the atoms of w_m .. w_M: always those of w_m, and those of later modules that Eqs. 14 and 15 allow."""
        assigned = self.stages[stage].parts[0].atoms
        flops = (
            sum(layer_statistics(self.blueprint, f"atoms.{atom}").flops for atom in assigned)
            * state.flops_per_second
            / slowest
        )
        for later in self.stages[stage + 1 :] if self.table.dma else []:
            longer = (*assigned, *later.parts[0].atoms)
            item = self.item(longer)
            if self.part(item).forward_flops > flops or self.needed_bytes(item) > state.allowed_bytes:
                break
            assigned = longer
        return assigned
