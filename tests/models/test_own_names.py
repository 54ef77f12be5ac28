"""The arrays of a model that was trained in atoms, given back to the module that it was made from."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from piecework.models.cascade import Blueprint, Cascade
from piecework.models.imported.objects import name_object
from piecework.models.imported.own_names import fill_module
from piecework.models.model_file import ModelFileError
from piecework.models.zoo import build_blueprint

FEATURES = (6,)


class Late(nn.Module):
    """Reads a parameter before the layers whose result it scales."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.scale, self.out = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        *first, second, last = self.layers
        for layer in first:
            x = layer(x).relu()
        return self.out(self.scale * last(second(x).relu()))


def blueprint_of(module: nn.Module, shape: tuple[int, ...] = FEATURES, batch_norm: str = "running") -> Blueprint:
    return build_blueprint(name_object(module), num_classes=3, input_shape=shape, batch_norm=batch_norm)


def save(arrays: dict[str, Tensor], folder: Path) -> Path:
    described = {"model": {"name": "object:Late"}, "variant": {}, "atoms": [0], "head": "head", "settings": {}}
    file = folder / "model.safetensors"
    save_file(arrays, file, metadata={"piecework": json.dumps(described)})
    return file


def test_a_parameter_is_in_the_one_atom_that_uses_it(tmp_path: Path) -> None:
    module = Late(11)
    cascade = Cascade(blueprint_of(module))
    arrays = cascade.state_dict()
    assert [name for name in arrays if name.endswith("scale")] == ["atoms.10.scale"]
    arrays["atoms.10.scale"] = torch.full((6,), 2.0)
    assert fill_module(module, save(arrays, tmp_path)).scale.tolist() == [2.0] * 6


def test_two_arrays_of_one_name_are_refused_unless_they_are_equal(tmp_path: Path) -> None:
    module = Late(3)
    arrays = Cascade(blueprint_of(module)).state_dict()
    fill_module(module, save(arrays | {"atoms.0.scale": torch.ones(6)}, tmp_path))
    with pytest.raises(
        ModelFileError, match=r"two different arrays of the name 'scale', one of which is atoms.2.scale"
    ):
        fill_module(module, save(arrays | {"atoms.0.scale": torch.zeros(6)}, tmp_path))
