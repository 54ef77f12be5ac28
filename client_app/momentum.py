"""Momentum that outlives a round: PriSM's and SpaFL's authors' choice (`prism.server-momentum`, `spafl.client-momentum`).

What the server averages, PriSM's of factors and of their norms, comes and goes with the model's arrays, each as `momentum_` and
the name of its parameter, and so with a unit of its own for every atom. That of the other parameters stays with the client, in
its state.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from piecework.client_app.client import Client
from piecework.models.cascade import Blueprint, unit_of
from piecework.models.low_rank import Pair
from piecework.training.loop import SGD, PieceModel

MOMENTUM = "momentum_"
OWN = "momentum"  # the folder in a client's state


def averaged(blueprint: Blueprint) -> list[str]:
    """The parameters of a sub-model whose momentum the server averages: factors and batch norms, by name."""
    with torch.device("meta"):
        units = {unit: blueprint.build_unit(unit) for unit in blueprint.units()}
    return [name for unit, module in units.items() for name in _averaged(unit, module)]


def _averaged(unit: str, module: nn.Module) -> Iterator[str]:
    for path, layer in module.named_modules():
        names: Sequence[str] = ()
        if isinstance(layer, Pair):
            names = ("v.weight", "u.weight")
        elif isinstance(layer, nn.BatchNorm2d):
            names = ("weight", "bias")
        yield from (".".join(filter(None, (unit, path, name))) for name in names)


class CarriedMomentum:
    """What a local trainer does with its optimiser's buffers at its start and at its end, one atom's or one array at a time.

    `sent`: the parameters whose buffers go to the server.
    """

    def __init__(self, client: Client, sent: Sequence[str] = ()) -> None:
        self.client, self.sent = client, set(sent)

    @torch.no_grad()
    def restore(self, pieces: list[PieceModel], optimiser: SGD) -> None:
        """Fill the buffers with what the server sent, else with what the client has kept; others stay zero."""
        with ExitStack() as opened:
            sources = [opened.enter_context(safe_open(path, "np")) for path in self._files()]
            # a safetensors handle is not a mapping
            known = {name: file for file in reversed(sources) for name in file.keys()}  # noqa: SIM118
            for name, buffer in buffers(pieces, optimiser):
                found = known[name].get_tensor(name) if name in known else None
                if found is not None and found.shape == tuple(buffer.shape):  # a sub-model's layers change
                    buffer.copy_(torch.from_numpy(found))

    def keep(self, pieces: list[PieceModel], optimiser: SGD) -> None:
        """Write the buffers: to the task's arrays what goes to the server, to the client's state the rest."""
        folder = self.client.new_state() / OWN
        folder.mkdir(exist_ok=True)
        for _, held in groupby(buffers(pieces, optimiser), key=lambda pair: unit_of(pair[0])):
            arrays = {name: buffer.detach().cpu().numpy() for name, buffer in held}
            theirs = {name: array for name, array in arrays.items() if name.removeprefix(MOMENTUM) in self.sent}
            self.client.store.write_units(theirs)
            self.client.store.write_units({name: arrays[name] for name in arrays.keys() - theirs.keys()}, folder)

    def units(self) -> list[str]:
        """The units that go to the server."""
        return sorted({unit_of(MOMENTUM + name) for name in self.sent})

    def _files(self) -> list[Path]:
        """The server's first."""
        folders = [self.client.store.model, *([self.client.old_state / OWN] if self.client.old_state else [])]
        return [path for folder in folders for path in sorted(folder.glob(f"{MOMENTUM}*.safetensors"))]


def buffers(pieces: list[PieceModel], optimiser: SGD) -> list[tuple[str, Tensor]]:
    """The optimiser's buffers, by name. Raises ValueError where they are not those of these pieces."""
    names = [
        f"{MOMENTUM}{unit}.{name}"
        for piece in pieces
        for unit, module in piece.units().items()
        for name, _ in module.named_parameters()
    ]
    return list(zip(names, optimiser.buffers, strict=True))
