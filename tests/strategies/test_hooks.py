"""The core of all methods is small: what a method and a cut may override, and that nothing else is overridden."""

import inspect

import pytest

from piecework.planning.cut import Cut
from piecework.strategies import find_method
from piecework.strategies.method import Method, StagedMethod
from piecework.training.methods import METHODS


def hooks(cls: type, *bases: type) -> set[str]:
    """The methods and properties of a base that classes override anywhere below it."""
    own = {name for base in bases for name, value in vars(base).items() if callable(value) or hasattr(value, "__get__")}
    below = {name for each in cls.__mro__ if each not in bases and issubclass(each, bases) for name in vars(each)}
    return {name for name in own & below if not name.startswith("__")}


ATTRIBUTES = {"can", "cut_class", "state_class", "serving_class", "piece_class"}


def test_methods_override_few_hooks() -> None:
    found = set().union(*(hooks(find_method(name), Method) for name in METHODS)) - ATTRIBUTES
    assert len(found) <= 13, sorted(found)


def test_cuts_override_few_hooks() -> None:
    found = set().union(*(hooks(find_method(name).cut_class, Cut) for name in METHODS)) - {"method"}
    assert len(found) <= 10, sorted(found)


@pytest.mark.parametrize("name", METHODS)
def test_an_assignment_is_a_function_of_its_context(name: str) -> None:
    method = find_method(name)
    assert list(inspect.signature(method.assign).parameters) == ["self", "ctx"]
    assert issubclass(method, StagedMethod) == method.can.stages
