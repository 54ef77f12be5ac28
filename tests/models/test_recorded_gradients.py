"""What recorded calls cannot say of gradients keeps a layer whole, so that a cut model learns what the module does."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from piecework.models.cascade import Cascade, unset_weights
from piecework.models.imported.atoms import cut
from piecework.models.imported.module import Source, make
from piecework.models.zoo import build_blueprint

DIGIT = (1, 8, 8)


def source_of(function: str) -> Source:
    return Source(f"{Path(__file__).with_name('own_gradients.py')}:{function}", 10, DIGIT, "running")


def cascade_of(source: Source, whole: nn.Module) -> Cascade:
    """The cut module with the weights of the whole one."""
    with unset_weights():
        cascade = Cascade(build_blueprint(source.name, num_classes=10, input_shape=DIGIT, batch_norm="running"))
    cascade.load_state_dict({name: whole.state_dict()[original(name)] for name in cascade.state_dict()})
    return cascade


def original(name: str) -> str:
    """The name that an array has in the module itself."""
    return name.partition(".")[2] if name.startswith("head") else name.split(".", 2)[2]


COUNTING = ["counts_in_dict", "counts_in_list", "counts_within", "counts_in_object"]


@pytest.mark.parametrize("function", ["rounded", "gated", "centred", "scaled", *COUNTING])
def test_layers_learn_what_they_do_in_the_module(function: str) -> None:
    source = source_of(function)
    whole, batch = make(source), torch.randn(8, *DIGIT, generator=torch.Generator().manual_seed(0))
    cascade = cascade_of(source, whole)
    for module in (cascade, whole):
        for _ in range(2):
            F.cross_entropy(module.train()(batch), torch.arange(8)).backward()
    expected, arrays = dict(whole.named_parameters()), whole.state_dict()
    for name, parameter in cascade.named_parameters():
        gradient = expected[original(name)].grad
        assert parameter.grad is gradient is None or torch.equal(parameter.grad, gradient), name
    assert all(torch.equal(array, arrays[original(name)]) for name, array in cascade.state_dict().items())


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("rounded", ["first", "middle", "last"]),
        ("centred", ["first", "middle", "last"]),
        ("scaled", ["first", "middle_layer", "last"]),
        ("exact", ["first", "middle", "last"]),
        ("decorated", ["first", "middle", "last"]),
        ("halved", ["first", "middle", "last"]),
    ],
)
def test_only_that_layer_is_whole(function: str, names: list[str]) -> None:
    assert list(cut(source_of(function)).names) == names


@pytest.mark.parametrize("function", ["exact", "decorated", "halved"])
def test_a_layer_has_the_precision_that_it_has_in_the_module(function: str) -> None:
    source = source_of(function)
    whole, batch = make(source).eval(), torch.randn(8, *DIGIT, generator=torch.Generator().manual_seed(0))
    cascade = cascade_of(source, whole).eval()
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert torch.equal(cascade(batch), whole(batch))


def test_functions_of_torch_are_as_they_were() -> None:
    before = torch.autograd.Function.__dict__["apply"], torch.ones, torch.zeros, torch.autocast.__enter__
    cut.cache_clear()
    cut(source_of("rounded"))
    assert (torch.autograd.Function.__dict__["apply"], torch.ones, torch.zeros, torch.autocast.__enter__) == before


@pytest.mark.parametrize("function", COUNTING)
def test_a_count_that_no_file_has_keeps_the_module_whole(function: str) -> None:
    found = cut(source_of(function))
    assert found.reason == "Net: its forward pass changes 'count', which no file has"
    assert found.parts[0].middle.count == make(source_of(function)).middle.count  # type: ignore[union-attr]
