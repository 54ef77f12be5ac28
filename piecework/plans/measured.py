"""What was measured nearest to a model and a fleet: a case of a claim, and who is ahead in it.

The cases are in measured.toml, which `python -m benchmarks.claims table` writes from the records in docs/claims.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from piecework.device_profiles.documents import read_toml
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.units import format_seconds
from piecework.plans.plan import planner_for
from piecework.plans.question import PlanQuestion
from piecework.training.methods import SIMPLEST, list_advised
from piecework.training.settings import Settings

FILE = Path(__file__).with_name("measured.toml")
FAR = 0.5  # of a situation's fractions, added up: what is farther away says little
LEADERS = 3  # rows that are shown whatever they are
FLOAT32 = 4  # bytes of a gradient
ALIKE = 0.25  # of the step's parameters, gradients and state: what fills the memory decides who is ahead


@dataclass(frozen=True)
class Situation:
    """What decides who can train: fractions of a plain step of the whole model.

    `poorest` and `richest` are the devices' budgets, 1 if they have more than a step takes. `kept` are the parameters, their
    gradients and the optimiser's state, which no smaller batch makes smaller; the rest are activations. `disk` are the bytes a
    second of the poorest device's disk, by which the storage of a measured time is chosen. `skew` says
    how data are divided, where each client is judged by its own; for other evaluations it is empty.
    """

    adversarial: bool
    poorest: float
    richest: float
    kept: float
    disk: float
    skew: str = ""

    def is_near(self, other: "Situation") -> bool:
        """Return whether what was measured there says something here."""
        return self.skew == other.skew and self.distance(other) <= FAR and abs(self.kept - other.kept) <= ALIKE

    def distance(self, other: "Situation") -> float:
        """Return the sum of the fractions' differences."""
        pairs = ((self.poorest, other.poorest), (self.richest, other.richest), (self.kept, other.kept))
        return sum(abs(one - two) for one, two in pairs)


@dataclass(frozen=True)
class Case:
    """A case of a claim. `rows` have trained, the best first; `idle` are rows that no client can train, `missing` have no run.

    `lead` is that of the first row over the `next` one, with the seeds that both have: points, seeds, and ahead, level,
    undecided or behind, as rows are sorted by all their seeds. `times` has for each storage its bytes a second, the simulated
    seconds in which half of the rows are through, and the row that is ahead then. A row's `seconds` are by storage, in which
    its rounds are through; it is `ahead_of` others by so many points. It is `plain` if it stands for its system in advice,
    which then gives the settings `advice` with it. `longer` are rows that are not behind the first one by having more rounds;
    their `verdict` is ahead, level or undecided.
    """

    claim: str
    name: str
    setting: str
    situation: Situation
    lead: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    idle: tuple[str, ...]
    missing: tuple[str, ...]
    times: tuple[dict[str, Any], ...]
    longer: tuple[dict[str, Any], ...] = ()


@cache
def read_cases(path: Path = FILE) -> tuple[Case, ...]:
    """Return the cases that were measured."""
    return tuple(
        Case(
            entry["claim"],
            entry["name"],
            entry["setting"],
            Situation(**entry["situation"]),
            entry["lead"],
            rows=tuple(entry["rows"]),
            idle=tuple(entry["idle"]),
            missing=tuple(entry["missing"]),
            times=tuple(entry["times"]),
            longer=tuple(entry["longer"]),
        )
        for entry in read_toml(path.read_text("utf-8")).get("case", [])
    )


def situate(settings: Settings, question: PlanQuestion) -> Situation:
    """Return the situation of a fleet and a model, for adversarial training if `training.adversarial` says so."""
    plain = settings.with_values({"strategy": SIMPLEST, "memory.fit": ""})
    planner, states = planner_for(load_fleet(settings.fleet), plain, question)
    cut = planner.cut
    part, config = cut.part(cut.whole), cut.cost_model.training_config
    step = cut.cost_model.bytes(part)
    budgets = [min(1.0, state.budget_bytes / step) for of_round in states for state in of_round]
    poorest = min((state for of_round in states for state in of_round), key=lambda state: state.budget_bytes)
    kept = part.state_bytes + (FLOAT32 + config.bytes_kept) * part.parameters
    return Situation(
        settings.training.adversarial,
        poorest=round(min(budgets), 3),
        richest=round(max(budgets), 3),
        kept=round(min(1.0, kept / step), 3),
        disk=poorest.disk_bandwidth,
        skew=skew_of(settings),
    )


def skew_of(settings: Settings) -> str:
    """Return how the data of clients differ that are judged by their own, as in `dirichlet 0.1`; else nothing."""
    data = settings.data
    alpha = f" {data.partition_alpha:g}" if data.partition == "dirichlet" else ""
    return f"{data.partition}{alpha}" if settings.evaluation.mode == "personal" else ""


def nearest(situation: Situation, cases: Sequence[Case]) -> Case | None:
    """Return the nearest case with the same kind of training and evaluation; None without one."""
    kind = (situation.adversarial, bool(situation.skew))
    alike = [case for case in cases if (case.situation.adversarial, bool(case.situation.skew)) == kind]
    return min(alike, key=lambda case: situation.distance(case.situation), default=None)


def near(situation: Situation, cases: Sequence[Case]) -> Case | None:
    """Return the nearest case if it is near enough to decide what one tries first, else None."""
    case = nearest(situation, cases)
    return case if case is not None and situation.is_near(case.situation) else None


def nearest_divided(situation: Situation, cases: Sequence[Case]) -> Case | None:
    """Return the nearest case if its data are divided in the same way, though not to the same degree, else None."""
    case = nearest(situation, cases)
    same = case is not None and case.situation.skew.partition(" ")[0] == situation.skew.partition(" ")[0]
    return case if same else None


def plain_rows(case: Case | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of a case that stand for a system and its `memory.fit`, by these two."""
    return {(each["strategy"], each["fit"]): each for each in case.rows if each["plain"]} if case else {}


class Ahead(NamedTuple):
    """A row of the advice, and by how many points over how many seeds it was ahead of another one."""

    row: dict[str, Any]
    points: float
    seeds: int


def ahead_of(chosen: dict[str, Any], rows: Sequence[dict[str, Any]], case: Case | None) -> Ahead | None:
    """Return which of the advice's `rows` was most accurate in a case, if it was ahead of `chosen` by the claims' rule.

    None if it was not, or `chosen` has no run there. A row's `fit` has the ways of its `memory.fit`.
    """
    ran = plain_rows(case)
    measured = [(ran[key], row) for row in rows if (key := (row["strategy"], row["fit"])) in ran]
    own = next((found for found, row in measured if row is chosen), None)
    if own is None:
        return None
    best, row = max(measured, key=lambda pair: pair[0]["accuracy"])
    if own["name"] not in best["ahead_of"]:
        return None
    return Ahead(row, best["ahead_of"][own["name"]], min(best["seeds"], own["seeds"]))


def evidence(situation: Situation, recommended: dict[str, Any] | None, cases: Sequence[Case]) -> dict[str, Any]:
    """Return what was measured nearest, as JSON values: `text`, and `rows` to show, which are none if nothing was measured.

    Rows are what is told of, the leaders, and those of systems that one would try first. A row has what it is `behind` the
    first one in points, and its simulated `seconds` on the storage that is nearest to the devices' disks.
    """
    case = nearest(situation, cases)
    if case is None:
        kind = "adversarial" if situation.adversarial else "clean"
        judged = " and personal evaluation" if situation.skew else ""
        return {
            "text": f"Nothing was measured with {kind} training{judged} yet (docs/results/index.md).",
            "rows": [],
            "case": None,
        }
    time = min(case.times, key=lambda each: abs(log(each["bandwidth"] / situation.disk)))
    named = [time["row"], *(row["name"] for row in case.rows[:LEADERS])]
    shown = [row for row in case.longer if is_told(row, case, time["storage"])]
    shown += [row for row in case.rows if row["name"] in named or row["strategy"] in list_advised()]
    best = case.rows[0]["accuracy"]
    figures = [
        {**row, "behind": round(best - row["accuracy"], 1), "seconds": row["seconds"][time["storage"]]} for row in shown
    ]
    return {
        "text": f"{where(situation, case)} {who(case, time, recommended)}",
        "rows": figures,
        "case": {"claim": case.claim, "name": case.name, "distance": round(situation.distance(case.situation), 3)},
    }


def as_quick(case: Case, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that one of a case is not ahead of, with as many rounds or with more, and that take no longer.

    That is on any storage. Those with more rounds come first. Rows with as many that stand for no system are left out.
    """
    level = [each for each in case.rows if each["plain"] and each is not row and each["name"] not in row["ahead_of"]]
    limit = row["seconds"]
    return [each for each in (*case.longer, *level) if all(each["seconds"][disk] <= limit[disk] for disk in limit)]


def is_told(row: dict[str, Any], case: Case, storage: str) -> bool:
    """Return whether a row with more rounds is told of: it is ahead of the first one, or as good in no more time."""
    return bool(row["verdict"] == "ahead" or row["seconds"][storage] <= case.rows[0]["seconds"][storage])


def longer_text(case: Case, storage: str) -> str:
    """Return which rows with more rounds are ahead of the first one, or as good in no more time; empty if none is."""
    best, said = case.rows[0], ""
    means = {"ahead": "is ahead of", "level": "is level with", "undecided": "cannot be told from"}
    for row in case.longer:
        if is_told(row, case, storage):
            took, other = (format_seconds(each["seconds"][storage]) for each in (row, best))
            said += (
                f" With more rounds {row['name']}, {means[row['verdict']]} {best['name']}: {row['accuracy']:.1f} % in {took} "
                f"against {best['accuracy']:.1f} % in {other}."
            )
    return said


def is_of(row: dict[str, Any], recommended: dict[str, Any] | None) -> bool:
    """Return whether a row is the recommended system, with the ways of `memory.fit` that are recommended."""
    if recommended is None:
        return False
    same = row["fit"] == recommended["settings"].get("memory.fit", "")
    return bool(same and row["plain"] and row["strategy"] == recommended["strategy"])


def where(situation: Situation, case: Case) -> str:
    """Return what was measured, and how far away it is."""
    other = case.situation
    far = "Measured nearest:" if situation.is_near(other) else "Nothing near this was measured; the nearest is"
    divided = f" Data are divided otherwise here: {situation.skew}." if situation.skew != other.skew else ""
    return (
        f"{far} {case.setting} (docs/claims/{case.claim}.md, {case.name}). There the devices have "
        f"{in_steps(other)} of a plain step (here {in_steps(situation)}), of which parameters, gradients and the optimiser's "
        f"state are {other.kept:.2f} (here {situation.kept:.2f}).{divided}"
    )


def in_steps(situation: Situation) -> str:
    """Return the devices' budgets in steps."""
    low, high = f"{situation.poorest:.2f}", f"{situation.richest:.2f}"
    return low if low == high else f"{low} to {high}"


def lead_text(case: Case) -> str:
    """Return which row is the highest in a case, and how far the next one is behind it by the rule for orders."""
    lead, first = case.lead, case.rows[0]
    seeds = "one seed" if lead["seeds"] == 1 else f"{lead['seeds']} seeds"
    verdict = "" if lead["verdict"] in ("ahead", "behind") else f": {lead['verdict']}"
    rounds = {row["name"]: row["rounds"] for row in case.rows}
    alike = rounds[first["name"]] == rounds[lead["next"]]
    name, other = (f"{each}{'' if alike else f' ({rounds[each]} rounds)'}" for each in (first["name"], lead["next"]))
    there = "there after as many rounds" if alike else "there"
    if lead["verdict"] == "ahead":
        return f"Ahead {there}: {name}, by {lead['points']:.1f} points; {other} is next ({seeds})."
    said = f"Highest {there}: {name}; {other} is {abs(lead['points']):.1f} points"
    return (
        f"{said} {'behind' if lead['points'] >= 0 else 'ahead of it with the seeds that both have'} ({seeds}{verdict})."
    )


def who(case: Case, time: dict[str, Any], recommended: dict[str, Any] | None) -> str:
    """Return who is ahead after as many rounds and in as much time, and whether the recommended system has a run."""
    said = lead_text(case)
    if time["row"] != case.rows[0]["name"]:
        said += (
            f" Highest in {format_seconds(time['seconds'])} of simulated time, when half of the systems are through: "
            f"{time['row']}."
        )
    said += longer_text(case, time["storage"])
    said += f" No client can train there: {'; '.join(case.idle)}." if case.idle else ""
    said += f" Not run there yet: {'; '.join(case.missing)}." if case.missing else ""
    if recommended is not None and not any(is_of(row, recommended) for row in case.rows):
        said += " The recommended system has no finished run there."
    return said
