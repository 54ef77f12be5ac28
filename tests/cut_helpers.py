"""A model of the zoo that tests of cuts share, built once."""

from functools import lru_cache

from piecework.models.cascade import Blueprint
from piecework.models.zoo import build_blueprint, usual_input


@lru_cache
def blueprint_of(name: str, width: float = 1.0, **options: str) -> Blueprint:
    shape, classes = usual_input(name)
    return build_blueprint(name, num_classes=classes, input_shape=shape, width=width, **options)
