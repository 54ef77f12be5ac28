"""What the pictures of a claim show, as numbers: drawing.py draws them, and a test compares the drawn ones with these."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from benchmarks.claims.definition import Case, Claim, Headline
from benchmarks.claims.standings import ACCURACY_AT, MEGABYTES_AT, TIME_AT, Standing
from benchmarks.claims.tables import STORAGE_NAMES
from piecework.studies.jobs import slug

Point = tuple[float, float]
Range = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A row in a panel: points of a curve, or a single dot. `style` counts the claim's candidates, or its bounds.

    In a headline, `style` counts the systems, and `variant` the rows of one.
    Only dots have a `height` (rows from the top), the lowest and the highest of their seeds, the paper's figure, and a note
    that stands where there is no dot.
    """

    name: str
    bound: bool
    style: int
    points: tuple[Point, ...]
    height: float = 0.0
    low: float | None = None
    high: float | None = None
    paper: float | None = None
    note: str = ""
    variant: int = 0

    @property
    def id(self) -> str:
        """The name as an id in the picture has it."""
        return slug(self.name)


@dataclass(frozen=True)
class Panel:
    """A pair of axes, from `x[0]` to `x[1]` and from `y[0]` to `y[1]`. `logarithmic` is said of x; `note`: what is absent."""

    title: str
    label: str
    x: Range
    y: Range
    logarithmic: bool
    lines: tuple[Line, ...]
    note: str = ""

    def place(self, point: Point) -> Point:
        """Return where a point lies in the panel: from 0 to 1, to the right and upwards."""
        scale = math.log if self.logarithmic else float
        (x, y), (left, right), (bottom, top) = point, self.x, self.y
        return (scale(x) - scale(left)) / (scale(right) - scale(left)), (y - bottom) / (top - bottom)


@dataclass(frozen=True)
class Picture:
    """A file with panels. `kind` is curves or dots; `y_label` is the label of all panels' y."""

    file: str
    title: str
    kind: str
    y_label: str
    panels: tuple[Panel, ...] = field(default=())


def overview(claim: Claim, found: dict[str, list[Standing]]) -> list[Picture]:
    """Return the picture of accuracy by case, or none without a run.

    Rows are sorted by how far they are above the mean of a case, on average over the cases that they have.
    """
    cases = {case: {each.row.name: each for each in shown_of(there)} for case, there in found.items()}
    cases = {case: there for case, there in cases.items() if any(each.recorded for each in there.values())}
    above = above_the_mean(found)
    if not above:
        return []
    names = [row.name for row in claim.rows if row.role != "experiment"]
    order = sorted(names, key=lambda name: (name not in above, -above.get(name, 0)))
    styles = styles_of(claim)
    lines = {
        case: [dot(there[name], case, height, styles[name]) for height, name in enumerate(order) if name in there]
        for case, there in cases.items()
    }
    values = [
        value
        for each in lines.values()
        for line in each
        for value in (*(x for x, _ in line.points), line.low, line.high, line.paper)
        if value is not None
    ]
    (low, high), y = percents(values), (len(order) - 0.5, -0.5)
    x = low - 0.5, high + 0.5
    panels = [Panel(case, measure(claim), x, y, False, tuple(each)) for case, each in lines.items()]
    return [Picture(f"{claim.name}-cases.svg", f"Accuracy by case: {claim.title}", "dots", "", tuple(panels))]


def shown_of(there: Sequence[Standing]) -> list[Standing]:
    """Return the rows that pictures show: experiments have other rounds, or settings that serve no comparison."""
    return [each for each in there if each.row.role != "experiment"]


def above_the_mean(found: dict[str, list[Standing]]) -> dict[str, float]:
    """Return by row how many points it is above the mean of all rows of a case, the mean over its cases."""
    distances: dict[str, list[float]] = {}
    for there in found.values():
        means = {each.row.name: each.mean for each in shown_of(there) if each.mean is not None}
        for name, mean in means.items():
            distances.setdefault(name, []).append(mean - fmean(means.values()))
    return {name: fmean(each) for name, each in distances.items()}


def dot(standing: Standing, case: str, height: float, style: int) -> Line:
    """Return the dot of a row in a case."""
    seeds, name, bound = standing.by_seed.values(), standing.row.name, not standing.candidate
    paper = standing.row.paper.get(case)
    if standing.mean is None:
        note = "cannot train" if standing.untrainable else "failed" if standing.failed else "not run yet"
        return Line(name, bound, style, (), height, paper=paper, note=note)
    return Line(name, bound, style, ((standing.mean, height),), height, min(seeds), max(seeds), paper)


def case_pictures(claim: Claim, case: Case, found: dict[str, list[Standing]]) -> list[Picture]:
    """Return the pictures of a case, accuracy against simulated time and against megabytes; none without a run."""
    there = [each for each in shown_of(found[case.name]) if each.runs]
    if not there:
        return []
    heights = percents([100 * point[ACCURACY_AT] for each in there for run in each.runs for point in run.curve])
    styles = styles_of(claim)
    times = [
        panel(there, styles, TIME_AT[storage], (shown, "simulated seconds"), heights)
        for storage, shown in STORAGE_NAMES.items()
    ]
    sent = panel(there, styles, MEGABYTES_AT, ("", "megabytes down and up"), heights)
    name, title = f"{claim.name}-{slug(case.name)}", f"{claim.title}: {case.name}"
    return [
        Picture(
            f"{name}-time.svg", f"Accuracy against simulated time: {title}", "curves", measure(claim), tuple(times)
        ),
        Picture(f"{name}-bytes.svg", f"Accuracy against megabytes sent: {title}", "curves", measure(claim), (sent,)),
    ]


def headline(claim: Claim, found: dict[str, list[Standing]]) -> list[Picture]:
    """Return the picture of the rows that the definition's headline names.

    There is none before all of them have a record, and have run in the last case, whose curves are named.
    """
    if (wanted := claim.headline) is None:
        return []
    named = {case: [each for each in found[case] if each.row.name in wanted.rows] for case in wanted.cases}
    if not all(each.recorded for there in named.values() for each in there):
        return []
    if not all(each.runs for each in [*named.values()][-1]):
        return []
    y = percents(
        [
            100 * point[ACCURACY_AT]
            for there in named.values()
            for each in there
            for run in each.runs
            for point in run.curve
        ]
    )
    panels = tuple(headline_panel(claim, wanted, case, there, y) for case, there in named.items())
    title = f"Accuracy against simulated time: {claim.title}"
    return [Picture(f"{claim.name}-headline.svg", title, "curves", measure(claim), panels)]


def headline_panel(claim: Claim, wanted: Headline, case: str, there: Sequence[Standing], y: Range) -> Panel:
    """Return the panel of a case, where only bounds are grey: an experiment in the headline is a way to train."""
    looks = looks_of(wanted.rows.values())
    styles = {row: looks[name][0] for row, name in wanted.rows.items()}
    words = wanted.cases[case], f"simulated seconds, {STORAGE_NAMES[wanted.storage]}"
    drawn = panel([each for each in there if each.runs], styles, TIME_AT[wanted.storage], words, y)
    lines = tuple(
        replace(
            line,
            name=wanted.rows[line.name],
            variant=looks[wanted.rows[line.name]][1],
            bound=claim.row(line.name).role == "bound",
        )
        for line in drawn.lines
    )
    return replace(drawn, lines=lines, note=absent(there, wanted.rows))


def looks_of(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return by name in a headline the number of its system, which is what stands before a comma, and its own among those."""
    by_system: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        by_system.setdefault(name.split(",")[0], []).append(name)
    return {name: (style, variant) for style, own in enumerate(by_system.values()) for variant, name in enumerate(own)}


def absent(there: Sequence[Standing], names: Mapping[str, str]) -> str:
    """Return which of the named rows no client can train."""
    idle = [names[each.row.name] for each in there if each.row.name in names and each.untrainable]
    return "\n".join(["cannot train:", *idle]) if idle else ""


def panel(there: Sequence[Standing], styles: dict[str, int], column: int, words: tuple[str, str], y: Range) -> Panel:
    """Return the panel of the curves' accuracies against one of their columns. `words` are its title and the label of x."""
    lines = [Line(each.row.name, not each.candidate, styles[each.row.name], curve(each, column)) for each in there]
    values = [x for line in lines for x, _ in line.points]
    low, high = min(values, default=1.0), max(values, default=1.0)
    margin = (high / low) ** 0.03 * 1.01  # as much on both sides of a logarithmic axis
    return Panel(*words, (low / margin, high * margin), y, True, tuple(lines))


def curve(standing: Standing, column: int) -> tuple[Point, ...]:
    """Return the points of a row's curve: the means over the seeds, or those of the first seed if not all have as many.

    Points at 0 have no place on a logarithmic axis and are left out.
    """
    curves = [run.curve for run in standing.runs]
    if len({len(each) for each in curves}) > 1:
        curves = curves[:1]
    means = [
        (fmean(point[column] for point in points), 100 * fmean(point[ACCURACY_AT] for point in points))
        for points in zip(*curves, strict=True)
    ]
    return tuple(point for point in means if point[0] > 0)


def styles_of(claim: Claim) -> dict[str, int]:
    """Return the number of each row's style: the same in all pictures of a claim."""
    return {
        row.name: number
        for bound in (False, True)
        for number, row in enumerate(row for row in claim.rows if (row.role != "candidate") == bound)
    }


def percents(values: Sequence[float]) -> Range:
    """Return the range of an axis of percents: multiples of 5 around all values."""
    low, high = 5 * math.floor(min(values) / 5), 5 * math.ceil(max(values) / 5)
    return float(low), float(high if high > low else low + 5)


def measure(claim: Claim) -> str:
    """Return the label of an axis of accuracies."""
    return "accuracy, %" if claim.measure == "accuracy" else "adversarial accuracy, %"


def apart(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Return heights at least `gap` apart and at most `top`, in the same order and near the given ones: places of labels."""
    order = sorted(range(len(heights)), key=lambda at: heights[at])
    placed = [heights[at] for at in order]
    for at in range(1, len(placed)):
        placed[at] = max(placed[at], placed[at - 1] + gap)
    limit = top
    for at in reversed(range(len(placed))):
        placed[at] = min(placed[at], limit)
        limit = placed[at] - gap
    found = [0.0] * len(heights)
    for at, height in zip(order, placed, strict=True):
        found[at] = height
    return found
