"""Reject settings that a run does not use: those of another strategy, of another partition, of another schedule.

The declaration of a setting says in which cases a run uses it (training/settings). Only values that differ from the default are
checked, because Flower passes all keys, whether the user set them or not.
"""

from collections.abc import Collection, Iterable, Mapping

from piecework.training.capabilities import Case
from piecework.training.settings import Scalar, Settings, SettingsError
from piecework.training.settings.cases import cases, default, holds
from piecework.training.settings.run import fields


def find_settable(settings: Settings) -> list[str]:
    """Return the keys that only some runs use, and those with these settings do."""
    values, known = settings.to_run_config(), cases(settings.strategy)
    return [key for key, allowed in known.items() if any(holds(case, values) for case in allowed)]


def find_unused(settings: Settings) -> list[str]:
    """Return the keys whose values differ from their defaults although no run with these settings uses them."""
    values, settable = settings.to_run_config(), find_settable(settings)
    given = [key for key in cases(settings.strategy) if values[key] != default(key, settings.strategy)]
    return [key for key in given if key not in settable]


def require_used(settings: Settings, among: Collection[str] | None = None) -> None:
    """Raise SettingsError with a line for each key that was set and is not used: its owner, and the remedy.

    Only keys in `among` are checked; None = all.
    """
    values = settings.to_run_config()
    if lines := [refusal(key, values) for key in find_unused(settings) if among is None or key in among]:
        raise SettingsError("\n".join(lines))


def refusal(key: str, values: Mapping[str, Scalar]) -> str:
    """Return why a run with these values does not use a setting."""
    used_in = cases(str(values["strategy"]))[key]
    governing = {name for case in used_in for name in case if not holds({name: case[name]}, values)}
    have = ", ".join(f"{name} is {values[name]!r}" for name in sorted(governing))
    owners = ", or to ".join(map(describe_case, used_in))
    return (
        f"setting {key} = {values[key]!r} has no effect here: it belongs to {owners}, and {have}. "
        f"Leave it out, or set it to its default, {default(key, str(values['strategy']))!r}"
    )


def drop_unused(given: Mapping[str, Scalar], preset: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], list[str]]:
    """Return a preset's values overridden by the `given` ones, without those that become unused, and the keys of these.

    If `given` replaces the preset's strategy, as with `--set strategy=NAME`, the settings of the preset's own strategy are
    unused. Raises SettingsError.
    """
    values, foreign = keep_known(dict(preset) | dict(given), str(preset.get("strategy", "")))
    known = cases(str(values.get("strategy", "")))
    changed = {key for key, value in given.items() if value != preset.get(key, default(key))}
    dropped = [
        key
        for key in find_unused(Settings.from_run_config(values))
        if key in preset and key not in given and changed & {name for case in known[key] for name in case}
    ]
    return {key: value for key, value in values.items() if key not in dropped}, [*foreign, *dropped]


def keep_known(values: Mapping[str, Scalar], strategy: str) -> tuple[dict[str, Scalar], list[str]]:
    """Return values without those that only this strategy of one's own knows, and the keys of these.

    Raises SettingsError if there is no such strategy.
    """
    known, own = fields(str(values.get("strategy", ""))), fields(strategy)
    foreign = [key for key in values if key in own and key not in known]
    return {key: value for key, value in values.items() if key not in foreign}, foreign


def describe_case(case: Case) -> str:
    """Return a case in words: `strategy = A or B with training.precision = float32`."""
    return " with ".join(f"{key} = {join_values(allowed)}" for key, allowed in case.items())


def join_values(values: Iterable[Scalar]) -> str:
    """Return `A, B or C`, with true and false in TOML's spelling."""
    *others, last = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return f"{', '.join(others)} or {last}" if others else last
