"""How the systems cut a model: each of them every model, rules on devices by hand, and papers' memory of others' models."""

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from cut_helpers import blueprint_of
from settings_helpers import settings_with
from zoo_helpers import ONE_A_FAMILY

from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import DeviceState
from piecework.models.cascade import initial_state
from piecework.models.layer_statistics import layer_statistics
from piecework.models.low_rank import low_rank
from piecework.models.masked import mask_model
from piecework.models.zoo import build_blueprint
from piecework.planning.costs import cost_model_for
from piecework.planning.cut import Cut, Traffic, label
from piecework.planning.paper_memory import fedepth, fedprophet, prism, profl
from piecework.planning.part import Part, whole_model
from piecework.strategies import find_method
from piecework.strategies.width.allsmall import AllSmallCut
from piecework.strategies.width.heterofl.server import HeteroFL, HeteroFLCut
from piecework.training.loop import classification_loss
from piecework.training.methods import METHODS
from piecework.training.scoring import predictions
from piecework.training.sgd import TrainingConfig


def state(budget: float, flops: float = 1e9) -> DeviceState:
    return DeviceState("board", int(budget), flops, math.inf, 1e8, 0.0)


@lru_cache
def cut_of(
    strategy: str,
    model: str,
    memory_model: str,
    smallest: float = 0,
    batch_size: int = 64,
    tokens: int = 500,
    aux_pool: str = "auto",
) -> Cut:
    norm = "running" if strategy == "fedrbn" else "batch"
    settings = settings_with(
        model=model,
        feddf__family=model,
        memory__model=memory_model,
        training__batch_size=batch_size,
        architecture__batch_norm=norm,
        fedprophet__aux_pool=aux_pool,
    )
    blueprint = blueprint_of(model, batch_norm=norm)
    if blueprint.vocabulary:
        blueprint = build_blueprint(model, num_classes=blueprint.num_classes, input_shape=(tokens,), batch_norm=norm)
    return find_method(strategy).make_cut(blueprint, cost_model_for(settings, blueprint), settings, int(smallest))


def parts_of(cut: Cut, stage: int, device: DeviceState, slowest: float) -> list[Part]:
    """What a device trains in a stage, by the method's assignment."""
    parts: list[Part] = cut.method(cut).parts(stage, device, slowest)
    return parts


def test_a_part_is_made_once() -> None:
    """HeteroFL's loss builds both models, which took most of a plan of many clients."""
    settings = settings_with(clients=2, strategy="heterofl")
    blueprint = blueprint_of("convnet")
    cut = HeteroFLCut(blueprint, cost_model_for(settings, blueprint), settings, method=HeteroFL)
    assert cut.part(cut.sub_model(1)) is cut.part(cut.sub_model(1))


# ---- one logit


def test_one_logit_is_a_binary_classifier() -> None:
    logits, y = torch.tensor([[0.0], [2.0], [-1.0]]), torch.tensor([1, 1, 0])
    by_hand = [math.log(2), math.log1p(math.exp(-2)), math.log1p(math.exp(-1))]
    assert float(classification_loss(logits, y)) == pytest.approx(sum(by_hand) / 3)
    assert float(classification_loss(logits, y, "sum")) == pytest.approx(sum(by_hand))
    assert predictions(logits).tolist() == [0, 1, 0]
    assert predictions(torch.tensor([[0.0, 1.0], [3.0, 1.0]])).tolist() == [1, 0]


REFUSED = {
    "feddf": ("lstm-imdb",),  # one logit
    "fedet": ("lstm-imdb",),
    "fedpm": ("deit-tiny", "lstm-imdb", "vit"),
    "fedprophet": ("lstm-imdb",),  # tokens cannot be attacked
    "fedrbn": ("cnn-femnist", "deit-tiny", "lenet5", "lstm-imdb", "mlp", "vit"),  # no batch norm
    "local": ("lstm-imdb", "mlp"),  # it masks convolutions, and linear layers without bias
    "orthdrop": ("mlp",),
    "prism": ("mlp",),  # its kernels are those of convolutions
    "slt": ("deit-tiny", "vit"),  # encoders add narrow features to wide ones
    "spafl": ("lstm-imdb", "mlp"),
}


# These take their cut from others: exclusivefl and jfat from FedAvg, fedrolex and feddrop from HeteroFL.
SAME_CUT = {"exclusivefl", "jfat", "fedrolex", "feddrop"}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name in METHODS if name not in SAME_CUT])
@pytest.mark.parametrize("name", ONE_A_FAMILY)
def test_every_system_cuts_every_model_or_says_why_not(strategy, name) -> None:
    try:
        cut = cut_of(strategy, name, "fedprophet", 1e12, tokens=20)  # of an LSTM every token is a step to trace
        cut.require_model()
        stages = cut.stages
    except ValueError as error:
        assert name in REFUSED.get(strategy, ()), error
        return
    assert name not in REFUSED.get(strategy, ())
    for number in range(len(stages)):
        parts = parts_of(cut, number, state(1e12), slowest=1e9)
        assert (min(cut.traffic(parts).bytes) > 0) == (strategy != "local")
        for part in parts:
            assert part.parameters > 0
            assert part.forward_flops > 0


# ---- SpaFL's thresholds


@pytest.mark.parametrize(
    ("name", "width", "thresholds", "weights"),
    [
        ("lenet5", 1.0, 20 + 50 + 500 + 10, 430_500),
        ("conv4", 1.0, 64 + 64 + 128 + 128 + 128 + 128 + 10, 804_800),
        ("resnet18-preact", 1.0, 4800, 11_159_232),
        ("resnet18-preact", 0.5, 2400, 2_790_240),
    ],
)
def test_thresholds(name, width, thresholds, weights) -> None:
    plain = blueprint_of(name, width)
    names = dict(initial_state(mask_model(plain), 0))
    assert sum(value.numel() for key, value in names.items() if key.endswith(".tau")) == thresholds
    assert sum(value.numel() for key, value in names.items() if key.removesuffix("weight") + "tau" in names) == weights
    part = whole_model(mask_model(plain))
    assert part.parameters == whole_model(plain).parameters + thresholds
    cut = cut_of("spafl", name, "traced") if width == 1 else None
    if cut:
        assert cut.traffic([part]) == Traffic((8 * thresholds, 4 * thresholds), (thresholds, thresholds))


# ---- rules


def test_fedprophet_assigns_later_modules_by_memory_and_time() -> None:
    cut = cut_of("fedprophet", "vgg16", "fedprophet", 60e6, aux_pool="authors")
    assert [label(stage.parts[0]) for stage in cut.stages][:3] == ["conv1+conv2", "conv3..conv5", "conv6..conv8"]
    assert [stage.parts[0].head for stage in cut.stages][-2:] == ["aux.11", "head"]

    def assigned(stage: int, budget: float, speed: float) -> str:
        (part,) = parts_of(cut, stage, state(budget, speed), slowest=1e9)
        return label(part)

    assert assigned(0, 60e6, 1e12) == "conv1+conv2"  # no memory for more
    assert assigned(0, 400e6, 1e9) == "conv1+conv2"  # no time for more
    assert assigned(0, 400e6, 1e12) == "the whole model"
    # 39.52 and 75.50 M multiply-accumulates, 2560 of the head behind conv5: 2.911 times as long as the first alone
    assert assigned(0, 400e6, 2.92e9) == "conv1..conv5"
    assert assigned(0, 400e6, 2.9e9) == "conv1+conv2"
    assert assigned(5, 400e6, 2e9) == "conv11..conv13"
    assert assigned(0, 55e6, 1e12) == "conv1+conv2"  # the first always: by a paper's memory it is swapped
    # 12 bytes x 39,626 parameters; 4 x 64 x the inputs of conv1, bn1, conv2, bn2, of the head (16,384), and ten logits
    needed = 12 * 39_626 + 4 * 64 * (3 * 1024 + 3 * 65_536 + 16_384 + 10)
    assert cut.needed_bytes(cut.item(cut.stages[0].parts[0].atoms)) == needed


def test_the_memory_of_a_module_includes_its_auxiliary_head() -> None:
    """64 channels of 16 x 16 are pooled to 1 x 1, 2 x 2, or not at all: 640, 2,560 or 163,840 weights and ten biases.

    Training holds parameters, gradients and momentum of 4 bytes each.
    """
    cost = {}
    for pool in ("authors", "auto", "none"):
        cut = cut_of("fedprophet", "vgg16", "fedprophet", 60e6, aux_pool=pool)
        cost[pool] = cut.bytes(cut.item((0, 1)))
    assert cost["auto"] - cost["authors"] == 12 * (2_560 - 640)
    assert cost["none"] - cost["authors"] == 12 * (163_840 - 640)
    traced = cut_of("fedprophet", "vgg16", "traced", 60e6, aux_pool="none")
    smaller = cut_of("fedprophet", "vgg16", "traced", 60e6, aux_pool="auto")
    assert traced.bytes(traced.item((0, 1))) > smaller.bytes(smaller.item((0, 1)))


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"num_rounds": 70}, [1] * 7),
        ({"num_rounds": 70, "fedprophet__lr_restart": False}, [1, 11, 21, 31, 41, 51, 61]),
        ({"fedprophet__stage_rounds": 5, "fedprophet__lr_restart": False}, [1, 6, 11, 16, 21, 26, 31]),
        ({"num_rounds": 5, "fedprophet__lr_restart": False}, [1, 2, 3, 4, 5, 6, 7]),  # a round for each module
        ({"strategy": "profl", "profl__stage_rounds": 4, "profl__shrinking": False}, [1, 5, 9, 13]),
        ({"strategy": "profl", "profl__stage_rounds": 4, "profl__distil_rounds": 2}, [20, 24, 28, 32]),
        ({"strategy": "profl", "num_rounds": 34, "profl__distil_rounds": 2}, [20, 24, 28, 32]),
        ({"strategy": "profl", "num_rounds": 5, "profl__distil_rounds": 2}, [11, 12, 13, 14]),
        # 102 = 1 + 3 x 5 + (13 + 13 + 12) + 4 x 12, and by parameters 100 = 1 + 3 x 5 + (30 + 8 + 3) + (2 + 3 + 8 + 30)
        ({"strategy": "profl", "num_rounds": 102}, [55, 67, 79, 91]),
        ({"strategy": "profl", "num_rounds": 100, "profl__freezing": "parameters"}, [58, 60, 63, 71]),
    ],
)
def test_the_places_of_stages_in_the_schedule_of_rates(changes: dict[str, Any], places: list[int]) -> None:
    """FedProphet's VGG-16 has seven modules; ProFL has four blocks, and first statistics, three steps and maps of shrinking."""
    settings = settings_with(
        **{"strategy": "fedprophet", "memory__model": "fedprophet", "training__batch_size": 64} | changes
    )
    blueprint = blueprint_of("vgg16" if settings.strategy == "fedprophet" else "resnet18")
    cut = find_method(settings.strategy).make_cut(blueprint, cost_model_for(settings, blueprint), settings, int(60e6))
    assert [stage.place for stage in cut.stages] == places


@pytest.mark.parametrize("strategy", ["heterofl", "fedrolex", "feddrop"])
def test_width_ratios_by_the_papers_rule(strategy: str) -> None:
    """R_k / R_max in 64ths, however much would fit; 1/64 at the least."""
    settings = settings_with(strategy=strategy, heterofl__width_rule="paper")
    blueprint = blueprint_of("convnet")
    cut = find_method(strategy).make_cut(blueprint, cost_model_for(settings, blueprint), settings)
    assert isinstance(cut, HeteroFLCut)
    whole = cut.bytes(cut.sub_model(0))
    half = -(-whole // 2)  # rounded up
    for budget, width in {2**60: 1, whole: 1, whole - 1: 63 / 64, half: 0.5, half - 1: 31 / 64, 1: 1 / 64}.items():
        assert cut.ratios[cut.level_of(state(budget))] == width
        assert cut.fit(budget, budget).stages[0].parts[0].blueprint.width == width
    by_budget = find_method(strategy).make_cut(
        blueprint, cut.cost_model, settings_with(heterofl__width_ratios="1,0.9,0.6,0.5")
    )
    assert isinstance(by_budget, HeteroFLCut)
    assert by_budget.ratios[by_budget.level_of(state(by_budget.bytes(by_budget.sub_model(2))))] == 0.6


def test_allsmall_by_the_papers_rule() -> None:
    settings = settings_with(strategy="allsmall", heterofl__width_rule="paper")
    blueprint = blueprint_of("convnet")
    cut = find_method("allsmall").make_cut(blueprint, cost_model_for(settings, blueprint), settings)
    assert isinstance(cut, AllSmallCut)
    whole = cut.cost_model.bytes(whole_model(blueprint))
    assert [cut.fit(budget, whole).width for budget in (2 * whole, whole, whole * 3 // 4 - 1)] == [1, 1, 47 / 64]
    with pytest.raises(
        ValueError, match=r"'paper' gives 0.01562 of the channels, which need [\d,]+ bytes, and .* has 100;"
    ):
        cut.fit(100, whole)


def test_prism_takes_the_largest_that_fits() -> None:
    cut = cut_of("prism", "resnet18", "prism", batch_size=32)
    full = cut.cost_model.reference_bytes
    assert full == 4 * 15 * 65536 * 32

    def taken(share: float) -> str:
        return label(parts_of(cut, 0, state(share * full), 1e9)[0])

    assert [taken(share) for share in (0.31, 0.61, 0.92, 1.3)] == [f"sub-model {keep}" for keep in (0.2, 0.4, 0.6, 0.8)]
    with pytest.raises(MemoryBudgetExceededError):
        taken(0.25)


def test_profl_uses_the_authors_thresholds_where_they_are_known() -> None:
    cut = cut_of("profl", "resnet18", "profl")
    assert [cut.cost_model.bytes(stage.parts[0]) for stage in cut.stages] == [506e6, 220e6, 112e6, 100e6]
    assert cut.cost_model.reference_bytes == 840e6
    assert cut.cost_model.bytes(Part(cut.blueprint, (0, 1, 2), "exits.2")) == 478e6
    # another batch: the formula, 3 maps a convolution: 5 convolutions, 3 basic ones of 2, 1 and 0.5 x 2^-2
    other = cut_of("profl", "resnet18", "profl", batch_size=32)
    units = 3 * 5 + 1 / 2 + 1 / 4 + 1 / 8
    assert other.cost_model.bytes(other.stages[0].parts[0]) == int(10**6 * units * 32 / 2)


def test_what_fedepth_leaves_out_is_said() -> None:
    cut = cut_of("fedepth", "preresnet20", "fedepth", batch_size=32)
    parts = parts_of(cut, 0, state(cut.cost_model.reference_bytes / 8), 1e9)
    assert cut.find_excluded(parts) == ["block1", "block2", "block3"]
    assert cut.find_excluded(parts_of(cut, 0, state(cut.cost_model.reference_bytes), 1e9)) == []


def test_an_unknown_system_raises_an_error_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'guess': known are allsmall, .*spafl"):
        find_method("guess")


# ---- memory-models on other systems' models


def test_a_mask_does_not_hide_its_convolution() -> None:
    plain, part = whole_model(blueprint_of("conv4")), whole_model(mask_model(blueprint_of("conv4")))
    first, masked_first = (layer_statistics(p.blueprint, "atoms.0").layers[0] for p in (plain, part))
    assert (masked_first.kind, masked_first.thresholds, first.thresholds) == ("Conv2d", 64, 0)
    assert (masked_first.inputs, masked_first.outputs, masked_first.weight) == (
        first.inputs,
        first.outputs,
        first.weight,
    )
    assert masked_first.parameters == first.parameters + 64
    training_config = TrainingConfig(lr=0.1, momentum=0.9, weight_decay=0.0, batch_size=16, epochs=1)
    by_fedprophet = [fedprophet.memory_bytes(p, plain.blueprint, training_config) for p in (plain, part)]
    assert by_fedprophet[1] - by_fedprophet[0] == 12 * 650
    assert len({profl.fitted_mb(p, 16) for p in (plain, part)}) == 1
    assert len({prism.memory_bytes(p, plain.blueprint, training_config) for p in (plain, part)}) == 1
    assert fedprophet.macs(part, 1) == fedprophet.macs(plain, 1)


def test_fedepths_memory_model_counts_the_layers_of_sub_models_and_takes_widths_as_ratios() -> None:
    training_config = TrainingConfig(lr=0.1, momentum=0.9, weight_decay=0.0, batch_size=32, epochs=1)
    full = blueprint_of("resnet18")
    whole = fedepth.memory_bytes(whole_model(full), full, training_config)
    assert fedepth.memory_bytes(whole_model(blueprint_of("resnet18", 0.5)), full, training_config) == whole / 2
    sizes = [fedepth.memory_bytes(whole_model(low_rank(full, keep)), full, training_config) for keep in (0.2, 0.4, 0.6)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.42 * whole


def test_a_cut_does_not_change() -> None:
    cut = cut_of("fedprophet", "vgg16", "fedprophet", 60e6)
    count = len(cut.stages)
    with pytest.raises(AttributeError, match="smallest of a cut is set already"):
        cut.smallest = 10**9
    assert len(cut.with_smallest(10**9).stages) < count == len(cut.stages)
