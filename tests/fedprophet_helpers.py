"""What tests of FedProphet share: small settings, cascades to be worked out by hand, a run before its first round, clients."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import SPEEDS, TRIO, a_client, few_digits, tiny_settings
from torch import nn

from piecework.client_app.client import Client
from piecework.models.cascade import Atom, Blueprint, Cascade, isolate_rng
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import RunDir
from piecework.server_app.rounds import Run
from piecework.training.loop import PieceModel


def chain(inputs: int, *atoms: tuple[Callable[[], nn.Module], int], classes: int = 2) -> Blueprint:
    """A cascade over vectors: atoms and how many values each makes, then a linear head."""
    made = tuple(Atom(f"a{n}", build, (size,)) for n, (build, size) in enumerate(atoms, start=1))
    return Blueprint("mine", (inputs,), classes, made, partial(nn.Linear, made[-1].shape[0], classes), "running")


def linear(inputs: int, outputs: int) -> tuple[Callable[[], nn.Module], int]:
    return partial(nn.Linear, inputs, outputs), outputs


def built(
    blueprint: Blueprint, atoms: tuple[int, ...], head: str | None, seed: int = 0, gain: float = 1.0
) -> PieceModel:
    """A piece in evaluation mode with random weights, those of atoms `gain` times torch's."""
    with isolate_rng(seed):
        piece = PieceModel(blueprint, atoms, head, blueprint.build_unit)
    piece.train(False)
    with torch.no_grad():
        for module in piece.modules.values():
            for weight in module.parameters():
                weight.mul_(gain)
    return piece


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def boards(**memory_and_speed: tuple[float | int, float]) -> str:
    """A fleet of boards that clients get in turn: memory (bytes, or a fraction of a step) and FLOP/s."""
    table = [
        {"name": name, "memory" if isinstance(m, int) else "memory-ratio": m, "flops": speed}
        | {"bandwidth": 1e6, "disk-bandwidth": 1e7}
        for name, (m, speed) in memory_and_speed.items()
    ]
    return json.dumps({"name": "test", "assignment": "round-robin", "device": table})


# The demo's convnet falls into three modules. Client 0 has no memory for more than one, 1 no time, 2 both.
SMALL: dict[str, Any] = TRIO | {
    "strategy": "fedprophet",
    "architecture__batch_norm": "running",
    "training__local_iterations": 2,
    "attack__steps": 1,
    "evaluation__attack_steps": 1,
    "evaluation__attack_examples": 20,
    "data__validation_fraction": 0.3,
    "num_rounds": 6,
    "fedprophet__stage_rounds": 2,
    "fedprophet__stage_patience": 0,
    "training__lr": 0.02,
    "fleet": boards(poor=(0.56, 1e10), slow=(1.3, 1e9), rich=(1.3, 1e11)),
    "fedprophet__r_min": "0.55x",
}

# By the authors' memory the convnet falls into (0, 1), (2, 3) and (4,). Of an example the first takes 313,344 FLOPs, the
# first two with a head 756,352 (2.41 times as many), all 1,350,656 (4.31 times); in the second stage (2, 3) takes 442,368,
# with the last module 1,037,312 (2.34 times).
SPEED = {"slow": 1e9, "medium": 3e9, "fast": 5e9}
FLEET = {
    "name": "test",
    "assignment": "round-robin",
    "device": [SPEEDS | {"name": name, "memory": 10**8, "flops": flops} for name, flops in SPEED.items()],
}
SETTINGS: dict[str, Any] = TRIO | {
    "dataset": "",
    "strategy": "fedprophet",
    "memory__model": "fedprophet",
    "fedprophet__r_min": "370kB",
    "fedprophet__aux_pool": "authors",
    "fleet": json.dumps(FLEET),
    "architecture__batch_norm": "running",
    "data__partition": "dirichlet",
    "data__partition_balanced": False,
    "seed": 3,
    "training__local_iterations": 2,
    "attack__steps": 1,
    "evaluation__attack_steps": 1,
}


@contextmanager
def a_run(folder: Path, **changes: Any) -> Iterator[Run]:
    """A run before its first round, all clients there."""
    chosen = SETTINGS | {"dataset": f"npz:{few_digits()}", "output_dir": str(folder)} | changes
    settings = tiny_settings(**chosen)
    run_dir = RunDir(folder / "run")
    run_dir.create(settings)
    with LocalGrid(3, settings.to_run_config()) as grid:
        run = Run(grid, settings, run_dir)
        run.wait_for_clients()
        yield run


def seasoned(folder: Path, blueprint: Blueprint | None = None, **changes: Any) -> Client:
    """A client whose batch norms, where they keep statistics, have seen some images."""
    settings = tiny_settings(strategy="fedprophet", **{"architecture__batch_norm": "running"} | changes)
    client = a_client(folder, settings, blueprint=blueprint)
    model = cascade(client).train()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        model(client.local_data(0).read(np.arange(40)))
    units = {f"atoms.{n}": atom for n, atom in enumerate(model.atoms)} | {"head": model.head}
    for unit, module in units.items():
        client.store.save(unit, module)
    return client


def cascade(client: Client) -> Cascade:
    """The whole model with the weights of the client's store, in evaluation mode."""
    model = Cascade(client.blueprint)
    state = dict(client.store.read(client.blueprint.units()))
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    return model.eval()
