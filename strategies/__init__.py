"""The methods, found by name. Each way of making a model fit a device has a folder, and in it each method has a folder with
`server.py` and `client.py`, or one file.

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

from importlib import import_module
from typing import TYPE_CHECKING

from piecework.device_profiles.names import did_you_mean

if TYPE_CHECKING:
    from piecework.strategies.method import Method

STRATEGIES = {
    "allsmall": ("piecework.strategies.width.allsmall", "AllSmall"),
    "depthfl": ("piecework.strategies.cascade.depthfl.server", "DepthFL"),
    "exclusivefl": ("piecework.strategies.whole.exclusivefl", "ExclusiveFL"),
    "fedavg": ("piecework.strategies.whole.fedavg", "FedAvg"),
    "feddf": ("piecework.strategies.distillation.feddf.server", "FedDF"),
    "feddrop": ("piecework.strategies.width.feddrop", "FedDrop"),
    "fedepth": ("piecework.strategies.cascade.fedepth.server", "FeDepth"),
    "fedet": ("piecework.strategies.distillation.fedet", "FedET"),
    "fedpm": ("piecework.strategies.sparse.fedpm.server", "FedPM"),
    "fedprophet": ("piecework.strategies.cascade.fedprophet.server", "FedProphet"),
    "fedrbn": ("piecework.strategies.whole.fedrbn.server", "FedRBN"),
    "fedrolex": ("piecework.strategies.width.fedrolex", "FedRolex"),
    "fjord": ("piecework.strategies.width.fjord.server", "FjORD"),
    "heterofl": ("piecework.strategies.width.heterofl.server", "HeteroFL"),
    "jfat": ("piecework.strategies.whole.jfat", "JFAT"),
    "local": ("piecework.strategies.sparse.spafl.server", "Local"),
    "m-fedepth": ("piecework.strategies.cascade.fedepth.server", "MFeDepth"),
    "origdrop": ("piecework.strategies.width.origdrop", "OrigDrop"),
    "orthdrop": ("piecework.strategies.low_rank.orthdrop", "OrthDrop"),
    "prism": ("piecework.strategies.low_rank.prism.server", "PriSM"),
    "profl": ("piecework.strategies.cascade.profl.server", "ProFL"),
    "spafl": ("piecework.strategies.sparse.spafl.server", "SpaFL"),
    "splitmix": ("piecework.strategies.width.splitmix.server", "SplitMix"),
}


def find_method(name: str) -> "type[Method]":
    """Return the method of this name, importing its module. Raises ValueError, which lists the known names."""
    require_strategy(name)
    module, attribute = STRATEGIES[name]
    found: type[Method] = getattr(import_module(module), attribute)
    return found


def require_strategy(name: str) -> None:
    """Raise ValueError, which lists the known names, if there is no strategy of this name."""
    if name not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise ValueError(f"unknown strategy {name!r}: known are {known}{did_you_mean(name, STRATEGIES)}")
