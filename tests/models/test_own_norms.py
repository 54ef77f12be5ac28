"""Batch norms of modules outside this project: weights of their own, and classes that do more than torch's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from piecework.models.cascade import Blueprint, Cascade
from piecework.models.dual_norm import with_two_sets
from piecework.models.imported.objects import name_object
from piecework.models.int8 import find_pairs, to_int8
from piecework.models.masked import norms_behind
from piecework.models.nested_norms import _build
from piecework.models.static_norms import with_statistics
from piecework.models.zoo import build_blueprint

SHAPE = (1, 8, 8)


class ActiveNorm(nn.BatchNorm2d):
    """A norm with the activation inside, as timm's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def block(norm: nn.Module) -> nn.Sequential:
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 3), norm), nn.Sequential(nn.Conv2d(4, 4, 3)), pooled)


def blueprint_of(module: nn.Module, batch_norm: str) -> Blueprint:
    return build_blueprint(name_object(module), num_classes=3, input_shape=SHAPE, batch_norm=batch_norm)


@pytest.mark.parametrize("batch_norm", ["running", "batch", "group", "frozen"])
def test_a_norm_begins_with_the_weights_of_the_module(batch_norm: str) -> None:
    norm = nn.BatchNorm2d(4)
    nn.init.zeros_(norm.weight)  # as of the last norm of a residual block
    nn.init.constant_(norm.bias, 0.5)
    arrays = Cascade(blueprint_of(block(norm), batch_norm)).state_dict()
    assert arrays["atoms.0.0.1.weight"].tolist() == [0] * 4
    assert arrays["atoms.0.0.1.bias"].tolist() == [0.5] * 4


def test_a_frozen_norm_has_the_statistics_of_the_module() -> None:
    module = block(nn.BatchNorm2d(4))
    module(torch.randn(5, *SHAPE))
    frozen, x = Cascade(blueprint_of(module, "frozen")), torch.randn(5, *SHAPE)
    torch.testing.assert_close(frozen.train()(x), module.eval()(x))


def test_a_norm_keeps_the_activation_inside() -> None:
    module = block(ActiveNorm(4))
    x = torch.randn(5, *SHAPE)
    torch.testing.assert_close(Cascade(blueprint_of(module, "batch")).eval()(x), module.train()(x))


@pytest.mark.parametrize("norm", ["group", "frozen"])
def test_a_norm_with_code_of_its_own_is_not_replaced_by_another_kind(norm: str) -> None:
    message = f"0.1 is a ActiveNorm, whose own code a norm of architecture.norm = {norm} would not have"
    with pytest.raises(ValueError, match=message):
        blueprint_of(block(ActiveNorm(4)), norm)


def frozen_in_int8(build: Callable[[], nn.Module]) -> None:
    to_int8(build(), find_pairs(build, SHAPE))


CHANGES = {
    "one with two sets of statistics": with_two_sets,
    "one with statistics of each nested net": lambda build: _build(build, 0.5, {"0.1": {0.5: 2, 1.0: 4}}),
    "a convolution in int8 that includes it": frozen_in_int8,
}


@pytest.mark.parametrize("replacement", CHANGES)
def test_a_strategy_that_changes_norms_refuses_those_with_code_of_their_own(replacement: str) -> None:
    message = f"a layer is a ActiveNorm, which does more than torch's batch norms, and {replacement}"
    with pytest.raises(ValueError, match=message):
        CHANGES[replacement](lambda: block(ActiveNorm(4)))


def test_channels_are_silent_only_behind_torchs_norms() -> None:
    assert norms_behind(lambda: block(nn.BatchNorm2d(4)), SHAPE) == (("0.1", "0.0"),)
    assert norms_behind(lambda: block(ActiveNorm(4)), SHAPE) == ()


@pytest.mark.parametrize("batch_norm", ["running", "batch", "local", "group", "frozen"])
def test_a_norm_without_weights_has_none_in_its_place(batch_norm: str) -> None:
    module = block(nn.BatchNorm2d(4, affine=False))
    cascade = Cascade(blueprint_of(module, batch_norm))
    assert not [name for name, _ in cascade.named_parameters() if name.startswith("atoms.0.0.1")]
    assert cascade.train()(torch.randn(2, *SHAPE)).shape == (2, 3)


@pytest.mark.parametrize("batch_norm", ["batch", "group"])
def test_a_narrow_norm_without_arrays_knows_its_channels(batch_norm: str) -> None:
    name = name_object(block(nn.BatchNorm2d(4, affine=False)))
    small = build_blueprint(name, num_classes=3, input_shape=SHAPE, width=0.5, batch_norm=batch_norm)
    tracking = Cascade(with_statistics(small))
    assert tracking(torch.randn(2, *SHAPE)).shape == (2, 3)
    norm = tracking.atoms[0].get_submodule("0.1")
    assert (norm.num_features if isinstance(norm, nn.BatchNorm2d) else norm.num_channels) == 2
