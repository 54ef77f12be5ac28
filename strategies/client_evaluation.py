"""Evaluation of the round's model by clients: the choice of clients, and the mean of their answers."""

from collections.abc import Callable, Collection, Iterable

from flwr.app import MetricRecord

from piecework.federation.registry import sample_clients
from piecework.strategies.method import Method, Round

Verdict = tuple[int, dict[str, float]]  # the number of examples that a client evaluated on, and its metrics


def choose_evaluators(
    method: Method, current: Round, reachable: Collection[int], present: Callable[[], Collection[int]]
) -> list[int]:
    """Return the clients that evaluate: those of the round, or for personal evaluation all or `evaluation.clients` of them.

    Of the round's clients, only those that are `reachable` evaluate. The method may also choose all that are `present`.
    """
    settings, every = method.settings, method.settings.evaluation.on_clients_every
    if method.personal:
        if not settings.evaluation_due(current.number):
            return []
        chosen = sample_clients([*present()], settings.evaluation.clients, settings.seed + 1, current.number)
        return [client for client in chosen if client in reachable or client not in current.assigned]
    if method.validates == "all":
        return sorted({*reachable, *(client for client in present() if client not in current.assigned)})
    due = every and current.number % every == 0 and method.progress.measurable
    return sorted(reachable) if due or method.validates == "asked" else []


def mean_verdict(verdicts: Iterable[Verdict], keys: Iterable[str], *, personal: bool) -> MetricRecord | None:
    """Return mean metrics over all clients' examples, or for personal evaluation over clients; None without examples."""
    total, sums = 0, dict.fromkeys(keys, 0.0)
    for examples, values in verdicts:
        weight = min(examples, 1) if personal else examples
        for key, value in values.items():
            sums[key] += value * weight
        total += weight
    return MetricRecord({key: sums[key] / total for key in sums}) if total else None
