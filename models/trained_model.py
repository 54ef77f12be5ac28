"""A trained model as a self-contained file, and as a module that takes raw pixels.

`model.safetensors` holds the arrays. Its metadata, one JSON object, describe how to build the network and how its inputs are
scaled. This module imports neither Flower nor the data sets.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from piecework.device_profiles.dispatch import without_data
from piecework.device_profiles.documents import abbreviate
from piecework.models.cascade import Blueprint, Cascade, isolate_rng
from piecework.models.depth_exits import ExitCascade
from piecework.models.dual_norm import begin_adversarial, use
from piecework.models.memory_layout import channels_last
from piecework.models.model_file import ModelFileError, description, find_file, require_loadable, require_sound
from piecework.models.narrow_convolution import leave_out_unread
from piecework.models.resizing import resize
from piecework.models.variant import Variant, vary
from piecework.models.zoo import build_blueprint

OUTSIDE = 1e-3  # tolerance for rounding of pixels in [0, 1]


@dataclass(frozen=True)
class Prediction:
    """A prediction: `classes[B]`, int64; `probabilities[B, num_classes]`; `names`, the class name of each example."""

    classes: Tensor
    probabilities: Tensor
    names: list[str]


class TrainedModel(nn.Module):
    """The network of a finished run in evaluation mode, including the scaling of its inputs.

    It takes raw images [B, C, H, W]: uint8 from 0 to 255, or floats equal to pixels / 255 in [0, 1], as torchvision's
    `ToTensor` makes them. A model trained on floats takes floats at their own scale, also feature vectors [B, F]; a text model
    takes tokens [B, length].
    With `normalise=False` images must be standardised already. A model that was trained on resized images (`data.image-size`)
    takes them at their new size, `input_shape`, and resizes images of the data set's own size, `resized_from`.

    `network` is the model alone and `class_names` are the names of its classes. `depends_on_batch` says whether the prediction
    for an example depends on the others of its batch (`architecture.batch-norm = batch`).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: Cascade, description: Mapping[str, Any], *, normalise: bool = True) -> None:
        super().__init__()
        self.network, self.normalise = network, normalise
        inputs, model = description["inputs"], description["model"]
        self.input_shape, self.num_classes = tuple(model["input_shape"]), int(model["num_classes"])
        self.resized_from = tuple(inputs.get("resized_from", ()))
        self.pixels = str(inputs["dtype"])
        self.vocabulary = int(inputs["vocabulary"])
        self.class_names = tuple(inputs["class_names"]) or tuple(map(str, range(self.num_classes)))
        self.depends_on_batch = model["batch_norm"] == "batch" and any(
            isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in network.modules()
        )
        for name in ("mean", "std"):
            values = torch.tensor(inputs[name], dtype=torch.float32)
            self.register_buffer(name, values.reshape(1, -1, *[1] * (len(self.input_shape) - 1)), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits[B, classes] for images[B, C, H, W] or tokens [B, length]; two classes may have one logit, [B, 1].

        Raises ValueError for another shape, or for floats that are not pixels in [0, 1].
        """
        if tuple(images.shape[1:]) not in self._taken:
            taken = " or ".join(f"[B, {', '.join(map(str, shape))}]" for shape in self._taken)
            raise ValueError(f"images have shape {tuple(images.shape)}: this model takes {taken}")
        if not len(images):
            raise ValueError("there are no images: the batch is empty")
        if not self.normalise and not self.vocabulary and not images.is_floating_point():
            raise ValueError(
                f"images are {images.dtype}: with normalise=False they must be floats, standardised already"
            )
        logits: Tensor = self.network(self._scale(images) if self.normalise else self._resize(images))
        return logits

    @property
    def _taken(self) -> list[tuple[int, ...]]:
        """The shapes of an example that the model takes."""
        return [self.input_shape, *filter(None, [self.resized_from])]

    def _resize(self, images: Tensor) -> Tensor:
        return images if tuple(images.shape[1:]) == self.input_shape else resize(images, self.input_shape[1:])

    def _scale(self, images: Tensor) -> Tensor:
        if self.vocabulary:
            return images.long()
        if images.dtype == torch.uint8:
            if self.pixels != "uint8":
                raise ValueError(f"images are uint8: this model was trained on {self.pixels} values at their own scale")
            x = self._resize(images.float()).div_(255)
        elif self.pixels == "uint8" and not (images.min() >= -OUTSIDE and images.max() <= 1 + OUTSIDE):  # nor NaN
            raise ValueError(
                f"images are {images.dtype} from {images.min():.4g} to {images.max():.4g}: floats are pixels / 255, in [0, 1]. "
                "Give uint8, divide by 255, or load the model with normalise=False where they are standardised already"
            )
        else:
            x = self._resize(images.float()).clone()
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        return x.sub_(self.mean).div_(self.std)

    @torch.no_grad()
    def predict(self, images: Tensor | np.ndarray | Sequence[Any]) -> Prediction:
        """Return classes and probabilities of a batch, or of one image.

        A numpy array is [B, H, W, C] or [B, H, W], as image files are read. A tensor is [B, C, H, W], and in one channel also
        [B, H, W]. One image has no dimension B. A list holds images (tensors, or arrays) of one shape, or the numbers of an
        array. Raises ValueError for images of another shape.
        """
        x = self._batch(images)
        logits = self(x.to(self.mean.device)).float()
        if logits.shape[1] == 1:
            one = logits.sigmoid()
            probabilities = torch.cat([1 - one, one], dim=1)
        else:
            probabilities = logits.softmax(1)
        classes = probabilities.argmax(1)
        return Prediction(classes, probabilities, [self.class_names[n] for n in classes.tolist()])

    def _batch(self, images: Tensor | np.ndarray | Sequence[Any]) -> Tensor:
        """Return images as [B, C, H, W]."""
        if not isinstance(images, Tensor | np.ndarray):
            images = self._stack(images)
        x = images if isinstance(images, Tensor) else torch.tensor(images)
        if len(self.input_shape) == 3:
            spaces = [shape[1:] for shape in self._taken]
            grey = self.input_shape[0] == 1 and x.shape[-2:] in spaces  # perhaps without a channel
            if isinstance(images, np.ndarray):
                x = x.unsqueeze(-1) if grey else x
                x = x.movedim(-1, -3) if x.dim() >= 3 else x
            elif grey and x.shape[-3:] not in self._taken:
                x = x.unsqueeze(-3)
        return x.unsqueeze(0) if x.dim() == len(self.input_shape) else x

    def _stack(self, images: Sequence[Any]) -> Tensor | np.ndarray:
        """Return a list of images as one tensor if they are tensors, else as one array, of uint8 if they are whole pixels."""
        try:
            if images and all(isinstance(image, Tensor) for image in images):
                return torch.stack(list(images))
            array = np.asarray(images)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"the images of a list must have one shape: {error}") from None
        if (
            self.pixels == "uint8"
            and array.dtype.kind in "iu"
            and array.size
            and array.min() >= 0
            and array.max() <= 255
        ):
            return array.astype(np.uint8)
        return array


def network_of(description: Mapping[str, Any]) -> Blueprint:
    """Return the blueprint of the whole trained network: the run's model with its variant applied."""
    model = description["model"]
    own = build_blueprint(
        model["name"],
        num_classes=model["num_classes"],
        input_shape=tuple(model["input_shape"]),
        width=model["width"],
        batch_norm="batch" if model["batch_norm"] in ("measured", "static") else model["batch_norm"],
        **model["options"],
    )
    return vary(own, Variant.from_values(description["variant"]))


def load_model(path: Path, *, normalise: bool = True) -> TrainedModel:
    """Load the model from a file or a run's folder. Raises ModelFileError."""
    file = find_file(path)
    described = description(file)
    require_loadable(described, file)
    require_sound(file)
    try:
        whole = network_of(described)
        atoms: Sequence[int] = described["atoms"]
        head, exits = described["head"], described["variant"].get("exits")
        if max(atoms) >= len(whole.atoms):
            raise ValueError(f"atoms = {abbreviate(atoms)}: {whole.name} has {len(whole.atoms)}, counted from 0")
        part = replace(
            whole,
            atoms=tuple(whole.atoms[i] for i in atoms),
            build_head=lambda: whole.build_unit(head),
            num_replacement_atoms=sum(i >= len(whole.atoms) - whole.num_replacement_atoms for i in atoms)
            if exits
            else 0,
        )
        kind = ExitCascade if exits else Cascade
        with safe_open(file, framework="pt") as arrays, torch.no_grad():
            # without memory for weights first: a description may ask for more than the file has, or any machine
            with isolate_rng(0), without_data():
                for name, target in named_arrays(kind(part), atoms, head):
                    require_shape(target, tuple(arrays.get_slice(name).get_shape()), name)
            with isolate_rng(0):
                network = kind(part)
            for name, target in named_arrays(network, atoms, head):
                target.copy_(of_type(target, arrays.get_tensor(name), name))
        model = TrainedModel(network, described, normalise=normalise)
    except (SafetensorError, KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"{file} cannot be read: {type(error).__name__}: {first_line(error)}") from error
    for unit in (*network.atoms, network.head):
        channels_last(unit)
    leave_out_unread(network)
    begin_adversarial([network])
    use([network], adversarial=described.get("evaluation_branch") == "adversarial")
    if model.depends_on_batch:
        warnings.warn(
            f"{file} was trained with architecture.batch-norm = batch: what it says of an example depends on the others of "
            "its batch. Give it large, mixed batches, or train with architecture.batch-norm = running or measured",
            stacklevel=3,
        )
    return model.eval()


def named_arrays(network: Cascade, atoms: Sequence[int], head: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the arrays of a network by their names in its file."""
    units = {f"atoms.{i}": module for i, module in zip(atoms, network.atoms, strict=True)} | {head: network.head}
    for unit, module in units.items():
        for name, target in module.state_dict().items():
            yield f"{unit}.{name}", target


def require_shape(target: Tensor, found: tuple[int, ...], name: str) -> None:
    """Raise ValueError if an array of a file has another shape than the model's: some others would be broadcast."""
    if found != tuple(target.shape):
        raise ValueError(f"array {name} has shape {found}, but the model's has {tuple(target.shape)}")


def of_type(target: Tensor, found: Tensor, name: str) -> Tensor:
    """Return an array of a file. Raises ValueError for whole numbers in place of floats or the reverse, which would be cast."""
    if found.is_floating_point() != target.is_floating_point():
        raise ValueError(f"array {name} is {found.dtype}, but the model's is {target.dtype}")
    return found


def first_line(error: Exception) -> str:
    """Return what an error says, without what libraries append."""
    if isinstance(error, ValidationError):  # of the variant, which has its own checks
        first = error.errors()[0]
        return f"variant.{'.'.join(map(str, first['loc']))} = {abbreviate(first['input'])}: {first['msg']}"
    return (str(error).splitlines() or [""])[0][:300]
