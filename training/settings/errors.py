"""What is said of settings that are wrong: unknown keys and values that are not allowed."""

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from piecework.device_profiles.documents import abbreviate
from piecework.training.capabilities import Scalar

if TYPE_CHECKING:
    from piecework.training.settings.run import Settings

# Settings of earlier versions, with the only value that they could have now.
REMOVED: dict[str, Scalar] = {"profl.growing-start": "shrinking"}

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}  # of a setting, by its default


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type or out of range."""


def describe_unknown_key(key: str, fields: Iterable[str]) -> str:
    """Return the error for a key that is none of the fields', with those that it may be meant for."""
    if key in REMOVED:
        return f"setting {key} exists no more: only {REMOVED[key]!r} is left of it, so leave it out"
    given = key.replace("_", "-")
    known = {name.replace(".", "-"): name for name in fields}
    last = {name.rpartition(".")[2] for name in fields}
    if given.replace(".", "-") in known:
        near = [known[given.replace(".", "-")]]
    else:
        table, _, word = given.rpartition(".")
        own = [name for name in fields if table and name.rpartition(".")[0] == table]
        near = [name for name in own if word in name.rpartition(".")[2].split("-")]
        close = [] if near else get_close_matches(word, last, n=1, cutoff=0.7)
        near = near or [name for name in fields if name.rpartition(".")[2] in close]
        initials = "".join(part[:1] for part in word.split("-"))  # learning-rate is lr
        near = near or [name for name in fields if len(initials) > 1 and name.rpartition(".")[2] == initials]
    if near:
        return f"unknown setting {abbreviate(key)}: did you mean {' or '.join(map(repr, near))}?"
    return f"unknown setting {abbreviate(key)}: `piecework settings` lists all {len(known)}"


def require_table_name(name: str, taken: Collection[str], strategy: str) -> None:
    """Raise ValueError for the name of a table of settings that another one has, or that is none."""
    if name in taken or not re.fullmatch("[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(
            f"strategy = {strategy!r}: its table of settings is named {name!r}; a name has lower-case letters, digits and "
            f"hyphens, and none of these is free: {', '.join(sorted(taken))}"
        )


def describe_error(error: Mapping[str, Any]) -> str:
    """Return an error of pydantic's in words: the key, the value and what is allowed."""
    if not error["loc"] or error["type"] == "value_error":  # of a check of ours, which names the key itself
        return str(error["msg"]).removeprefix("Value error, ")
    key = ".".join(map(str, error["loc"]))
    message = str(error["msg"]).removeprefix("Input ")
    return f"setting {key} = {abbreviate(error['input'])}: {message}"


def too_many_asked(settings: "Settings", clients: int) -> str:
    """Return an error text if a round asks more clients than exist, else an empty text; the default may ask more."""
    asked, more = settings.clients_per_round, settings.faults.over_sample
    if asked + more <= clients or (not more and asked == type(settings).model_fields["clients_per_round"].default):
        return ""
    if more:
        return (
            f"clients-per-round = {asked} and faults.over-sample = {more} are more than the {clients} clients there are "
            "(clients, --nodes): lower one of them"
        )
    return (
        f"clients-per-round = {asked} is more than the {clients} clients there are (clients, --nodes): set it to at most "
        f"{clients}, or to 0 to ask all of them"
    )
