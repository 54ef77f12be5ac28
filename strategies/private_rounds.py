"""Private rounds: which entries of the model each client of the federation may move, whether it takes part or not."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from flwr.app import ArrayRecord

from piecework.federation.privacy import Privacy
from piecework.federation.private_mean import Entries, Holders
from piecework.models.cascade import Blueprint, unit_of
from piecework.models.static_norms import has_batch_norms, is_statistic
from piecework.planning.assignment import Assignment
from piecework.strategies.method import Assigned, Method
from piecework.training.settings import Settings

KEPT_NORMS = ("batch", "group", "frozen")  # the norms of which clients send no statistics of their data


class Held(NamedTuple):
    """The entries of each client, and how many clients hold the same ones."""

    by_client: dict[int, Entries]
    holders: list[Holders]


def begin_privacy(settings: Settings, model: Blueprint, known: Mapping[str, Any]) -> Privacy | None:
    """Return the privacy of a run that trains a model; None if it is not private. `known` is what a checkpoint kept of it.

    Raises ValueError for norms whose statistics clients would send, and for a limit that does not pay for a round.
    """
    if not settings.privacy.on:
        return None
    if settings.norms not in KEPT_NORMS and has_batch_norms(model):
        raise ValueError(
            f"architecture.batch-norm = {settings.norms!r}: clients would send statistics of their data, which a private run "
            "(privacy.noise-multiplier, privacy.epsilon) does not take; use architecture.norm = group, or "
            "architecture.batch-norm = batch"
        )
    return Privacy.of(settings, known)


def require_classes(auto: Collection[int]) -> None:
    """Raise ValueError if there are clients whose devices measure themselves, by number."""
    if auto:
        raise ValueError(
            f"client {min(auto)} has device = 'auto': what it can train follows from what else runs there, and a private run "
            "must know that of every client beforehand; give it the name of a device of the fleet"
        )


def find_entries(method: Method, assigned: Mapping[int, Assigned], model: ArrayRecord, *, enforced: bool) -> Held:
    """Return what each client may move in a round, by its assignment: nothing if it cannot do that.

    Neither statistics nor counts of batch norms ever move.
    """
    by_client, alike = dict[int, Entries](), dict[object, list[int]]()
    for client, each in assigned.items():
        found = _entries_of(method, each.assignment, model) if _is_able(each, enforced=enforced) else {}
        by_client[client] = {name: where for name, where in found.items() if not is_statistic(name)}
        alike.setdefault(_key(by_client[client]), []).append(client)
    holders = [Holders(by_client[clients[0]], len(clients)) for clients in alike.values()]
    return Held(by_client, holders)


def _entries_of(method: Method, assignment: Assignment, model: ArrayRecord) -> Entries:
    """Return the entries of the model that an update of this assignment may move: what is sent to be trained of it."""
    if (indices := getattr(assignment.sends, "indices", None)) is not None:
        found: Entries = indices()
        return found
    learned = {unit for item in assignment.items for unit in method.cut.part(item).learned}
    return {name: None for name in assignment.sends(model) if unit_of(name) in learned}


def _is_able(assigned: Assigned, *, enforced: bool) -> bool:
    """Return whether a device can do its assignment within its budget."""
    assignment, allowed = assigned.assignment, assigned.device.allowed_bytes
    fits = (assignment.needed.get(item, 0) <= allowed for item in assignment.items)
    return assignment.refusal is None and bool(assignment.items) and (not enforced or all(fits))


def _key(entries: Entries) -> object:
    """Return what is equal for equal entries, and takes less time than counting them."""
    return tuple((n, None if where is None else tuple(map(bytes, where))) for n, where in entries.items())
