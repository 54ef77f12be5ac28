"""The cases in which a run uses a setting: with which methods, and with which values of other settings."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from piecework.training.capabilities import Capabilities, Case, Refusal, Scalar
from piecework.training.methods import METHODS, Entry, find_entry, is_own, lineage, table_class
from piecework.training.settings.run import Settings, fields, tables
from piecework.training.settings.shared import WAYS

ON_OTHERS = "whether one client's update counts must not depend on the others"
# Settings that a private run leaves at their defaults, and why.
NOT_IN_PRIVATE = {
    "faults.over-sample": ON_OTHERS,
    "faults.accept-late": "a client would count twice in a round, and in rounds for which it was not drawn",
    "faults.deadline-factor": ON_OTHERS,
    "faults.min-clients": "every round makes a model, and all clients must be known at the start",
    "messages.max-in-flight": "a slow client would keep others from being asked",
    "heterofl.left-out": "clients whose sub-models are left out would count in what a sum is divided by",
    "evaluation.on-clients-every": "clients do not tell how well a model does on their data",
    "evaluation.mode": "clients do not tell how well a model does on their data",
}
PRIVATE_VALUES: Mapping[str, tuple[Scalar, ...]] = {"evaluation.mode": ("central",)}


class Exactly(tuple[Scalar, ...]):
    """Names of methods that a capability or a table has selected, so that what derives from one of them is not meant."""


@cache
def cases(strategy: str = "") -> dict[str, tuple[Case, ...]]:
    """Return the cases in which each setting is used, also by a strategy of one's own; those of every run are missing."""
    entries = METHODS | ({strategy: find_entry(strategy)} if is_own(strategy) else {})
    found = {}
    for key, info in fields(strategy).items():
        own: Any = (info.json_schema_extra or {}).get("only") if isinstance(info.json_schema_extra, dict) else ()
        table = tables(strategy)[key.rpartition(".")[0]]
        readers = [name for name, entry in entries.items() if table.name and table in map(table_class, entry.tables)]
        if own or readers:
            found[key] = tuple(each for case in own or [{}] for each in _of_methods(case, readers, entries))
    return found


def _of_methods(case: Case, readers: Iterable[str], entries: Mapping[str, Entry]) -> Iterator[Case]:
    """Yield a case with the names of methods: of those that read the table, or have the capability that it names."""
    if "can" not in case:
        yield case or {"strategy": Exactly(readers)}
        return
    able: dict[tuple[tuple[str, tuple[Scalar, ...]], ...], list[str]] = {}
    for name, entry in entries.items():
        if condition := getattr(entry.can, str(case["can"][0])):
            able.setdefault(() if condition is True else tuple(condition.items()), []).append(name)
    for when, names in able.items():
        yield {"strategy": Exactly(names)} | {key: values for key, values in case.items() if key != "can"} | dict(when)


def holds(case: Case, values: Mapping[str, Scalar]) -> bool:
    """Return whether each key of a case has one of its values; a strategy of one's own is also what it derives from."""
    return all(
        values[key] in allowed
        or (key == "strategy" and not isinstance(allowed, Exactly) and bool({*lineage(str(values[key]))} & {*allowed}))
        for key, allowed in case.items()
    )


def is_true(capability: bool | Case, settings: Settings) -> bool:
    """Return whether a method has a capability with these settings."""
    return capability if isinstance(capability, bool) else holds(capability, settings.to_run_config())


def default(key: str, strategy: str = "") -> Scalar:
    """Return the default of a setting, or an empty text if there is no such setting."""
    found = fields(strategy).get(key)
    value: Scalar = found.default if found is not None else ""
    return value


def require_accepted(settings: Settings, refuses: Iterable[Refusal], name: str) -> None:
    """Raise ValueError for a setting that the method of this name refuses, before the run changes anything."""
    values = settings.to_run_config()
    for refusal in refuses:
        key = refusal.key
        if key not in values:
            raise ValueError(f"strategy {name!r} refuses the setting {key!r}, which does not exist")
        value = values[key]
        bad = value in refusal.values if refusal.values else value != default(key, settings.strategy)
        if bad and holds(refusal.when, values):
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise ValueError(f"{key} = {shown}: {refusal.why.format(name=name)}")
    _require_possible_ways(settings, name)
    if settings.privacy.on:
        _require_private(settings, name)


def _require_private(settings: Settings, name: str) -> None:
    """Raise ValueError for what a private run cannot keep its promise with."""
    own, can, clients = settings.privacy, find_entry(settings.strategy).can, settings.clients
    key, value = ("noise-multiplier", own.noise_multiplier) if own.noise_multiplier else ("epsilon", own.epsilon)
    said = f"privacy.{key} = {value:g}"
    if not can.private or is_own(settings.strategy):
        able = ", ".join(each for each, entry in METHODS.items() if entry.can.private)
        why = Capabilities.why_not_private if is_own(settings.strategy) else can.why_not_private
        raise ValueError(f"{said}: {name} cannot be private: {why}; use one of {able}")
    if clients < 2:
        raise ValueError(
            f"{said}: clients = {clients}: set the number of those among whom a client of a private run hides"
        )
    if own.delta * clients >= 1:
        raise ValueError(
            f"privacy.delta = {own.delta:g}: with {clients} clients it must be below {1 / clients:g}, because one client in "
            "1 / delta may be given away whole; 0 = clients^-1.1"
        )
    for setting, why in NOT_IN_PRIVATE.items():
        given, usual = settings.to_run_config()[setting], default(setting)
        if given != usual and given not in PRIVATE_VALUES.get(setting, ()):
            raise ValueError(f"{setting} = {given!r}: in a private run ({said}) {why}; leave it at {usual!r}")


def _require_possible_ways(settings: Settings, name: str) -> None:
    """Raise ValueError for a way that `memory.fit` names and the run cannot go; `auto` leaves such ways out."""
    named, can = settings.memory.named_ways, find_entry(settings.strategy).can
    said = f"memory.fit = {settings.memory.fit!r}"
    for way in [way for way in named if way in can.lacks]:
        able = [each for each in WAYS if each not in can.lacks and (each != "page" or is_true(can.pages, settings))]
        raise ValueError(
            f"{said}: a step of {name} cannot go the way {way}, because {can.lacks[way]}; leave {way} out, use auto, or name "
            f"some of {', '.join(able)}"
        )
    if settings.training.clip_norm and (found := [way for way in ("step-in-backward", "page") if way in named]):
        raise ValueError(
            f"{said}: training.clip-norm = {settings.training.clip_norm:g} needs the norm of all gradients at once, and a step "
            f"never has them with {' or '.join(found)}; leave it out, or set clip-norm to 0"
        )
    if "page" in named and not is_true(can.pages, settings):
        able = [each for each, entry in METHODS.items() if entry.can.pages is True]
        cases = can.pages.items() if isinstance(can.pages, Mapping) else ()
        case = " and ".join(f"{key} = {values[0]}" for key, values in cases)
        raise ValueError(
            f"{said}: the clients of {name} do not train the whole model with the usual step, which alone can page"
            f"{f' (they do with {case})' if case else ''}; leave page out, or use one of {', '.join(able)}"
        )
