"""The metadata in the file of a trained model, from which the model can be built again."""

from typing import Any

from piecework.federated_data.datasets import ArrayDataset, set_name
from piecework.models.imported.atoms import cut
from piecework.models.imported.module import Source
from piecework.models.imported.source import is_imported
from piecework.models.model_file import FORMAT
from piecework.training.examples import is_resized
from piecework.training.settings import Settings


def describe_model(settings: Settings, data: ArrayDataset) -> dict[str, Any]:
    """Return the metadata on the network, its inputs and the run's settings, as JSON values."""
    source = Source(settings.model, data.num_classes, tuple(data.input_shape), settings.norms)
    # Their values are in no file: a module that is filled from it keeps its own.
    unused = {"unused": list(cut(source).unused)} if is_imported(settings.model) else {}
    return {
        "format": FORMAT,
        "model": {
            "name": settings.model,
            "width": settings.architecture.width,
            "options": settings.architecture.parse_options(),
            "batch_norm": settings.norms,
            "input_shape": list(data.input_shape),
            "num_classes": data.num_classes,
            **unused,
        },
        "inputs": {
            "dataset": set_name(settings.dataset),
            "dtype": str(data.inputs.dtype),
            "mean": list(data.mean),
            "std": list(data.std),
            "vocabulary": data.vocabulary,
            "class_names": list(data.class_names),
            "resized_from": list(data.stored_shape) if is_resized(data) else [],
        },
        "settings": settings.to_run_config(),
    }
