"""Training a model whose filters are masked by thresholds (SpaFL), in its masked form or without what is masked.

The masked form is the definition. In the compact form, which makes the same outputs, pruned filters, and weights on inputs that
come from them, are neither computed nor moved: straight-through gradients of pruned filters are excluded, which those before a
ReLU do not have anyhow, momentum rests, and so do weight decay and the options by which gradients flow through masks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from piecework.client_app.client import Client
from piecework.models.compact import Compact, Layout, Places, compacted, kept_fraction, kept_parts, put, take_into
from piecework.models.masked import Masked, masked_layers
from piecework.training.attacks import Loss
from piecework.training.examples import Examples
from piecework.training.loop import Carried, LocalTrainer, MakeLoss, PieceModel, classification_loss, start
from piecework.training.memory_cap import MemoryCap

WORTH = 0.75  # of the parameters: a compact form that keeps more saves next to nothing


class SparseModel(PieceModel):
    """A whole model with thresholds."""

    def layers(self) -> list[Masked]:
        """The layers with thresholds, in order."""
        return [layer for module in self.units().values() for _, layer in masked_layers(module)]

    def undecayed(self) -> list[nn.Parameter]:
        """The thresholds."""
        return [layer.tau for layer in self.layers()]

    def after_step(self) -> None:
        """Keep weights and thresholds within their bounds; see `Masked.after_step`."""
        for layer in self.layers():
            layer.after_step()

    def logits(self, z: Tensor) -> Tensor:
        """Logits[B, classes]; between units a compact form has fewer channels than the blueprint."""
        for module in self.units().values():
            z = module(z)
        return z

    def mask(self) -> np.ndarray:
        """p of all filters, in order: bool [thresholds]."""
        return torch.cat([layer.mask() for layer in self.layers()]).cpu().numpy()

    def thresholds(self) -> np.ndarray:
        """All thresholds, in order: float32 [thresholds]."""
        return torch.cat([layer.tau.detach() for layer in self.layers()]).cpu().numpy()

    def compacted(self, layout: Layout, parts: Mapping[str, Places] | None = None) -> tuple["SparseModel", Compact]:
        """The compact form at the mask that there is, whose `parts` of the arrays may be known already."""
        with torch.device("meta"):
            empty = {unit: self.blueprint.build_unit(unit) for unit in self.units()}
        compact = compacted(self.units(), layout, empty, kept_parts(self.units(), layout) if parts is None else parts)
        return SparseModel(self.blueprint, self.atoms, self.head_unit, compact.units.__getitem__), compact


@cache
def sparse_loss(alpha: float) -> MakeLoss:
    """Cross-entropy and alpha R, R = sum_i exp(-tau_i) (Eq. 5)."""

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
    """Trains a `SparseModel`. Every `masked_every`-th step is in the masked form, none where that is 0, all where it is 1, as
    published; the others are in the compact form of the mask that there was then, or with 0 at the beginning of the epoch.

    While the compact form is trained, the masked one and its momentum lie in the client's store. Where it would keep more than
    WORTH of the parameters, the masked form goes on: it is not slower then, and takes no more. `macs`: multiply-accumulates of
    masked layers in forward passes so far; of what is in training, the layers have them.
    """

    def __init__(
        self,
        client: Client,
        make: Callable[[], list[PieceModel]],
        make_loss: MakeLoss,
        carried: Carried | None,
        layout: Layout | None,
    ) -> None:
        super().__init__(make, client.training_config, make_loss, carried)
        self.client, self.layout, self.macs = client, layout, 0
        self._compact: Compact | None = None
        self._stays = False
        self._momentum = client.store.task / "momentum.safetensors"

    def epoch(self, examples: Examples, rng: np.random.Generator, cap: MemoryCap, phase: str) -> None:
        """One pass, which begins with the masked form or a new compact one."""
        self._expand()
        super().epoch(examples, rng, cap, phase)

    def _form(self) -> Sequence[int]:
        """Making the compact form is a step of its own kind."""
        if self._compact is not None and self._is_masked():
            self._expand()
        return (0,) if self._stays or self._is_masked() else (1, int(self._compact is None))

    def _is_masked(self) -> bool:
        every = self.client.settings.spafl.masked_every
        return self.layout is None or (every > 0 and self.batches % every == 0)

    def _step(self, z: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        if self._is_masked():
            self._stays = False
        elif self._compact is None and not self._stays:
            self._compress()
        return super()._step(z, y, rng)

    @torch.no_grad()
    def _compress(self) -> None:
        """Put the masked form into the store, and go on in the compact one, if that is worth it."""
        (model,) = self.pieces
        assert isinstance(model, SparseModel)
        assert self.layout is not None
        parts = kept_parts(model.units(), self.layout)
        self._stays = kept_fraction(model.units(), parts) > WORTH
        if self._stays:
            return
        self.client.save(model)
        self.optimiser.save(self._momentum)
        self.macs += executed_macs(self.pieces)
        self.pieces = []
        del self.optimiser, self._loss
        small, self._compact = model.compacted(self.layout, parts)
        names = parameter_names(model)
        del model
        self._take_up(small)
        with safe_open(self._momentum, framework="pt") as file:
            for i, buffer in enumerate(self.optimiser.buffers):
                take_into(buffer, file.get_tensor(str(i)).to(buffer.device), parts[names[i]])

    @torch.no_grad()
    def _expand(self) -> None:
        """Go back to the masked form, with what was learned in the compact one."""
        self._stays = False
        if self._compact is None:
            return
        with self.client.cap.first("go back to the masked form"):
            self.macs += executed_macs(self.pieces)
            learned, blueprint, parts = self.optimiser.buffers, self.client.blueprint, self._compact.places
            self.pieces = []
            del self.optimiser, self._loss
            model = SparseModel(blueprint, range(len(blueprint.atoms)), "head", self.client.load())
            self._compact.write_back(model.units())
            self._compact = None  # its weights go before momentum is read
            self._take_up(model)
            if learned:
                self.optimiser.load(self._momentum)
                for whole, part, name in zip(self.optimiser.buffers, learned, parameter_names(model), strict=True):
                    put(whole, part, parts[name])

    def _take_up(self, model: SparseModel) -> None:
        self.pieces = [model]
        self._loss, self.optimiser = start(self.pieces, self.training_config, self._make_loss)

    def finish(self) -> list[PieceModel]:
        """The masked form."""
        self._expand()
        self.macs += executed_macs(self.pieces)
        return super().finish()


def parameter_names(model: PieceModel) -> list[str]:
    """Of the parameters, as they are in order."""
    return [f"{unit}.{name}" for unit, module in model.units().items() for name, _ in module.named_parameters()]


def executed_macs(pieces: list[PieceModel]) -> int:
    """Multiply-accumulates of masked layers, in forward passes in training."""
    return sum(layer.macs for piece in pieces for unit in piece.units().values() for _, layer in masked_layers(unit))
