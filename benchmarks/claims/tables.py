"""The tables of a claim's page."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.claims.definition import Case, Claim, Row
from benchmarks.claims.jobs import source_of
from benchmarks.claims.records import Records, RunRecord, SearchRecord
from benchmarks.claims.standings import Standing, accuracy_at, current_searches, deadlines
from benchmarks.claims.storage import STORAGE
from benchmarks.claims.verdicts import Difference, Judgement
from benchmarks.tables.shared import table
from piecework.training.settings import Scalar

STORAGE_NAMES = {"sd": "SD", "emmc": "eMMC", "nvme": "NVMe"}
NONE = "-"


def accuracies(claim: Claim, case: Case, there: Sequence[Standing]) -> str:
    """Return the table of a case's accuracies, in percent."""
    columns: dict[str, list[str]] = {
        "row": [name_of(each) for each in there],
        "accuracy": [measured(each) for each in there],
        "paper": [percent(each.row.paper.get(case.name), 1) for each in there],
        "last": [percent(each.average(lambda run: run.last)) for each in there],
        "best": [percent(each.average(lambda run: run.best)) for each in there],
        "clean": [percent(each.average(lambda run: run.accuracy)) for each in there],
        "PGD": [percent(each.average(lambda run: run.adversarial)) for each in there],
        "AutoAttack": [percent(each.average(lambda run: run.autoattack)) for each in there],
        "models: mean": [percent(each.average(lambda run: (run.models or {}).get("mean"))) for each in there],
        "models: worst": [percent(each.average(lambda run: (run.models or {}).get("worst"))) for each in there],
        "density": [percent(each.average(lambda run: run.density)) for each in there],
        "seeds": [f"{len(each.runs)} of {len(claim.seeds_of(case, each.row))}" for each in there],
        "rate": [rate(claim, case, each) for each in there],
        "participation": [percent(each.average(lambda run: run.participation)) for each in there],
    }
    if claim.measure == "accuracy":
        del columns["clean"]
    optional = ("paper", "clean", "PGD", "AutoAttack", "models: mean", "models: worst", "density")
    return from_columns({key: cells for key, cells in columns.items() if key not in optional or set(cells) != {NONE}})


def costs(there: Sequence[Standing]) -> str:
    """Return the table of what a run of each row costs; rows without a completed run are not in it."""
    ran = [each for each in there if each.runs]
    return from_columns(
        {
            "row": [name_of(each) for each in ran],
            "peak / budget": [number(peak(each)) for each in ran],
            "MB down + up": [f"{mega(each, 'bytes_down')} + {mega(each, 'bytes_up')}" for each in ran],
            "TFLOPs": [number(scaled(each.average(lambda run: run.flops), 1e-12)) for each in ran],
            **{
                f"simulated s, {shown}": [number(each.average(simulated(storage))) for each in ran]
                for storage, shown in STORAGE_NAMES.items()
            },
            "core s": [number(each.average(lambda run: run.core_seconds)) for each in ran],
        }
    )


def equal_time(there: Sequence[Standing]) -> str:
    """Return the table of accuracies at equal simulated time; empty without a completed candidate."""
    ran = [each for each in there if each.runs]
    columns = {"row": [name_of(each) for each in ran]}
    for storage in STORAGE:
        for seconds in deadlines(ran, storage):
            figures = [accuracy_at(each, storage, seconds) for each in ran]
            best = max(
                (figure for figure, each in zip(figures, ran, strict=True) if figure and each.candidate), default=0
            )
            columns[f"{STORAGE_NAMES[storage]}, {number(seconds)} s"] = [
                f"**{figure:.1f}**" if figure == best and each.candidate else percent(figure, 1)
                for figure, each in zip(figures, ran, strict=True)
            ]
    return from_columns(columns) if len(columns) > 1 else ""


def judgements(judged: Iterable[Judgement]) -> str:
    """Return the table of the claimed orders."""
    rows = [
        [cell(each.order.text), cell(each.case), f"**{each.verdict}**", "; ".join(map(distance, each.differences))]
        for each in judged
    ]
    return table(("claimed", "case", "verdict", "points ahead of"), rows)


def distance(difference: Difference) -> str:
    """Return a difference in words: `HeteroFL +3.1 ± 0.4, 3 seeds: ahead`."""
    if difference.points is None:
        return cell(f"{difference.other}: {difference.verdict}, {difference.why}")
    spread = "" if difference.spread is None else f" ± {difference.spread:.1f}"
    seeds = f"{difference.seeds} seed{'s' * (difference.seeds > 1)}"
    why = f" ({difference.why})" if difference.why else ""
    return cell(f"{difference.other} {difference.points:+.1f}{spread}, {seeds}: {difference.verdict}{why}")


def rates(claim: Claim, records: Records) -> str:
    """Return the table of the recorded searches that the definition needs; empty if there is none."""
    found = current_searches(claim, records)
    tried = sorted({value for search in found.values() for value in search.figures})
    rows = []
    for (case, row), search in found.items():
        figures = [searched(search, value) if value in search.figures else "" for value in tried]
        rows.append([cell(row), cell(case), *figures, chosen(search), str(search.rounds)])
    if not rows:
        return ""
    return table(("row", "case", *(f"{value:g}" for value in tried), "chosen", "rounds"), rows)


def searched(search: SearchRecord, value: float) -> str:
    """Return the figure of a rate."""
    figure = search.figures[value]
    if figure is None:
        return "failed"
    return f"**{percent(figure)}**" if value == search.chosen else percent(figure)


def chosen(search: SearchRecord) -> str:
    """Return the chosen rate; one at the edge may not be the best one."""
    if search.chosen is None:
        return NONE
    edge = {min(search.figures): ", the lowest", max(search.figures): ", the highest"}.get(search.chosen, "")
    return f"{search.chosen:g}{edge}"


def row_settings(claim: Claim) -> str:
    """Return the table of the rows' own settings."""
    return table(("row", "settings"), [[cell(row.name), cell(settings(row.settings))] for row in claim.rows])


def settings(given: Mapping[str, Scalar]) -> str:
    """Return settings as the command line takes them."""
    words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in given.items()}
    return ", ".join(f"`{key}={value}`" for key, value in words.items()) or NONE


# ---- cells


def name_of(standing: Standing) -> str:
    """Return the row's name, in italics with its role for one that does not compete."""
    return cell(standing.row.name) if standing.candidate else f"*{cell(standing.row.name)}* ({standing.row.role})"


def measured(standing: Standing) -> str:
    """Return the accuracy by the measure, with its spread, or what became of it."""
    if standing.mean is None:
        return "cannot train" if standing.untrainable else "failed" if standing.failed else "missing"
    return f"{standing.mean:.1f}" + ("" if standing.spread is None else f" ± {standing.spread:.1f}")


def rate(claim: Claim, case: Case, standing: Standing) -> str:
    """Return the rates of the runs, and how they were found where the row was not searched itself."""
    values = sorted({run.rate for run in standing.runs if run.rate is not None})
    if not values:
        return NONE
    return ", ".join(f"{value:g}" for value in values) + origin(claim, case, standing.row)


def origin(claim: Claim, case: Case, row: Row) -> str:
    """Return where a row's rate comes from; nothing if it was searched."""
    source = source_of(claim, case, row)
    if source is None:
        return ", given"
    words = [f"as {source[1]}"] if source[1] != row.name else []
    words += [f"in {source[0]}"] if source[0] != case.name else []
    return cell(f", {' '.join(words)}" if words else "")


def peak(standing: Standing) -> float | None:
    """Return the largest peak as a fraction of the budget; None if no run has one."""
    return max((run.peak_over_budget for run in standing.runs if run.peak_over_budget is not None), default=None)


def simulated(storage: str) -> Callable[[RunRecord], float]:
    """Return the function that finds the simulated seconds on a storage."""
    return lambda run: run.simulated[storage]


def mega(standing: Standing, key: str) -> str:
    """Return a figure in bytes as megabytes."""
    return number(scaled(standing.average(lambda run: float(getattr(run, key))), 1e-6))


def scaled(value: float | None, factor: float) -> float | None:
    """Return a multiple of a figure that may be unknown."""
    return None if value is None else factor * value


def percent(value: float | None, unit: float = 100) -> str:
    """Return a fraction in percent with a decimal place."""
    return NONE if value is None else f"{unit * value:.1f}"


def number(value: float | None) -> str:
    """Return a figure with three digits, or all digits before the point."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def cell(text: str) -> str:
    """Return a text that does not end a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def from_columns(columns: Mapping[str, Sequence[str]]) -> str:
    """Return a table, given its columns by their headings."""
    return table(columns, zip(*columns.values(), strict=True))
