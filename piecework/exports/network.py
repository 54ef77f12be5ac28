"""A trained model as one module of plain operators: raw examples in, logits out, with the scaling inside.

`TrainedModel` checks what it is given and takes images in several forms, which no file can. The module here takes one form, and
its masks, its memory format and its resizing are such that every runtime has the operators.
"""

import copy
import json
from typing import Any

import torch
from torch import Tensor, nn

from piecework import __version__
from piecework.models.masked import fix_thresholds
from piecework.models.resizing import resize_matrix
from piecework.models.supermask import fix_masks
from piecework.models.trained_model import TrainedModel

INPUTS = {3: "images", 1: "features"}


class ExportedNetwork(nn.Module):
    """The network of a trained model, for one form of its examples (`dtype` and `shape`, without the batch dimension).

    A model of one logit z for two classes gives the logits [0, z], which have the same probabilities.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self.network = copy.deepcopy(model.network).cpu().float()
        for parameter in self.network.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.contiguous()  # ExecuTorch takes no channels-last weights
        fix_masks(self.network)
        fix_thresholds(self.network)
        scale_norms(self.network)
        self.tokens = bool(model.vocabulary)
        self.shape = model.resized_from or model.input_shape
        self.dtype = torch.int64 if self.tokens else getattr(torch, model.pixels)
        self.divisor = 255.0 if self.dtype == torch.uint8 else 1.0
        self.resized = self.shape != model.input_shape
        self.register_buffer("mean", model.mean.clone())
        self.register_buffer("std", model.std.clone())
        if self.resized:
            for name, have, want in zip(("down", "across"), self.shape[1:], model.input_shape[1:], strict=True):
                self.register_buffer(name, resize_matrix(have, want))
        with torch.no_grad():
            example = torch.zeros(2, *model.input_shape)
            self.single = self.network.eval()(example.long() if self.tokens else example).shape[1] == 1

    def forward(self, examples: Tensor) -> Tensor:
        """Return logits[B, classes] for examples[B, *shape]."""
        logits: Tensor = self.network(examples if self.tokens else self._scale(examples))
        return torch.cat([torch.zeros_like(logits), logits], dim=1) if self.single else logits

    def _scale(self, examples: Tensor) -> Tensor:
        x = examples.float()
        if self.resized:
            x = self.get_buffer("down") @ x @ self.get_buffer("across").T
        return (x / self.divisor - self.mean) / self.std

    @property
    def input_name(self) -> str:
        """`images`, `features` or `tokens`."""
        return "tokens" if self.tokens else INPUTS[len(self.shape)]


def scale_norms(network: nn.Module) -> None:
    """Give batch norms without scale and shift a scale of 1 and a shift of 0, which ExecuTorch's passes ask for."""
    for layer in network.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.weight is None:
            layer.weight = nn.Parameter(torch.ones(layer.num_features), requires_grad=False)
            layer.bias = nn.Parameter(torch.zeros(layer.num_features), requires_grad=False)


def metadata_of(network: ExportedNetwork, model: TrainedModel, described: dict[str, Any]) -> dict[str, str]:
    """Return what a file tells about itself, as text by key; `class_names` is a JSON list in the order of the logits."""
    shape = ", ".join(map(str, ("B", *network.shape)))
    kind = str(network.dtype).removeprefix("torch.")
    if network.tokens:
        meaning = f"token numbers below {model.vocabulary}"
    elif network.dtype == torch.uint8:
        meaning = "pixels from 0 to 255, channels first; scaled inside"
    else:
        meaning = "values at the scale of the training data; standardised inside"
    if network.resized:
        meaning += f", and resized to {' x '.join(map(str, model.input_shape[1:]))}"
    settings = described.get("settings")
    strategy = settings.get("strategy", "") if isinstance(settings, dict) else ""
    return {
        "class_names": json.dumps(list(model.class_names), ensure_ascii=False),
        "input": f"{network.input_name}: {kind} [{shape}], {meaning}",
        "output": f"logits: float32 [B, {model.num_classes}], in the order of class_names; softmax makes probabilities",
        "model": str(described["model"]["name"]),
        "dataset": str(described["inputs"]["dataset"]),
        "strategy": str(strategy),
        "producer": f"piecework {__version__}",
    }
