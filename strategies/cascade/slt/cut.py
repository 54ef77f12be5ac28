"""SLT's cut: the configuration {K_F, K_T, s} of each step, chosen for the poorest client, and its memory cost.

A layer is an atom, with the atoms without arrays behind it. In step n, W_1 .. W_K_T are the first K_T = n layers, of which a
client trains as many as it can (the poorest one: W_K_T alone) and the head behind them, narrowed to the fraction s_n.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Self

from piecework.models.basic_layers import without_bare_blocks
from piecework.models.cascade import Blueprint, Shape
from piecework.models.channels import channel_axes
from piecework.models.layer_statistics import layer_statistics
from piecework.models.variant import Variant, vary
from piecework.models.wide_prefix import WidePrefix
from piecework.models.width import Indices, require_parts, shapes, sub_indices, take_first
from piecework.models.work_item import WorkItem
from piecework.planning.cut import Cut, Stage, label
from piecework.planning.part import Part
from piecework.strategies.cascade.slt.settings import SLTSettings
from piecework.strategies.cascade.slt.steps import STEPS, Step, choose_ratios, round_weights


def indices_of(full: Blueprint, narrow: Blueprint) -> dict[str, Indices]:
    """Return the indices of each array of a step's network in the full model's: W^{s1,s2} has the first channels of W."""
    axes, whole = channel_axes(full), shapes(full)
    return {name: _first(name, axes, whole, shape) for name, shape in shapes(narrow).items()}


def _first(name: str, axes: object, whole: Mapping[str, Shape], shape: Shape) -> Indices:
    # Each array for itself: behind full layers, channels that belong together are not cut alike.
    return sub_indices({name: axes[name]}, {name: whole[name]}, {name: shape}, take_first)[name]  # type: ignore[index]


class SLTCut(Cut):
    """One stage for pretraining and one for each step. `ratios` are s_1 .. s_N, largest last."""

    chosen: tuple[float, ...] = ()

    @cached_property
    def layers(self) -> list[int]:
        """The number of atoms up to the end of each layer."""
        atoms = range(len(self.blueprint.atoms))
        return [block[-1] + 1 for block in without_bare_blocks(self.blueprint, [(atom,) for atom in atoms])]

    def require_model(self) -> None:
        """Raise ValueError, which names the layer, if the model cannot be narrowed behind each of its layers."""
        narrow = vary(self.blueprint, Variant(width=1 / STEPS))
        require_parts(self.blueprint, {1 / STEPS: narrow})
        for full in self.layers:
            self.network(self.variant_of(full, 1 / STEPS))

    def variant_of(self, full: int, ratio: float) -> Variant:
        """Return the network whose first `full` atoms have all channels, and the others a fraction."""
        if ratio == 1:
            return Variant()
        return Variant(width=ratio, changes=(WidePrefix(full),) if full else ())

    @cached_property
    def _networks(self) -> dict[Variant, Blueprint]:
        return {}

    def network(self, variant: Variant) -> Blueprint:
        """Return the network of a step, made once. Raises ValueError if there is none."""
        if variant not in self._networks:
            self._networks[variant] = vary(self.blueprint, variant)
        return self._networks[variant]

    def item_of(self, step: Step, frozen: int) -> WorkItem:
        """Return the work item that trains a step's network behind the first `frozen` atoms."""
        return WorkItem(tuple(range(frozen, len(self.blueprint.atoms))), variant=self.variant_of(step.full, step.ratio))

    def choices(self, step: Step) -> list[int]:
        """Return the numbers of atoms that clients may freeze in a step, fewest first; K_T - 1 layers are the last."""
        return [0, *self.layers[: max(0, step.number - 1)]]

    def bytes(self, item: WorkItem) -> int:
        """Return the memory cost (bytes) of a work item, before which each frozen atom runs forward alone."""
        frozen = range(item.atoms[0]) if item.atoms and not item.measured else ()
        return max(super().bytes(item), *(self.cost_model.trace_inference(self.blueprint, atom) for atom in frozen), 0)

    def fit(self, minimum: int, maximum: int) -> Self:
        """Return the cut with the steps for the poorest client's `minimum` bytes. Raises ValueError if one is too large."""
        cut = self.with_smallest(minimum)
        return cut.having(chosen=tuple(cut.choose()))

    def choose(self) -> list[float]:
        """Return s_1 .. s_N for the smallest budget. Raises ValueError if a step is too large even with the smallest s."""
        if self.needed_bytes(self.item_of(Step(0, 0, 1.0), 0)) <= self.allowed:
            return [1.0]
        found = choose_ratios(len(self.layers), lambda n, s: self.needed_of(n, s / STEPS) <= self.allowed)
        if not all(found):
            n = next(n for n in range(1, len(self.layers) + 1) if self.needed_of(n, 1 / STEPS) > self.allowed)
            needed, name = self.needed_of(n, 1 / STEPS), self.blueprint.atoms[self.layers[n - 1] - 1].name
            raise ValueError(
                f"slt: training {name} with 1/{STEPS} of the channels behind it needs {needed:,} bytes, and the poorest client "
                f"has {self.smallest:,}; lower training.batch-size or architecture.width, or give clients more memory"
            )
        return [s / STEPS for s in found]

    def needed_of(self, n: int, ratio: float) -> int:
        """Return the bytes that the poorest client needs for step n, from 1."""
        step = Step(n, self.layers[n - 1], ratio)
        return self.needed_bytes(self.item_of(step, self.choices(step)[-1]))

    @cached_property
    def steps(self) -> list[Step]:
        """Pretraining and the steps of the run; only one, with the whole network, if that fits the poorest client."""
        ratios = self.chosen or self.choose()
        if ratios[0] == 1:
            return [Step(0, 0, 1.0)]
        steps = [Step(n, self.layers[n - 1], ratio) for n, ratio in enumerate(ratios, start=1)]
        return [Step(0, 0, ratios[0]), *steps]

    @cached_property
    def weights(self) -> list[float]:
        """The weights to which the rounds of the steps are proportional."""
        whole = [self.network(self.item_of(step, 0).variant) for step in self.steps]
        sizes = [sum(layer_statistics(model, unit).parameters for unit in model.units()) for model in whole]
        trained = [self.part(self.item_of(step, self.choices(step)[-1])).parameters for step in self.steps]
        return round_weights(self.settings.of(SLTSettings).rounds, sizes, trained, self.steps[0].ratio)

    def plain_part(self, item: WorkItem) -> Part:
        """Return the layers that an item trains in full width, and the narrow ones behind them."""
        model, ratio = self.network(item.variant), item.variant.width
        part = Part(model, item.atoms, channels=self.chosen[-1] if self.chosen else 1.0)
        if ratio == 1:
            return part
        full = item.variant.find(WidePrefix).full_atoms if item.variant.changes else 0
        narrow = f"{ratio:.4g} of the channels"
        whole = label(Part(model, item.atoms[: full - item.atoms[0]])) if full else ""
        return replace(part, name=f"{whole}, then {narrow}" if whole else narrow)

    @cached_property
    def stages(self) -> list[Stage]:
        """Pretraining and the steps, as the poorest client trains them."""
        return [
            Stage(
                str(step),
                (self._fit_part(self.item_of(step, self.choices(step)[-1]), self.allowed),),
                step.number,
                place,
            )
            for step, place in zip(self.steps, self._places(self.weights), strict=True)
        ]

    def _places(self, weights: Sequence[float]) -> list[int]:
        """Return the first round of each stage, approximately."""
        rounds, total = self.settings.num_rounds, sum(weights)
        return [min(rounds, 1 + int(rounds * sum(weights[:n]) / total)) for n in range(len(weights))]
