"""The figures of a round, of a run's end and of its settings, under names with `/`, as trackers and exports have them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from piecework.device_profiles.clock import round_seconds
from piecework.server_app.summary import peak_over_budget
from piecework.server_app.used_settings import find_settable
from piecework.training.settings import Scalar, Settings
from piecework.training.settings.cases import cases

Scalars = dict[str, float]


def round_scalars(record: Mapping[str, Any]) -> Scalars:
    """Return the numbers in a round's record, and by device class: answers, simulated seconds, and peaks over budgets.

    What was not evaluated or not measured is missing, as are lists, texts, and what only says yes or no.
    """
    values = dict(record)
    values["peak_over_budget"] = peak_over_budget([values])
    classes = sorted({client["device"] for client in record["clients"]})
    of = {name: [each for each in record["clients"] if each["device"] == name] for name in classes}
    values["peak_over_budget_by_device"] = {
        name: peak_over_budget([{"enforced": record["enforced"], "clients": clients}]) for name, clients in of.items()
    }
    values["answered_by_device"] = {
        name: sum(each["status"] == "ok" for each in clients) for name, clients in of.items()
    }
    values["simulated_seconds_by_device"] = {
        name: round_seconds(each.get("simulated_seconds", 0.0) for each in clients) for name, clients in of.items()
    }
    del values["round"]
    return flatten(values)


def summary_scalars(summary: Mapping[str, Any]) -> Scalars:
    """Return the numbers of summary.json under `summary/`."""
    return flatten({"summary": summary})


def flatten(values: Mapping[str, Any]) -> Scalars:
    """Return the numbers in nested tables, with the names of the tables before theirs and `/` between.

    A character that some tracker refuses, such as the brackets in the name of a device, becomes `_`.
    """
    return {re.sub(r"[^\w\-. /]", "_", name): number for name, number in _numbers(values)}


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{name}", number) for name, number in _numbers(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield str(key), float(value)


def parameters(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings that this run uses, by key: without those of other strategies, partitions or schedules."""
    settings = Settings.from_run_config(values)
    of_some, used = cases(settings.strategy), find_settable(settings)
    return {key: value for key, value in values.items() if key not in of_some or key in used}
