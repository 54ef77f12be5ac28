"""The methods, found by name (training/methods.py). Each way of making a model fit a device has a folder, and in it each
method has a folder with `server.py`, `client.py` and `settings.py`, or one file.

The way of a task. A method (method.py) decides, and its server (server.py) does what all methods share:

    draw_clients                which clients take part in the round
    Method.assign               a client's Assignment: work items, arrays to send, frozen units, the method's own config
    MethodServer.task_of        the Task that carries it, with the costs of its items (planning/cut.py)
    Dispatcher.configure        a message for each client; WeightCache sends frozen units ahead
    find_trainer, train         the client's side (client.py of the method): an Update within its budget
    UpdateGate.admit            each answer is read (Method.read), checked (Method.check) and compared with the others
    Method.combine, finish      updates are added as they arrive, and make the new model
    Method.assign_evaluation    who holds it evaluates it (choose_evaluators)
    Method.details              what the record says of the round

Plans and the coverage check call `Method.assign` too, so that they cannot disagree with the run. This package may import
federation, planning, client_app and the packages that these import.
"""

from typing import TYPE_CHECKING

from piecework.training.methods import find_entry, load

if TYPE_CHECKING:
    from piecework.strategies.method import Method


def find_method(name: str) -> "type[Method]":
    """Return the method of this name (training/methods.py), importing its module. Raises ValueError if there is none."""
    found: type[Method] = load(find_entry(name).server)
    return found
