"""A trained model as an ExecuTorch program, for one example at a time: the memory of a board is planned for one.

Convolutions, linear layers and what else XNNPACK knows run in it, the rest in portable kernels. Each of the metadata is a
constant method of the program, which returns a text: `program.load_method("class_names").execute([])`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from piecework.exports.checked import require_extra, write_checked
from piecework.exports.formats import Exported
from piecework.exports.network import ExportedNetwork
from piecework.exports.program import record, without_known_warnings

EXTRA = "executorch"


def write_executorch(run: Path, target: Path) -> Exported:
    """Write the trained model of a run; `formats.export_run` says what is raised."""
    with quiet():
        require_extra("executorch.exir", EXTRA)
        return write_checked(run, target, "executorch", write, read)


def write(network: ExportedNetwork, examples: Tensor, metadata: dict[str, str], file: BinaryIO) -> None:
    """Write a network for one example."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    with without_known_warnings():
        program = record(network, examples, any_number=False)
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], constant_methods=metadata)
        file.write(lowered.to_executorch().buffer)


def read(file: Path, examples: Tensor) -> tuple[Tensor, dict[str, str]]:
    """Run a program by ExecuTorch's runtime, one example after the other."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(file)
    forward = program.load_method("forward")
    logits = [forward.execute([example.unsqueeze(0)])[0].clone() for example in examples]
    told = {name: program.load_method(name).execute([])[0] for name in program.method_names - {"forward"}}
    return torch.cat(logits), told


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch logs about the packages that ExecuTorch imports."""
    log = logging.getLogger("torch.utils._pytree")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
