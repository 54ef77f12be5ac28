"""The description in the file of a trained model: what it may hold, checked before anything is built from it.

The description ends with a checksum of itself and of all arrays. A file of an earlier version has none.
"""

import hashlib
from collections.abc import Iterable, Mapping
from itertools import filterfalse
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open

from piecework.device_profiles.documents import abbreviate, read_json
from piecework.models.imported.objects import is_object
from piecework.models.imported.source import is_imported, is_loaded, is_own
from piecework.models.static_norms import is_statistic
from piecework.models.zoo import known_models

DESCRIPTION, CHECKSUM = "piecework", "sha256"  # the key of the metadata, and the last one of the description
SEPARATOR = f', "{CHECKSUM}": "'
FORMAT = 3  # 1 did not describe the scaling of inputs; 2 had no variant
LARGEST_EXAMPLE, MOST_CLASSES = 10**8, 10**6  # values of an example, classes

Edge = Annotated[int, Field(ge=1, le=LARGEST_EXAMPLE)]
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-1e30, le=1e30)]
Divisor = Annotated[float, Field(gt=0, le=1e30)]


class ModelFileError(ValueError):
    """The file of a trained model is missing, damaged or of another version. The message names the file."""


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Model(_Table):
    name: str
    width: Annotated[float, Field(gt=0, le=4)]
    options: dict[str, str | int]
    batch_norm: str
    input_shape: Annotated[list[Edge], Field(min_length=1, max_length=3)]
    num_classes: Annotated[int, Field(ge=1, le=MOST_CLASSES)]


class _Inputs(_Table):
    dtype: str
    mean: list[Finite]
    std: list[Divisor]
    vocabulary: Annotated[int, Field(ge=0, le=2**31 - 1)]
    class_names: list[str]
    resized_from: Annotated[list[Edge], Field(max_length=3)] = []


class _Described(_Table):
    model: _Model
    inputs: _Inputs
    variant: dict[str, Any]
    atoms: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    head: str
    evaluation_branch: str | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        shape, inputs, classes = self.model.input_shape, self.inputs, self.model.num_classes
        if prod(shape) > LARGEST_EXAMPLE:
            raise ValueError(f"model.input_shape = {shape}: an example has at most {LARGEST_EXAMPLE:,} values")
        if inputs.class_names and len(inputs.class_names) != classes:
            raise ValueError(f"inputs.class_names has {len(inputs.class_names)} names, and there are {classes} classes")
        for key in ("mean", "std"):
            if len(shape) == 1 and len(getattr(inputs, key)) != (0 if inputs.vocabulary else shape[0]):
                raise ValueError(
                    f"inputs.{key} has {len(getattr(inputs, key))} values, and vectors {shape[0]} features"
                )
            if len(shape) == 3 and len(getattr(inputs, key)) not in (1, shape[0]):
                raise ValueError(f"inputs.{key} has {len(getattr(inputs, key))} values, and images {shape[0]} channels")
        if (stored := inputs.resized_from) and (len(stored) != 3 or stored[:1] != shape[: len(shape) - 2]):
            raise ValueError(
                f"inputs.resized_from = {stored}: images of model.input_shape = {shape} cannot come from it"
            )
        return self


def description(file: Path) -> dict[str, Any]:
    """Return the metadata of a trained model's file, which are a table and no more than that. Raises ModelFileError."""
    try:
        with safe_open(file, framework="np") as arrays:
            described = read_json((arrays.metadata() or {})[DESCRIPTION])
            if isinstance(described, dict):
                described.pop(CHECKSUM, None)
    except KeyError:
        raise ModelFileError(f"{file} cannot be read: it has no description, as Piecework's models have") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelFileError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(described, dict):
        raise ModelFileError(f"{file} cannot be read: its description is {abbreviate(described)}, not a table")
    return described


def count_parameters(file: Path) -> int:
    """Return how many parameters a trained model's file holds, without statistics of norms. Raises ModelFileError."""
    try:
        with safe_open(file, framework="np") as arrays:
            names = filterfalse(is_statistic, arrays.keys())
            return sum(prod(arrays.get_slice(name).get_shape()) for name in names)
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def metadata_of(described: str, arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the metadata of a file with these arrays, from its description as JSON."""
    # One key alone: safetensors writes several in an order that differs from time to time.
    return {DESCRIPTION: f'{described[:-1]}{SEPARATOR}{_digest(described, arrays.items())}"}}'}


def require_sound(file: Path) -> None:
    """Raise ModelFileError if a file does not match its checksum. One array is in memory at a time."""
    try:
        with safe_open(file, framework="np") as arrays:
            text = (arrays.metadata() or {}).get(DESCRIPTION, "")
            before, sealed, expected = text.rpartition(SEPARATOR)
            if not sealed:
                return
            held = ((name, arrays.get_tensor(name)) for name in sorted(arrays.keys()))
            found = _digest(before + "}", held) + '"}'
    except (OSError, SafetensorError, TypeError) as error:  # TypeError: of a type that numpy does not have
        raise ModelFileError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if found != expected:
        raise ModelFileError(
            f"{file} is damaged: it does not match its checksum. (Who changes the arrays on purpose leaves the key "
            f"{CHECKSUM!r} out of its description.)"
        )


def _digest(described: str, arrays: Iterable[tuple[str, np.ndarray]]) -> str:
    """Return the sha256 hex digest of a description, and of arrays in the order of their names."""
    digest = hashlib.sha256(described.encode())
    for name, array in sorted(arrays, key=lambda entry: entry[0]):
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def require_loadable(described: dict[str, Any], file: Path) -> None:
    """Raise ModelFileError, which names the field, unless a description is one of this version with all that it needs."""
    if (found := described.get("format", 1)) != FORMAT or isinstance(found, bool):
        raise ModelFileError(
            f"{file} was written by another version of Piecework (format {abbreviate(found)}, this is {FORMAT}): "
            "load it with that version, or train again"
        )
    if "personal" in described:
        raise ModelFileError(
            f"{file} holds thresholds alone: every client has a model of its own, in its store (state-dir), which `piecework "
            "export` and `piecework evaluate` take with --client N"
        )
    model = described.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    if isinstance(name, str) and name not in known_models() and not is_imported(name):
        raise ModelFileError(
            f"{file} was trained with model {abbreviate(name)}, which Piecework does not have: first import the module that "
            "adds it to piecework.models.zoo.MODELS, or install the package that registers it"
        )
    if isinstance(name, str) and is_own(name) and not is_loaded(name):
        if is_object(name):
            raise ModelFileError(
                f"{file} was trained with {abbreviate(name)}, a module of a Python process: make such a module here, and "
                "give it the weights by piecework.load(..., into=module)"
            )
        raise ModelFileError(
            f"{file} was trained with code of your own, {abbreviate(name)}, and no file can have code run. If you trust it, "
            "give this name to piecework.load(..., model=...), or to --model on the command line"
        )
    try:
        _Described.model_validate(described)
    except ValidationError as error:
        first = error.errors()[0]
        place, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        given = f"{place} = {abbreviate(first['input'])}: " if place and first["type"] != "missing" else ""
        missing = f"{place} is missing" if first["type"] == "missing" else message
        raise ModelFileError(f"{file} cannot be read: of its description, {given}{missing}") from None


def find_file(path: Path) -> Path:
    """Return the file of a trained model, given directly or as the run's folder. Raises ModelFileError if there is none."""
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ModelFileError(f"{path} holds no model.safetensors: has the run completed?")
    return file
