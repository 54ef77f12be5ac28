"""Sub-models and output modules as real modules: the layers they are built of, counted by hand."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from cut_helpers import blueprint_of
from helpers import num_parameters

from piecework.models.basic_layers import basic_atoms, blocks_of, cascade_at, step_atoms, with_basic_layers
from piecework.models.cascade import Atom, Blueprint, auxiliary_head, initial_state
from piecework.models.layer_statistics import layer_statistics, unit_signature
from piecework.models.low_rank import low_rank
from piecework.models.partition import Piece
from piecework.models.zoo import MODELS, build_blueprint
from piecework.planning.paper_memory import profl
from piecework.planning.part import Part
from piecework.training.loop import PieceModel
from piecework.training.sgd import TrainingConfig


def forward(blueprint: Blueprint, atoms: Piece = ()) -> torch.Tensor:
    piece = PieceModel(blueprint, atoms or range(len(blueprint.atoms)), "head", blueprint.build_unit)
    return piece.logits(torch.rand(2, *blueprint.input_shape))


def at_step(blueprint: Blueprint, t: int) -> tuple[Blueprint, Piece]:
    """The model with basic layers, and its atoms in step t of ProFL."""
    blocks = blocks_of(blueprint)
    model = with_basic_layers(blueprint, blocks)
    return model, cascade_at(model, blocks, t)


# ---- layer statistics


@pytest.mark.parametrize("name", sorted(MODELS))
def test_layer_statistics_count_what_is_built(name) -> None:
    blueprint = blueprint_of(name)
    assert sum(layer_statistics(blueprint, unit).parameters for unit in blueprint.units()) == num_parameters(blueprint)
    small = blueprint_of(name, 0.25)
    state_bytes = sum(layer_statistics(small, unit).state_bytes for unit in small.units())
    assert state_bytes == sum(value.numel() * value.element_size() for _, value in initial_state(small, 0))


def test_a_layer_by_hand() -> None:
    blueprint = blueprint_of("vgg16")
    conv, bn, relu, pool = layer_statistics(blueprint, "atoms.1").layers
    assert (conv.kind, conv.path, conv.inputs, conv.outputs) == ("Conv2d", "conv", 64 * 32 * 32, 64 * 32 * 32)
    assert (conv.parameters, conv.weight, conv.macs) == (64 * 64 * 9 + 64, (64, 64, 3, 3), 64 * 32 * 32 * 64 * 9)
    assert (bn.macs, relu.parameters, pool.outputs) == (0, 0, 64 * 16 * 16)
    assert layer_statistics(blueprint, "atoms.1").flops == 2 * conv.macs
    assert layer_statistics(blueprint, "head").flops == 2 * (512 * 512 * 2 + 5120)


def test_sub_models_of_low_rank_that_differ_in_name_alone_share_their_costs() -> None:
    """PriSM's are narrow and OrthDrop's are not, but only maps have channels."""
    for name, alike in (("lstm-imdb", True), ("vit", True), ("resnet18", False)):
        narrow, wide = (low_rank(blueprint_of(name), 0.4, narrow=narrow) for narrow in (True, False))
        units = narrow.units()
        assert alike == all(unit_signature(narrow, unit) == unit_signature(wide, unit) for unit in units)


def test_units_that_are_built_alike_are_known() -> None:
    blueprint = blueprint_of("resnet18")
    same, other = (unit_signature(blueprint, f"atoms.{i}") for i in (1, 2))
    assert same == other != unit_signature(blueprint, "atoms.3")
    again = build_blueprint("resnet18", num_classes=10, input_shape=(3, 32, 32))
    assert unit_signature(again, "atoms.1") == same
    assert (
        unit_signature(low_rank(again, 0.5), "atoms.2") == unit_signature(low_rank(blueprint, 0.5), "atoms.2") != same
    )


def test_factories_with_lists_are_distinguished_by_their_values() -> None:
    def stack(sizes: list[int]) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(sizes)))

    atoms = tuple(Atom(name, partial(stack, [8, 8, 8]), (8,)) for name in ("a", "b"))
    blueprint = Blueprint("mine", (8,), 2, atoms, partial(torch.nn.Linear, 8, 2), "running")
    assert (
        unit_signature(blueprint, "atoms.0")
        == unit_signature(blueprint, "atoms.0")
        != unit_signature(blueprint, "atoms.1")
    )
    assert layer_statistics(blueprint, "atoms.1").parameters == 2 * 72


@pytest.mark.parametrize(
    ("shape", "classes", "authors", "auto", "none"),
    [
        ((64, 16, 16), 10, 64, 256, 16384),  # s = ceil(sqrt(10 / 64)) = 1; ceil(sqrt(256 / 64)) = 2
        ((16, 14, 14), 10, 16, 256, 3136),  # 1; 4
        ((8, 28, 28), 10, 32, 288, 6272),  # ceil(sqrt(1.25)) = 2; ceil(sqrt(32)) = 6
        ((64, 56, 56), 256, 256, 256, 200704),  # 2; 2
        ((64, 8, 8), 1000, 1024, 1024, 4096),  # ceil(sqrt(15.6)) = 4, whatever 256 inputs take
        ((128, 28, 28), 256, 512, 512, 100352),  # ceil(sqrt(2)) = 2
        ((256, 14, 14), 256, 256, 256, 50176),  # 1
        ((512, 1, 1), 10, 512, 512, 512),  # no larger than s: as it is
        ((16, 3, 3), 10, 16, 144, 144),  # at most the map
        ((4, 2, 2), 10, 16, 16, 16),
        ((65, 192), 10, 192, 192, 12480),  # tokens
        ((84,), 10, 84, 84, 84),
    ],
)
def test_auxiliary_heads(shape, classes, authors, auto, none) -> None:
    for pool, inputs in {"authors": authors, "auto": auto, "none": none}.items():
        head = auxiliary_head(shape, classes, pool)
        assert head.fc.weight.shape == (classes, inputs)
        assert head(torch.rand(3, *shape)).shape == (3, classes)


# ---- ProFL's blocks and output modules


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("resnet18", {}, [3, 2, 2, 2]),
        ("resnet34", {}, [4, 4, 6, 3]),
        ("preresnet20", {}, [4, 3, 3]),
        ("vgg11", {"pooling": "profl"}, [4, 4]),
        ("vgg16", {"pooling": "profl"}, [4, 4, 5]),
        ("convnet", {}, [2, 2, 1]),
        ("deit-tiny", {}, [5, 4, 4]),
        ("lstm-imdb", {}, [1, 2]),
    ],
)
def test_blocks_and_output_modules(name, options, sizes) -> None:
    blueprint = blueprint_of(name, **options)
    blocks = blocks_of(blueprint)
    assert [len(block) for block in blocks] == sizes
    assert [atom for block in blocks for atom in block] == list(range(len(blueprint.atoms)))
    model = with_basic_layers(blueprint, blocks)
    assert (model.feature_shape, model.num_replacement_atoms) == (blueprint.feature_shape, len(blocks) - 1)
    for t in range(1, len(blocks) + 1):
        cascade = cascade_at(model, blocks, t)
        assert cascade == (*range(blocks[t - 1][-1] + 1), *range(len(blueprint.atoms) + t - 1, len(model.atoms)))
        assert cascade[-len(step_atoms(model, blocks, t)) :] == step_atoms(model, blocks, t)


def test_an_output_module_with_norms() -> None:
    """The second basic layer of four has 64 channels of 8 x 8: a norm with 128 parameters behind 64 x 32 x 9 weights."""
    blueprint = blueprint_of("resnet18", 0.25)
    plain, normed = (with_basic_layers(blueprint, blocks_of(blueprint), norm=norm) for norm in (False, True))
    assert [type(layer).__name__ for layer in normed.build_unit("atoms.10")] == ["Conv2d", "BatchNorm2d"]
    counts = [sum(p.numel() for p in model.build_unit("atoms.10").parameters()) for model in (plain, normed)]
    assert counts == [64 * 32 * 9, 64 * 32 * 9 + 128]
    assert normed.shape_before(10) == plain.shape_before(10)
    encoders = blueprint_of("deit-tiny")
    same = with_basic_layers(encoders, blocks_of(encoders), norm=True)
    assert same.atoms == with_basic_layers(encoders, blocks_of(encoders)).atoms


def test_the_papers_memory_of_output_norms() -> None:
    """Norms of 128 x 16 x 16, 256 x 8 x 8 and 512 x 4 x 4 outputs take 28 MB. With them the authors' 506 MB do not hold."""
    blueprint = blueprint_of("resnet18")
    config = TrainingConfig(lr=0.1, momentum=0.9, weight_decay=0.0, batch_size=64, epochs=1)
    found = []
    for norm in (False, True):
        model = with_basic_layers(blueprint, blocks_of(blueprint), norm=norm)
        part = Part(model, step_atoms(model, blocks_of(blueprint), 1))
        found.append((profl.fitted_mb(part, 64), profl.memory_bytes(part, blueprint, config)))
    assert found == [(508, 506 * 10**6), (536, 536 * 10**6)]


def test_the_output_module_of_resnet18() -> None:
    model, atoms = at_step(blueprint_of("resnet18", 0.25), 2)
    assert [model.atoms[atom].name for atom in atoms[-3:]] == ["block4", "basic3", "basic4"]
    assert (basic_atoms(model), model.shape_before(10)) == ({2: 9, 3: 10, 4: 11}, (32, 16, 16))
    basic = model.build_unit("atoms.10")
    assert (basic.weight.shape, basic.stride, basic.bias) == ((64, 32, 3, 3), (2, 2), None)
    assert forward(model, atoms).shape == (2, 10)


def test_a_basic_layer_says_what_it_makes() -> None:
    """From odd maps a convolution with stride does not end where poolings do."""
    for name, shape, options in (
        ("vgg16", (1, 28, 28), {"pooling": "profl"}),
        ("vgg11", (3, 36, 36), {"pooling": "profl"}),
    ):
        model, atoms = at_step(build_blueprint(name, num_classes=10, input_shape=shape, width=0.1, **options), 1)
        for number, atom in enumerate(model.atoms):
            assert tuple(atom.build()(torch.rand(2, *model.shape_before(number))).shape[1:]) == atom.shape
        assert forward(model, atoms).shape == (2, 10)
