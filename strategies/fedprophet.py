"""FedProphet ("Memory-Efficient Federated Adversarial Training via Robust and Consistent Cascade Learning"), the server's
side: the model partitioner, module assignment, and the authors' memory and FLOPs.

w_m: module m, consecutive atoms with the auxiliary head theta_m; the last module has the model's own head. R_min: the
smallest memory reserved on a client; R_k, P_k: memory and performance of client k in a round.

Algorithm 1: atoms are appended to a module while MemReq(w_m + theta_m) stays within R_min. Differentiated Module Assignment
(Eqs. 14 and 15): a client of stage m trains w_m .. w_M as one, with M as large as memory, MemReq <= R_k, and time,
FLOPs(w_m .. w_M + theta_M) <= P_k / P_min FLOPs(w_m), allow.

Ours: the last module is priced with its own head; the authors' code adds the cost of an auxiliary head there too.
"""

from functools import cached_property
from math import prod

from client_app.training import Recipe
from device_profiles.profile import DeviceState
from models.anatomy import anatomy, input_of
from models.cascade import Blueprint
from models.partition import Piece, atom_names, greedy_partition
from strategies.pricing import Part
from strategies.rules import Rule, Stage


class FedProphetRule(Rule):
    """One stage a module."""

    cuts = True
    attack_steps = 10

    def part(self, piece: Piece) -> Part:
        """Atoms with the auxiliary head behind them, or with the model's own head at the end."""
        last = len(self.blueprint.atoms) - 1
        return Part(self.blueprint, piece, "head" if piece[-1] == last else f"aux.{piece[-1]}")

    def least(self) -> int:
        """The largest atom's price."""
        return max(self.bytes((atom,)) for atom in range(len(self.blueprint.atoms)))

    @cached_property
    def stages(self) -> list[Stage]:
        """w_1, w_2, ... Raises AtomTooLargeError where an atom does not fit R_min alone."""
        modules = greedy_partition(
            range(len(self.blueprint.atoms)),
            self.bytes,
            self.settings.allowance(self.smallest),
            atom_names(self.blueprint),
        )
        return [Stage(f"module {m}", (self.part(module),)) for m, module in enumerate(modules, start=1)]

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """The module of the stage and, where memory and time allow, those behind it. Raises MemoryBudgetExceededError."""
        (module,) = self.stages[stage].parts
        assigned = self.within(module, state)
        backbone = sum(anatomy(self.blueprint, f"atoms.{atom}").flops for atom in module.atoms)
        flops = backbone * state.flops_per_second / slowest
        allowed = self.settings.allowance(state.budget_bytes)
        for later in self.stages[stage + 1 :]:
            longer = self.part((*assigned.atoms, *later.parts[0].atoms))
            if longer.forward_flops > flops or self.bytes(longer.atoms) > allowed:
                break
            assigned = longer
        return [assigned]


def memory_bytes(part: Part, reference: Blueprint, recipe: Recipe) -> float:
    """MemReq: weights, gradients and momentum, 4 bytes each, and the inputs of all weight layers for a whole batch.

    An auxiliary head counts its un-pooled input and its logits. A 1 x 1 shortcut shares its input with the block.
    """
    copies = 3 if recipe.momentum else 2
    elements = copies * part.parameters
    for unit in part.units:
        if unit.startswith("aux."):
            elements += recipe.batch_size * (prod(input_of(part.blueprint, unit)) + part.blueprint.num_classes)
        else:
            layers = anatomy(part.blueprint, unit).layers
            counted = [x for x in layers if x.parameters and not (x.kind == "Conv2d" and x.on_shortcut)]
            elements += recipe.batch_size * sum(layer.inputs for layer in counted)
    return 4 * part.copies * elements


def macs(part: Part, batch_size: int) -> int:
    """The authors' count of a batch's forward pass: multiply-accumulates, 5 an element of batch norm, 1 of average pooling."""
    layers = [layer for unit in part.units for layer in anatomy(part.blueprint, unit).layers]
    others = {"BatchNorm2d": 5, "AdaptiveAvgPool2d": 1}
    return batch_size * sum(layer.macs + others.get(layer.kind, 0) * layer.inputs for layer in layers)
