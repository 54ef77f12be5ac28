"""The trainers by the name of their strategy."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

from client_app.client import Client, Update
from client_app.task import Task

TRAINERS = {
    "fedavg": "client_app.trainers.fedavg",
    "fedepth": "client_app.trainers.fedepth",
    "m-fedepth": "client_app.trainers.m_fedepth",
}


def find_trainer(strategy: str) -> Callable[[Task, Client], Update]:
    """The client's side of a strategy; imported when it is needed, so that a board loads no other."""
    if strategy not in TRAINERS:
        raise ValueError(f"strategy {strategy!r} has no trainer: known are {', '.join(TRAINERS)}")
    return cast(Callable[[Task, Client], Update], import_module(TRAINERS[strategy]).train)
