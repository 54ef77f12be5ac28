"""Train a model whose filters are masked by thresholds (SpaFL), in its masked form or in a compact form without masked filters.

The masked form is the definition. The compact form has the same outputs, but neither computes nor updates pruned filters and
weights on inputs that come from them. It therefore excludes the straight-through gradients of pruned filters, which filters
before a ReLU do not have anyway. Momentum and weight decay of pruned weights stand still, and the options by which gradients
flow through masks have no effect on them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from piecework.client_app.client import Client
from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint
from piecework.models.compact import (
    Compact,
    Layout,
    Places,
    compact_units,
    kept_fraction,
    kept_parts,
    take_into,
    write_back,
)
from piecework.models.masked import Masked, masked_layers
from piecework.strategies.sparse.spafl.settings import SpaFLSettings
from piecework.training.attacks import Loss
from piecework.training.examples import Examples
from piecework.training.loop import (
    Load,
    LocalTrainer,
    MakeLoss,
    OptimizerStateStore,
    PieceModel,
    classification_loss,
    start,
)
from piecework.training.memory_cap import MemoryCap
from piecework.training.settings import Settings
from piecework.training.settings.shared import WAYS
from piecework.training.sgd import TrainingConfig

WORTH = 0.75  # fraction of the parameters; a compact form that keeps more saves next to nothing


class SparseModel(PieceModel):
    """All units of a model with thresholds, in masked or compact form, which count the MACs of their forward passes."""

    ways = tuple(way for way in WAYS if way != "recompute")  # a second forward pass would be counted twice

    def layers(self) -> list[Masked]:
        """Return the layers with thresholds, in order."""
        return [layer for module in self.units().values() for _, layer in masked_layers(module)]

    def list_undecayed(self) -> list[nn.Parameter]:
        """Return the thresholds, which do not decay."""
        return [layer.tau for layer in self.layers()]

    def after_step(self) -> None:
        """Keep weights and thresholds within their bounds; see `Masked.after_step`."""
        for layer in self.layers():
            layer.after_step()

    def logits(self, z: Tensor) -> Tensor:
        """Return logits[B, classes]. Units run without the blueprint's shapes, because a compact form has fewer channels."""
        for module in self.units().values():
            z = module(z)
        return z

    def mask(self) -> np.ndarray:
        """Return which filters are kept (p in Eq. 1), in order: bool [thresholds]."""
        return torch.cat([layer.mask() for layer in self.layers()]).cpu().numpy()

    def thresholds(self) -> np.ndarray:
        """Return all thresholds, in order: float32 [thresholds]."""
        return torch.cat([layer.tau.detach() for layer in self.layers()]).cpu().numpy()

    def compact(self, layout: Layout, parts: Mapping[str, Places] | None = None) -> tuple["SparseModel", Compact]:
        """Return the compact form at the present mask. `parts` are the kept parts of the arrays, if they are already known."""
        with without_data():
            empty = {unit: self.blueprint.build_unit(unit) for unit in self.units()}
        compact = compact_units(
            self.units(), layout, empty, kept_parts(self.units(), layout) if parts is None else parts
        )
        return SparseModel(self.blueprint, self.atoms, self.head_unit, compact.units.__getitem__), compact


class FrozenSparseModel(SparseModel):
    """A model of which thresholds alone are trained: its weights have no gradients and no momentum."""

    def __init__(self, blueprint: Blueprint, atoms: Sequence[int], head: str | None, load: Load) -> None:
        super().__init__(blueprint, atoms, head, load)
        for module in self.units().values():
            module.requires_grad_(False)
        for layer in self.layers():
            layer.tau.requires_grad_(True)


def model_class(settings: Settings) -> type[SparseModel]:
    """Return the class of the models that a run's clients train (`spafl.frozen-weights`)."""
    return FrozenSparseModel if settings.of(SpaFLSettings).frozen_weights else SparseModel


@cache
def sparse_loss(alpha: float) -> MakeLoss:
    """Return the loss of Eq. 5: cross-entropy + alpha R with R = sum_i exp(-tau_i)."""

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces
        assert isinstance(piece, SparseModel)
        layers = piece.layers()

        def loss(z: Tensor, y: Tensor) -> Tensor:
            value = classification_loss(piece.logits(z), y)
            return value + alpha * sum((-layer.tau).exp().sum() for layer in layers)

        return loss

    return make


class SparseTrainer(LocalTrainer):
    """Trains a `SparseModel`, switching between its masked and its compact form.

    Every `spafl.masked-every`-th step is in the masked form: all with 1, as published, and none with 0. The other steps are in
    the compact form, at the mask of the last masked step, or with 0 of the start of the epoch.

    While the compact form is trained, the masked form and its optimiser's state are in the client's store. If the compact form
    would keep more than WORTH of the parameters, training stays in the masked form, which is then as fast and as small. `macs`
    are the multiply-accumulates of masked layers in forward passes so far; the layers in training hold their own until the form
    changes.
    """

    def __init__(
        self,
        client: Client,
        training_config: TrainingConfig,
        make: Callable[[], list[PieceModel]],
        make_loss: MakeLoss,
        carried: OptimizerStateStore | None,
        layout: Layout | None,
    ) -> None:
        super().__init__(make, training_config, make_loss, carried)
        self.client, self.layout, self.macs = client, layout, 0
        self._compact: Compact | None = None
        self._stays = False
        self._masked_state = client.store.task / "optimiser-masked"
        self._compact_state = client.store.task / "optimiser-compact"

    def epoch(self, examples: Examples, rng: np.random.Generator, cap: MemoryCap, phase: str) -> None:
        """Run one pass over the examples. It starts from the masked form, from which a new compact form may be made."""
        self._expand()
        super().epoch(examples, rng, cap, phase)

    def _form(self) -> Sequence[int]:
        """Return the key of the step's memory: a step that first makes the compact form has its own."""
        if self._compact is not None and self._is_masked():
            self._expand()
        return (0,) if self._stays or self._is_masked() else (1, int(self._compact is None))

    def _is_masked(self) -> bool:
        every = self.client.settings.of(SpaFLSettings).masked_every
        return self.layout is None or (every > 0 and self.batches % every == 0)

    def _step(self, z: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        if self._is_masked():
            self._stays = False
        elif self._compact is None and not self._stays:
            self._compress()
        return super()._step(z, y, rng)

    @torch.no_grad()
    def _compress(self) -> None:
        """Save the masked form to the store and continue in the compact form, if that saves enough."""
        (model,) = self.pieces
        assert isinstance(model, SparseModel)
        assert self.layout is not None
        parts = kept_parts(model.units(), self.layout)
        self._stays = kept_fraction(model.units(), parts) > WORTH
        if self._stays:
            return
        self.client.save(model)
        self.optimiser.save(self._masked_state)
        self.macs += executed_macs(self.pieces)
        self.pieces = []
        del self.optimiser, self._loss
        small, self._compact = model.compact(self.layout, parts)
        names = parameter_names(model)
        del model
        self._take_up(small)
        for i, part, whole in self.optimiser.stored(self._masked_state):
            take_into(
                part, whole.to(part.device), parts[names[i]] if part.dim() else ()
            )  # Adam counts steps in one number

    @torch.no_grad()
    def _expand(self) -> None:
        """Return to the masked form, with the values learned in the compact form."""
        self._stays = False
        if self._compact is None:
            return
        with self.client.cap.first("return to the masked form"):
            self.macs += executed_macs(self.pieces)
            blueprint, parts = self.client.blueprint, self._compact.places
            self.optimiser.save(self._compact_state)
            self.pieces = []
            del self.optimiser, self._loss
            kind = model_class(self.client.settings)
            model = kind(blueprint, range(len(blueprint.atoms)), "head", self.client.load())
            self._compact.write_back(model.units())
            self._compact = None  # frees its weights before the optimiser's state is read
            self._take_up(model)
            self.optimiser.load(self._masked_state)
            names = parameter_names(model)
            for i, whole, part in self.optimiser.stored(self._compact_state):
                write_back(whole, part.to(whole.device), parts[names[i]] if whole.dim() else ())

    def _take_up(self, model: SparseModel) -> None:
        self.pieces = [model]
        self._loss, self.optimiser = start(self.pieces, self.training_config, self._make_loss)

    def finish(self) -> list[PieceModel]:
        """Return the model in masked form and evaluation mode. Raises ValueError if nothing was trained."""
        self._expand()
        self.macs += executed_macs(self.pieces)
        return super().finish()


def parameter_names(model: PieceModel) -> list[str]:
    """Return the names of a model's parameters, in their order."""
    return [f"{unit}.{name}" for unit, module in model.units().items() for name, _ in module.named_parameters()]


def executed_macs(pieces: list[PieceModel]) -> int:
    """Return the multiply-accumulates of masked layers in forward passes in training."""
    return sum(layer.macs for piece in pieces for unit in piece.units().values() for _, layer in masked_layers(unit))
