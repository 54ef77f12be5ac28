"""Find the client's side of a strategy by name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import cast

from piecework.client_app.client import Client, Update
from piecework.client_app.validation import evaluate_whole
from piecework.models.cascade import Blueprint
from piecework.models.width import Indices
from piecework.training.answers import Metrics
from piecework.training.messages import Task
from piecework.training.methods import find_entry


def find_trainer(strategy: str) -> Callable[[Task, Client], Update]:
    """Return the function that trains a strategy's tasks. Only its own module is imported, so that a board loads no others.

    Raises ValueError for an unknown strategy.
    """
    return cast(Callable[[Task, Client], Update], _module(strategy).train)


def find_evaluator(strategy: str) -> Callable[[Task, Client], Metrics]:
    """Return the function that evaluates the sent model: the trainer's `evaluate`, else the whole model atom by atom.

    Raises ValueError for an unknown strategy.
    """
    return cast(Callable[[Task, Client], Metrics], getattr(_module(strategy), "evaluate", evaluate_whole))


def no_places(task: Task, seed: int, full: Blueprint, model: Blueprint) -> Mapping[str, Indices]:
    """Return no indices: the task's arrays are not cut out of longer ones."""
    return {}


def find_places(strategy: str) -> Callable[[Task, int, Blueprint, Blueprint], Mapping[str, Indices]]:
    """Return the function that says where a task's arrays lie in the full model's, for a run's seed, full and task's model.

    Raises ValueError for an unknown strategy.
    """
    return getattr(_module(strategy), "places", no_places)


def find_query(strategy: str) -> Callable[[Task, Client], Metrics]:
    """Return the trainer's `query`, which answers a strategy's query of all clients between rounds.

    Raises ValueError for an unknown strategy, or for one that queries nothing.
    """
    found = getattr(_module(strategy), "query", None)
    if found is None:
        raise ValueError(f"strategy {strategy} has no query that a client could answer")
    return cast(Callable[[Task, Client], Metrics], found)


def _module(strategy: str) -> ModuleType:
    return import_module(find_entry(strategy).client)
