"""The model of one client of a run whose clients have models of their own, rebuilt from what the client's store kept.

The clients' states lie in RUN/clients, or in `state-dir`, until `piecework clean` removes them. Of a client on a device of its
own they lie on that device alone. A client that never trained has none.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.numpy import load_file, save_file

from piecework.client_app.seal import damage
from piecework.models.model_file import ModelFileError, description, find_file, metadata_of
from piecework.training.settings import Settings


@contextmanager
def client_model(run: Path, client: int) -> Iterator[Path]:
    """Yield the file of a client's model, like that of a trained model, until the body ends. Raises ModelFileError."""
    file = find_file(run)
    described = description(file)
    if not described.get("personal"):
        raise ModelFileError(f"{file} is the one model of all clients of this run: leave --client out")
    state = newest_state(stores_of(run, described) / str(client), run, client)
    arrays = {name: array for path in sorted(state.glob("*.safetensors")) for name, array in load_file(path).items()}
    own = {key: value for key, value in described.items() if key != "personal"}
    with TemporaryDirectory(prefix="piecework-") as folder:
        made = Path(folder) / "model.safetensors"
        save_file(arrays, made, metadata=metadata_of(json.dumps(own), arrays))
        yield made


def stores_of(run: Path, described: dict[str, Any]) -> Path:
    """Return the folder of the clients' stores of a run."""
    settings = Settings.from_run_config(described["settings"])
    folder = run if run.is_dir() else run.parent
    return Path(settings.state_dir or folder / "clients") / str(described["experiment-id"])


def newest_state(store: Path, run: Path, client: int) -> Path:
    """Return the folder of a client's newest state. Raises ModelFileError if there is none, or if it is damaged."""
    states = sorted((int(path.name), path) for path in (store / "state").glob("*") if path.name.isdecimal())
    if not states:
        raise ModelFileError(
            f"client {client} of {run} has no model in {store}: it has not trained in this run, `piecework clean` or another "
            "run removed it, or it lies on the client's own device. Train again with emulated clients, whose models lie in "
            "the run's folder or in `state-dir`, and ask before you clean"
        )
    folder = states[-1][1]
    if fault := damage(folder):
        raise ModelFileError(f"the model of client {client} in {folder} is damaged: {fault}")
    return folder
