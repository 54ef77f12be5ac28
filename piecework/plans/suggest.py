"""Advice on which systems suit a fleet and a model: one recommendation, what one would try first, then the rest.

Nothing here ranks by memory peaks, as what fits needs no ranking. What was measured nearest stands beside the recommendation,
and decides it if it is near.
"""

from collections.abc import Callable
from itertools import chain
from statistics import fmean
from typing import Any

from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.profile import DeviceState, format_bytes, format_compared
from piecework.device_profiles.units import format_share
from piecework.models.cascade import Blueprint
from piecework.models.imported.objects import is_object
from piecework.models.static_norms import mixes_examples
from piecework.planning.costs import CostModel, cost_model_for
from piecework.planning.less_memory import FIT, in_less_memory
from piecework.planning.page_plan import speed_of
from piecework.planning.part import whole_model
from piecework.plans.beside import Helpers
from piecework.plans.ladder import climb
from piecework.plans.measured import Case, Situation, evidence, near, nearest_divided, read_cases, situate
from piecework.plans.plan import fleet_states, make_plan, planner_for
from piecework.plans.question import PlanQuestion
from piecework.plans.recommend import recommend
from piecework.strategies import find_method
from piecework.training.methods import METHODS, SIMPLEST, list_advised
from piecework.training.settings import Settings
from piecework.training.setup import blueprint_of_shape

Row = dict[str, Any]


def advise(
    settings: Settings, question: PlanQuestion, tell: Callable[[str], None] = lambda _: None, helpers: int = 0
) -> dict[str, Any]:
    """Return the whole advice as JSON values; `tell` hears what is being planned, and so many `helpers` plan beside it.

    `simple` is FedAvg's verdict; if all devices fit a step of the whole model, no other system is planned. Otherwise `ladder`
    is how the poorest device could train the whole model, `first` are FedAvg and the systems that one would try first, some
    also with `memory.fit`; `others` are the other systems by name; `refused` cannot train the model, with the reason.
    `recommended` is one of `first`, or None, and `measured` what was measured nearest. If the settings ask for adversarial
    training, by `training.adversarial` or a system that always does it, the advice is on that. If they ask for a personal
    evaluation, or a system of the clients' own models, `first` has these too, also if all devices fit a step.
    """
    asked = find_method(settings.strategy).can
    attacked = settings.training.adversarial or asked.attack == "always"
    personal = settings.evaluation.mode == "personal" or asked.personal
    mode = {"evaluation.mode": "personal"} if personal else {}
    settings = settings.with_values({"training.adversarial": attacked, **mode})
    tell(SIMPLEST)
    plain = make_plan(plain_settings(settings), question)
    names = sorted(n for n in METHODS if n != SIMPLEST and suits(n, attacked))
    own = [name for name in names if personal and METHODS[name].can.personal]
    names = own if fits_all(plain) else names

    def plan(name: str, fit: str = "") -> Row:
        tell(f"{name} with memory.fit = {fit}" if fit else name)
        given = {"strategy": name, "memory.fit": fit or settings.memory.fit}
        return plan_system(settings.with_values(given), question, plain["attack_steps"])

    helpers = 0 if is_object(settings.model) or not names else helpers  # no other process has the object
    with Helpers(names, settings, question, plain["attack_steps"], helpers) as beside:
        simple, first = fedavg_verdict(settings, question, plain)
        climbs = settings.memory.model == "traced" and not simple["fits"]
        fitted = [plan(name, METHODS[name].can.advised_fit) for name in fitted_names(settings, names) if climbs]
        rows = beside.rows(plan)
    able = [row for row in (*(rows[name] for name in names), *wider(fitted, rows)) if not row["reason"]]
    first += [row for name in (*list_advised(), *own) for row in able if row["strategy"] == name]
    situation = situate(settings, question) if climbs or (own and settings.memory.model == "traced") else None
    recommended = recommend(simple, first, attacked, able, *advising_cases(situation), settings.training.lr)
    if recommended:
        recommended["settings"] |= {} if METHODS[recommended["strategy"]].can.personal else mode
    return {
        "adversarial": attacked,
        "simple": simple,
        "ladder": climb(settings, question) if climbs else None,
        "recommended": recommended,
        "measured": situation and evidence(situation, recommended, read_cases()),
        "first": first,
        "others": [row for row in able if row not in first],
        "refused": [rows[name] for name in names if name not in {row["strategy"] for row in able}],
    }


def advising_cases(situation: Situation | None) -> tuple[Case | None, Case | None]:
    """Return the case that is near enough to decide what one tries first, and the nearest with data that are divided alike."""
    if situation is None:
        return None, None
    return near(situation, read_cases()), nearest_divided(situation, read_cases())


def suits(name: str, attacked: bool) -> bool:
    """Return whether a system can train as requested: on adversarial examples, or on clean ones."""
    return find_method(name).can.attack != ("never" if attacked else "always")


def blueprint_of(settings: Settings, question: PlanQuestion) -> Blueprint:
    """Return the model of the question."""
    return blueprint_of_shape(settings, question.input_shape, question.num_classes)


# ---- FedAvg


def plain_settings(settings: Settings) -> Settings:
    """Return the settings of FedAvg with plain steps."""
    return settings.with_values({"strategy": SIMPLEST, "memory.fit": ""})


def fits_all(plan: Row) -> bool:
    """Return whether every device can take part in a plan."""
    return bool(plan["fleet"]["participation"] == 1)


def fedavg_verdict(settings: Settings, question: PlanQuestion, plan: Row) -> tuple[Row, list[Row]]:
    """Return whether every device can hold a step of the whole model, and the rows of FedAvg without and with `memory.fit`.

    `plan` is that with plain steps. If not every device can, `fitted` says how far `memory.fit` helps, and `smaller_batch`
    which batch every device could hold.
    """
    settings = plain_settings(settings)
    fleet = load_fleet(settings.fleet)
    states = list(chain(*fleet_states(fleet, settings, plan["reference_bytes"])))
    poorest = min(states, key=lambda state: state.budget_bytes)
    participation = plan["fleet"]["participation"]
    verdict: Row = {
        "fits": fits_all(plan),
        "participation": participation,
        "batch_size": settings.training.batch_size,
        "attack_steps": plan["attack_steps"],
        "step_bytes": plan["full_memory_bytes"],
        "poorest_bytes": poorest.budget_bytes,
        "fitted": None,
        "smaller_batch": None,
        "ratios": any(device.memory_ratio is not None for device in fleet.devices),
    }
    rows = [row_of(settings, plan)]
    if not verdict["fits"]:
        if settings.memory.model == "traced":
            fitted = settings.with_values({"memory.fit": FIT})
            plan = make_plan(fitted, question)
            verdict["fitted"] = judge_fit(fitted, question, states, plan["fleet"]["participation"])
            rows.append(row_of(fitted, plan))
        verdict["smaller_batch"] = smaller_batch(settings, question, poorest, verdict["attack_steps"])
    return verdict | {"text": verdict_text(verdict)}, rows


def judge_fit(settings: Settings, question: PlanQuestion, states: list[DeviceState], participation: float) -> Row:
    """Return who can train the whole model with `memory.fit`, and the step of the poorest of them, or the smallest step.

    `flops` is a multiple of the plain step's, and `disk_bytes` are read and written in a step.
    """
    planner, _ = planner_for(load_fleet(settings.fleet), settings, question)
    cut = planner.cut
    found = in_less_memory(
        cut.cost_model, cut.part(cut.whole), [(each.allowed_bytes, speed_of(each)) for each in states]
    )
    assert found is not None
    cost = cut.cost_model.trace(found.part)
    return {
        "participation": participation,
        "step": found.part.step,
        "step_bytes": found.bytes,
        "least_bytes": found.least,
        "plain_bytes": found.plain,
        "flops": found.flops,
        "disk_bytes": cost.bytes_read + cost.bytes_written,
        "batch_norms": bool(found.part.micro_batch) and mixes_examples(found.part.blueprint),
    }


def smaller_batch(settings: Settings, question: PlanQuestion, poorest: DeviceState, attack_steps: int) -> Row | None:
    """Return the largest power of two below the batch size at which every device can hold a step, or None."""
    for size in smaller_batches(settings.training.batch_size):
        cost_model = cost_model_of(settings.with_values({"training.batch-size": size}), question, attack_steps)
        needed = cost_model.bytes(whole_model(blueprint_of(settings, question)))
        if needed <= poorest.allowed_bytes:
            return {"batch_size": size, "step_bytes": needed}
    return None


def smaller_batches(batch_size: int) -> list[int]:
    """Return the powers of two below a batch size, down to 2."""
    return [2**power for power in range(batch_size.bit_length(), 0, -1) if 2**power < batch_size]


def cost_model_of(settings: Settings, question: PlanQuestion, attack_steps: int) -> CostModel:
    """Return the cost model of all systems' steps."""
    reference = blueprint_of(settings.with_values({"architecture.width": 1.0}), question)
    return cost_model_for(settings, reference, attack_steps, question.precision)


def verdict_text(verdict: Row) -> str:
    """Return FedAvg's verdict as text."""
    step, poorest = format_compared(verdict["step_bytes"], verdict["poorest_bytes"])
    has = "no device has a limit" if poorest == "unlimited" else f"the poorest device has {poorest}"
    figures = f"A step at batch {verdict['batch_size']} takes {step}, {has}."
    if verdict["fits"]:
        return f"Every device fits a step of the whole model. {figures}"
    said = f"{format_share(verdict['participation'])} of the clients fit a step of the whole model. {figures}"
    if verdict["fitted"] is not None and verdict["fitted"]["participation"] < 1:
        said += f" {describe_fit(verdict['fitted'])}"
    smaller = verdict["smaller_batch"]
    if smaller is None:
        return f"{said} No smaller batch fits every device, down to 2."
    said += (
        f" At batch {smaller['batch_size']} it takes {format_bytes(smaller['step_bytes'])} and fits every device, but a "
        "smaller batch changes the optimisation and the statistics of batch norms, so choose the rate again."
    )
    if verdict["ratios"]:
        said += (
            f" (The budgets of this fleet are ratios of a step, here at batch {verdict['batch_size']}. In a run with a smaller "
            "batch they would shrink with it.)"
        )
    return said


def describe_fit(fitted: Row) -> str:
    """Return what stands in the way of `memory.fit`, as text."""
    who = f"{format_share(fitted['participation'])} of the clients" if fitted["participation"] else "no client"
    return f"With memory.fit {who} can train it: the smallest step takes {format_bytes(fitted['least_bytes'])}."


# ---- the others


def plan_system(settings: Settings, question: PlanQuestion, attack_steps: int) -> Row:
    """Plan one system; `reason` says why it cannot train the model, or why no device can take part."""
    refused = {"strategy": settings.strategy, "fit": "", "participation": 0.0}
    try:
        plan = make_plan(settings, question, cost_model_of(settings, question, attack_steps))
    except ValueError as error:
        return refused | {"reason": str(error)}
    if not plan["fleet"]["participation"]:
        return refused | {"reason": no_device_reason(plan)}
    if plan["coverage"]["level"] == "error":
        return refused | {"reason": plan["coverage"]["says"]}
    return row_of(settings, plan)


def fitted_names(settings: Settings, names: list[str]) -> list[str]:
    """Return which of the named systems one would also try with steps in less memory, unless all are asked to take them."""
    return [name for name in names if METHODS[name].can.advised_fit and not settings.memory.fit]


def wider(fitted: list[Row], rows: dict[str, Row]) -> list[Row]:
    """Return the rows with steps in less memory that train more of the model than the same system does in plain steps.

    `rows` are those with plain steps by system. What trains no more would only take more time.
    """
    return [row for row in fitted if row.get("covered", 0) > rows[row["strategy"]].get("covered", 0)]


def row_of(settings: Settings, plan: Row) -> Row:
    """Return the row of a plan."""
    stages, trained, cover = plan["fleet"]["stages"], plan["trained"], plan["coverage"]
    able = plan["fleet"]["participation"] > 0
    caveats = [find_method(settings.strategy).can.caveat, cover["says"] if able and cover["level"] == "warning" else ""]
    return {
        "strategy": settings.strategy,
        "fit": ",".join(way.strip() for way in settings.memory.fit.split(",")),
        "reason": "",
        "participation": plan["fleet"]["participation"],
        "swapping": plan["swapping"]["fraction"] if plan["swapping"] else 0.0,
        "trains": trained["devices"],
        "min_fraction": trained["minimum"],
        "covered": trained["together"],
        "bytes_per_round": fmean(stage["bytes_down"] + stage["bytes_up"] for stage in stages),
        "round_seconds": fmean(stage["round_seconds"] for stage in stages),
        "stages": len(stages),
        "caveat": "; ".join(filter(None, caveats)) if able else no_device_reason(plan),
    }


def no_device_reason(plan: Row) -> str:
    """Return why no device can train anything: what the device that is closest to fitting needs, and what it has."""
    closest = min((stage["closest"] for stage in plan["fleet"]["stages"]), key=lambda pair: pair[0] - pair[1])
    needed, budget = format_compared(*closest)
    return f"no device can: the one that is closest needs {needed} and has {budget}"
