"""List the settings of a run with their meanings, defaults and allowed values."""

from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.device_profiles.names import did_you_mean
from piecework.device_profiles.plugins import list_plugins
from piecework.server_app.used_settings import describe_case
from piecework.training.methods import METHODS, is_own, lineage
from piecework.training.settings import SettingsError
from piecework.training.settings.cases import cases
from piecework.training.settings.run import fields, tables

LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def setting_rows(word: str = "") -> list[dict[str, Any]]:
    """Return every setting; or those of the table or strategy `word`, or with `word` in their key or meaning.

    A strategy of one's own is MODULE:CLASS, or the name that an installed package registers.

    A row has the setting's `key`, its `default`, `allowed` values in words, its `meaning`, and the cases that it `belongs` to,
    which are empty if every run uses it. `run` is also for keys without a table. Raises SettingsError if there are none.
    """
    own = word if is_own(word) or ":" in word else ""
    schemas = {name: table.model_json_schema(by_alias=True)["properties"] for name, table in tables(own).items()}
    rows = []
    for key in fields(own):
        table, _, name = key.rpartition(".")
        schema, belongs = schemas[table][name], cases(own).get(key, ())
        row = {
            "key": key,
            "default": schema["default"],
            "allowed": describe_allowed(schema),
            "meaning": schema["description"],
            "belongs": ", or ".join(map(describe_case, belongs)),
        }
        strategies = {name for case in belongs for name in case.get("strategy", ())}
        if (word and word in tables()) or word in METHODS or own:
            wanted = word == (table or "run") or bool({*lineage(word)} & strategies)
        else:
            wanted = word.lower() in f"{key} {row['meaning']}".lower()
        if wanted:
            rows.append(row)
    if not rows:
        near = did_you_mean(word, [*fields(), *METHODS, *list_plugins("methods")])
        raise SettingsError(f"no setting is about {word!r}: piecework settings lists all {len(fields())}{near}")
    return rows


def describe_allowed(field: dict[str, Any]) -> str:
    """Return the values that a setting may have, from its JSON schema: `0 <= value < 1`, choices, or its type."""
    if "enum" in field:
        return " | ".join(map(str, field["enum"]))
    if "anyOf" in field:
        return ", or ".join(map(describe_allowed, field["anyOf"]))
    limits = [f"{sign} {field[name]:g}" for name, sign in LIMITS.items() if name in field]
    kind = {"boolean": "true | false", "string": "text"}.get(field["type"], field["type"])
    return f"{kind} {' and '.join(limits)}" if limits else kind


def setting_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of settings that fits a terminal of 80 columns."""
    table = Table(box=None, padding=(0, 2, 1, 0), show_header=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("meaning")
    for row in rows:
        text = Text(f"default {format_default(row['default'])}; {row['allowed']}", style="dim")
        lines = [row["meaning"], f"only with {row['belongs']}" if row["belongs"] else ""]
        table.add_row(Text(row["key"]), Text("\n").join([text, *(Text(line) for line in lines if line)]))
    return table


def format_default(value: Any) -> str:
    """Return a default as TOML has it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
