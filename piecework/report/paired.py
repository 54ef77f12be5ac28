"""Paired differences: a group of runs against another one, between runs with the same seed.

Runs with the same seed share what it decides (the partition of the data, the devices, the first weights), so that their
difference says more than that of two means.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from piecework.device_profiles.profile import format_percent
from piecework.report.compare import UNDER_ATTACK, Group, RunResult, marks
from piecework.report.participation import span
from piecework.server_app.run_folder import COMPLETED

if TYPE_CHECKING:
    from piecework.report.page import Section

ENOUGH = 3  # seeds from which a chance is given
MEASURES = {"accuracy": "accuracy at the end", **{key: f"under {name}" for key, name in UNDER_ATTACK.items()}}


@dataclass(frozen=True)
class Pair:
    """How far the runs of a group are ahead of those of another one, `against`, with the same seeds: fractions by seed.

    `measure` is a key of MEASURES, and both groups have the marks that tables give them.
    """

    measure: str
    group: str
    against: str
    label: str
    differences: dict[int, float]

    @property
    def mean(self) -> float:
        """The mean difference."""
        return fmean(self.differences.values())

    @property
    def spread(self) -> float | None:
        """The sample standard deviation of the differences; None for one."""
        return stdev(self.differences.values()) if len(self.differences) > 1 else None

    @property
    def ahead(self) -> int:
        """With how many seeds the group is ahead."""
        return sum(each > 0 for each in self.differences.values())

    @property
    def behind(self) -> int:
        """With how many seeds the group is behind."""
        return sum(each < 0 for each in self.differences.values())

    @property
    def chance(self) -> float | None:
        """How often equals would be apart in so many seeds, in either direction (sign test); None for fewer than ENOUGH.

        Seeds with no difference are left out, as the test has it.
        """
        apart = self.ahead + self.behind
        if len(self.differences) < ENOUGH or not apart:
            return None
        fewer = min(self.ahead, self.behind)
        ways = sum(comb(apart, k) for k in range(fewer + 1))
        return min(1.0, 2 * ways / int(2**apart))

    def to_values(self) -> dict[str, Any]:
        """Return the figures as JSON values; differences are fractions."""
        return {
            **{key: getattr(self, key) for key in ("measure", "group", "label", "against")},
            "seeds": list(self.differences),
            "differences": list(self.differences.values()),
            **{"mean": self.mean, "std": self.spread, "ahead": self.ahead, "behind": self.behind},
            "chance": self.chance,
        }


def pair_groups(groups: Sequence[Group]) -> list[Pair]:
    """Compare each group with the first, by seeds with which both have one completed run, for each accuracy that they have."""
    found, names = [], marks(groups)
    for measure in MEASURES:
        values = [by_seed(group, measure) for group in groups]
        for mark, group, own in list(zip(names, groups, values, strict=True))[1:]:
            differences = {seed: own[seed] - values[0][seed] for seed in own if seed in values[0]}
            if differences:
                found.append(Pair(measure, mark, names[0], group.label, differences))
    return found


def completed(group: Group) -> dict[int, RunResult]:
    """Return the completed run with each seed; without seeds that several have, which are repetitions."""
    runs = [(seed, run) for seed, run in zip(group.seeds, group.runs, strict=True) if run.status == COMPLETED]
    counts = Counter(seed for seed, _ in runs)
    return {seed: run for seed, run in runs if counts[seed] == 1}


def by_seed(group: Group, measure: str) -> dict[int, float]:
    """Return the accuracy of the completed run with each seed."""
    known = {seed: accuracy_of(run, measure) for seed, run in completed(group).items()}
    return {seed: value for seed, value in known.items() if value is not None}


def accuracy_of(run: RunResult, measure: str) -> float | None:
    """Return an accuracy of the trained model."""
    if measure == "accuracy":
        return run.accuracy
    return run.under_attack[measure].accuracy if measure in run.under_attack else None


def paired_rows(pairs: Iterable[Pair]) -> list[dict[str, str]]:
    """Return the differences as text, by column."""
    return [
        {
            "": f"{pair.group} against {pair.against}",
            "accuracy": MEASURES[pair.measure].removeprefix("accuracy "),
            "mean difference": in_points(pair.mean, pair.spread),
            "seeds": str(len(pair.differences)),
            "ahead": f"in {pair.ahead}",
            "by chance": "-" if pair.chance is None else format_percent(pair.chance, 1),
        }
        for pair in pairs
    ]


def in_points(mean: float, spread: float | None) -> str:
    """Format fractions as `+1.20 ± 0.50 points`."""
    return f"{100 * mean:+.2f}{'' if spread is None else f' ± {100 * spread:.2f}'} points"


def explain(pairs: Sequence[Pair]) -> str:
    """Say how the differences are meant, and what so few seeds can say."""
    most = max(len(pair.differences) for pair in pairs)
    text = "Differences between runs with the same seed: mean ± sample standard deviation."
    if most < ENOUGH:
        few = "One seed says" if most == 1 else f"{most} seeds say"
        return f"{text} {few} little: with other seeds the order may be another one."
    least = format_percent(2 / 2**most, 1)
    return (
        f"{text} By chance: how often equals would be apart in so many seeds, in either direction (sign test). With {most} "
        f"seeds that is {least} at best{', so that no order is certain' if 2 / 2**most > 0.05 else ''}."
    )


def unequal_rounds(pairs: Iterable[Pair], groups: Sequence[Group]) -> list[str]:
    """Return which groups ran other numbers of rounds than the first, with the seeds that are compared; empty if none did."""
    rounds = {
        mark: {seed: run.rounds for seed, run in completed(group).items()}
        for mark, group in zip(marks(groups), groups, strict=True)
    }
    compared: dict[str, set[int]] = {}
    for pair in pairs:
        compared.setdefault(pair.group, set()).update(pair.differences)
    first = marks(groups)[0]
    unequal = {
        mark: seeds for mark, seeds in compared.items() if any(rounds[mark][n] != rounds[first][n] for n in seeds)
    }
    if not unequal:
        return []
    others = [f"{mark} ran {span(rounds[mark][seed] for seed in seeds)}" for mark, seeds in unequal.items()]
    own = span(rounds[first][seed] for seeds in unequal.values() for seed in seeds)
    return [f"{first} ran {own} rounds, and {', '.join(others)}: a difference may come from that."]


def paired_tables(groups: Sequence[Group]) -> list[Table | Text]:
    """Return a table of the paired differences and a sentence about it; nothing where no two groups share a seed."""
    if not (pairs := pair_groups(groups)):
        return []
    rows = paired_rows(pairs)
    table = Table(title="paired by seed", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("", "accuracy") else "right")
    for row in rows:
        table.add_row(*map(Text, row.values()))
    return [Text(), table, *map(Text, (explain(pairs), *unequal_rounds(pairs, groups)))]


def paired_section(groups: Sequence[Group]) -> "Section | None":
    """Return the paired differences as a section of a page; None where no two groups share a seed."""
    from piecework.report.page import Section, table

    if not (pairs := pair_groups(groups)):
        return None
    rows = paired_rows(pairs)
    said = " ".join((explain(pairs), *unequal_rounds(pairs, groups)))
    return Section("Paired by seed", said, below=table((list(row.values()) for row in rows), list(rows[0])))
