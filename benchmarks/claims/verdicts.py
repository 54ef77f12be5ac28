"""Whether a claimed order holds, by one rule for all claims, which RULE says in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.claims.definition import Case, Claim, Order
from benchmarks.claims.standings import Standing, with_more_rounds

ENOUGH = 3  # seeds, of which the spread says how much a difference is worth
MARGIN = 2.0  # points that a difference must exceed with fewer seeds
RULE = f"""Two rows are compared seed by seed: the difference is the mean over the seeds that both have, and ± is the
standard deviation of the differences. One row is ahead if the difference is larger than a margin: {MARGIN:g} points with
fewer than {ENOUGH} seeds, the standard deviation with {ENOUGH} or more. Within the margin the comparison is undecided with
fewer than {ENOUGH} seeds, and with {ENOUGH} or more the two are level. A row that no client can train is behind every row that
trains; one that failed for another reason, or has no run yet, leaves it undecided. An order holds if the row is ahead of all
the others that the claim names, does not hold if it is level with or behind one of them, and is undecided otherwise. Where an
order is of a number of points, the row is ahead if the difference is at least as large, and behind if it is not; of a row that
is claimed to come within a number of points of another, the difference is below zero."""


@dataclass(frozen=True)
class Difference:
    """How far a row is ahead of another one, in points. `verdict` is ahead, behind, level or undecided; `why` explains it."""

    other: str
    verdict: str
    points: float | None = None
    spread: float | None = None
    seeds: int = 0
    why: str = ""


@dataclass(frozen=True)
class Judgement:
    """A claimed order in a case. `verdict` is holds, does not hold or undecided."""

    order: Order
    case: str
    verdict: str
    differences: tuple[Difference, ...]


def judge(claim: Claim, order: Order, case: str, found: Sequence[Standing]) -> Judgement | None:
    """Judge an order by the standings of a case; None if the order is not claimed there, or a row is not run there."""
    by_name = {each.row.name: each for each in found}
    if (order.cases and case not in order.cases) or not {order.ahead, *order.behind} <= by_name.keys():
        return None
    differences = tuple(difference(by_name[order.ahead], by_name[name], order.by) for name in order.behind)
    verdicts = {each.verdict for each in differences}
    if verdicts & {"behind", "level"}:
        return Judgement(order, case, "does not hold", differences)
    return Judgement(order, case, "undecided" if "undecided" in verdicts else "holds", differences)


def difference(row: Standing, other: Standing, least: float | None = None) -> Difference:
    """Compare two rows by the rule. `least`: the points by which the first must be ahead, if the order is of a number."""
    name = other.row.name
    if row.untrainable != other.untrainable and (row.runs or other.runs):
        if row.untrainable:
            return Difference(name, "behind", why=f"no client can train {row.row.name}")
        return Difference(name, "ahead", why=f"no client can train {name}")
    seeds = [seed for seed in row.by_seed if seed in other.by_seed]
    if not seeds:
        return Difference(name, "undecided", why=unknown(row, other))
    values = [row.by_seed[seed] - other.by_seed[seed] for seed in seeds]
    points, spread = fmean(values), stdev(values) if len(values) > 1 else None
    if least is not None:
        verdict = "ahead" if points >= least else "behind"
        claimed = f"at least {least:g} points" if least > 0 else f"at most {-least:g} points behind"
        return Difference(name, verdict, points, spread, len(values), f"{claimed} are claimed")
    return Difference(name, decide(points, spread, len(values)), points, spread, len(values))


def as_good_with_more_rounds(claim: Claim, case: Case, there: Sequence[Standing]) -> list[tuple[Standing, Difference]]:
    """Return the rows that are not behind the first candidate, by having more rounds, and by how much they are ahead of it.

    The best comes first. Without a candidate that has trained there are none.
    """
    first = next((each for each in there if each.candidate and each.runs), None)
    if first is None:
        return []
    pairs = [(each, difference(each, first)) for each in with_more_rounds(claim, case, there)]
    return [(each, found) for each, found in pairs if found.verdict != "behind" and found.points is not None]


def decide(points: float, spread: float | None, seeds: int) -> str:
    """Return the verdict on a difference in points over so many seeds: ahead, behind, level or undecided."""
    enough = spread is not None and seeds >= ENOUGH
    if abs(points) > (spread if enough and spread is not None else MARGIN):
        return "ahead" if points > 0 else "behind"
    return "level" if enough else "undecided"


def unknown(*pair: Standing) -> str:
    """Return why two rows have no seed in common."""
    words = []
    for each in pair:
        if not each.runs:
            words.append(f"{each.row.name} {'failed' if each.failed else 'has no run yet'}")
    return ", ".join(words) or "they have no seed in common"
