"""Recommend what to try first of a fleet and a model, and say why.

The whole model comes first, if every device can train it, unless something else was ahead in what was measured nearest.
"""

from collections.abc import Sequence
from typing import Any

from piecework.device_profiles.profile import format_bytes
from piecework.device_profiles.units import format_seconds, format_share
from piecework.plans.measured import Ahead, Case, ahead_of, as_quick, plain_rows
from piecework.strategies import find_method
from piecework.training.methods import METHODS, SIMPLEST

USEFUL = 0.05  # of a model's parameters; less is no model that one would use
Row = dict[str, Any]


def recommend(
    simple: Row,
    rows: list[Row],
    attacked: bool,
    others: Sequence[Row] = (),
    case: Case | None = None,
    nearest: Case | None = None,
    rate: float = 0.0,
) -> Row | None:
    """Return the row to try first, as `strategy`, `settings` to give and `text`, which says why; None if nothing can train.

    The whole model comes first, if every device can train it: in a plain step, then in one that takes less memory, then in
    pieces. Else it is the widest model that every device can train, and last what most clients can do. If another one that
    every device can do was ahead of it in the `case` that was measured nearest, after as many rounds, that is recommended.
    Of `others`, too, those are named that came as far there in no more time. Its rate there is told beside the question's,
    which is `rate`. Settings that a system should have for a question like this are those of the `nearest` case, however far
    away it is; if any system has such, then only one that has them is recommended, or one of the clients' own models.
    """
    useful = [row for row in rows if row["participation"] and row["covered"] >= USEFUL]
    if any(row["advice"] for row in plain_rows(nearest).values()):
        able = [row for row in useful if METHODS[row["strategy"]].can.personal or advised_row(row["strategy"], nearest)]
        useful = able or useful
    everyone = [row for row in useful if row["participation"] - row["swapping"] == 1]
    whole = [row for row in everyone if row["covered"] == 1]
    widest = max(everyone, key=lambda row: row["covered"], default=None)
    most = max(useful, key=lambda row: row["participation"] - row["swapping"], default=None)
    chosen: Row | None = whole[0] if whole else widest or most
    if chosen is None:
        return None
    text = reason_text(simple, chosen, useful, case)
    if ahead := ahead_of(chosen, everyone, case):
        text, chosen = f"{what_it_trains(ahead.row)} {rival_text(ahead, chosen)}".strip(), ahead.row
    text = f"{text} {rate_text(chosen, case, rate)} {rounds_text(chosen, case)} {time_text(chosen, [*rows, *others], case)}"
    text = f"{text} {advice_text(chosen['strategy'], nearest)}"
    text = " ".join(text.split())
    changes: dict[str, Any] = {"strategy": chosen["strategy"]}
    changes |= {"memory.fit": chosen["fit"]} if chosen["fit"] else {}
    changes |= advised["advice"] if (advised := advised_row(chosen["strategy"], nearest)) else {}
    if attacked and find_method(chosen["strategy"]).can.attack != "always":
        changes["training.adversarial"] = True
    return {"strategy": chosen["strategy"], "settings": changes, "text": text}


def reason_text(simple: Row, chosen: Row, rows: list[Row], case: Case | None) -> str:
    """Return why a row is recommended of `rows`, and what it costs."""
    if not chosen["fit"] and chosen["strategy"] == SIMPLEST:
        return (
            "Every device can hold a step of the whole model, so nothing has to be cut."
            if simple["fits"]
            else "Of what one would try first, nothing reaches more clients."
        )
    if chosen["fit"] and chosen["strategy"] == SIMPLEST:
        who = (
            "Every device can"
            if chosen["participation"] == 1
            else f"{format_share(chosen['participation'])} of the clients can"
        )
        said = f"{who} train the whole model in a step that takes less memory. {cost_text(simple['fitted'])}"
        return f"{said} {pieces_text(chosen, rows, case)}".strip()
    reached = simple["fitted"]["participation"] if simple["fitted"] else simple["participation"]
    of_clients = f"{format_share(reached)} of the clients"
    aside = f"Federated averaging of the whole model reaches {of_clients}, and leaves out the others' data."
    said = what_it_trains(chosen)
    return f"{said} {aside}" if said else "Of what one would try first, nothing reaches more clients."


def what_it_trains(chosen: Row) -> str:
    """Return what devices train by a system that does not train the whole model in one step; nothing for others."""
    if METHODS[chosen["strategy"]].can.cuts:
        who = (
            "Every device trains"
            if chosen["participation"] == 1
            else f"{format_share(chosen['participation'])} of the clients train"
        )
        left_out = "" if chosen["min_fraction"] == 1 else f", the poorest {format_share(chosen['min_fraction'])} of it"
        return f"{who} the whole model in pieces that fit it{left_out}."
    if chosen["covered"] < 1:
        how = f", by steps with memory.fit = {chosen['fit']}" if chosen["fit"] else ""
        return f"Every device can train a narrower model, {format_share(chosen['covered'])} of the parameters{how}."
    return ""


def rival_text(ahead: Ahead, rival: Row) -> str:
    """Return how far a row was ahead of what would be tried first without measurements, and how long both take."""
    name = name_text(rival)
    own, other = format_seconds(ahead.row["round_seconds"]), format_seconds(rival["round_seconds"])
    seeds = "one seed" if ahead.seeds == 1 else f"{ahead.seeds} seeds"
    return (
        f"Every device could do {name} too, but in what was measured nearest that was {ahead.points:.1f} points of accuracy "
        f"behind after as many rounds ({seeds}). A round takes {own} here, and {other} by {name}."
    )


def advised_row(strategy: str, case: Case | None) -> Row | None:
    """Return the row of a case by which a system has settings to be advised, or None."""
    return next((row for row in plain_rows(case).values() if row["strategy"] == strategy and row["advice"]), None)


def advice_text(strategy: str, case: Case | None) -> str:
    """Return why the settings of `advised_row` are advised."""
    row = advised_row(strategy, case)
    if row is None:
        return ""
    given = " and ".join(f"{key} = {value}" for key, value in row["advice"].items())
    return f"With {given} it had {row['accuracy']:.1f} % in what was measured nearest."


def rate_text(chosen: Row, case: Case | None, rate: float) -> str:
    """Return with which rate a row trained in a case, of another model; that of the question, `rate`, may be far from it."""
    row = plain_rows(case).get((chosen["strategy"], chosen["fit"]))
    if row is None or not row["rate"]:
        return ""
    here = "the command has it too" if row["rate"] == rate else f"the command has {rate:g}"
    return f"What was measured nearest had training.lr = {row['rate']:g} for {chosen['strategy']}, and {here}: compare rates."


def rounds_text(chosen: Row, case: Case | None) -> str:
    """Return what more rounds gave a row in a case, if one with more rounds is not behind the best one there."""
    key = (chosen["strategy"], chosen["fit"])
    row = plain_rows(case).get(key)
    longer = [each for each in case.longer if (each["strategy"], each["fit"]) == key] if case else []
    if row is None or not longer:
        return ""
    most = max(longer, key=lambda each: each["accuracy"])
    had = f"{most['rounds']} rounds gave it {most['accuracy']:.1f} % there, and {row['rounds']} gave it {row['accuracy']:.1f}"
    return f"Give it many rounds: {had}."


def time_text(chosen: Row, rows: Sequence[Row], case: Case | None) -> str:
    """Return what to compare if time counts: what came as far in no more time, with as many rounds or with more.

    They were measured, so a narrow model of few parameters is one of them. Of each only the most accurate is told. One is left
    out if it takes longer here, or another one was more accurate, takes no more time here, and as many clients can train by it.
    """
    measured = plain_rows(case).get((chosen["strategy"], chosen["fit"]))
    if case is None or measured is None:
        return ""
    able = [row for row in rows if row["participation"] > row["swapping"] and row["strategy"] != chosen["strategy"]]
    possible = {(row["strategy"], row["fit"]): row for row in able}
    quick: dict[tuple[str, str], Row] = {}
    for found in as_quick(case, measured):
        quick.setdefault((found["strategy"], found["fit"]), found)
    pairs = [(measured, chosen), *((found, possible[key]) for key, found in quick.items() if key in possible)]
    own = measured["rounds"] * chosen["round_seconds"]
    told = [(found, here, round(found["rounds"] * here["round_seconds"] / own, 1)) for found, here in pairs]
    said = [
        f"{who_text(here)} ({part_text(here)}{found['accuracy']:.1f} % with {found['rounds']} rounds, {times:.1f} times the "
        "time)"
        for found, here, times in told[1:]
        if times <= 1
        and not any(
            other["accuracy"] > found["accuracy"] and time <= times and part_of(there) >= part_of(here)
            for other, there, time in told
        )
    ]
    if not said:
        return ""
    return (
        f"If time counts more than rounds, compare {and_text(said)}: in what was measured nearest, that took no longer than "
        f"{measured['rounds']} rounds of {measured['name']} ({measured['accuracy']:.1f} %). Times are those of your devices, "
        f"as multiples of {measured['rounds']} rounds of {name_text(chosen)}."
    )


def part_of(row: Row) -> float:
    """Return the fraction of the clients that can train by a system, without those that only pretend to have the memory."""
    return float(row["participation"] - row["swapping"])


def name_text(row: Row) -> str:
    """Return a system with its ways of `memory.fit`."""
    return f"{row['strategy']} with memory.fit = {row['fit']}" if row["fit"] else str(row["strategy"])


def who_text(row: Row) -> str:
    """Return a system with its ways of `memory.fit`, and who can train by it if not all clients can."""
    part = part_of(row)
    return name_text(row) if part == 1 else f"{name_text(row)} by {format_share(part)} of the clients"


def part_text(row: Row) -> str:
    """Return the part of the model that is trained, if it is not all of it."""
    return "" if row["covered"] == 1 else f"{format_share(row['covered'])} of the model, "


def and_text(words: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def pieces_text(chosen: Row, rows: list[Row], case: Case | None) -> str:
    """Return how a round's time compares with a system's that as many clients train the model by in pieces, if there is one.

    With it, how the two compared in a case that both have a run in.
    """
    able = [row for row in rows if row["participation"] - row["swapping"] >= chosen["participation"]]
    cut = [row for row in able if METHODS[row["strategy"]].can.cuts and row["covered"] == 1 and row["stages"] == 1]
    if not cut:
        return ""
    quickest = min(cut, key=lambda row: row["round_seconds"])
    own, other = format_seconds(chosen["round_seconds"]), format_seconds(quickest["round_seconds"])
    said = f"A round takes {own}; with {quickest['strategy']}, which trains the model in pieces, {other}."
    one, two = (plain_rows(case).get((row["strategy"], row["fit"])) for row in (chosen, quickest))
    if one is None or two is None or one["name"] in two["ahead_of"]:
        return said
    if two["name"] in one["ahead_of"]:
        points = one["ahead_of"][two["name"]]
        return f"{said} In what was measured nearest that was {points:.1f} points behind after as many rounds."
    had = f"{one['accuracy']:.1f} and {two['accuracy']:.1f} %"
    return f"{said} In what was measured nearest the two cannot be told apart after as many rounds: {had}."


def cost_text(fitted: Row) -> str:
    """Return what a step with `memory.fit` costs the poorest device that can do it."""
    norms = " Batch norms take the statistics of a micro-batch." if fitted["batch_norms"] else ""
    factor = f"{fitted['flops']:.2f} times the FLOPs, and so that much more time to compute"
    more = "hardly more FLOPs" if fitted["flops"] > 1 else "no more FLOPs"
    cost = factor if round(fitted["flops"], 2) > 1 else more
    disk = f" A step moves {format_bytes(fitted['disk_bytes'])} to and from the disk." if fitted["disk_bytes"] else ""
    way = f" ({fitted['step']})" if fitted["step"] else ""
    return (
        f"The poorest of them needs {format_bytes(fitted['step_bytes'])} instead of {format_bytes(fitted['plain_bytes'])} for "
        f"a step{way}, and {cost}.{disk}{norms}"
    )
