"""Federated training of one model across devices none of which can hold it."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from torch import nn

    from piecework.api.comparisons import Comparison, compare
    from piecework.api.plans import Advice, Plan, plan, suggest
    from piecework.api.runs import Run, RunFailedError, run
    from piecework.api.studies import Study, study
    from piecework.models.trained_model import TrainedModel

__all__ = [
    "Advice",
    "Comparison",
    "Plan",
    "Run",
    "RunFailedError",
    "Study",
    "compare",
    "load",
    "plan",
    "run",
    "study",
    "suggest",
]

__version__ = "0.1.0"

# The packages are imported as piecework.NAME, so that a user's own `models.py` hides none of ours. A wheel has them in this
# folder, and a checkout links to them. The bundle that Flower makes of a checkout has no links, and neither has a checkout on a
# system without them: there the packages are found beside this folder.
if not (Path(__file__).parent / "models").is_dir():
    __path__.append(str(Path(__file__).resolve().parent.parent))


_PLACES = {  # loaded when they are asked for: clients and boards import this package too
    **dict.fromkeys(("Comparison", "compare"), "comparisons"),
    **dict.fromkeys(("Advice", "Plan", "plan", "suggest"), "plans"),
    **dict.fromkeys(("Run", "RunFailedError", "run"), "runs"),
    **dict.fromkeys(("Study", "study"), "studies"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'piecework' has no attribute {name!r}")
    return getattr(import_module(f"piecework.api.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@overload
def load(path: str | Path, *, normalise: bool = True, model: str = "") -> "TrainedModel": ...
@overload
def load(path: str | Path, *, into: "nn.Module") -> "nn.Module": ...
def load(path: str | Path, *, normalise: bool = True, model: str = "", into: "nn.Module | None" = None) -> "nn.Module":
    """Load the trained model of a finished run, in evaluation mode, from the run's folder or a copy of its model.safetensors.

    The model takes images [B, C, H, W], uint8 or floats in [0, 1], and scales them itself; with `normalise=False` they must be
    standardised already. `model(images)` returns logits, `model.predict(images)` classes and probabilities. If the run ended in
    the middle of a cascade, the model has the trained atoms and the head after them. A model with exits predicts by the mean of
    their logits. A model with separate statistics for attacked images (FedRBN) has those of its setting `evaluation-branch`, or
    the clean ones if that setting chooses per image.

    A run with code of one's own needs `model`, its name as in the run (`FILE.py:FUNCTION`), which says that the code may run.

    With `into`, a module of one's own of the kind that the run trained (`model=FILE.py:FUNCTION` or a module), the trained
    weights are given to it under its own names, and it is returned. It takes standardised images, as in training: those of a
    loaded model are `(images - model.mean) / model.std`, of images in [0, 1].

    Neither the data set nor Flower is needed. Raises ModelFileError (in piecework.models.trained_model) if the file does not
    exist, cannot be read, or does not fit the module, and ValueError if the code cannot be imported.
    """
    if into is not None:
        if not normalise or model:
            raise ValueError(
                "into=module gives back your own module, which scales nothing: leave normalise and model out"
            )
        from piecework.models.imported.own_names import fill_module

        return fill_module(into, Path(path))
    from piecework.models.imported.trust import import_code
    from piecework.models.trained_model import load_model

    import_code(Path(path), model)
    return load_model(Path(path), normalise=normalise)
