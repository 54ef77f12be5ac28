"""The trainers by the name of their strategy."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import cast

from client_app.client import Client, Update
from client_app.task import Metrics, Task
from client_app.validation import evaluate_whole

TRAINERS = {
    "allsmall": "client_app.trainers.fedavg",  # of a narrow model
    "depthfl": "client_app.trainers.depthfl",
    "exclusivefl": "client_app.trainers.fedavg",  # who cannot afford the whole model is not asked
    "fedavg": "client_app.trainers.fedavg",
    "feddf": "client_app.trainers.feddf",
    "feddrop": "client_app.trainers.heterofl",  # the server chooses other channels
    "fedepth": "client_app.trainers.fedepth",
    "fedet": "client_app.trainers.feddf",  # what differs is the server's
    "fedpm": "client_app.trainers.fedpm",
    "fedprophet": "client_app.trainers.fedprophet",
    "fedrbn": "client_app.trainers.fedrbn",
    "fedrolex": "client_app.trainers.heterofl",
    "fjord": "client_app.trainers.fjord",
    "heterofl": "client_app.trainers.heterofl",
    "jfat": "client_app.trainers.fedprophet",  # one module, the whole model
    "local": "client_app.trainers.spafl",  # without communication
    "m-fedepth": "client_app.trainers.m_fedepth",
    "origdrop": "client_app.trainers.heterofl",
    "orthdrop": "client_app.trainers.prism",
    "prism": "client_app.trainers.prism",
    "profl": "client_app.trainers.profl",
    "spafl": "client_app.trainers.spafl",
    "splitmix": "client_app.trainers.splitmix",
}


def find_trainer(strategy: str) -> Callable[[Task, Client], Update]:
    """The client's side of a strategy; imported when it is needed, so that a board loads no other."""
    return cast(Callable[[Task, Client], Update], _module(strategy).train)


def find_evaluator(strategy: str) -> Callable[[Task, Client], Metrics]:
    """How a client evaluates the model that was sent: by its trainer's `evaluate`, else the whole model, atom by atom."""
    return cast(Callable[[Task, Client], Metrics], getattr(_module(strategy), "evaluate", evaluate_whole))


def find_survey(strategy: str) -> Callable[[Task, Client], Metrics]:
    """What a strategy asks of all clients between rounds: its trainer's `survey`."""
    return cast(Callable[[Task, Client], Metrics], _module(strategy).survey)


def _module(strategy: str) -> ModuleType:
    if strategy not in TRAINERS:
        raise ValueError(f"strategy {strategy!r} has no trainer: known are {', '.join(TRAINERS)}")
    return import_module(TRAINERS[strategy])
