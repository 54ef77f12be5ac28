"""Reject settings that a run does not use: those of another strategy, of another partition, of another schedule.

The declaration of a setting says in which cases a run uses it (training/settings). Only values that differ from the default are
checked, because Flower passes all keys, whether the user set them or not.
"""

from collections.abc import Collection, Iterable, Mapping

from piecework.strategies import STRATEGIES, find_method
from piecework.training.settings import Scalar, Settings, SettingsError
from piecework.training.settings.run import cases, fields
from piecework.training.settings.table import Case


def find_settable(settings: Settings) -> list[str]:
    """Return the keys that only some runs use, and those with these settings do."""
    values = settings.to_run_config()
    return [key for key, allowed in cases().items() if any(holds(case, values) for case in allowed)]


def find_unused(settings: Settings) -> list[str]:
    """Return the keys whose values differ from their defaults although no run with these settings uses them."""
    values, settable = settings.to_run_config(), find_settable(settings)
    return [key for key in cases() if values[key] != default(key) and key not in settable]


def require_used(settings: Settings, among: Collection[str] | None = None) -> None:
    """Raise SettingsError with a line for each key that was set and is not used: its owner, and the remedy.

    Only keys in `among` are checked; None = all.
    """
    values = settings.to_run_config()
    if lines := [refusal(key, values) for key in find_unused(settings) if among is None or key in among]:
        raise SettingsError("\n".join(lines))


def refusal(key: str, values: Mapping[str, Scalar]) -> str:
    """Return why a run with these values does not use a setting."""
    governing = {name for case in cases()[key] for name in case if not holds({name: case[name]}, values)}
    have = ", ".join(f"{name} is {values[name]!r}" for name in sorted(governing))
    owners = ", or to ".join(map(describe_case, cases()[key]))
    return (
        f"setting {key} = {values[key]!r} has no effect here: it belongs to {owners}, and {have}. "
        f"Leave it out, or set it to its default, {default(key)!r}"
    )


def without_unused(given: Mapping[str, Scalar], preset: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], list[str]]:
    """Return a preset's values overridden by the `given` ones, without those that become unused, and the keys of these.

    If `given` replaces the preset's strategy, as with `--set strategy=NAME`, the settings of the preset's own strategy are
    unused. Raises SettingsError.
    """
    values = dict(preset) | dict(given)
    changed = {key for key, value in given.items() if value != preset.get(key, default(key))}
    dropped = [
        key
        for key in find_unused(Settings.from_run_config(values))
        if key in preset and key not in given and changed & {name for case in cases()[key] for name in case}
    ]
    return {key: value for key, value in values.items() if key not in dropped}, dropped


def holds(case: Case, values: Mapping[str, Scalar]) -> bool:
    """Return whether each key of a case has one of its values."""
    return all(
        any(value in allowed for value in (lineage(str(values[key])) if key == "strategy" else [values[key]]))
        for key, allowed in case.items()
    )


def lineage(strategy: str) -> list[str]:
    """Return the strategy and, for a user's own strategy, those that it derives from, whose settings it may read."""
    module, _ = STRATEGIES.get(strategy, ("piecework.strategies.", ""))
    if module.startswith("piecework.strategies."):
        return [strategy]
    return [strategy, *(found for base in find_method(strategy).__mro__ if (found := base.__dict__.get("name")))]


def describe_case(case: Case) -> str:
    """Return a case in words: `strategy = A or B with training.precision = float32`."""
    return " with ".join(f"{key} = {join_values(allowed)}" for key, allowed in case.items())


def join_values(values: Iterable[Scalar]) -> str:
    """Return `A, B or C`, with true and false in TOML's spelling."""
    *others, last = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return f"{', '.join(others)} or {last}" if others else last


def default(key: str) -> Scalar:
    """Return the default of a setting, or an empty text if there is no such setting."""
    value: Scalar = fields()[key].default if key in fields() else ""
    return value
