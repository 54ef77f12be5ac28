"""ProFL's cut: blocks, output modules, the parts that a device trains, and their memory costs.

theta_1 .. theta_T are the blocks. theta_op is the output module of step t: basic layers in place of the blocks after t, and the
output layer theta_L. In step t, theta_t and theta_op are trained, and the blocks before are frozen (section 2.1). A device
that has memory for no step trains theta_L only (section 3.1); `profl.cohort` = all: one that has none for this step.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from piecework.device_profiles.profile import allowance
from piecework.models.basic_layers import (
    BasicLayers,
    basic_atoms,
    blocks_of,
    cascade_at,
    step_atoms,
    student_atoms,
    without_bare_blocks,
)
from piecework.models.cascade import Blueprint, has_statistics, unit_of
from piecework.models.init_weights import read_pretrained
from piecework.models.partition import AtomTooLargeError, Piece
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.planning.costs import CostModel
from piecework.planning.cut import Cut, Stage, label
from piecework.planning.part import OUTPUT_LAYER_NAME, Part
from piecework.strategies.cascade.profl.client import OUTPUT_LAYER, distillation, learners
from piecework.strategies.cascade.profl.phases import Phase, allot_rounds, least_rounds, phases_of
from piecework.strategies.cascade.profl.settings import ProFLSettings
from piecework.training.settings import Settings

LOG = logging.getLogger("piecework")


class ProFLCut(Cut):
    """One stage per step of growing, T in total; shrinking runs through the same steps in reverse order."""

    cut_blocks: tuple[Piece, ...] = ()

    def __init__(self, blueprint: Blueprint, cost_model: CostModel, settings: Settings, *rest: Any, **own: Any) -> None:
        self.table = settings.of(ProFLSettings)
        costs = cost_model.having(frozen_training=self.table.frozen_mode == "training")
        super().__init__(blueprint, costs, settings, *rest, **own)

    @cached_property
    def blocks(self) -> list[Piece]:
        """The blocks of the model: those that were chosen (`cut`), or those of its architecture."""
        return list(self.cut_blocks) or blocks_of(self.blueprint)

    def fit(self, minimum: int, maximum: int) -> Self:
        """Return the cut with blocks given by the architecture, or with `profl.blocks` = budget by the `minimum` bytes.

        If a step is too large for the `maximum` bytes of the richest client, every atom is a block. Raises
        AtomTooLargeError (by budget) or ValueError (by architecture) if even a single atom does not fit.
        """
        cut = self.with_smallest(minimum)
        if self.table.blocks == "budget":
            return cut.divide(self.by_budget(minimum))
        allowed = allowance(maximum, self.settings.memory.excess)
        step, needed = self.largest()
        if needed > allowed:
            LOG.info(
                "step %s needs %s bytes, more than any client has (%s): every atom is a block (layer-wise training)",
                *(step, f"{needed:,}", f"{allowed:,}"),
            )
            cut = cut.divide(self.by_layer())
            step, needed = cut.largest()
        if needed > allowed:
            raise ValueError(
                f"step {step} of layer-wise training needs {needed:,} bytes, and the richest client has {allowed:,}: no client "
                "could train its atom; lower training.batch-size or architecture.width, or give clients more memory"
            )
        return cut

    def parameters_of(self, t: int) -> int:
        """Return the number of parameters of block t."""
        return self.part(self.item(self.blocks[t - 1])).parameters

    def divide(self, blocks: Sequence[Piece]) -> Self:
        """Return the cut with these blocks."""
        return self.having(cut_blocks=tuple(blocks))

    @property
    def variant(self) -> Variant:
        """The run's model with basic layers in addition to its blocks."""
        return Variant(changes=(BasicLayers(tuple(self.blocks), self.table.output_norm),))

    def by_budget(self, budget: int) -> list[Piece]:
        """Return the largest blocks that can be trained with their output modules within a budget (bytes).

        Blocks are formed from the end of the model. Raises AtomTooLargeError if an atom does not fit.
        """
        later: list[Piece] = []
        while end := later[0][0] if later else len(self.blueprint.atoms):
            start = end - 1
            if (needed := self._with_block(start, end, later)) > budget:
                raise AtomTooLargeError(self.blueprint.atoms[start].name, needed, budget)
            while start and self._with_block(start - 1, end, later) <= budget:
                start -= 1
            later.insert(0, tuple(range(start, end)))
        return without_bare_blocks(self.blueprint, later)

    def _with_block(self, start: int, end: int, later: list[Piece]) -> int:
        """Return the bytes of the step of the atoms `start` to `end` - 1, with the blocks `later` after them."""
        before = [tuple(range(start))] if start else []
        cut, t = self.divide([*before, tuple(range(start, end)), *later]), len(before) + 1
        return cut.needed_in_step(t)[cut.item(cut.step(t))]

    def by_layer(self) -> list[Piece]:
        """Return blocks of one atom each, for "layer-wise training" (section 3.1)."""
        return without_bare_blocks(self.blueprint, [(atom,) for atom in range(len(self.blueprint.atoms))])

    def step(self, t: int) -> Piece:
        """Return the atoms of theta_t and the basic layers of its output module, with t from 1."""
        return step_atoms(self.model, self.blocks, t)

    def needed_in_step(self, t: int) -> dict[WorkItem, int]:
        """Return the bytes of the work items that a client may do in step t: the step, or the output layer alone.

        Each includes running the blocks before, one atom at a time; the output layer also needs the step's own atoms run.
        """
        step, before = self.step(t), [atom for block in self.blocks[: t - 1] for atom in block]
        streamed = {step: before, OUTPUT_LAYER: [*before, *step]}
        return {self.item(atoms): self.with_streams(atoms, others) for atoms, others in streamed.items()}

    def needed_for_step(self, t: int) -> int:
        """Return the bytes of training block t with its output module."""
        return self.needed_in_step(t)[self.item(self.step(t))]

    @cached_property
    def cheapest(self) -> int:
        """The bytes of the cheapest step. A device with less can train no block."""
        return min(self.needed_for_step(t) for t in range(1, len(self.blocks) + 1))

    def unasked_budgets(self, t: int) -> range:
        """Return the numbers of bytes with which a device gets no task in step t: enough for another block, but not for this.

        With `profl.cohort` = all there are none.
        """
        return range(self.cheapest, self.needed_for_step(t)) if self.table.cohort == "eligible" else range(0)

    def largest(self) -> tuple[int, int]:
        """Return the step with the largest memory cost, and its bytes."""
        needed = {t: self.needed_for_step(t) for t in range(1, len(self.blocks) + 1)}
        t = max(needed, key=needed.__getitem__)
        return t, needed[t]

    def needed_to_map(self, t: int) -> dict[WorkItem, int]:
        """Return the bytes of the map of block t. The teacher runs one atom at a time, the last atom with theta_L."""
        student, teacher = self.student(t), cascade_at(self.model, self.blocks, t)
        needed = max(
            self.with_streams(student, teacher), self.cost_model.trace_inference(self.model, teacher[-1], "head")
        )
        return {self.item(student): needed}

    def needed_to_measure(self, t: int) -> dict[WorkItem, int]:
        """Return the bytes of measuring the statistics of the blocks before t, one atom at a time."""
        before = tuple(atom for block in self.blocks[: t - 1] for atom in block)
        item = replace(self.item(before), measured=True)
        return {item: max(self.cost_model.trace_inference(self.model, atom, measured=True) for atom in before)}

    def with_streams(self, atoms: Piece, before: Iterable[int]) -> int:
        """Return the bytes of training `atoms`, after each of the atoms `before` was in memory alone and ran forward."""
        return max(
            self.needed_bytes(self.item(atoms)),
            *(self.cost_model.trace_inference(self.model, atom) for atom in before),
            0,
        )

    def student(self, t: int) -> Piece:
        """Return the basic layers of block t (from 2) and of all later blocks."""
        return student_atoms(self.model, t)

    def plain_part(self, item: WorkItem) -> Part:
        """Return the atoms with theta_L; if the first atom is a basic layer, they are a student in a map."""
        piece = item.atoms
        if piece == OUTPUT_LAYER:
            return Part(self.model, piece, name=OUTPUT_LAYER_NAME)
        if piece[0] < len(self.blueprint.atoms):
            return Part(self.model, piece, name=self._name(piece))
        trained = learners(piece, piece[0] == basic_atoms(self.model).get(len(self.blocks)))
        return Part(
            self.model,
            piece,
            make_loss=distillation(trained),
            targets=True,
            name=label(Part(self.model, piece)),
            learns=trained,
        )

    def _name(self, piece: Piece) -> str:
        """Return how plans call the atoms of a step: by its block."""
        block = tuple(atom for atom in piece if atom < len(self.blueprint.atoms))
        return label(Part(self.blueprint, block)) + (" + output module" if block != piece else "")

    @cached_property
    def phases(self) -> list[Phase]:
        """The phases of a run, in order."""
        maps = basic_atoms(self.model) if self.table.distil_rounds else ()
        random = [f"atoms.{atom}" for block in self.blocks[:-1] for atom in block]
        known = self._brought() if self.settings.training.init_weights else set()
        unknown = any(has_statistics(self.model, unit) for unit in random if unit not in known)
        return phases_of(len(self.blocks), shrinking=self.table.shrinking, maps=maps, statistics=unknown)

    def _brought(self) -> set[str]:
        """Return the units whose batch-norm statistics come from `training.init-weights`."""
        taken, _ = read_pretrained(Path(self.settings.training.init_weights), self.model)
        return {unit_of(name) for name in taken if name.endswith("running_mean")}

    def rounds(self, num_rounds: int) -> list[int]:
        """Return the most rounds of each phase in a run of so many. Raises ValueError if they are too few for all phases."""
        return allot_rounds(self.phases, self.table, num_rounds, self.parameters_of)

    @cached_property
    def stages(self) -> list[Stage]:
        """The steps 1 .. T of growing. With fewer rounds than a run needs, they are those of the shortest run."""
        rounds = max(self.settings.num_rounds, least_rounds(self.phases, self.table))
        firsts = accumulate(self.rounds(rounds), initial=1)  # the first round of each phase
        growing = [(phase, first) for phase, first in zip(self.phases, firsts, strict=False) if phase.kind == "growing"]
        return [
            Stage(f"step {phase.t}", (self._fit_part(self.item(self.step(phase.t)), self.allowed),), phase, first)
            for phase, first in growing
        ]
