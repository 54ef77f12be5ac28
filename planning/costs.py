"""The costs of training parts of a model on a device: traced, or by a paper's own memory model.

Strategies list these costs in their tasks, and plans report them. Each cost is computed once in a process: systems share the
traces of parts that they train alike. Processes share what was traced by device_profiles/trace_cache.py.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from piecework.device_profiles.clock import Batch
from piecework.device_profiles.memory import StepCost
from piecework.device_profiles.profile import parse_bytes
from piecework.device_profiles.trace_cache import recall
from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import unit_signature
from piecework.models.partition import Piece
from piecework.models.step import Step, step_of, with_step
from piecework.planning.fit import AUTO, cheapest, smallest
from piecework.planning.page_cost import paged_cost
from piecework.planning.page_plan import BOARD, Speed
from piecework.planning.paper_memory import MEMORY_MODELS, MemoryModel
from piecework.planning.part import Part, whole_model
from piecework.planning.step_cost import piece_cost, stream_cost
from piecework.training.attacks import Attack, Norm
from piecework.training.settings import Settings
from piecework.training.setup import training_config_for
from piecework.training.sgd import Precision, TrainingConfig

_TRACED: dict[Hashable, StepCost] = {}
_EVALUATED: dict[Hashable, int] = {}


def forward_only(training_config: TrainingConfig, size: int = 0) -> TrainingConfig:
    """Return a training config with what matters to a forward pass of `size` examples, by default a batch, and nothing else."""
    size = size or training_config.batch_size
    return TrainingConfig(1.0, 0.0, 0.0, batch_size=size, epochs=1, precision=training_config.precision)


def once(key: Hashable, traced: Callable[[], int]) -> int:
    """Return the peak bytes of running parts of a model without training them, asked for once in a process for each key."""
    if key not in _EVALUATED:
        _EVALUATED[key] = traced()
    return _EVALUATED[key]


def fraction_or_bytes(text: str, full: int) -> int:
    """Return the bytes of `60MB`, `57MiB`, or `0.2x`, a fraction of the full model's bytes `full`. Raises ValueError."""
    try:
        found = int(float(text[:-1]) * full) if text.endswith("x") else parse_bytes(text)
    except (ValueError, OverflowError):
        found = 0
    if found <= 0:
        raise ValueError("expected bytes as 60MB or 57MiB, or a fraction of the full model as 0.2x")
    return found


class CostModel:
    """Computes costs of parts for one training config. `memory_model` is None for traced bytes.

    `reference` is the model at width 1. `feature_norm` is the norm of attacks on features behind the first atom.
    `frozen_training`: frozen atoms run in training mode when they make features. `rounded`: files have features in bfloat16.
    `ways` are those of `memory.fit`.
    """

    def __init__(
        self,
        training_config: TrainingConfig,
        memory_model: MemoryModel | None,
        reference: Blueprint,
        feature_norm: Norm = "l2",
        *,
        frozen_training: bool = False,
        rounded: bool = False,
        ways: Sequence[str] = (),
    ) -> None:
        self.training_config, self.memory_model, self.reference = training_config, memory_model, reference
        self.feature_norm, self.frozen_training, self.ways = feature_norm, frozen_training, tuple(ways)
        self.rounded = rounded
        self._steps: dict[Hashable, Step] = {}
        self._by_paper: dict[Hashable, int] = {}

    def trace(self, part: Part) -> StepCost:
        """Return peak bytes and FLOPs of one training step of a part, from fake tensors."""
        training_config = self._config_of(part)
        key = training_config, part.signature()
        if key not in _TRACED and part.pages:
            _TRACED[key] = recall(paged_cost, part.blueprint, part.atoms, part.head, training_config, part.piece_class)
        if key not in _TRACED:
            _TRACED[key] = recall(
                piece_cost,
                part.blueprint,
                part.atoms,
                part.head,
                training_config,
                part.copies,
                part.make_loss,
                targets=part.targets,
                piece_class=part.piece_class,
            )
        return _TRACED[key]

    def trace_inference(
        self,
        blueprint: Blueprint,
        atoms: int | Piece,
        head: str | None = None,
        *,
        measured: bool = False,
        evaluated: bool = False,
        size: int = 0,
    ) -> int:
        """Return the peak bytes of a frozen atom, or several, that compute features of a batch, or logits if `head` is given.

        `measured`: batch norms measure statistics meanwhile. `evaluated`: this is for an evaluation. `size` examples are
        computed at once, by default a batch. Papers' memory models do not count this, so they give 0.
        """
        if self.memory_model is not None:
            return 0
        # a teacher is always evaluated
        training = self.frozen_training and head is None and not (measured or evaluated)
        piece = (atoms,) if isinstance(atoms, int) else atoms
        units = tuple(
            unit_signature(blueprint, unit) for unit in [*(f"atoms.{a}" for a in piece), *filter(None, [head])]
        )
        config = forward_only(self.training_config, size)
        rounded = self.rounded and not measured and head is None
        options = {"training": training, "measured": measured, "rounded": rounded}
        key = config, units, head is None, *options.values()
        return once(key, lambda: recall(stream_cost, blueprint, piece, config, head=head, **options))

    def _config_of(self, part: Part) -> TrainingConfig:
        own = self.training_config
        own = with_step(own, part)
        if own.attack is None:
            return own
        if part.clean:
            return replace(own, attack=None)
        return own if part.at_input else replace(own, attack=replace(own.attack, norm=self.feature_norm, std=()))

    def bytes(self, part: Part) -> int:
        """Return the bytes of training a part, traced or by the paper's memory model."""
        if self.memory_model is None:
            return self.trace(part).peak_bytes
        key = part.blueprint.name, part.whole, part.atoms, part.signature()
        if key not in self._by_paper:
            self._by_paper[key] = int(self.memory_model(part, self.reference, self.training_config))
        return self._by_paper[key]

    def fit_part(self, part: Part, allowed: int, speed: Speed = BOARD) -> Part:
        """Return the part with the cheapest step of at most `allowed` bytes (planning/fit.py), else the smallest step.

        What is cheapest may depend on the device's speed, where steps page.
        """
        ways = tuple(way for way in self.ways if way == AUTO or (way in part.ways and way not in self._impossible))
        if not set(ways) - {AUTO}:
            return part
        key = part.signature(), part.at_input, part.pageable, allowed, speed if "page" in ways else None
        if key not in self._steps:
            found = cheapest(self, part, allowed, ways, speed) if allowed else smallest(self, part, ways)
            found = found or self.fit_part(part, 0)
            self._steps[key] = step_of(found)
        return with_step(part, self._steps[key])

    @property
    def _impossible(self) -> tuple[str, ...]:
        """The ways that this training config rules out: clipping needs all gradients at once."""
        return ("step-in-backward", "page") if self.training_config.clip_norm else ()

    @cached_property
    def unattacked(self) -> "CostModel":
        """The cost model of the same training config without an attack."""
        if self.training_config.attack is None:
            return self
        return self.having(training_config=replace(self.training_config, attack=None))

    def having(self, **changes: Any) -> "CostModel":
        """Return the cost model with other arguments than these, by name; or this one if they are as they were."""
        if all(getattr(self, name) == value for name, value in changes.items()):
            return self
        names = ("training_config", "memory_model", "reference", "feature_norm", "frozen_training", "rounded", "ways")
        return CostModel(**{name: getattr(self, name) for name in names} | changes)

    def batch(self, part: Part, size: float) -> Batch:
        """Return a training step of a part on `size` examples, for the emulated clock of devices that swap."""
        attack = self._config_of(part).attack
        return Batch(
            flops=self.trace(part).flops * size / self.training_config.batch_size,
            input_bytes=round(part.input_bytes * size),
            parameters=part.parameters,
            features=round(part.features * size),
            attack_steps=attack.steps if attack else 0,
            optimizer_scale=(2, 3, 5)[self.training_config.moments],  # the authors charge 5 for Adam,
        )

    @cached_property
    def reference_bytes(self) -> int:
        """Bytes of the reference step, a FedAvg step of the model at width 1. Ratio budgets are fractions of it."""
        return self.unattacked.bytes(whole_model(self.reference))


def on_images(blueprint: Blueprint, steps: int) -> Attack:
    """Return an attack on a model's images, for tracing: its radius does not matter."""
    channels = (0.5,) * blueprint.input_shape[0]
    return Attack("linf", 8 / 255, 2 / 255, steps, 0.0, 1.0, mean=channels, std=channels)


def cost_model_for(
    settings: Settings, reference: Blueprint, attack_steps: int = 0, precision: Precision | None = None
) -> CostModel:
    """Return the cost model of a run's local step, by the run's memory model.

    `attack_steps` > 0 adds an attack, of which only the norm and the number of steps affect costs. `precision` replaces
    `training.precision`.
    """
    attack = on_images(reference, attack_steps) if attack_steps else None
    training_config = replace(
        training_config_for(settings, 1.0), attack=attack, precision=precision or settings.training.precision
    )
    return CostModel(
        training_config,
        MEMORY_MODELS.get(settings.memory.model),
        reference,
        rounded=settings.memory.features == "bfloat16",
        ways=settings.memory.ways,
    )
