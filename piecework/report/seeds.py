"""Summarise runs that differ only in the seed: mean and spread of their accuracies."""

from collections.abc import Sequence
from typing import Any

from piecework.report.compare import mean, spread
from piecework.report.compare_view import with_spread

ACCURACIES = {
    "accuracy": "accuracy",
    "adversarial_accuracy": "adversarial accuracy",
    "autoattack_accuracy": "accuracy under AutoAttack",
}


def accuracies(summaries: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return mean and, as `KEY_std`, sample standard deviation of each accuracy over the runs that have it.

    Accuracies are the clean one and that of each attack of any run. The spread of one value is None.
    """
    found: dict[str, float | None] = {}
    for key in ACCURACIES:
        values = [summary[key] for summary in summaries if summary.get(key) is not None]
        if values or key == "accuracy":
            found |= {key: mean(values), f"{key}_std": spread(values, several=True)}
    return found


def summarise_seeds(seeds: Sequence[int], summaries: Sequence[dict[str, Any]]) -> str:
    """Summarise the runs of some seeds in a sentence."""
    finished = {seed: s for seed, s in zip(seeds, summaries, strict=True) if s["status"] == "completed"}
    if not finished:
        return f"no run of seeds {join_seeds(seeds)} completed"
    found = accuracies(list(finished.values()))
    shown = [
        f"{name} {with_spread(found[key], found[f'{key}_std'])}" for key, name in ACCURACIES.items() if key in found
    ]
    failed = [seed for seed in seeds if seed not in finished]
    without = f"; without seeds that failed: {join_seeds(failed)}" if failed else ""
    return f"seeds {join_seeds(list(finished))}: {', '.join(shown)} (mean ± sample standard deviation{without})"


def join_seeds(seeds: Sequence[int]) -> str:
    """Format as `1, 2, 3`."""
    return ", ".join(map(str, seeds))
