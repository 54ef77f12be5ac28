"""Names of modules that are given as objects: other computations have other names, and equal ones the same in each process."""

import enum
import functools
import operator
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.models.cascade import Cascade, unset_weights
from piecework.models.imported.atoms import cut
from piecework.models.imported.module import Source
from piecework.models.imported.objects import name_object
from piecework.models.zoo import build_blueprint

SHAPE = (1, 8, 8)


class Mode(enum.Enum):
    """What a layer does."""

    ONE = 1
    TWO = 2


@dataclass
class Config:
    """A factor, as of a configuration."""

    scale: float


class Factor:
    """A function with an attribute."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale


class Net(nn.Module):
    """Layers with a thing between them that decides what is computed."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.thing = thing

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        if callable(self.thing):
            x = self.thing(x)
        elif hasattr(self.thing, "scale"):
            x = x * self.thing.scale
        elif isinstance(self.thing, torch.dtype):
            x = x.to(self.thing).float()
        elif self.thing is Mode.TWO:
            x = x * 2
        return self.last(self.second(x))


PAIRS: dict[str, tuple[Any, Any]] = {
    "functions": (torch.tanh, torch.sigmoid),
    "partials": (
        functools.partial(F.leaky_relu, negative_slope=0.1),
        functools.partial(F.leaky_relu, negative_slope=0.5),
    ),
    "dataclasses": (Config(1.0), Config(5.0)),
    "namespaces": (SimpleNamespace(scale=1.0), SimpleNamespace(scale=5.0)),
    "enums": (Mode.ONE, Mode.TWO),
    "types": (torch.float32, torch.bfloat16),
    "objects": (Factor(1.0), Factor(7.0)),
    "methods": (Factor(1.0).__call__, Factor(7.0).__call__),
    "functions of Python": (F.relu, F.relu6),
}


def require_own_cuts(first: nn.Module, second: nn.Module) -> None:
    """The second of two modules has another name, and a cut that computes what it does."""
    names = []
    x = torch.randn(3, *SHAPE)
    for module in (first, second):
        names.append(name_object(module))
        with unset_weights():
            cascade = Cascade(build_blueprint(names[-1], num_classes=10, input_shape=SHAPE)).eval()
        own = module.state_dict()
        cascade.load_state_dict(
            {name: own[name.split(".", 1 if name.startswith("head") else 2)[-1]] for name in cascade.state_dict()}
        )
        assert torch.equal(cascade(x), module.eval()(x))
    assert names[0] != names[1]


@pytest.mark.parametrize("kind", PAIRS)
def test_modules_that_hold_other_things_are_not_taken_for_one_another(kind: str) -> None:
    require_own_cuts(*map(Net, PAIRS[kind]))


CELL = """
import functools, torch
from torch import nn
class Net(nn.Module):
    {member}
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)
    def forward(self, x):
        return self.last(self.second({used}(self.first(x.flatten(1)))))
{after}
"""
CELLS = {
    "class attribute": ("k = {k}", "self.k * ", ""),
    "property": ("@property\n    def k(self): return {k}", "self.k * ", ""),
    "static method": ("@staticmethod\n    def k(x): return {k} * x", "self.k", ""),
    "class method": ("@classmethod\n    def k(cls, x): return {k} * x", "self.k", ""),
    "keyword default": ("def k(self, x, *, f={k}): return f * x", "self.k", ""),
    "helper": ("", "act", "def act(x): return x * {k}"),
    "helper of a helper": ("", "act", "def act(x): return inner(x)\ndef inner(x): return x * {k}"),
    "cached helper": ("", "factor() * ", "@functools.lru_cache\ndef factor(): return {k}"),
    "constant": ("", "SCALE * ", "SCALE = {k}"),
    "constant in a lambda": ("act = lambda self, x: SCALE * x", "self.act", "SCALE = {k}"),
    "settings": ("", "SETTINGS['k'] * ", "SETTINGS = dict(k={k})"),
    "tensor": ("", "SCALE * ", "SCALE = torch.tensor(float({k}))"),
}


@pytest.mark.parametrize("kind", CELLS)
def test_a_class_that_is_defined_again_with_a_change_is_another_one(kind: str) -> None:
    made = []
    for k in (1, 5):
        member, used, after = (text.format(k=k) for text in CELLS[kind])
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(CELL.format(member=member, used=used, after=after), scope)  # as a notebook does
        made.append(scope["Net"]())
    require_own_cuts(*made)


def test_a_module_that_cannot_be_told_from_another_has_its_own_cut_nevertheless() -> None:
    """What an object of C holds is not found, and the cut of the module that was given last holds."""
    modules, cuts = [Net(operator.methodcaller("mul", factor)) for factor in (2.0, 3.0)], []
    for module in modules:
        cuts.append(cut(Source(name_object(module), 10, SHAPE, "running")))
        assert cut(Source(name_object(module), 10, SHAPE, "running")) is cuts[-1]
    assert cuts[0] is not cuts[1]


def test_what_is_nested_deeply_has_a_name() -> None:
    nested: Any = SimpleNamespace(scale=1.0)
    for _ in range(5000):
        nested = SimpleNamespace(scale=1.0, inner=nested)
    assert name_object(Net(nested)).startswith("object:Net-")


NAMED = """
import sys
sys.path[:0] = {paths!r}
import test_object_names as own
kinds = [own.torch.float32, own.Mode.ONE]
thing = own.SimpleNamespace(scale=2.0, words={{"a", "b", "c"}}, kinds=kinds, act=own.PAIRS["partials"][0])
print(own.name_object(own.Net(thing)), own.name_object(own.Net(own.torch.tanh)), own.name_object(own.Net(own.Factor(2.0))))
"""


def test_equal_modules_have_the_same_name_in_each_process() -> None:
    code = NAMED.format(paths=[str(Path(__file__).parent), str(Path(__file__).parents[1])])
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert found.pop().count("object:Net-") == 3
