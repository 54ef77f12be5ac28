"""FeDepth: every client trains all blocks of the model, one after another (the server's side).

Kai Zhang, Yutong Dai, Hongyi Wang, Eric Xing, Xun Chen, Lichao Sun, "Memory-adaptive Depth-wise Heterogeneous Federated
Learning", 2023, https://arxiv.org/abs/2303.04887

    Algorithm 1, line 2, sample clients             cohort.py: draw_clients
    line 3, broadcast W^t                           strategies/server.py: MethodServer.configure_train
    line 5, ClientUpdate (lines 9 to 15, Eq. 1)     strategies/cascade/fedepth/client.py: train
    the decomposition (sections 4.1, 4.2)           strategies/cascade/fedepth/client.py: choose_items
    mutual distillation (section 4.3)               strategies/cascade/fedepth/mutual.py: train_mutually
    a whole and a depth-wise model (section 5.1)    strategies/cascade/fedepth/client.py: train_pair
    line 7, aggregate                               method.py: Method.combine

Aggregation (line 7) is W^{t+1} = sum_k p_k / sum_k' p_k' W_k^{t+1}, where p_k is client k's number of training examples. Each
client cuts the model by its own budget. The server sends the memory costs that this cut looks up, each from one training step
on fake tensors. m-FeDepth's heads are part of the global model and are averaged with it.

Where it differs from the paper: the paper does not say what a skipped block counts for (section 4.2). Here a block that a
client has to skip is neither uploaded nor averaged; with `fedepth.partial-training = dilute`, as in the authors' code, it
counts as an unchanged one. Frozen blocks run in evaluation mode, and their features are kept in a file; the authors run them
again in every step, in training mode. Every sub-problem starts with zero momentum (theirs share one optimiser for a round).
Batch norms have measured statistics (theirs always use a batch's: `architecture.batch-norm = batch`). The authors' PreResNet-20
takes its shortcuts from relu(bn(x)) (`architecture.options = shortcut_from=relu`), and their rate is 0.01 instead of the
paper's 0.1 (preset `fedepth-cifar10-authors`). In mutual distillation their cross-entropy has no factor 1/M
(`fedepth.mutual-loss = authors`). In their m-FeDepth, clients with a sixth of the memory train blocks 5 and 6 in the place of 7
to 9 in the last sub-problem, which we take for an error.

The paper has results for a budget of 7/6 of the whole model, and does not say when two models teach each other there. Ours: a
client whose budget exceeds the whole model's memory by enough for every block, but not for two whole models, trains a second
model depth-wise. It learns from the logits of the received one, and then the whole model from the logits of the second one. One
after the other, they take no more memory than the whole model alone. `memory.tolerance` is no surplus: a budget of r = 1 (Fair,
Lack) trains one model.

In the paper a model of a sixth of the width takes a sixth of the memory, and the budgets follow from that. The first three
blocks take 20.02 MB and the smallest budget is 19.34 MB, so the presets of its tables have a tolerance of 5 %
(`memory.tolerance`). By traced bytes the first block takes 0.31 of a step, so the fleet `fedepth-fair-traced` has larger
budgets.

For transformers, only the first sub-problem trains the first atom (embedding, class token, positions), and encoders that are
not trained are not in memory. The authors' sub-problems run the whole network and all train that atom: gradients pass back
through all encoders, which saves hardly any memory (`fedepth.sub-problem = network`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from piecework.models.cascade import can_fit
from piecework.models.layer_statistics import layer_statistics
from piecework.models.partition import AtomTooLargeError, Piece, exclude_input_side
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context
from piecework.planning.cut import Cut, Stage, Traffic, label
from piecework.planning.part import Part
from piecework.strategies.cascade.fedepth.client import (
    ItemCost,
    indispensable,
    items_of,
    network_piece,
    sub_problem,
)
from piecework.strategies.cascade.fedepth.mutual import Mutual, Taught, mutual_loss, taught_loss
from piecework.strategies.cascade.fedepth.settings import FeDepthSettings
from piecework.strategies.method import Method
from piecework.training.capabilities import Refusal
from piecework.training.methods import METHODS


class FeDepthCut(Cut):
    """One stage: each device trains all blocks of its own decomposition, one after another."""

    def item(self, atoms: Piece) -> WorkItem:
        """Return the sub-problem of a block, that is the work item that trains it."""
        return sub_problem(self.blueprint, self.settings, atoms, own_heads=self.can.exits)

    def plain_part(self, item: WorkItem) -> Part:
        """Return a sub-problem's part: a block with its head, a block in the whole network, or models that learn mutually."""
        kind = self.settings.of(FeDepthSettings).mutual_loss
        if isinstance(item.mode, Mutual):
            copies = item.mode.copies
            name = f"{copies} whole models, mutually"
            return Part(self.blueprint, item.atoms, item.head, copies, mutual_loss(kind), name)
        if isinstance(item.mode, Taught):
            alone = label(Part(self.blueprint, item.atoms))
            name = f"{alone}, mutually" if item.atoms == self.whole.atoms else f"{alone} of a second model"
            return Part(self.blueprint, item.atoms, item.head, make_loss=taught_loss(kind), name=name, targets=True)
        if item.learns:
            name = f"{label(Part(self.blueprint, item.learns))} of the network"
            learns = tuple(dict.fromkeys(["atoms.0", *(f"atoms.{atom}" for atom in item.learns), "head"]))
            return Part(self.blueprint, item.atoms, name=name, piece_class=network_piece(item.learns), learns=learns)
        return Part(self.blueprint, item.atoms, item.head)

    def require_model(self) -> None:
        """Raise ValueError, if blocks share a head, for an atom whose features cannot be zero-padded to the head's input."""
        wanted = self.blueprint.feature_shape
        if self.can.exits or self.settings.of(FeDepthSettings).sub_problem == "network":
            return
        for atom in self.blueprint.atoms:
            if not can_fit(atom.shape, wanted):
                raise ValueError(
                    f"{self.blueprint.name} cannot be trained block by block: atom {atom.name!r} makes features of shape "
                    f"{atom.shape}, which zero padding cannot bring to the shared head's {wanted}. Put layers that change "
                    "the number of dimensions into the head, or use strategy = m-fedepth, whose blocks have separate heads"
                )

    def bytes(self, item: WorkItem) -> int:
        """Return the memory cost (bytes) of a work item; a paper's memory model counts only the block that learns."""
        if self.cost_model.memory_model is None or not item.learns:
            return super().bytes(item)
        return self.cost_model.bytes(Part(self.blueprint, item.learns))

    def items(self, allowed: int, cost: ItemCost) -> list[WorkItem]:
        """Return the decomposition for `allowed` bytes. Raises AtomTooLargeError if an indispensable atom does not fit."""
        return items_of(self.blueprint, self.settings, cost, allowed, own_heads=self.can.exits)

    def _parts(self, allowed: int) -> list[Part]:
        return [self._fit_part(item, allowed) for item in self.items(allowed, self.needed_bytes)]

    def min_budget(self) -> int:
        """Return the bytes for the last atom and all indispensable ones; other atoms are excluded if they do not fit."""
        atoms = range(len(self.blueprint.atoms))
        last = self._alone(atoms[-1])
        if self.settings.of(FeDepthSettings).sub_problem == "network":
            return last
        costs = sorted({last, *(cost for atom in atoms if (cost := self._alone(atom)) > last)})
        kept = (exclude_input_side(atoms, lambda piece: self.needed_bytes(self.item(piece)), cost) for cost in costs)
        return next(p for p, left in zip(costs, kept, strict=True) if indispensable(self.blueprint, left) is None)

    @cached_property
    def stages(self) -> list[Stage]:
        """One stage, with the decomposition for the smallest budget."""
        return [Stage("training", tuple(self._parts(self.allowed)))]

    def _alone(self, atom: int) -> int:
        """Return the memory cost (bytes) of training an atom as a block."""
        return self.needed_bytes(self.item((atom,)))

    def traffic(self, parts: list[Part]) -> Traffic:
        """Return the bytes sent down, those of all units including separate heads, and up, those of the trained units."""
        units = self.blueprint.units(exits=self.can.exits)
        down = sum(layer_statistics(self.blueprint, unit).state_bytes for unit in units)
        found = super().traffic(parts)
        return replace(found, bytes=(down, found.bytes[1]))


class FeDepth(Method):
    """FeDepth with one head, shared by all sub-problems."""

    name = "fedepth"
    can = METHODS["fedepth"].can
    cut_class = FeDepthCut
    cut: FeDepthCut

    def assign(self, ctx: Context) -> Assignment:
        """Return the device's own decomposition, with the costs of all items that its search looks up.

        If any client measures its own memory, these include every run of atoms that fits. If an indispensable atom does not
        fit, the client itself will refuse, and report the cost of that atom.
        """
        allowed, needed, items, refusal = ctx.device.allowed_bytes, dict[WorkItem, int](), list[WorkItem](), None

        def look_up(item: WorkItem) -> int:
            needed[item] = self.cut.needed_bytes(item)
            return needed[item]

        try:
            items = self.cut.items(allowed, look_up)
        except AtomTooLargeError as error:
            refusal = error
        if ctx.measured:
            self._cost_all(look_up, allowed)
        return Assignment(tuple(items), needed, least=self.cut.min_budget, refusal=refusal)

    def _cost_all(self, look_up: Callable[[WorkItem], int], allowed: int) -> None:
        """Look up every run of atoms that fits, because a device may have less free memory than the server assumes."""
        atoms = len(self.cut.model.atoms)
        for start in range(atoms):
            for stop in range(start + 1, atoms + 1):
                if look_up(self.cut.item(tuple(range(start, stop)))) > allowed:
                    break


class MFeDepth(FeDepth):
    """m-FeDepth: every sub-problem has a separate head (section 4.1)."""

    name = "m-fedepth"
    can = METHODS["m-fedepth"].can
    refuses = (
        Refusal(
            "fedepth.sub-problem",
            "it trains the model's own head, but m-fedepth has separate heads: use fedepth",
            ("network",),
        ),
    )
