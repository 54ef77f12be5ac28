"""Sub-models by width: which channels are the same, extraction, and averaging by coverage."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_pruning
from torch import nn

from piecework.federation.aggregation import WeightedMean
from piecework.models.cascade import Blueprint, Cascade
from piecework.models.channel_axes import Axis
from piecework.models.channels import channel_axes
from piecework.models.layers import narrow_models, scale_channels, stack_layers
from piecework.models.width import Select, draw_channels, rolling, sub_indices, take, take_first
from piecework.models.zoo import MODELS, build_blueprint

SMALL = {"vit": (1, 32, 32), "cnn4": (3, 56, 56), "cnn3": (3, 16, 16), "lstm-imdb": (12,)}
SELECTS: dict[str, Select] = {
    "ordered": take_first,
    "rolling": rolling(7),
    "drawn": draw_channels(np.random.default_rng(3)),
}


@pytest.mark.parametrize(
    ("channels", "width", "ratio", "down", "up"),
    [
        (16, 1.0, 0.3, 4, 5),  # 4.8
        (30, 1.0, 0.1, 3, 3),  # exactly 3, although 30 * 0.1 is above it in floating point
        (16, 0.36, 0.5, 2, 3),  # of 5 channels, which a model of width 0.36 has
        (8, 1.0, 0.0625, 1, 1),
        (50, 0.25, 1.0, 12, 12),
    ],
)
def test_a_sub_model_rounds_the_channels_of_the_full_model_up(
    channels: int, width: float, ratio: float, down: int, up: int
) -> None:
    assert scale_channels(channels, width * ratio) == down
    with narrow_models(ratio):
        assert scale_channels(channels, width * ratio) == up
    assert scale_channels(channels, width * ratio) == down


def blueprint(name: str, width: float, **more: Any) -> Blueprint:
    shape = SMALL.get(name, (1, 8, 8) if name == "convnet" else (1, 32, 32))
    return build_blueprint(name, num_classes=7, input_shape=shape, width=width, **more)


def state(of: Blueprint, seed: int = 1) -> dict[str, np.ndarray]:
    """The arrays of a model, batch norms' statistics as after some training."""
    torch.manual_seed(seed)
    found = Cascade(of).state_dict()
    return {name: np.asarray(value.numpy() + (0.1 if "running" in name else 0)) for name, value in found.items()}


def shapes(arrays: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("name", MODELS)
def test_extract_then_scatter_is_the_identity(name: str, select: str) -> None:
    full_model, small_model = blueprint(name, 0.25), blueprint(name, 0.125)
    full, small = state(full_model), shapes(state(small_model))
    indices = sub_indices(channel_axes(full_model), shapes(full), small, SELECTS[select])
    taken = {key: take(full[key], where) for key, where in indices.items()}
    assert shapes(taken) == small
    cascade = Cascade(small_model).eval()
    cascade.load_state_dict({key: torch.tensor(value) for key, value in taken.items()})
    tokens = torch.int64 if small_model.vocabulary else torch.float32
    assert cascade(torch.ones(2, *small_model.input_shape).to(tokens)).shape == (2, 7)

    mean = WeightedMean()
    mean.add(taken, 3.0, indices, shapes(full))
    for key, array in full.items():
        assert np.array_equal(mean.over(key, array), array), key
    moved = WeightedMean()
    moved.add({key: array + 1 for key, array in taken.items()}, 2.0, indices, shapes(full))
    for key, array in full.items():
        fresh, covered = moved.over(key, array), np.zeros(array.shape, bool)
        covered[np.ix_(*indices[key])] = True
        assert np.array_equal(fresh[~covered], array[~covered]), key
        assert (fresh[covered] != array[covered]).all(), key


@pytest.mark.parametrize("name", MODELS)
def test_at_full_width_it_is_the_full_model(name: str) -> None:
    model = blueprint(name, 0.25)
    full = state(model)
    for select in SELECTS.values():
        indices = sub_indices(channel_axes(model), shapes(full), shapes(full), select)
        assert all(np.array_equal(take(full[key], where), full[key]) for key, where in indices.items())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("vit", "deit-tiny", "resnet34", "vgg13")])
def test_where_the_other_channels_are_silent_the_small_model_is_the_full_one(name: str) -> None:
    """A channel whose arrays are zero says nothing, so that choosing the others must not change the output.

    Not so for transformers, whose layer norms look at all features. ResNet-34 and VGG-13 are built as others here.
    """
    full_model, small_model = blueprint(name, 0.25), blueprint(name, 0.125)
    full = state(full_model)
    indices = sub_indices(channel_axes(full_model), shapes(full), shapes(state(small_model)), SELECTS["drawn"])
    silent = {}
    for key, array in full.items():
        silent[key] = np.zeros_like(array)
        silent[key][np.ix_(*indices[key])] = take(array, indices[key])
    x = torch.rand(3, *full_model.input_shape)
    x = (9 * x).long() if full_model.vocabulary else x
    outputs = []
    for model, arrays in ((full_model, silent), (small_model, {k: take(full[k], w) for k, w in indices.items()})):
        cascade = Cascade(model).eval()
        cascade.load_state_dict({key: torch.tensor(value) for key, value in arrays.items()})
        with torch.no_grad():
            outputs.append(cascade(x))
    torch.testing.assert_close(*outputs)


ORACLE: dict[str, Callable[..., Any]] = {
    "prune_out_channels": lambda layer: (
        [("weight", 0), ("bias", 0)]
        + [(each, 0) for each in ("running_mean", "running_var") if getattr(layer, each, None) is not None]
    ),
    "prune_in_channels": lambda layer: [("weight", 1)],
}


@pytest.mark.parametrize(
    "name", ["resnet18", "preresnet20", "resnet18-preact", "vgg11", "convnet", "lenet5", "cnn-femnist"]
)
def test_torch_pruning_agrees(name: str) -> None:
    """What it would prune with a convolution's second output channel: the same entries of the same arrays."""
    model = blueprint(name, 0.125)
    cascade, axes = Cascade(model).eval(), channel_axes(model)
    graph = torch_pruning.DependencyGraph().build_dependency(cascade, torch.rand(2, *model.input_shape))
    names = {module: path for path, module in cascade.named_modules()}
    arrays = cascade.state_dict()
    for module, path in names.items():
        if not isinstance(module, nn.Conv2d):
            continue
        theirs = set()
        for dependency, channels in graph.get_pruning_group(module, torch_pruning.prune_conv_out_channels, [1]):
            layer = dependency.target.module
            if layer in names:
                places = ORACLE[dependency.handler.__name__](layer)
                theirs |= {(f"{names[layer]}.{each}", dim, *channels) for each, dim in places}
        theirs = {entry for entry in theirs if entry[0] in arrays}
        group = axes[f"{path}.weight"][0].group
        ours = {
            (key, dim, *(1 * axis.inner + i for i in range(axis.inner)))
            for key, each in axes.items()
            for dim, axis in enumerate(each)
            if axis is not None and axis.group == group
        }
        assert ours == theirs, path


def test_coverage_by_hand() -> None:
    """A weight [3, 2] of two clients, n = 1 and n = 3: rows 0, 1 of column 0; rows 1, 2 of both columns."""
    full = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "n": np.array(4), "alone": np.ones(2, np.float32)}
    mean = WeightedMean()
    first = {"w": (np.array([0, 1]), np.array([0])), "n": ()}
    second = {"w": (np.array([1, 2]), np.array([0, 1])), "n": ()}
    mean.add({"w": np.array([[10], [20]], np.float32), "n": np.array(5)}, 1, first, shapes(full))
    mean.add({"w": np.array([[40, 50], [60, 70]], np.float32), "n": np.array(9)}, 3, second, shapes(full))
    # row 0: 10 alone, and 1 as it was; row 1: (20 + 3 x 40) / 4, and 50 alone; row 2: 60, 70
    assert mean.over("w", full["w"]).tolist() == [[10, 1], [35, 50], [60, 70]]
    assert mean.over("w", full["w"]).dtype == np.float32
    assert mean.over("n", full["n"]) == 9
    assert "alone" not in mean


def test_disjoint_covers_put_the_model_together() -> None:
    full = {"w": np.zeros((2, 2), np.float32)}
    mean = WeightedMean()
    for row in (0, 1):
        mean.add({"w": np.full((1, 2), row + 1.0)}, 7 + row, {"w": (np.array([row]), np.arange(2))}, shapes(full))
    assert mean.over("w", full["w"]).tolist() == [[1, 1], [2, 2]]


def test_choices_by_hand() -> None:
    """Five channels, of which three: the first; from round 4 on 3, 4, 0; and drawn ones, ascending, another time others."""
    assert take_first(5, 3).tolist() == [0, 1, 2]
    assert [rolling(t)(5, 3).tolist() for t in (1, 2, 4, 6)] == [[0, 1, 2], [1, 2, 3], [3, 4, 0], [0, 1, 2]]
    select = draw_channels(np.random.default_rng(1))
    choices = [select(5, 3).tolist() for _ in range(20)]
    assert all(choice == sorted(set(choice)) and len(choice) == 3 and max(choice) < 5 for choice in choices)
    assert len({tuple(choice) for choice in choices}) > 5


def test_flattened_maps_gates_and_heads() -> None:
    """C x inner of a flattened map; outer x C of gates."""
    axes = {"flat": (None, Axis(0, inner=3)), "gates": (Axis(0, outer=2), None)}
    full, small = {"flat": (1, 12), "gates": (8, 1)}, {"flat": (1, 6), "gates": (4, 1)}
    indices = sub_indices(axes, full, small, lambda channels, kept: np.array([1, 3]))
    assert indices["flat"][1].tolist() == [3, 4, 5, 9, 10, 11]
    assert indices["gates"][0].tolist() == [1, 3, 5, 7]


def test_channels_that_do_not_match_are_an_error() -> None:
    axes = {"a": (Axis(0),), "b": (Axis(0),), "c": (None,)}
    with pytest.raises(ValueError, match="array 'b' has 3 channels where others of the same have 2"):
        sub_indices(axes, {"a": (4,), "b": (4,)}, {"a": (2,), "b": (3,)}, take_first)
    with pytest.raises(ValueError, match="array 'c' has 2 entries where the full model has 4"):
        sub_indices(axes, {"c": (4,)}, {"c": (2,)}, take_first)


class Grouped(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.deep(x)
        return out


def test_depthwise_convolutions_keep_channels() -> None:
    model = Blueprint(
        "own", (1, 4, 4), 2, (), lambda: stack_layers(conv=nn.Conv2d(1, 4, 1), deep=Grouped(4)), "running"
    )
    axes = channel_axes(model)
    (channels,) = {axes["head.conv.weight"][0], axes["head.deep.deep.weight"][0], axes["head.deep.deep.bias"][0]}
    assert channels is not None and axes["head.deep.deep.weight"][1:] == (None, None, None)


def test_layers_that_mix_channels_in_other_ways_are_an_error() -> None:
    for layer, why in (
        (nn.Conv2d(4, 4, 1, groups=2), "a convolution of 2 groups"),
        (nn.PixelShuffle(2), "pixel_shuffle"),
    ):
        model = Blueprint(
            "own", (1, 4, 4), 2, (), lambda layer=layer: stack_layers(conv=nn.Conv2d(1, 4, 1), own=layer), "running"
        )
        with pytest.raises(ValueError, match=f"cannot be followed through {why}"):
            channel_axes(model)
