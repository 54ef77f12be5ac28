"""A trained model as an ONNX file, for any number of examples at once; the metadata are its `metadata_props`."""

from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from piecework.exports.checked import require_extra, write_checked
from piecework.exports.formats import Exported
from piecework.exports.network import ExportedNetwork
from piecework.exports.program import record, without_known_warnings

EXTRA = "onnx"


def write_onnx(run: Path, target: Path) -> Exported:
    """Write the trained model of a run; `formats.export_run` says what is raised."""
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require_extra(module, EXTRA)
    return write_checked(run, target, "onnx", write, read)


def write(network: ExportedNetwork, examples: Tensor, metadata: dict[str, str], file: BinaryIO) -> None:
    """Write a network with the number of examples left open."""
    with without_known_warnings():
        program = record(network, examples, any_number=True)
        made = torch.onnx.export(
            program, dynamo=True, input_names=[network.input_name], output_names=["logits"], verbose=False
        )
    assert made is not None
    made.model.producer_name, made.model.producer_version = "piecework", None
    made.model.metadata_props.update(metadata)
    file.write(made.model_proto.SerializeToString())


def read(file: Path, examples: Tensor) -> tuple[Tensor, dict[str, str]]:
    """Run a file by onnxruntime, on all examples and on the first alone."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (name,) = [each.name for each in session.get_inputs()]
    first, rest = (session.run(["logits"], {name: part.numpy()})[0] for part in (examples[:1], examples[1:]))
    told = dict(session.get_modelmeta().custom_metadata_map)
    return torch.cat([torch.tensor(first), torch.tensor(rest)]), told
