"""Momentum and Adam's moments carried over between rounds, as in the code of PriSM's, SpaFL's and FedPM's authors, where a
setting of theirs asks for it: `server-momentum`, `client-momentum`, `keep-adam`.

The server averages the momentum buffers of PriSM's factors and of their norms. They travel with the model's arrays, named
`momentum_` and the name of the parameter, so that every atom has a separate unit for them. The buffers of all other parameters
stay with the client, in its state. Adam has three buffers for each parameter: `average_`, `square_` and `steps_`.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from piecework.client_app.client import Client
from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint, unit_of
from piecework.models.low_rank import Pair
from piecework.training.loop import PieceModel
from piecework.training.optimiser_state import Held
from piecework.training.sgd import SGD

MOMENTUM = "momentum_"
OWN = "momentum"  # the folder in a client's state


def averaged_names(blueprint: Blueprint) -> list[str]:
    """Return the names of a sub-model's parameters whose momentum the server averages: factors and batch norms."""
    with without_data():
        units = {unit: blueprint.build_unit(unit) for unit in blueprint.units()}
    return [name for unit, module in units.items() for name in _averaged_names(unit, module)]


def _averaged_names(unit: str, module: nn.Module) -> Iterator[str]:
    for path, layer in module.named_modules():
        names: Sequence[str] = ()
        if isinstance(layer, Pair):
            names = ("v.weight", "u.weight")
        elif isinstance(layer, nn.BatchNorm2d):
            names = ("weight", "bias")
        yield from (".".join(filter(None, (unit, path, name))) for name in names)


class CarriedMomentum:
    """Restores a local trainer's optimiser buffers at its start, array by array, and keeps them at its end, unit by unit.

    `sent` are the names of the parameters whose buffers go to the server.
    """

    def __init__(self, client: Client, sent: Sequence[str] = ()) -> None:
        self.client, self.sent = client, set(sent)

    @torch.no_grad()
    def restore(self, pieces: list[PieceModel], optimiser: SGD) -> None:
        """Fill each buffer from the server's arrays, or else from the client's state. Buffers in neither stay zero."""
        with ExitStack() as opened:
            sources = [opened.enter_context(safe_open(path, "np")) for path in self._files()]
            # a safetensors handle is not a mapping
            known = {name: file for file in reversed(sources) for name in file.keys()}  # noqa: SIM118
            for name, buffer in buffers(pieces, optimiser):
                found = known[name].get_tensor(name) if name in known else None
                if found is not None and found.shape == tuple(
                    buffer.shape
                ):  # layers of sub-models can change their shape
                    buffer.copy_(torch.from_numpy(found))

    def keep(self, pieces: list[PieceModel], optimiser: SGD) -> None:
        """Write the buffers that go to the server to the task's model folder, and the others to the client's state."""
        folder = self.client.new_state() / OWN
        folder.mkdir(exist_ok=True)
        for _, held in groupby(buffers(pieces, optimiser), key=lambda pair: unit_of(pair[0])):
            arrays = {name: buffer.float().cpu().numpy() for name, buffer in held}
            theirs = {name: array for name, array in arrays.items() if name.removeprefix(MOMENTUM) in self.sent}
            self.client.store.write_units(theirs)
            self.client.store.write_units({name: arrays[name] for name in arrays.keys() - theirs.keys()}, folder)

    def units(self) -> list[str]:
        """Return the units of momentum that go to the server."""
        return sorted({unit_of(MOMENTUM + name) for name in self.sent})

    def _files(self) -> list[Path]:
        """List the files with buffers, those of the server first, because they take precedence."""
        own = sorted((self.client.old_state / OWN).glob("*.safetensors")) if self.client.old_state else []
        return [*sorted(self.client.store.model.glob(f"{MOMENTUM}*.safetensors")), *own]


def buffers(pieces: list[PieceModel], optimiser: SGD) -> list[tuple[str, Held]]:
    """Return the buffers of an optimiser with their names, `<kind>_<unit>.<parameter>`, of each kind in the pieces' order."""
    names = [
        f"{unit}.{name}"
        for piece in pieces
        for unit, module in piece.units().items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    return [
        (f"{kind}_{name}", buffer)
        for kind, held in optimiser.state().items()
        for name, buffer in zip(names, held, strict=True)
    ]
