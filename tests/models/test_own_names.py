"""The arrays of a model that was trained in atoms, given back to the module that it was made from."""

import json
from pathlib import Path

import pytest
import torch
from helpers import TRIO, run_local
from safetensors.torch import save_file
from torch import Tensor, nn

from piecework.models.cascade import Blueprint, Cascade
from piecework.models.imported.objects import name_object
from piecework.models.imported.own_names import fill_module
from piecework.models.model_file import ModelFileError, description
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


class Masked(nn.Module):
    """Has a token that only another task uses, beside one that each pass uses."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(64, 8), nn.Linear(8, classes)
        self.token, self.mask_token = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.full((8,), 3.0))
        self.register_buffer("relative", torch.arange(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x.flatten(1)).relu() + self.token)


def masked(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return Masked(num_classes)


def test_an_array_that_no_pass_uses_keeps_the_values_of_the_module_that_is_filled(tmp_path: Path) -> None:
    settings = {"model": f"{__file__}:masked", "strategy": "fedavg", "fleet": "unlimited", "num_rounds": 1}
    run = run_local(tmp_path, **TRIO | settings)
    described = description(run.path / "model.safetensors")
    assert described["model"]["unused"] == ["mask_token", "relative"]
    module = Masked()
    filled = fill_module(module, run.path)
    assert filled.mask_token.tolist() == [3.0] * 8
    assert filled.token.abs().sum() > 0


def test_an_absent_array_is_refused_unless_the_file_says_that_none_uses_it(tmp_path: Path) -> None:
    arrays = Cascade(blueprint_of(Late(3))).state_dict()
    fill_module(Late(3), save(arrays, tmp_path))
    del arrays["head.out.bias"]
    with pytest.raises(ModelFileError, match=r"the file has no out\.bias"):
        fill_module(Late(3), save(arrays, tmp_path))
