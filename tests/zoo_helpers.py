"""The models of the zoo as tests build them."""

from piecework.models.cascade import Blueprint
from piecework.models.zoo import build_blueprint, usual_input

SMALL = {"cnn4": {"input_shape": (3, 64, 64)}, "lstm-imdb": {"input_shape": (60,)}, "vit": {"input_shape": (3, 96, 96)}}


def blueprint_of(name: str, **changes) -> Blueprint:
    shape, classes = usual_input(name)
    return build_blueprint(name, **{"num_classes": classes, "input_shape": shape, "batch_norm": "batch"} | changes)
