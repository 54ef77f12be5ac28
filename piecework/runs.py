"""What can be done with the folders of runs: load the model, remove what is not needed any more."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from client_app.setup import blueprint_for, narrowed, with_dual_norms
from client_app.training import channels_last
from federated_data.datasets import default_cache, load, prepare
from models.basic_layers import with_basic_layers
from models.cascade import Cascade, isolated_rng
from models.depth_exits import ExitCascade, with_exits
from models.dual_norm import begin_adversarial, use
from models.mix import mixed
from models.supermask import supermask
from server_app.records import CheckpointError
from server_app.settings import Settings, SettingsError


def load_model(run_dir: Path) -> Cascade:
    """The trained model of a finished run, in evaluation mode: of one that ended in the middle of a cascade, the atoms that
    were trained with the head behind them; with exits, it predicts by the mean of theirs; of FedRBN, with the statistics
    of its `evaluation-branch`, or the clean ones where that chooses by image. Raises CheckpointError where there is
    none.
    """
    path = model_file(run_dir)
    described = description(path)
    try:
        settings = Settings.from_run_config(described["settings"])
        if "personal" in described:
            raise CheckpointError(
                f"{path} holds thresholds alone: every client has a model of its own, in its store (state-dir)"
            )
        data = load(prepare(settings.dataset, data_dir=settings.data_dir, cache_dir=default_cache()))
        whole = blueprint_for(settings, data)
        if described.get("norms") == "dual":
            whole = with_dual_norms(settings, data.input_shape, data.num_classes)
        if share := described.get("share"):
            whole = narrowed(settings, data.input_shape, data.num_classes, share)
        if mix := described.get("mix_share"):
            whole = mixed(narrowed(settings, data.input_shape, data.num_classes, mix), range(max(1, round(1 / mix))))
        if "supermask" in described:
            whole = supermask(whole, described["supermask"]["seed"])
        if exits := described.get("exits"):
            whole = with_exits(whole, [tuple(block) for block in exits])
        if blocks := described.get("blocks"):
            whole = with_basic_layers(whole, [tuple(block) for block in blocks])
        # older runs do not say: theirs are whole
        atoms, head = described.get("atoms", range(len(whole.atoms))), described.get("head", "head")
        part = replace(
            whole,
            atoms=tuple(whole.atoms[i] for i in atoms),
            build_head=lambda: whole.build_unit(head),
            spare=sum(i >= len(whole.atoms) - whole.spare for i in atoms) if exits else 0,
        )
        with isolated_rng(0):
            model = ExitCascade(part) if exits else Cascade(part)
        units = {f"atoms.{i}": module for i, module in zip(atoms, model.atoms, strict=True)} | {head: model.head}
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for unit, module in units.items():
                for name, target in module.state_dict().items():
                    target.copy_(file.get_tensor(f"{unit}.{name}"))
    except SettingsError as error:
        raise CheckpointError(f"{path} was written by another version of Piecework: {error}") from error
    except (SafetensorError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    channels_last(model)
    begin_adversarial([model])
    use([model], adversarial=described.get("evaluation_branch") == "adversarial")
    return model.eval()


def model_file(run_dir: Path) -> Path:
    """Where a run's trained model lies. Raises CheckpointError where there is none."""
    path = run_dir / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{run_dir} holds no model.safetensors: has the run completed?")
    return path


def description(path: Path) -> dict[str, Any]:
    """What a trained model's file says of it besides the arrays. Raises CheckpointError."""
    try:
        with safe_open(path, framework="np") as file:
            described: dict[str, Any] = json.loads(file.metadata()["piecework"])
            return described
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


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
