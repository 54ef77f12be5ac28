"""A trained model as a TorchScript file, which libtorch runs without Python. torch itself has declared it deprecated.

Each of the metadata is an extra file in the archive: `torch.jit.load(FILE, _extra_files={"class_names": ""})` fills the values.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from piecework.exports.checked import write_checked
from piecework.exports.formats import Exported
from piecework.exports.network import ExportedNetwork

KEYS = ("class_names", "input", "output", "model", "dataset", "strategy", "producer")


def write_torchscript(run: Path, target: Path) -> Exported:
    """Write the trained model of a run; `formats.export_run` says what is raised."""
    return write_checked(run, target, "torchscript", write, read)


def write(network: ExportedNetwork, examples: Tensor, metadata: dict[str, str], file: BinaryIO) -> None:
    """Write a network as it computes these examples; the number of examples is left open."""
    with deprecated():
        traced = torch.jit.trace(network, (examples[:2],))  # type: ignore[no-untyped-call]
        torch.jit.save(traced, file, _extra_files=metadata)


def read(file: Path, examples: Tensor) -> tuple[Tensor, dict[str, str]]:
    """Run a file by torch, on all examples and on the first alone."""
    found: dict[str, str | bytes] = dict.fromkeys(KEYS, "")
    with deprecated():
        loaded = torch.jit.load(str(file), _extra_files=found)  # type: ignore[no-untyped-call]
    logits = torch.cat([loaded(examples[:1]), loaded(examples[1:])])
    return logits, {key: value.decode() if isinstance(value, bytes) else value for key, value in found.items()}


@contextmanager
def deprecated() -> Iterator[None]:
    """Without the warnings that TorchScript is deprecated, as the documentation says, and that shapes may become constants.

    They do not: the file is checked with other numbers of examples than it was traced with.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is deprecated", category=DeprecationWarning)
        yield
