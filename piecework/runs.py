"""What can be done with the folders of runs: load the model, remove what is not needed any more."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from client_app.setup import blueprint_for
from client_app.training import channels_last
from federated_data.datasets import default_cache, load, prepare
from models.cascade import Cascade, isolated_rng
from server_app.records import CheckpointError
from server_app.settings import Settings


def load_model(run_dir: Path) -> Cascade:
    """The trained model of a finished run, in evaluation mode. Raises CheckpointError where there is none."""
    path = run_dir / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{run_dir} holds no model.safetensors: has the run completed?")
    try:
        with safe_open(path, framework="pt") as file:
            settings = Settings.from_run_config(json.loads(file.metadata()["piecework"])["settings"])
            data = load(prepare(settings.dataset, data_dir=settings.data_dir, cache_dir=default_cache()))
            with isolated_rng(0):
                model = channels_last(Cascade(blueprint_for(settings, data)))
            with torch.no_grad():
                for name, target in model.state_dict().items():
                    target.copy_(file.get_tensor(name))
    except (SafetensorError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    assert isinstance(model, Cascade)
    return model.eval()


def stores(output_dir: Path) -> list[Path]:
    """What emulated clients left in the ended runs of a folder: nothing but folders named by an experiment-id."""
    ended = [path.parent for path in output_dir.glob("*/summary.json") if (path.parent / "settings.toml").is_file()]
    return sorted(
        path for run in ended for path in (run / "clients").glob("*") if re.fullmatch("[0-9a-f]{32}", path.name)
    )


def converted(cache: Path) -> list[Path]:
    """The converted data sets in a cache."""
    return sorted(path.parent for path in cache.glob("*/meta.json"))


def remove(paths: list[Path]) -> int:
    """Remove folders; returns how many bytes that freed."""
    freed = 0
    for path in paths:
        freed += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
    return freed
