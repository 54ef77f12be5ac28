"""The methods by name: where their code is, which tables of settings they read, and what they can do.

These are names and data only. Clients, lists of settings and a board read them without loading a method, or torch. A method of
a user's own needs no entry: its name is `MODULE:CLASS`, or that of a plugin (device_profiles/plugins.py).
"""

import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from piecework.device_profiles.documents import abbreviate
from piecework.device_profiles.names import did_you_mean
from piecework.device_profiles.plugins import find_plugin, list_plugins, load_plugin, refuse_exit
from piecework.training.capabilities import Capabilities
from piecework.training.families import FEDAVG, FEDDF, FEDEPTH, FEDPROPHET, HETEROFL, LOW_RANK, NARROW, SPAFL


@dataclass(frozen=True)
class Entry:
    """A method: its server's class (MODULE:CLASS), its clients' module, what it can do, and the tables of settings it reads.

    The clients' module has the function `train`, and may have `evaluate`, `query` and `places` (client_app/trainers.py).
    """

    server: str
    client: str
    can: Capabilities
    tables: tuple[str, ...] = ()


TABLES = {  # of settings, by name
    "depthfl": "piecework.strategies.cascade.depthfl.settings:DepthFLSettings",
    "fedavg": "piecework.strategies.whole.fedavg.settings:FedAvgSettings",
    "feddf": "piecework.strategies.distillation.feddf.settings:FedDFSettings",
    "fedepth": "piecework.strategies.cascade.fedepth.settings:FeDepthSettings",
    "fedet": "piecework.strategies.distillation.fedet.settings:FedETSettings",
    "fedpm": "piecework.strategies.sparse.fedpm.settings:FedPMSettings",
    "fedprophet": "piecework.strategies.cascade.fedprophet.settings:FedProphetSettings",
    "fedprox": "piecework.strategies.whole.fedprox.settings:FedProxSettings",
    "fedrbn": "piecework.strategies.whole.fedrbn.settings:FedRBNSettings",
    "fjord": "piecework.strategies.width.fjord.settings:FjORDSettings",
    "heterofl": "piecework.strategies.width.heterofl.settings:HeteroFLSettings",
    "prism": "piecework.strategies.low_rank.prism.settings:PriSMSettings",
    "profl": "piecework.strategies.cascade.profl.settings:ProFLSettings",
    "slt": "piecework.strategies.cascade.slt.settings:SLTSettings",
    "spafl": "piecework.strategies.sparse.spafl.settings:SpaFLSettings",
    "splitmix": "piecework.strategies.width.splitmix.settings:SplitMixSettings",
}

SIMPLEST = "fedavg"  # with which all others are compared

WHOLE = "piecework.client_app.whole"
METHODS = {
    "allsmall": Entry(
        "piecework.strategies.width.allsmall:AllSmall",
        WHOLE,
        replace(FEDAVG, advised=4, advised_fit="recompute"),
        ("heterofl",),
    ),
    "cocofl": Entry(
        "piecework.strategies.whole.cocofl.server:CoCoFL",
        "piecework.strategies.whole.cocofl.client",
        Capabilities(
            adapts=True,
            fit=False,
            why_not_private="it divides by the examples of the clients that answered, and its norms keep running statistics",
        ),
    ),
    "depthfl": Entry(
        "piecework.strategies.cascade.depthfl.server:DepthFL",
        "piecework.strategies.cascade.depthfl.client",
        Capabilities(
            attack="optional",
            adapts=True,
            untrained="cut off",
            asks="able",
            evaluates="as trained",
            measures=False,
            private=True,
            fit={"depthfl.feddyn-alpha": (0.0,)},
            lacks={"recompute": "its exits branch off inside of the segments that would run again"},
            when_excluded="gets no task",
        ),
        ("depthfl",),
    ),
    "exclusivefl": Entry(
        "piecework.strategies.whole.exclusivefl:ExclusiveFL",
        WHOLE,
        replace(FEDAVG, asks="able", advised=5, when_excluded="gets no task"),
    ),
    "fedavg": Entry(
        "piecework.strategies.whole.fedavg.server:FedAvg",
        "piecework.strategies.whole.fedavg.client",
        replace(FEDAVG, advised=1),
        ("fedavg",),
    ),
    "feddf": Entry(
        "piecework.strategies.distillation.feddf.server:FedDF",
        "piecework.strategies.distillation.feddf.client",
        FEDDF,
        ("feddf",),
    ),
    "feddrop": Entry(
        "piecework.strategies.width.feddrop:FedDrop",
        "piecework.strategies.width.heterofl.client",
        replace(NARROW, rotates=True),
        ("heterofl",),
    ),
    "fedepth": Entry(
        "piecework.strategies.cascade.fedepth.server:FeDepth",
        "piecework.strategies.cascade.fedepth.client",
        replace(FEDEPTH, advised=2),
        ("fedepth",),
    ),
    "fedet": Entry(
        "piecework.strategies.distillation.fedet.server:FedET",
        "piecework.strategies.distillation.feddf.client",
        replace(FEDDF, norms="running"),
        ("feddf", "fedet"),
    ),
    "fedpm": Entry(
        "piecework.strategies.sparse.fedpm.server:FedPM",
        "piecework.strategies.sparse.fedpm.client",
        Capabilities(
            attack="optional",
            norms="measured",
            other_norms=False,
            optimisers=False,
            why_not_private="a mask of d bits changes d counts by 1 each, and nothing bounds that but d itself",
            lacks={"micro-batch": "a step draws one mask, and each micro-batch would draw its own"},
            caveat="a mask of random weights, not the model",
        ),
        ("fedpm",),
    ),
    "fedprophet": Entry(
        "piecework.strategies.cascade.fedprophet.server:FedProphet",
        "piecework.strategies.cascade.fedprophet.client",
        replace(FEDPROPHET, advised=3),
        ("fedprophet",),
    ),
    "fedprox": Entry(
        "piecework.strategies.whole.fedprox.server:FedProx",
        "piecework.strategies.whole.fedprox.client",
        replace(FEDAVG, pages={"fedprox.mu": (0.0,)}),
        ("fedprox",),
    ),
    "fedrbn": Entry(
        "piecework.strategies.whole.fedrbn.server:FedRBN",
        "piecework.strategies.whole.fedrbn.client",
        Capabilities(
            attack="always",
            swaps=True,
            measures=False,
            evaluates="as trained",
            norms="local",
            other_norms=False,
            fit=False,
            why_not_private="norms' statistics of some clients are copied to others, beside the mean",
            public={"fedrbn.evaluation-branch": ("detector",)},
            caveat="swapping is only simulated",
        ),
        ("fedrbn",),
    ),
    "fedrolex": Entry(
        "piecework.strategies.width.fedrolex:FedRolex",
        "piecework.strategies.width.heterofl.client",
        replace(NARROW, rotates=True),
        ("heterofl",),
    ),
    "fjord": Entry(
        "piecework.strategies.width.fjord.server:FjORD",
        "piecework.strategies.width.fjord.client",
        replace(NARROW, fit=False),
        ("heterofl", "fjord"),
    ),
    "heterofl": Entry(
        "piecework.strategies.width.heterofl.server:HeteroFL",
        "piecework.strategies.width.heterofl.client",
        HETEROFL,
        ("heterofl",),
    ),
    "jfat": Entry(
        "piecework.strategies.whole.jfat:JFAT",
        "piecework.strategies.cascade.fedprophet.client",
        replace(FEDPROPHET, cuts=False, swaps=True, caveat="swapping is only simulated"),
        ("fedprophet",),
    ),
    "local": Entry(
        "piecework.strategies.sparse.spafl.server:Local", "piecework.strategies.sparse.spafl.client", SPAFL, ("spafl",)
    ),
    "m-fedepth": Entry(
        "piecework.strategies.cascade.fedepth.server:MFeDepth",
        "piecework.strategies.cascade.fedepth.client_of_m",
        replace(FEDEPTH, exits=True),
        ("fedepth",),
    ),
    "origdrop": Entry(
        "piecework.strategies.width.origdrop:OrigDrop",
        "piecework.strategies.width.heterofl.client",
        replace(NARROW, caveat="as narrow as the largest sub-model"),
        ("prism",),
    ),
    "orthdrop": Entry(
        "piecework.strategies.low_rank.orthdrop:OrthDrop",
        "piecework.strategies.low_rank.prism.client",
        LOW_RANK,
        ("prism",),
    ),
    "prism": Entry(
        "piecework.strategies.low_rank.prism.server:PriSM",
        "piecework.strategies.low_rank.prism.client",
        replace(
            LOW_RANK,
            caveat="with prism.output-channels = first, the served network is as narrow as the largest sub-model",
        ),
        ("prism",),
    ),
    "profl": Entry(
        "piecework.strategies.cascade.profl.server:ProFL",
        "piecework.strategies.cascade.profl.client",
        Capabilities(stages=True, norms="measured", private=True),
        ("profl",),
    ),
    "slt": Entry(
        "piecework.strategies.cascade.slt.server:SLT",
        "piecework.strategies.cascade.slt.client",
        Capabilities(stages=True, norms="measured", private=True),
        ("slt",),
    ),
    "spafl": Entry(
        "piecework.strategies.sparse.spafl.server:SpaFL", "piecework.strategies.sparse.spafl.client", SPAFL, ("spafl",)
    ),
    "splitmix": Entry(
        "piecework.strategies.width.splitmix.server:SplitMix",
        "piecework.strategies.width.splitmix.client",
        Capabilities(
            attack="optional",
            adapts=True,
            rotates=True,
            measures=False,
            private=True,
            caveat="an ensemble of narrow nets",
        ),
        ("splitmix",),
    ),
}


def in_pieces(attacked: bool) -> str:
    """Return the method to try where devices cannot hold the whole model, for clean or for adversarial training."""
    return next(
        name for name in list_advised() if METHODS[name].can.cuts and METHODS[name].can.always_attacks == attacked
    )


def in_width() -> list[str]:
    """Return the methods whose clients train a model with the fraction of its channels that fits."""
    return [name for name, entry in METHODS.items() if entry.can.adapts and "heterofl" in entry.tables]


def list_advised() -> list[str]:
    """Return the methods that one would try first, in this order."""
    return sorted(
        (name for name, entry in METHODS.items() if entry.can.advised), key=lambda name: METHODS[name].can.advised
    )


def is_own(strategy: str) -> bool:
    """Return whether a method is none of this project's: `MODULE:CLASS`, or a plugin."""
    return strategy not in METHODS and (":" in strategy or strategy in list_plugins("methods"))


def find_entry(strategy: str) -> Entry:
    """Return the entry of a method, or make that of `MODULE:CLASS` or a plugin. Raises ValueError, which lists known names."""
    find_plugin("methods", strategy, METHODS)  # raises for a name that two packages have
    if strategy in METHODS:
        return METHODS[strategy]
    if is_own(strategy):
        return _entry_of_ones_own(strategy)
    names = [*METHODS, *list_plugins("methods")]
    raise ValueError(
        f"unknown strategy {abbreviate(strategy)}: known are {', '.join(names)}; one of your own is MODULE:CLASS, or the name "
        f"under which an installed package registers it{did_you_mean(strategy, names)}"
    )


@cache
def _entry_of_ones_own(strategy: str) -> Entry:
    """Return the entry of a class: what it does not say is that of the method that it derives from."""
    found = _load_own(strategy)
    can = getattr(found, "can", None)
    if not isinstance(can, Capabilities):
        raise ValueError(f"strategy = {strategy!r}: {found!r:.100} is no class that derives from Method")
    own = [base for base in found.__mro__ if not base.__module__.startswith("piecework.")]
    base = METHODS.get(lineage(strategy)[-1], Entry("", WHOLE, can))
    clients = [each.__module__ for each in own if hasattr(sys.modules[each.__module__], "train")]
    if clients and not any("can" in vars(each) for each in own):
        can = replace(can, pages=False)  # only the usual step pages
    tables = [f"{each.__module__}:{each.__qualname__}" for each in own if vars(each).get("settings_class") is not None]
    server = strategy if ":" in strategy else f"{found.__module__}:{found.__qualname__}"
    return Entry(server, next(iter(clients), base.client), can, (*base.tables, *tables))


def _load_own(strategy: str) -> Any:
    return load(strategy) if ":" in strategy else load_plugin("methods", strategy)


def lineage(strategy: str) -> list[str]:
    """Return the method, and for one of a user's own that of this project from which it derives, whose settings it reads."""
    if not is_own(strategy):
        return [strategy]
    names = [vars(base).get("name") for base in _load_own(strategy).__mro__ if base.__module__.startswith("piecework.")]
    return [strategy, *[name for name in names if name in METHODS][:1]]


@cache
def table_class(name: str) -> Any:
    """Return the class of a table of settings, by its name or that of the method of one's own that brings it."""
    return load(TABLES[name]) if name in TABLES else load(name).settings_class


def load(path: str) -> Any:
    """Return what `MODULE:NAME` says. A module is looked for where Python looks, then in the working directory.

    Raises ValueError if there is no such module, or nothing of this name in it.
    """
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"{path!r}: expected MODULE:NAME, with a module as in my_package.my_module, not a file")
    try:
        with refuse_exit():
            found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] or str(Path.cwd()) in sys.path:
            raise ValueError(
                f"{path!r}: there is no module {error.name!r} in {Path.cwd()} or where Python looks"
            ) from error
        sys.path.append(str(Path.cwd()))
        return load(path)
    except Exception as error:
        raise ValueError(f"{path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(found, name):
        raise ValueError(f"{path!r}: there is no {name!r} in {getattr(found, '__file__', module)}")
    return getattr(found, name)
