"""CoCoFL: each client trains some layers of the whole network, and freezes the others in int8 (the server's side).

Kilian Pfeiffer, Martin Rapp, Ramin Khalili, Joerg Henkel, "CoCoFL: Communication- and Computation-Aware Federated Learning via
Partial NN Freezing and Quantization", TMLR 2023, https://openreview.net/forum?id=XJIg4kQbkv

    int8 layers, forward and backward, fused norms   models/int8.py: quantise, fuse, convolve, spread, Int8Conv2d
    configurations that fit, none within another      cocofl/server.py: largest_runs, CoCoFLCut.choices
    a random one of them for each client and round    cocofl/server.py: CoCoFL.assign
    local training of a configuration                 cocofl/client.py: frozen_around, train
    aggregation by the share that trained a layer     cocofl/server.py: ShareMean.over

A configuration is a run of consecutive layers to train. Those before it run forward in int8; those behind it also pass the
gradient on in int8. Of the configurations that fit a client's memory, those are left that are no part of another one, and in
each round one of them is drawn. A layer that a share r of the round's clients trained becomes r times their mean and 1 - r
times what it was.

Where it differs from the paper: a layer is an atom, and the head is trained with the last one. Memory is the only constraint;
the paper's tables also have times and bytes. r counts examples. Int8 covers convolutions and the norms behind them; other
frozen layers, and what lies between convolutions, are float32. Scales are those of each batch, where the authors carry averaged
ones over from training. A frozen norm uses its running statistics, as theirs does, so `architecture.batch-norm` is running.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from piecework.federation.aggregation import CheckedUpdate, WeightedMean
from piecework.models.cascade import is_bare
from piecework.models.layer_statistics import layer_statistics
from piecework.models.partition import Piece
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context
from piecework.planning.counts import entries
from piecework.planning.cut import Cut, Stage, Traffic, label
from piecework.planning.part import Part
from piecework.strategies.method import Method, Round
from piecework.strategies.whole.cocofl.client import CoCoFLTaskConfig, frozen_around, item_of, learned_units
from piecework.training.capabilities import Refusal
from piecework.training.methods import METHODS
from piecework.training.randomness import generator


def largest_runs(count: int, fits: Callable[[int, int], bool]) -> list[Piece]:
    """Return the runs of atoms that fit and are no part of another one that fits. `fits(i, j)` is asked of i .. j - 1.

    A part of what fits must fit too.
    """
    found: list[Piece] = []
    end = 0
    for start in range(count):
        before, end = end, max(end, start)
        while end < count and fits(start, end + 1):
            end += 1
        if end > max(before, start):
            found.append(tuple(range(start, end)))
    return found


class ShareMean(WeightedMean):
    """r times the mean of what clients sent, and 1 - r times what was there before; r is the share that sent it of `total`."""

    total = 0.0

    def over(self, name: str, previous: np.ndarray) -> np.ndarray:
        """Return the new array in the dtype of its previous value. An integer buffer is the maximum."""
        mean = super().over(name, previous)
        if not np.issubdtype(previous.dtype, np.floating):
            return mean
        share = self.weight(name) / self.total
        return (share * mean.astype(np.float64) + (1 - share) * previous).astype(previous.dtype)


class CoCoFLCut(Cut):
    """One stage, in which each device trains a run of layers of the whole network."""

    def __init__(self, *args: Any, **own: Any) -> None:
        super().__init__(*args, **own)
        self._choices: dict[int, list[Piece]] = {}

    def choices(self, allowed: int) -> list[Piece]:
        """Return the runs of atoms that a client with so many bytes may train; none if no atom fits."""
        if allowed not in self._choices:
            count = len(self.blueprint.atoms)
            found = largest_runs(count, lambda i, j: self.needed_bytes(self.run(i, j)) <= allowed)
            self._choices[allowed] = [run for run in found if any(atom in self.learnable for atom in run)]
        return self._choices[allowed]

    @cached_property
    def learnable(self) -> list[int]:
        """The atoms that have arrays."""
        return [n for n in range(len(self.blueprint.atoms)) if not is_bare(self.blueprint, f"atoms.{n}")]

    def run(self, start: int, end: int) -> WorkItem:
        """Return the work item that trains the atoms `start` .. `end` - 1."""
        return item_of(self.blueprint, tuple(range(start, end)))

    def cheapest(self) -> Piece:
        """Return the atom whose training needs the fewest bytes."""
        return (min(self.learnable, key=lambda atom: self.needed_bytes(self.run(atom, atom + 1))),)

    def min_budget(self) -> int:
        """Return the bytes of training the cheapest atom."""
        return self.needed_bytes(item_of(self.blueprint, self.cheapest()))

    def plain_part(self, item: WorkItem) -> Part:
        """Return the whole network, of which the item's atoms learn."""
        if not item.learns:
            return Part(self.model, item.atoms)
        name = f"{label(Part(self.model, item.learns))} of the network"
        learns = tuple(learned_units(self.model, item.learns))
        return Part(self.model, item.atoms, name=name, piece_class=frozen_around(item.learns), learns=learns)

    @property
    def stages(self) -> list[Stage]:
        """One stage, with the first run of the poorest client."""
        trained = next(iter(self.choices(self.allowed)), None) or self.cheapest()
        return [Stage("training", (self.part(item_of(self.blueprint, trained)),))]

    def traffic(self, parts: list[Part]) -> Traffic:
        """Return the whole model, and what is trained of it on the way back."""
        down, up = self.model.units(), sorted({unit for part in parts for unit in part.learned})
        sizes = [sum(layer_statistics(self.model, unit).state_bytes for unit in units) for units in (down, up)]
        values = [sum(entries(self.model, unit) for unit in units) for units in (down, up)]
        return Traffic((sizes[0], sizes[1]), (values[0], values[1]))


class CoCoFL(Method):
    """Trains a random run of layers on each client, in a network whose other layers are frozen in int8."""

    name = "cocofl"
    can = METHODS["cocofl"].can
    refuses = (
        Refusal(
            "architecture.batch-norm",
            "cocofl fuses frozen norms into convolutions with their running statistics, use running",
            ("measured", "static", "batch", "local"),
        ),
        Refusal("training.accelerator", "cocofl multiplies int8 matrices on CPUs only", ("cuda",)),
    )
    cut_class = CoCoFLCut
    cut: CoCoFLCut

    def assign(self, ctx: Context) -> Assignment:
        """Return a random one of the largest runs of layers that fit, or else the cheapest layer."""
        cut, choices = self.cut, self.cut.choices(ctx.device.allowed_bytes)
        least = cut.cheapest()
        drawn = generator(self.settings.seed, ctx.round, ctx.client, "freeze").integers(len(choices)) if choices else 0
        trained = choices[int(drawn)] if choices else least
        config = CoCoFLTaskConfig([list(trained), list(least)])
        item, other = item_of(cut.blueprint, trained), item_of(cut.blueprint, least)
        reached = {unit for run in choices for unit in learned_units(cut.model, run)}
        return self.work(item, others=[other], config=config, covers=tuple(sorted(reached)))

    def open(self, current: Round) -> None:
        """Begin a round."""
        current.mean = ShareMean()

    def combine(self, current: Round, client: int, update: CheckedUpdate) -> None:
        """Add a client's layers, and its examples to those of all clients of the round."""
        current.mean.total += update.examples
        super().combine(current, client, update)

    def details(self, current: Round) -> dict[str, Any]:
        """Return the atoms that each client was given to train, for the round record."""
        items = {client: each.assignment.items[0] for client, each in current.assigned.items()}
        return {"trained_atoms": {str(client): list(item.learns or item.atoms) for client, item in items.items()}}
