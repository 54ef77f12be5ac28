"""The columns of a table, or of a hub's data set, that the user names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Columns:
    """`data.input-columns`, `data.label-column` and `data.group-column`; empty = to be found."""

    inputs: tuple[str, ...] = ()
    label: str = ""
    group: str = ""

    def named(self) -> str:
        """Return the settings that name columns as text, empty if there are none."""
        values = {"input-columns": ",".join(self.inputs), "label-column": self.label, "group-column": self.group}
        return ", ".join(f"data.{key} = {value!r}" for key, value in values.items() if value)


NO_COLUMNS = Columns()
