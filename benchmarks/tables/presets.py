"""Which preset runs which row of the papers' result tables and figures."""

from benchmarks.tables.shared import section, table
from piecework.commands.papers import PaperRow, PaperTable, paper_tables


def text() -> str:
    """Return the section."""
    head = section(
        "## Which preset runs which row",
        """Each result table and figure of the five papers, with the preset that runs a row, or
        the reason why none does. `piecework presets --paper fedprophet` prints the same. None of these presets was run to its
        end here unless its header says so. Rows "by its authors' code" are not in the papers.""",
    )
    return "\n\n".join([head, *map(part, paper_tables())])


def part(each: PaperTable) -> str:
    """Return a table or figure."""
    lines = [f"**{each.paper}, {each.name}**: {each.about}."]
    if each.runs_of:
        lines.append(f"It shows the runs of {each.runs_of}.")
    if each.rows:
        lines.append(table(["row", "preset, or why none"], [[row.row, cell(row)] for row in each.rows]))
    if each.columns:
        columns = "; ".join(f"{name}: `{given}`" for name, given in each.columns.items())
        lines.append(f"The other columns, given to each row's preset: {columns}.")
    return "\n\n".join(lines)


def cell(row: PaperRow) -> str:
    """Return the preset with what it is given, as code, or the reason."""
    return f"`{row.command}`" if row.preset else row.reason
