"""Present advice: the recommendation with its command, what one would try first, the other systems, and who cannot."""

from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.device_profiles.profile import format_bytes
from piecework.device_profiles.units import format_seconds, format_share
from piecework.plans.ladder_view import ladder_tables
from piecework.plans.plan_view import columns
from piecework.plans.recommend import USEFUL

COLUMNS = ("strategy", "take part", "each", "together", "bytes", "time", "notes")
LEGEND = (
    "take part: of the clients; each, together: the part of the model that a client trains, and all of them; bytes and time "
    "are those of a round. +fit: with memory.fit, by steps that take less memory (docs/howto/memory.md)."
)
ANSWERED = (
    "behind by: points of the means over all seeds (the text compares the seeds that both have); answered: of the clients that "
    "were asked; those that a system has no task for are not asked."
)
NO_ORDER = "The other systems, {training} training, by name: the order claims nothing."


def advice_tables(advice: dict[str, Any]) -> list[str | Text | Table]:
    """Return what to print, in order: prose that wraps at words, commands in one line, tables."""
    training = "adversarial" if advice["adversarial"] else "clean"
    ask = (
        "Adversarial training. For clean training leave training.adversarial and the strategy as they are by default."
        if advice["adversarial"]
        else "Clean training. For adversarial training ask with --set training.adversarial=true."
    )
    lines: list[str | Text | Table] = [*recommendation(advice["recommended"]), Text(advice["simple"]["text"])]
    lines += [Text(), *evidence_tables(advice["measured"])] if advice["measured"] else []
    lines += [Text(), *ladder_tables(advice["ladder"])] if advice["ladder"] else []
    if advice["simple"]["fits"] and not (advice["first"][1:] or advice["refused"]):
        return [*lines, Text(ask)]
    lines += [Text(f"\nWhat to try first, {training} training:"), table(advice["first"])]
    lines += [*caveats(advice["first"]), Text(LEGEND)]
    if advice["others"]:
        lines += [Text(f"\n{NO_ORDER.format(training=training)}"), table(advice["others"])]
        lines += caveats(advice["others"])
    if advice["refused"]:
        lines.append(Text("\nThese cannot:"))
        lines += told_together([(row["strategy"], row["reason"]) for row in advice["refused"]])
    return [*lines, Text(f"\n{ask}")]


def recommendation(found: dict[str, Any] | None) -> list[str | Text]:
    """Return the recommendation and its command."""
    if found is None:
        said = (
            f"No system trains {USEFUL:.0%} of this model or more on these devices: lower the batch size or the width."
        )
        return [Text(said, "bold")]
    fit = " with memory.fit" if "memory.fit" in found["settings"] else ""
    command = [f"    {found['command']}"] if "command" in found else []
    return [Text.assemble((f"Use {found['strategy']}{fit}.", "bold"), f" {found['text']}"), *command]


def evidence_tables(measured: dict[str, Any]) -> list[Text | Table]:
    """Return what was measured nearest, with the rows that matter."""
    if not measured["rows"]:
        return [Text(measured["text"])]
    found = columns("system", "accuracy", "behind by", "seeds", "answered", "simulated time")
    for row in measured["rows"]:
        accuracy, part = f"{row['accuracy']:.1f}%", f"{row['participation']:.0f}%"
        behind = f"{row['behind']:.1f}" if row["behind"] >= 0 else f"{-row['behind']:.1f} ahead"
        found.add_row(row["name"], accuracy, behind, str(row["seeds"]), part, format_seconds(row["seconds"]))
    return [Text(measured["text"]), found, Text(ANSWERED)]


def table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with a row per system, which fits 80 columns; `caveats` has what stands below it."""
    found = columns(*COLUMNS)
    found.columns[0].no_wrap = True
    found.columns[-1].justify = "left"
    for row in rows:
        figures = [fraction_range([*row["trains"].values()]), format_share(row["covered"])]
        figures += [format_bytes(int(row["bytes_per_round"])), format_seconds(row["round_seconds"])]
        part = row["participation"] - row["swapping"]
        found.add_row(shown_name(row), format_share(part), *(figures if row["participation"] else "----"), notes(row))
    return found


def fraction_range(found: list[float]) -> str:
    """Return the range from the device that trains the smallest part of the model to the one that trains the largest."""
    low, high = (format_share(each) for each in (min(found), max(found)))
    return low if low == high else f"{low} - {high}"


def shown_name(row: dict[str, Any]) -> str:
    """Return a system's name, with what tells of `memory.fit`, which LEGEND explains."""
    return f"{row['strategy']} +fit" if row["fit"] else str(row["strategy"])


def notes(row: dict[str, Any]) -> str:
    """Return a short remark on a row, which fits beside its figures."""
    return f"{row['stages']} stages" if row["stages"] > 1 else ""


def caveats(rows: list[dict[str, Any]]) -> list[Text]:
    """Return a line for each row of which there is more to say than fits beside its figures."""
    found = []
    for row in rows:
        pretends = (
            f"{format_share(row['swapping'])} of the clients pretend to have the memory" if row["swapping"] else ""
        )
        if said := pretends or row["caveat"]:
            found.append((shown_name(row), said))
    return told_together(found)


def told_together(remarks: list[tuple[str, str]]) -> list[Text]:
    """Return a line for each remark, after the names of all systems of which it is said."""
    names: dict[str, list[str]] = {}
    for name, said in remarks:
        names.setdefault(said, []).append(name)
    return [Text(f"{', '.join(those)}: {said}") for said, those in names.items()]
