"""The models of the zoo as tests build them."""

import numpy as np
import torch
from helpers import random_examples

from piecework.models.cascade import Blueprint
from piecework.models.zoo import MODELS, build_blueprint, usual_input
from piecework.training.examples import Examples

SMALL = {"cnn4": {"input_shape": (3, 64, 64)}, "lstm-imdb": {"input_shape": (60,)}, "vit": {"input_shape": (3, 96, 96)}}

# Models made of other layers: sizes of the same family differ in their number only.
ONE_A_FAMILY = sorted(MODELS.keys() - {"resnet10", "resnet34", "vgg13", "vgg16"})

# What most tests show depends neither on the number of encoders nor, but for bytes, on that of channels.
SHALLOW = {name: SMALL.get(name, {}) for name in MODELS}
SHALLOW |= {name: SHALLOW[name] | {"depth": 3} for name in ("deit-tiny", "vit")}
NARROW = {name: changes | {"width": 0.25} for name, changes in SHALLOW.items()}


def blueprint_of(name: str, **changes) -> Blueprint:
    shape, classes = usual_input(name)
    return build_blueprint(name, **{"num_classes": classes, "input_shape": shape, "batch_norm": "batch"} | changes)


def examples_for(blueprint: Blueprint, atom: int, count: int) -> Examples:
    if atom or not blueprint.vocabulary:
        return random_examples(count, blueprint.shape_before(atom), classes=blueprint.num_classes)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, blueprint.vocabulary, (count, *blueprint.input_shape))
    return Examples(lambda positions: torch.tensor(tokens[positions]), rng.integers(0, blueprint.num_classes, count))
