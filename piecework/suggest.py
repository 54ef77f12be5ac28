"""Advice on which systems suit a fleet and a model. Simple baselines come first; our measurements come with their setting.

Nothing here ranks by memory peaks, as what fits needs no ranking. Accuracies of different settings are never compared.
"""

import tomllib
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.profile import DeviceState, format_bytes, format_compared
from piecework.models.cascade import Blueprint
from piecework.models.static_norms import mixes_examples
from piecework.plan import fleet_states, make_plan, policy_for
from piecework.planning.costs import CostModel, cost_model_for
from piecework.planning.part import whole_model
from piecework.question import PlanQuestion
from piecework.strategies import STRATEGIES, find_policy
from piecework.strategies.whole.fedavg import FedAvgPolicy
from piecework.training.settings import Settings
from piecework.training.setup import blueprint_of_shape
from piecework.training.sgd import TrainingConfig

MEASURED = Path(__file__).parent / "measured.toml"
FIT = "recompute,micro-batch"  # the advice prefers the way that changes nothing
SIMPLE = ("allsmall", "exclusivefl")  # beside FedAvg, what one would try first
ORDER = (
    "Order: the fraction of clients that can take part, then the part of the model that the fleet trains together, then the "
    "accuracy that was measured in setting [1]; systems without one come after."
)


def advise(settings: Settings, question: PlanQuestion) -> dict[str, Any]:
    """Return the whole advice as JSON values.

    `simple` is FedAvg's verdict; if all devices fit a step of the whole model, that is the advice, and no other system is
    planned. Otherwise `rivals` are AllSmall and ExclusiveFL, `rows` the other systems in order, and `refused` those that cannot
    train the model, with the reason. The advice is on adversarial training if the settings ask for it, by `training.adversarial
    = true` or a system that always does it.
    """
    attacked = settings.training.adversarial or find_policy(settings.strategy).adversarial == "always"
    settings = settings.changed({"training.adversarial": attacked})
    simple = fedavg_verdict(settings, question)
    advice: dict[str, Any] = {"adversarial": attacked, "simple": simple, "rivals": [], "rows": [], "refused": []}
    if not simple["fits"]:
        measured = nearest(blueprint_of(settings, question), attacked)
        found = []
        costs: dict[str, CostModel] = {}  # by how batch norms are run, which a strategy may decide
        for name in STRATEGIES:
            if name != "fedavg" and suits(name, attacked):
                own = settings.changed({"strategy": name})
                if own.norms_in_training not in costs:
                    costs[own.norms_in_training] = cost_model_of(own, question, simple["attack_steps"])
                found.append(
                    planned(own, question, costs[own.norms_in_training]) | {"measured": accuracies(name, measured)}
                )
        able = [row for row in found if not row["reason"]]
        advice["rivals"] = [row for row in able if row["strategy"] in SIMPLE]
        advice["rows"] = sorted((row for row in able if row["strategy"] not in SIMPLE), key=order)
        advice["refused"] = [row for row in found if row["reason"]]
        used = {number for row in able for number in row["measured"]}
        advice["settings"] = {n: entry for n, entry in enumerate(measured, start=1) if n in used}
        advice["order"] = ORDER
    return advice


def suits(name: str, attacked: bool) -> bool:
    """Return whether a system can train as requested: on adversarial examples, or on clean ones."""
    return find_policy(name).adversarial != ("never" if attacked else "always")


def blueprint_of(settings: Settings, question: PlanQuestion) -> Blueprint:
    """Return the model of the question."""
    return blueprint_of_shape(settings, question.input_shape, question.num_classes)


# ---- FedAvg


def fedavg_verdict(settings: Settings, question: PlanQuestion) -> dict[str, Any]:
    """Return whether every device can hold a step of the whole model; if not, how far `memory.fit` and smaller batches help."""
    settings = settings.changed({"strategy": "fedavg"})
    plan = make_plan(settings, question)
    fleet = load_fleet(settings.fleet)
    everyone = chain(*fleet_states(fleet, settings, plan["reference_bytes"]))
    poorest = min(everyone, key=lambda state: state.budget_bytes)
    participation = plan["fleet"]["participation"]
    verdict: dict[str, Any] = {
        "fits": participation == 1,
        "participation": participation,
        "batch_size": settings.training.batch_size,
        "attack_steps": plan["attack_steps"],
        "step_bytes": plan["full_memory_bytes"],
        "poorest_bytes": poorest.budget_bytes,
        "fitted": None,
        "smaller_batch": None,
        "ratios": any(device.memory_ratio is not None for device in fleet.devices),
    }
    if not verdict["fits"]:
        if settings.memory.model == "traced":
            verdict["fitted"] = fitted_verdict(settings, question, poorest)
        for size in smaller_batches(settings.training.batch_size):
            cost_model = cost_model_of(settings.changed({"training.batch-size": size}), question, plan["attack_steps"])
            needed = cost_model.bytes(whole_model(blueprint_of(settings, question)))
            if needed <= poorest.allowed_bytes:
                verdict["smaller_batch"] = {"batch_size": size, "step_bytes": needed}
                break
    return verdict | {"text": verdict_text(verdict)}


def fitted_verdict(settings: Settings, question: PlanQuestion, poorest: DeviceState) -> dict[str, Any]:
    """Return who can train the whole model with `memory.fit`, and the step of the poorest device.

    `flops` is a multiple of the plain step's. `held_bytes` are those of parameters, gradients and momentum, which no way
    spares.
    """
    settings = settings.changed({"memory.fit": FIT})
    policy, _ = policy_for(load_fleet(settings.fleet), settings, question)
    assert isinstance(policy, FedAvgPolicy)
    plain, costs = policy.part(policy.whole), policy.cost_model
    part = costs.fitted(plain, poorest.allowed_bytes)
    return {
        "participation": make_plan(settings, question)["fleet"]["participation"],
        "step": part.step,
        "step_bytes": costs.bytes(part),
        "flops": costs.traced(part).flops / costs.traced(plain).flops,
        "held_bytes": held_bytes(costs.training_config) * part.parameters,
        "batch_norms": bool(part.micro_batch) and mixes_examples(part.blueprint),
    }


def held_bytes(training_config: TrainingConfig) -> int:
    """Return the bytes of a parameter, its gradient and its momentum."""
    momentum = 2 if training_config.optimiser_state == "bfloat16" else 4
    return 8 + (momentum if training_config.momentum else 0)


def smaller_batches(batch_size: int) -> list[int]:
    """Return the powers of two below a batch size, down to 2."""
    return [2**power for power in range(batch_size.bit_length(), 0, -1) if 2**power < batch_size]


def cost_model_of(settings: Settings, question: PlanQuestion, attack_steps: int) -> CostModel:
    """Return the cost model of all systems' steps."""
    reference = blueprint_of(settings.changed({"architecture.width": 1.0}), question)
    return cost_model_for(settings, reference, attack_steps, question.precision)


def verdict_text(verdict: dict[str, Any]) -> str:
    """Return FedAvg's verdict as text."""
    step, poorest = format_compared(verdict["step_bytes"], verdict["poorest_bytes"])
    figures = f"A step at batch {verdict['batch_size']} takes {step} ({verdict['step_bytes']:,} bytes)"
    if verdict["fits"]:
        return f"Every device fits a step of the whole model: use FedAvg. {figures}, the poorest device has {poorest}."
    fit = f"FedAvg: {verdict['participation']:.0%} of the clients fit a step of the whole model."
    said = f"{fit} {figures}, the poorest device has {poorest}."
    if verdict["fitted"] is not None:
        said += fitted_text(verdict["fitted"], verdict["poorest_bytes"])
    smaller = verdict["smaller_batch"]
    if smaller is None:
        return f"{said} No smaller batch fits every device, down to 2."
    said += (
        f" At batch {smaller['batch_size']} it takes {format_bytes(smaller['step_bytes'])} and fits every device. "
        "A smaller batch changes the optimisation and the statistics of batch norms, so choose the rate again."
    )
    if verdict["ratios"]:
        said += (
            f" (The budgets of this fleet are ratios of a step, here at batch {verdict['batch_size']}. In a run with a smaller "
            "batch they would shrink with it.)"
        )
    return said


def fitted_text(fitted: dict[str, Any], poorest_bytes: int) -> str:
    """Return what `memory.fit` makes possible, or what stands in its way, as text."""
    how = f"train the whole model in a step that takes less memory (--set strategy=fedavg --set memory.fit={FIT})"
    step, held, poorest = format_compared(fitted["step_bytes"], fitted["held_bytes"], poorest_bytes)
    if fitted["participation"] == 1:
        statistics = " Batch norms take the statistics of a micro-batch." if fitted["batch_norms"] else ""
        return (
            f" But every device can {how}: try that first. The poorest {fitted['step']}, in {step} and "
            f"{fitted['flops']:.2f} times the FLOPs.{statistics}"
        )
    who = f"{fitted['participation']:.0%} of the clients can" if fitted["participation"] else "No client can"
    return (
        f" {who} {how}. The poorest device has {poorest} and would need at least {step}: parameters, gradients and momentum "
        f"alone are {held}."
    )


# ---- the others


def planned(settings: Settings, question: PlanQuestion, cost_model: CostModel) -> dict[str, Any]:
    """Plan one system; `reason` says why it cannot train the model, or why no device can take part."""
    row: dict[str, Any] = {"strategy": settings.strategy, "reason": "", "participation": 0.0}
    try:
        plan = make_plan(settings, question, cost_model)
    except ValueError as error:
        return row | {"reason": str(error)}
    if not plan["fleet"]["participation"]:
        return row | {"reason": no_device_reason(plan)}
    stages, trained, cover = plan["fleet"]["stages"], plan["trained"], plan["coverage"]
    if cover["level"] == "error":
        return row | {"reason": cover["says"]}
    caveats = [find_policy(settings.strategy).caveat, cover["says"] if cover["level"] == "warning" else ""]
    return row | {
        "participation": plan["fleet"]["participation"],
        "swapping": plan["swapping"]["fraction"] if plan["swapping"] else 0.0,
        "trains": trained["devices"],
        "min_fraction": trained["minimum"],
        "covered": trained["together"],
        "bytes_per_round": fmean(stage["bytes_down"] + stage["bytes_up"] for stage in stages),
        "round_seconds": fmean(stage["round_seconds"] for stage in stages),
        "stages": len(stages),
        "caveat": "; ".join(filter(None, caveats)),
    }


def no_device_reason(plan: dict[str, Any]) -> str:
    """Return why no device can train anything."""
    richest = max(device["budget_bytes"][1] for device in plan["devices"])
    needed = min(module["memory_bytes"] for module in plan["modules"])
    minimum, maximum = format_compared(needed, richest)
    return f"no device can: at least {minimum} are needed, the richest has {maximum}"


def order(row: dict[str, Any]) -> tuple[float, ...]:
    """Return the sort key that ORDER describes; whole percents, against rounding errors. Pretended swapping does not count."""
    first = row["measured"].get(1)
    accuracy = float(first[0]["accuracy"].split()[0]) if first else -1.0
    return -round(row["participation"] - row["swapping"], 2), -round(row["covered"], 2), -accuracy


# ---- what was measured


@cache
def measurements() -> tuple[dict[str, Any], ...]:
    """Return the settings in which our own runs compared systems, with their results."""
    return tuple(tomllib.loads(MEASURED.read_text(encoding="utf-8"))["setting"])


def kind_of(blueprint: Blueprint) -> str:
    """Return the kind of a model: text, transformer (atoms make tokens), convolutional (atoms make maps), or other."""
    if blueprint.vocabulary:
        return "text"
    dimensions = {len(atom.shape) for atom in blueprint.atoms}
    return "convolutional" if 3 in dimensions else "transformer" if 2 in dimensions else "other"


def accuracies(name: str, measured: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return a system's results by setting, counted from 1."""
    numbered = enumerate(measured, start=1)
    found = {number: [row for row in setting["rows"] if row["system"] == name] for number, setting in numbered}
    return {number: rows for number, rows in found.items() if rows}


def nearest(blueprint: Blueprint, attacked: bool) -> list[dict[str, Any]]:
    """Return the settings with such a model and such training.

    The first one orders the rows, because it compares most systems; settings with a model per client come last.
    """
    kind = kind_of(blueprint)
    alike = [entry for entry in measurements() if (entry["kind"], entry["adversarial"]) == (kind, attacked)]
    return sorted(
        alike, key=lambda entry: (entry.get("personal", False), -len({row["system"] for row in entry["rows"]}))
    )
