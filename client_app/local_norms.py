"""Batch norms that stay with a client (FedBN): `architecture.batch-norm = local`.

Clients of HeteroFL, FedRolex and FedDrop may train other channels in every round. Their norms are kept at the full model's
length, so that a channel finds its own statistics, scale and shift. A channel that the client has not trained yet is NaN there
and takes the server's average.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from piecework.client_app.client import Client
from piecework.client_app.store import Store
from piecework.models.cascade import isolate_rng
from piecework.models.static_norms import batch_norm_names
from piecework.models.width import Indices, shapes, take

FOLDER = "batch-norm"  # in a client's state


def overlay_norms(store: Store, state: Path, places: Mapping[str, Indices]) -> None:
    """Replace the norms of the task's model by the client's own. `places` are the indices of cut arrays in the full ones."""
    for path in sorted((state / FOLDER).glob("*.safetensors")):
        if (store.model / path.name).is_file():
            sent, own = dict(store.read([path.stem])), dict(store.read([path.stem], state / FOLDER))
            store.write_units(
                sent | {name: prefer_own(take(array, places.get(name, ())), sent[name]) for name, array in own.items()}
            )


def prefer_own(own: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """Return the client's own values, and the sent ones where they are NaN."""
    return np.where(np.isnan(own), sent, own) if own.dtype.kind == "f" else own


def keep(client: Client, units: list[str], places: Mapping[str, Indices]) -> None:
    """Write the norms of the trained units to the client's new state; the server's average is for evaluation only."""
    folder = client.new_state() / FOLDER
    folder.mkdir(exist_ok=True)
    full = shapes(client.full) if places else {}
    for unit in units:
        with isolate_rng(0):
            names = batch_norm_names(unit, client.blueprint.build_unit(unit))
        own = {name: array for name, array in client.store.read([unit]) if name in names}
        seen = bool(places) and (folder / f"{unit}.safetensors").is_file()
        before = dict(client.store.read([unit], folder)) if seen else {}
        for name in own.keys() & places.keys():
            own[name] = spread(own[name], places[name], before.get(name, np.full(full[name], np.nan, np.float32)))
        client.store.write_units(own, folder)


def spread(array: np.ndarray, places: Indices, before: np.ndarray) -> np.ndarray:
    """Return `before`, of the full length, with these values in their places; an array without dimensions as it is."""
    if not places:
        return array
    whole = before.copy()
    whole[np.ix_(*places)] = array
    return whole
