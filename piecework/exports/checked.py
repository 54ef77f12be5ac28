"""Write a trained model to a file, and keep the file only if it computes what the model computes.

The file is run by the runtime of its format on test examples of the run's own data set, under a name beside its own. It gets
its own name, and replaces an earlier file, once each example has the same class and the logits are close.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from piecework.exports.formats import Exported, ExportError
from piecework.exports.network import ExportedNetwork, metadata_of
from piecework.exports.target import replacing
from piecework.federated_data.datasets import DatasetError
from piecework.models.model_file import description, find_file
from piecework.models.trained_model import TrainedModel, load_model
from piecework.training.settings import Settings
from piecework.training.setup import dataset_of, prepare_dataset

EXAMPLES = 16  # on which a file is checked
CLOSE = 1e-4  # of the largest logit: what two orders of summation may differ by

Write = Callable[[ExportedNetwork, Tensor, dict[str, str], BinaryIO], None]
# Returns the logits for examples, and the metadata that the file holds.
Read = Callable[[Path, Tensor], tuple[Tensor, dict[str, str]]]


def write_checked(run: Path, target: Path, form: str, write: Write, read: Read) -> Exported:
    """Write the trained model of a run to `target`. Raises ExportError, and ModelFileError for a run without a model."""
    described = description(find_file(run))
    model = open_model(run)
    network = ExportedNetwork(model).eval()
    examples, source = check_examples(described, network, model)
    with torch.no_grad():
        expected = with_both_classes(model(examples))
    metadata = metadata_of(network, model, described)
    with torch.no_grad(), replacing(target) as unchecked:
        with naming_the_model(form, metadata["model"], unchecked, target):
            content = BytesIO()  # some formats' libraries would not say which error of the disk they met
            write(network, examples, metadata, content)
        unchecked.write_bytes(content.getbuffer())
        with naming_the_model(form, metadata["model"], unchecked, target):
            found, told = read(unchecked, examples)
        difference, bound = require_same(form, expected, found)
        if told != metadata:
            raise ExportError(f"{form}: the file says {told} about itself, and should say {metadata}: it was not kept")
    size = target.stat().st_size
    return Exported(
        target,
        (
            f"checked on {len(examples)} {source}: the same classes, logits within {difference:.1e} (allowed {bound:.1e})",
            *(f"{key}: {metadata[key]}" for key in ("input", "output", "class_names")),
        ),
        {
            "bytes": size,
            "checked_on": source,
            "examples": len(examples),
            "max_difference": difference,
            "allowed_difference": bound,
            "metadata": metadata,
        },
    )


@contextmanager
def naming_the_model(form: str, model: str, unchecked: Path, target: Path) -> Iterator[None]:
    """Turn whatever the library of a format raises into an ExportError, which names the format, the model and the target."""
    try:
        yield
    except (OSError, ExportError):
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0].replace(str(unchecked), str(target))[:300]
        raise ExportError(f"{form}: {model} cannot be written: {type(error).__name__}: {first}") from error


def open_model(run: Path) -> TrainedModel:
    """Load the trained model of a run. Raises ExportError if it predicts an example by the others of its batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that of such a model, in whose place the error stands
        model = load_model(run)
    if model.depends_on_batch:
        raise ExportError(
            f"{find_file(run)} was trained with architecture.batch-norm = batch: what it says of an example depends on the "
            "others of its batch, and a device has one. Train with architecture.batch-norm = running or measured"
        )
    return model


def check_examples(described: dict[str, Any], network: ExportedNetwork, model: TrainedModel) -> tuple[Tensor, str]:
    """Return the examples for the check, spread over the run's test split, and what they are.

    Where the data are not at hand, or are others now, the examples are random.
    """
    try:
        settings = Settings.from_run_config(described["settings"])
        prepare_dataset(settings)
        data = dataset_of(settings)
        if data.stored_shape != network.shape or data.vocabulary > model.vocabulary:
            raise DatasetError(f"{data.name} holds examples of another kind now")
        rows = np.linspace(0, len(data.test_inputs) - 1, EXAMPLES).astype(int)
        return as_examples(data.test_inputs[np.unique(rows)], network.dtype), f"test examples of {settings.dataset}"
    except (KeyError, TypeError, ValueError, ImportError, OSError) as error:
        rng, shape = np.random.default_rng(0), (EXAMPLES, *network.shape)
        drawn: np.ndarray
        if network.tokens:
            drawn = rng.integers(0, model.vocabulary, shape)
        elif network.dtype == torch.uint8:
            drawn = rng.integers(0, 256, shape)
        else:
            drawn = model.mean.numpy() + model.std.numpy() * rng.standard_normal(shape)
        reason = (str(error).splitlines() or [""])[0]
        return torch.tensor(drawn).to(
            network.dtype
        ), f"random examples, because the run's data are not at hand ({reason})"


def as_examples(stored: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return examples as they lie on disk (images [N, H, W, C]) as a model takes them, with channels first."""
    x = torch.tensor(np.asarray(stored)).to(dtype)
    x = x.movedim(-1, 1) if x.dim() == 4 else x
    return x.clone(memory_format=torch.contiguous_format)  # strides count for ExecuTorch also where a size is 1


def with_both_classes(logits: Tensor) -> Tensor:
    """Return the logits of both classes where a model has a single one, as files have them."""
    return torch.cat([torch.zeros_like(logits), logits], dim=1) if logits.shape[1] == 1 else logits


def require_same(form: str, expected: Tensor, found: Tensor) -> tuple[float, float]:
    """Return the largest difference of two models' logits, and the allowed one.

    Raises ExportError if it is larger, or if the class of an example is another, unless its best two are that close.
    """
    if found.shape != expected.shape:
        raise ExportError(
            f"{form}: the file gives logits of shape {tuple(found.shape)} and the model {tuple(expected.shape)}: it was "
            "not kept"
        )
    bound = CLOSE * max(1.0, float(expected.abs().max()))
    difference = float((found.float() - expected).abs().max())
    best = expected.topk(min(2, expected.shape[1]), dim=1).values
    clear = best[:, 0] - best[:, -1] > 2 * bound
    others = int((clear & (found.argmax(1) != expected.argmax(1))).sum())
    if not difference <= bound or others:  # nor NaN
        raise ExportError(
            f"{form}: the file computes something else than the model: logits differ by up to {difference:.3g} (allowed "
            f"{bound:.3g}), and {others} of {len(expected)} examples have another class: it was not kept"
        )
    return difference, bound


def require_extra(module: str, extra: str) -> Any:
    """Import a module of an extra. Raises ImportError, which names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}; this format needs `pip install 'piecework[{extra}]'`") from error
