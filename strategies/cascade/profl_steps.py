"""How ProFL cuts a model: blocks, output modules, who trains what; and its authors' memory.

theta_1 .. theta_T: the blocks; theta_op: the output module of step t, basic layers for the blocks behind t and the classifier
theta_L. In step t block theta_t and theta_op are trained, the blocks before are frozen (section 2.1). A device that cannot
afford a step trains theta_L only.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Self

from piecework.client_app.trainers.cascade.profl import OUTPUT_LAYER, distillation, learners
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import DeviceState, allowance
from piecework.models.basic_layers import basic_atoms, blocks_of, cascade_at, step_atoms, student_atoms
from piecework.models.cascade import Blueprint
from piecework.models.partition import AtomTooLargeError, Piece
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.planning.costs import CostModel
from piecework.planning.part import Part
from piecework.planning.partition_policy import PartitionPolicy, Stage, label
from piecework.training.settings import Settings

LOG = logging.getLogger("piecework")


class ProFLPolicy(PartitionPolicy):
    """One stage a step of the growing phase, T of them; shrinking goes through the same steps backwards."""

    when_excluded = "trains the output layer only"

    def __init__(
        self,
        blueprint: Blueprint,
        cost_model: CostModel,
        settings: Settings,
        smallest: int = 0,
        blocks: Sequence[Piece] = (),
    ) -> None:
        super().__init__(blueprint, cost_model, settings, smallest)
        self.blocks = list(blocks) or blocks_of(blueprint)

    def with_smallest(self, budget: int) -> Self:
        """The same blocks where the smallest budget is so many bytes."""
        return type(self)(self.blueprint, self.cost_model, self.settings, budget, self.blocks)

    def fit(self, minimum: int, maximum: int) -> Self:
        """By architecture unless settings say by budget; layer by layer, where a step is too large for every client.

        Raises AtomTooLargeError, and ValueError where not even layers fit.
        """
        policy = self.with_smallest(minimum)
        if self.settings.profl.blocks == "budget":
            return policy.cut(self.by_budget(minimum))
        allowed = allowance(maximum, self.settings.memory.excess)
        step, needed = self.largest()
        if needed > allowed:
            LOG.warning(
                "step %s needs %s bytes, more than any client has (%s): every atom is a block (layer-wise training)",
                *(step, f"{needed:,}", f"{allowed:,}"),
            )
            policy = policy.cut(self.by_layer())
            step, needed = policy.largest()
        if needed > allowed:
            raise ValueError(
                f"step {step} of layer-wise training needs {needed:,} bytes, and the richest client has {allowed:,}: no client "
                "could train its atom; lower training.batch-size or architecture.width, or give clients more memory"
            )
        return policy

    def cut(self, blocks: Sequence[Piece]) -> Self:
        """The policy with these blocks."""
        return type(self)(self.blueprint, self.cost_model, self.settings, self.smallest, blocks)

    @property
    def variant(self) -> Variant:
        """The model with basic layers beside its blocks."""
        return Variant(basic_layers=tuple(self.blocks))

    def by_budget(self, budget: int) -> list[Piece]:
        """Blocks as large as can be trained with their output modules for a budget (bytes), from the last one on.

        Raises AtomTooLargeError.
        """
        later: list[Piece] = []
        while end := later[0][0] if later else len(self.blueprint.atoms):
            start = end - 1
            if (needed := self._with_block(start, end, later)) > budget:
                raise AtomTooLargeError(self.blueprint.atoms[start].name, needed, budget)
            while start and self._with_block(start - 1, end, later) <= budget:
                start -= 1
            later.insert(0, tuple(range(start, end)))
        return later

    def _with_block(self, start: int, end: int, later: list[Piece]) -> int:
        """Bytes of the step of a block whose later blocks are known; what comes before it does not matter."""
        before = [tuple(range(start))] if start else []
        policy, t = self.cut([*before, tuple(range(start, end)), *later]), len(before) + 1
        return policy.needed(t)[policy.item(policy.step(t))]

    def by_layer(self) -> list[Piece]:
        """Every atom a block: "layer-wise training" (section 3.1)."""
        return [(atom,) for atom in range(len(self.blueprint.atoms))]

    def step(self, t: int) -> Piece:
        """theta_t and the basic layers behind it, t from 1."""
        return step_atoms(self.model, self.blocks, t)

    def needed(self, t: int) -> dict[WorkItem, int]:
        """Bytes of what a client may do in step t: the step, or the output layer alone.

        For both the blocks before are streamed, one atom after another; for the output layer also the step's own atoms.
        """
        step, before = self.step(t), [atom for block in self.blocks[: t - 1] for atom in block]
        streamed = {step: before, OUTPUT_LAYER: [*before, *step]}
        return {self.item(atoms): self.with_streams(atoms, others) for atoms, others in streamed.items()}

    def largest(self) -> tuple[int, int]:
        """The step that needs most, and how many bytes."""
        needed = {t: self.needed(t)[self.item(self.step(t))] for t in range(1, len(self.blocks) + 1)}
        t = max(needed, key=needed.__getitem__)
        return t, needed[t]

    def needed_to_map(self, t: int) -> dict[WorkItem, int]:
        """Bytes of integrating block t into its basic layer; the teacher is streamed, its last atom with the output layer."""
        student, teacher = self.student(t), cascade_at(self.model, self.blocks, t)
        needed = max(self.with_streams(student, teacher), self.cost_model.streamed(self.model, teacher[-1], "head"))
        return {self.item(student): needed}

    def needed_to_measure(self, t: int) -> dict[WorkItem, int]:
        """Bytes of taking statistics of the blocks before t, one atom after another."""
        before = tuple(atom for block in self.blocks[: t - 1] for atom in block)
        item = replace(self.item(before), measured=True)
        return {item: max(self.cost_model.streamed(self.model, atom, measured=True) for atom in before)}

    def with_streams(self, atoms: Piece, before: Iterable[int]) -> int:
        """Bytes of training atoms behind others, each of which is in memory alone before them."""
        return max(self.bytes(self.item(atoms)), *(self.cost_model.streamed(self.model, atom) for atom in before), 0)

    def student(self, t: int) -> Piece:
        """The basic layers of block t (from 2) and of those behind it."""
        return student_atoms(self.model, t)

    def part(self, item: WorkItem) -> Part:
        """Atoms with theta_L; where they begin with a basic layer, a student."""
        piece = item.atoms
        if piece == OUTPUT_LAYER:
            return Part(self.model, piece, name="the output layer")
        if piece[0] < len(self.blueprint.atoms):
            return Part(self.model, piece)
        trained = learners(piece, piece[0] == basic_atoms(self.model).get(len(self.blocks)))
        return Part(
            self.model,
            piece,
            make_loss=distillation(trained),
            targets=True,
            name=label(Part(self.model, piece)),
            learns=trained,
        )

    @cached_property
    def stages(self) -> list[Stage]:
        """Step 1 .. T."""
        found = []
        for t, block in enumerate(self.blocks, start=1):
            name = label(Part(self.blueprint, block)) + (" + output module" if t < len(self.blocks) else "")
            found.append(Stage(f"step {t}", (Part(self.model, self.step(t), name=name),)))
        return found

    @property
    def stage_count(self) -> int:
        """As many as there are blocks."""
        return len(self.blocks)

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """The block of the step with its output module. Raises MemoryBudgetExceededError."""
        (part,) = self.stages[stage].parts
        needed = self.needed(stage + 1)[self.item(part.atoms)]
        if needed > state.allowed_bytes:
            raise MemoryBudgetExceededError(needed, state.budget_bytes, f"training {label(part)}")
        return [part]

    def trainable(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """The step, or where that does not fit the output layer alone."""
        needed = self.needed(stage + 1)
        items = [self.item(atoms) for atoms in (self.stages[stage].parts[0].atoms, OUTPUT_LAYER)]
        return [self.part(item) for item in items if needed[item] <= state.allowed_bytes][:1]
