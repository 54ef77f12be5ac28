"""What parts of a model cost on a device: traced, or by a paper's own memory-model.

Used by strategies for the prices in their tasks, and by plans; each question is answered once.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from client_app.attacks import Attack, Norm
from client_app.prices import piece_price, stream_price
from client_app.setup import recipe_for
from client_app.training import MakeLoss, PieceModel, Precision, Recipe, single_loss
from device_profiles.clock import Batch
from device_profiles.memory import StepPrice
from device_profiles.profile import parse_bytes
from models.anatomy import anatomy, input_of, unit_signature
from models.cascade import Blueprint
from models.partition import Piece
from server_app.settings import Settings
from strategies import find_memory_model


@dataclass(frozen=True)
class Part:
    """What a device holds at once while it trains: atoms of a model, or none, and a head.

    There are `copies` of them where several learn together. `name` is for people, where the atoms do not tell. With `targets`
    it learns logits instead of labels. `piece_class` says how they are run. `clean`: on clean examples, also where the run's
    step is adversarial. `learns` are the units that learn, where not all do.
    """

    blueprint: Blueprint
    atoms: Piece
    head: str = "head"
    copies: int = 1
    make_loss: MakeLoss = single_loss
    name: str = ""
    targets: bool = False
    piece_class: type[PieceModel] = PieceModel
    clean: bool = False
    learns: tuple[str, ...] = ()

    @property
    def learned(self) -> list[str]:
        """The units that a step changes."""
        return list(self.learns) or self.units

    @property
    def units(self) -> list[str]:
        """The units of one copy, the head last."""
        return [*(f"atoms.{atom}" for atom in self.atoms), self.head]

    @property
    def whole(self) -> bool:
        """Whether this is the whole model."""
        return len(self.atoms) == len(self.blueprint.atoms)

    @property
    def parameters(self) -> int:
        """Trainable parameters of one copy."""
        return sum(anatomy(self.blueprint, unit).parameters for unit in self.units)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters and buffers of one copy."""
        return sum(anatomy(self.blueprint, unit).state_bytes for unit in self.units)

    @property
    def input_bytes(self) -> int:
        """Bytes of one example at the entrance: 4 a value of an image or of stored features, 8 a token."""
        if not self.atoms:
            return 4 * prod(self.blueprint.feature_shape)
        return (8 if self.at_input and self.blueprint.vocabulary else 4) * prod(
            self.blueprint.shape_before(self.atoms[0])
        )

    @property
    def at_input(self) -> bool:
        """Whether it begins with the model's first atom."""
        return self.atoms[:1] == (0,)

    @cached_property
    def forward_flops(self) -> int:
        """FLOPs of one example on its way through atoms and head, 2 per multiply-accumulate."""
        return self.copies * sum(anatomy(self.blueprint, unit).flops for unit in self.units)

    @property
    def features(self) -> int:
        """Values of one example that the backward pass needs, as FedProphet's authors count: inputs of layers with weights.

        An auxiliary head counts its un-pooled input and its logits. A 1 x 1 shortcut shares its input with the block.
        """
        values = 0
        for unit in self.units:
            if unit.startswith("aux."):
                values += prod(input_of(self.blueprint, unit)) + self.blueprint.num_classes
            else:
                layers = anatomy(self.blueprint, unit).layers
                counted = [x for x in layers if x.parameters and not (x.kind == "Conv2d" and x.on_shortcut)]
                values += sum(layer.inputs for layer in counted)
        return values

    def names(self) -> list[str]:
        """What a person calls the atoms."""
        return [self.blueprint.atoms[atom].name for atom in self.atoms]

    def signature(self) -> Hashable:
        """Equal for parts that are built alike on inputs of the same shape: they cost the same."""
        units = tuple(unit_signature(self.blueprint, unit) for unit in self.units)
        return units, self.copies, self.make_loss, self.targets, self.piece_class, self.clean


def share_or_bytes(text: str, full: int) -> int:
    """`60MB`, `57MiB`, or `0.2x` of the full model's bytes. Raises ValueError."""
    try:
        found = int(float(text[:-1]) * full) if text.endswith("x") else parse_bytes(text)
    except (ValueError, OverflowError):
        found = 0
    if found <= 0:
        raise ValueError("expected bytes as 60MB or 57MiB, or a share of the full model as 0.2x")
    return found


def whole_model(blueprint: Blueprint, name: str = "the whole model") -> Part:
    """All atoms and the head, as FedAvg trains them."""
    return Part(blueprint, tuple(range(len(blueprint.atoms))), name=name)


# Bytes of training a part by a paper's own rule: (part, the model at width 1, recipe) -> bytes
MemoryModel = Callable[[Part, Blueprint, Recipe], float]


class Pricing:
    """Prices of parts for one recipe. `memory_model` is None for traced bytes; `reference` is the model at width 1."""

    def __init__(
        self,
        recipe: Recipe,
        memory_model: MemoryModel | None,
        reference: Blueprint,
        feature_norm: Norm = "l2",
        *,
        frozen_training: bool = False,
    ) -> None:
        self.recipe, self.memory_model, self.reference = recipe, memory_model, reference
        self.feature_norm, self.frozen_training = feature_norm, frozen_training
        self._traced: dict[Hashable, StepPrice] = {}
        self._by_paper: dict[Hashable, int] = {}
        self._streamed: dict[Hashable, int] = {}

    def traced(self, part: Part) -> StepPrice:
        """Peak bytes and FLOPs of one training step on fake tensors."""
        key = part.signature(), part.at_input
        if key not in self._traced:
            self._traced[key] = piece_price(
                part.blueprint,
                part.atoms,
                part.head,
                self._recipe_of(part),
                part.copies,
                part.make_loss,
                targets=part.targets,
                piece_class=part.piece_class,
            )
        return self._traced[key]

    def streamed(self, blueprint: Blueprint, atom: int, head: str | None = None, *, measured: bool = False) -> int:
        """Peak bytes of a frozen atom that makes features of a batch, or with a head logits; 0 by a paper's memory-model.

        `measured`: while its batch norms take statistics.
        """
        if self.memory_model is not None:
            return 0
        training = self.frozen_training and head is None and not measured  # a teacher is always evaluated
        key = unit_signature(blueprint, f"atoms.{atom}"), head and unit_signature(blueprint, head), training, measured
        if key not in self._streamed:
            self._streamed[key] = stream_price(
                blueprint, atom, self.recipe, training=training, measured=measured, head=head
            )
        return self._streamed[key]

    def _recipe_of(self, part: Part) -> Recipe:
        if self.recipe.attack is None or part.clean:
            return replace(self.recipe, attack=None)
        if part.at_input:
            return self.recipe
        return replace(self.recipe, attack=replace(self.recipe.attack, norm=self.feature_norm, std=()))

    def bytes(self, part: Part) -> int:
        """Bytes of training a part by the memory-model."""
        if self.memory_model is None:
            return self.traced(part).peak_bytes
        key = part.blueprint.name, part.whole, part.atoms, part.signature()
        if key not in self._by_paper:
            self._by_paper[key] = int(self.memory_model(part, self.reference, self.recipe))
        return self._by_paper[key]

    @cached_property
    def unattacked(self) -> "Pricing":
        """The prices of the same step on clean examples."""
        if self.recipe.attack is None:
            return self
        recipe, frozen = replace(self.recipe, attack=None), self.frozen_training
        return Pricing(recipe, self.memory_model, self.reference, self.feature_norm, frozen_training=frozen)

    def batch(self, part: Part, size: float) -> Batch:
        """A training step of a part on `size` examples, for the clock of devices that swap."""
        attack = self._recipe_of(part).attack
        return Batch(
            flops=self.traced(part).flops * size / self.recipe.batch_size,
            input_bytes=round(part.input_bytes * size),
            parameters=part.parameters,
            features=round(part.features * size),
            attack_steps=attack.steps if attack else 0,
            optimizer_scale=3 if self.recipe.momentum else 2,
        )

    @cached_property
    def reference_bytes(self) -> int:
        """One reference step: the model at width 1, a FedAvg step; ratio budgets are shares of it."""
        return self.unattacked.bytes(whole_model(self.reference))


def pricing_for(
    settings: Settings, reference: Blueprint, attack_steps: int = 0, precision: Precision | None = None
) -> Pricing:
    """The prices of a run: its local step, by its memory-model. Of an attack only its norm and its steps matter.

    `precision` is that of the settings, unless it is given.
    """
    attack, channels = None, (0.5,) * reference.input_shape[0]
    if attack_steps:
        attack = Attack("linf", 8 / 255, 2 / 255, attack_steps, 0.0, 1.0, mean=channels, std=channels)
    recipe = replace(recipe_for(settings, 1.0), attack=attack, precision=precision or settings.precision)
    return Pricing(
        recipe,
        find_memory_model(settings.memory_model),
        reference,
        settings.feature_norm,
        frozen_training=settings.frozen_mode == "training",
    )
