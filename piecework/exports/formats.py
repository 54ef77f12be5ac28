"""The formats in which `piecework export` writes a run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from piecework.device_profiles.names import did_you_mean
from piecework.exports.target import ExportError, require_target

__all__ = ["FORMATS", "ExportError", "Exported", "Format", "export_run"]


@dataclass(frozen=True)
class Exported:
    """What an export wrote: a file or folder, `lines` that tell a reader about it, and `record`, the same as JSON values."""

    path: Path
    lines: tuple[str, ...] = ()
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """A format: `place` is MODULE:FUNCTION of (run, target) -> Exported, where `run` is the folder of a run.

    `default` is the name of the file or folder that is written into the run's folder if no other is named.
    """

    place: str
    default: str
    about: str

    def writer(self) -> Callable[[Path, Path], Exported]:
        """Import the function that writes."""
        module, _, function = self.place.partition(":")
        found: Callable[[Path, Path], Exported] = getattr(import_module(f"piecework.exports.{module}"), function)
        return found


FORMATS = {
    "onnx": Format("onnx_model:write_onnx", "model.onnx", "the trained model, for onnxruntime and others"),
    "torchscript": Format("torchscript_model:write_torchscript", "model.pt", "the trained model, for libtorch"),
    "executorch": Format(
        "executorch_model:write_executorch", "model.pte", "the trained model, for ExecuTorch on a board"
    ),
    "csv": Format("run_records:write_csv", "csv", "a folder with tables of the rounds and of their clients"),
    "tensorboard": Format("run_records:write_tensorboard", "tensorboard", "a folder with the curves of the rounds"),
}


def export_run(run: Path, name: str, target: Path | None = None, client: int | None = None) -> Exported:
    """Write a run in a format; `target` is the file or folder to write. Raises ExportError, ModelFileError and ImportError.

    `run` is the folder of a run; a trained model is also written from a copy of its model.safetensors alone. `client` is the
    number of a client whose own model is written, of a run whose clients have models of their own.
    """
    if name not in FORMATS:
        raise ExportError(f"unknown format {name!r}; known: {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}")
    chosen = FORMATS[name]
    folder = run if run.is_dir() else run.parent
    default = Path(chosen.default)
    if client is not None and not default.suffix:
        raise ExportError(f"{name} has the records of all clients: leave --client out")
    named = chosen.default if client is None else f"client-{client}{default.suffix}"
    to = folder / named if target is None else target
    if target is not None or folder.is_dir():  # else what writes says that there is no run
        require_target(to, name, {other: each.default for other, each in FORMATS.items()})
    if client is None:
        return chosen.writer()(run, to)
    from piecework.exports.client_model import client_model  # here, since the list of formats needs no torch

    with client_model(run, client) as file:
        return chosen.writer()(file, to)
