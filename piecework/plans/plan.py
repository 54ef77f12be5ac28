"""Compute what a fleet can train of a model before training: pieces, costs, participation, times."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from statistics import fmean
from typing import Any

from piecework.device_profiles.clock import simulated_seconds
from piecework.device_profiles.fleet import Fleet, device_state, load_fleet
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import DeviceState
from piecework.federation.pace import Done
from piecework.federation.registry import sample_clients
from piecework.models.partition import AtomTooLargeError
from piecework.planning.assignment import Planner
from piecework.planning.costs import CostModel, cost_model_for
from piecework.planning.coverage import Trainer, richest
from piecework.planning.cut import Cut, label, trains_adversarially
from piecework.planning.paper_memory import MACS
from piecework.planning.part import Part, whole_model
from piecework.planning.timing import expected_share, local_work, round_flops, swapped_seconds, work_seconds
from piecework.plans.parts import simulated_swapping, trained_fractions
from piecework.plans.plan_evaluation import evaluation_row
from piecework.plans.plan_privacy import privacy_row
from piecework.plans.plan_rounds import Timed, awaited_seconds, time_rounds
from piecework.plans.question import PlanQuestion, budget_bytes
from piecework.server_app.rates import low_lr_warning
from piecework.server_app.start import describe_coverage
from piecework.strategies import find_method
from piecework.training.settings import Settings, learning_rate
from piecework.training.settings.cases import require_accepted
from piecework.training.setup import blueprint_of_shape

ROUNDS = 20  # rounds of a plan if the fleet changes between rounds or not all clients take part


@dataclass(frozen=True)
class PlannedTask:
    """A client's task in a round: parts, bytes needed, seconds, bytes down and up, FLOPs. Without parts it is excluded."""

    client: int
    state: DeviceState
    parts: tuple[Part, ...]
    needed: int
    seconds: float = 0.0
    message_bytes: tuple[int, int] = (0, 0)
    flops: float = 0.0


def make_plan(settings: Settings, question: PlanQuestion, cost_model: CostModel | None = None) -> dict[str, Any]:
    """Return the whole plan as JSON values. Raises ValueError if a setting makes no sense or the budget allows no cut.

    `cost_model` may be that of another plan with the same steps, which are then not traced again. Bytes and FLOPs of a module
    are those of one step (a batch); seconds are simulated seconds of one round.
    """
    fleet = load_fleet(settings.fleet)
    planner, states = planner_for(fleet, settings, question, cost_model)
    cut = planner.cut
    blueprint = blueprint_of_shape(settings, question.input_shape, question.num_classes)
    model = whole_model(blueprint)
    full = cut.cost_model.bytes(model)
    tasks = [
        [
            tasks_of_round(planner, stage, number, of_round, question.examples)
            for number, of_round in enumerate(states, start=1)
        ]
        for stage in range(len(cut.stages))
    ]
    return {
        "strategy": settings.strategy,
        "model": settings.model,
        "input_shape": list(blueprint.input_shape),
        "classes": question.num_classes,
        "batch_size": settings.training.batch_size,
        "precision": question.precision,
        "attack_steps": cut.cost_model.training_config.attack.steps if cut.cost_model.training_config.attack else 0,
        "memory_model": settings.memory.model,
        "parameters": model.parameters,
        "full_memory_bytes": full,
        "reference_bytes": cut.cost_model.reference_bytes,
        "budget_bytes": cut.smallest,
        "cuts": cut.can.cuts,
        "uncut": blueprint.uncut,
        "modules": [module_row(cut, stage.name, part) for stage in cut.stages for part in stage.parts],
        "fleet": fleet_row(fleet, settings, cut, tasks),
        "devices": device_rows(cut, tasks, question.examples),
        "trained": trained_fractions(blueprint, tasks, rotates=cut.can.rotates),
        "swapping": simulated_swapping(full, tasks) if cut.swaps else None,
        "evaluation": evaluation_row(cut, allowed_to_train(tasks), question.examples),
        "learning_rates": rates_row(cut),
        "coverage": describe_coverage(planner, trainers(states, settings)),
        "privacy": privacy_row(cut),
    }


def allowed_to_train(tasks: list[list[list[PlannedTask]]]) -> dict[int, int]:
    """Return for each client that trains something the smallest number of bytes that it may use. `tasks`: see fleet_row."""
    everyone = [task for rounds in tasks for of_round in rounds for task in of_round if task.parts]
    found: dict[int, int] = {}
    for task in everyone:
        found[task.client] = min(found.get(task.client, task.state.allowed_bytes), task.state.allowed_bytes)
    return found


def rates_row(cut: Cut) -> dict[str, Any]:
    """Return the learning rate of each stage's first round, and a warning if stages are left without one."""
    found = {stage.name: learning_rate(cut.settings, stage.place) for stage in cut.stages}
    return {"first": found, "says": low_lr_warning(cut.settings, found)}


def planner_for(
    fleet: Fleet, settings: Settings, question: PlanQuestion, cost_model: CostModel | None = None
) -> tuple[Planner, list[list[DeviceState]]]:
    """Return the method, with its model cut or sized for the fleet, and the device states by round.

    Raises ValueError.
    """
    method = find_method(settings.strategy)
    require_accepted(settings, method.refuses, method.name)
    blueprint = blueprint_of_shape(settings, question.input_shape, question.num_classes)
    reference = blueprint_of_shape(
        settings.with_values({"architecture.width": 1.0}), question.input_shape, question.num_classes
    )
    own = settings.attack.steps if trains_adversarially(method.can, settings) else 0
    steps = own if question.attack_steps is None else question.attack_steps
    if steps and blueprint.reads != "images":
        raise ValueError(
            f"{settings.model} reads {blueprint.reads}, and attacks change pixels of images: attack.steps must be 0"
        )
    cost_model = cost_model or cost_model_for(settings, reference, steps, question.precision)
    full = cost_model.bytes(whole_model(blueprint))
    states = fleet_states(fleet, settings, cost_model.reference_bytes)
    budgets = [state.budget_bytes for states_of_round in states for state in states_of_round]
    cut = method.make_cut(blueprint, cost_model, settings)
    cut.require_model()
    budget = question.budget or cut.reserves
    minimum = budget_bytes(budget, full) if budget else min(budgets)
    cut = cut.fit(minimum, max(minimum, *budgets))
    if not budget and cut.smallest < cut.min_budget():
        cut = cut.with_smallest(cut.min_budget())
    return method(cut), states


def trainers(states: list[list[DeviceState]], settings: Settings) -> dict[int, Trainer]:
    """Return the fleet's clients, each with the same number of examples; `states` are by round and client."""
    looked_at = states[: settings.num_rounds]
    return {client: Trainer(richest(of_client)) for client, of_client in enumerate(zip(*looked_at, strict=True))}


def module_row(cut: Cut, stage: str, part: Part) -> dict[str, Any]:
    """Return the row of one part: bytes and FLOPs of a step, bytes of arrays per round."""
    batch, down_up = cut.cost_model.training_config.batch_size, cut.traffic([part]).bytes
    return {
        "stage": stage,
        "name": label(part),
        "atoms": part.names(),
        "head": part.head,
        "parameters": part.parameters,
        "memory_bytes": cut.cost_model.bytes(part),
        "forward_flops": part.forward_flops * batch,
        "training_flops": cut.cost_model.trace(part).flops,
        "macs": count(part, batch) if (count := MACS.get(cut.settings.memory.model)) else None,
        "bytes_down": down_up[0],
        "bytes_up": down_up[1],
    }


def fleet_states(fleet: Fleet, settings: Settings, reference_bytes: int) -> list[list[DeviceState]]:
    """Return the device states by round and client; one round if rounds do not differ."""
    clients = settings.clients
    changes = fleet.memory_loss[1] or fleet.flops_loss[1] or fleet.flops_left
    rounds = ROUNDS if changes or 0 < settings.clients_per_round < clients else 1

    def state(number: int, client: int) -> DeviceState:
        emulated = device_state(fleet, client, clients, settings.seed, number, reference_bytes)
        return replace(emulated, tolerance=settings.memory.excess)

    return [[state(number, client) for client in range(clients)] for number in range(1, rounds + 1)]


def tasks_of_round(
    planner: Planner, stage: int, number: int, states: list[DeviceState], examples: int
) -> list[PlannedTask]:
    """Return the task of every client in a round of a stage, as if it were asked; `number` decides which clients are."""
    speeds = [states[client].flops_per_second for client in draw_clients(planner.cut.settings, states, number)]
    return [
        client_task(planner, stage, client, state, min(*speeds, state.flops_per_second), examples, number)
        for client, state in enumerate(states)
    ]


def draw_clients(settings: Settings, states: Sequence[object], number: int) -> list[int]:
    """Return the clients that a run asks in round `number`."""
    return sample_clients(range(len(states)), settings.asked, settings.seed, number)


def client_task(
    planner: Planner, stage: int, client: int, state: DeviceState, slowest: float, examples: int, number: int = 1
) -> PlannedTask:
    """Return the task of one client in round `number`."""
    cut = planner.cut
    try:
        parts = tuple(planner.parts(stage, state, slowest, number, client))
    except (MemoryBudgetExceededError, AtomTooLargeError) as error:
        return PlannedTask(client, state, (), error.needed or 0)
    needed, message_bytes = totals(cut, parts)
    flops = round_flops(cut.settings, cut.cost_model, parts, examples)
    return PlannedTask(client, state, parts, needed, seconds_of(cut, parts, state, examples), message_bytes, flops)


def time_task(task: PlannedTask) -> Timed | None:
    """Return what a task takes of its device's time, or None for an excluded client."""
    if not task.parts:
        return None
    network = simulated_seconds(task.state, 0, *task.message_bytes)
    return Timed(task.state.device, Done(task.seconds - network, task.seconds, task.flops, task.message_bytes[0]))


def seconds_of(cut: Cut, parts: Sequence[Part], state: DeviceState, examples: int) -> float:
    """Return the seconds of a round of a device that trains these parts on this many examples."""
    seen, share = [local_work(cut.settings, examples)[1]] * len(parts), expected_share(cut.cost_model, parts)
    return work_seconds(cut, cut.cost_model, parts, seen, examples, state, totals(cut, tuple(parts))[1], share)


def swap_seconds(cut: Cut, part: Part, state: DeviceState, examples: int) -> float:
    """Return the seconds of a round of a device that trains a part beyond its memory by swapping to its disk."""
    _, seen = local_work(cut.settings, examples)
    return swapped_seconds(cut.settings, cut.cost_model, part, seen, state, cut.traffic([part]).bytes)


@cache
def totals(cut: Cut, parts: tuple[Part, ...]) -> tuple[int, tuple[int, int]]:
    """Return, for parts trained one after another, the maximum bytes of a step, and the bytes down and up."""
    return max(cut.cost_model.bytes(part) for part in parts), cut.traffic(list(parts)).bytes


def fleet_row(fleet: Fleet, settings: Settings, cut: Cut, tasks: list[list[list[PlannedTask]]]) -> dict[str, Any]:
    """Return who takes part in which stage, with seconds and bytes of a round, as means over rounds of the asked clients.

    `tasks` are by stage, round and client.
    """
    stages: list[dict[str, Any]] = []
    for stage, rounds in zip(cut.stages, tasks, strict=True):
        works = [[time_task(task) for task in of_round] for of_round in rounds]
        timed = time_rounds(settings, works)
        tasked = [[of_round[client] for client in each.asked] for each, of_round in zip(timed, rounds, strict=True)]
        everyone = [task for of_round in rounds for task in of_round]
        out = [task for task in everyone if not task.parts]
        stages.append(
            {
                "stage": stage.name,
                "participation": (len(everyone) - len(out)) / len(everyone),
                "trains": trained_parts(cut, everyone),
                "excluded_clients": sorted({task.client for task in out}),
                "missing_bytes": max((task.needed - task.state.budget_bytes for task in out), default=0),
                "closest": closest(out),
                "round_seconds": fmean(each.seconds for each in timed),
                "awaited_seconds": fmean(awaited_seconds(settings, works)),
                "late": sum(each.late for each in timed) / sum(len(each.asked) for each in timed),
                "bytes_down": fmean(sum(task.message_bytes[0] for task in of_round) for of_round in tasked),
                "bytes_up": fmean(sum(task.message_bytes[1] for task in of_round) for of_round in tasked),
                "peak_bytes": max((task.needed for task in everyone if task.parts), default=0),
            }
        )
    return {
        "name": fleet.name,
        "clients": settings.clients,
        "clients_per_round": min(settings.clients_per_round or settings.clients, settings.clients),
        "over_sample": settings.faults.over_sample,
        "deadline_factor": settings.faults.deadline_factor,
        "rounds": len(tasks[0]),
        "budget_quantiles_bytes": quantiles([task.state.budget_bytes for r in tasks[0] for task in r]),
        "participation": fmean(stage["participation"] for stage in stages),
        "excluded": cut.can.when_excluded,
        "stages": stages,
    }


def closest(out: Sequence[PlannedTask]) -> list[int] | None:
    """Return the bytes that the excluded task which is closest to fitting needs, and those that its device has."""
    pairs = [[task.needed, task.state.budget_bytes] for task in out]
    return min(pairs, key=lambda pair: pair[0] - pair[1], default=None)


def quantiles(budgets: list[int]) -> list[int]:
    """Return the minimum budget and the 5 %, 10 %, ... 100 % quantiles over clients and rounds."""
    ordered = sorted(budgets)
    return [ordered[max(0, ceil(len(ordered) * twentieths / 20) - 1)] for twentieths in range(21)]


def device_rows(cut: Cut, tasks: list[list[list[PlannedTask]]], examples: int) -> list[dict[str, Any]]:
    """Return each device of the fleet: its budgets and, by stage, what its clients train and how much memory is missing."""
    names = sorted({task.state.device for task in tasks[0][0]}, key=lambda name: (min_budget(tasks[0], name), name))
    rows = []
    for name in names:
        own = [[task for of_round in rounds for task in of_round if task.state.device == name] for rounds in tasks]
        budgets = [task.state.budget_bytes for task in own[0]]
        rows.append(
            {
                "device": name,
                "clients": len({task.client for task in own[0]}),
                "budget_bytes": [min(budgets), max(budgets)],
                "stages": [
                    {"stage": stage.name} | stage_row(cut, stage.parts[-1], mine, examples)
                    for stage, mine in zip(cut.stages, own, strict=True)
                ],
            }
        )
    return rows


def trained_parts(cut: Cut, tasks: Sequence[PlannedTask]) -> list[dict[str, Any]]:
    """Return what is trained in some tasks, the most common first, each with its fraction of the tasks and what it skips."""
    trained = Counter(" | ".join(map(label, task.parts)) for task in tasks if task.parts)
    skipped = {" | ".join(map(label, task.parts)): cut.find_excluded(list(task.parts)) for task in tasks if task.parts}
    return [
        {"what": what, "fraction": count / len(tasks), "leaves_out": skipped[what]}
        for what, count in trained.most_common()
    ]


def min_budget(rounds: list[list[PlannedTask]], name: str) -> int:
    """Return the minimum budget of a device."""
    return min(task.state.budget_bytes for of_round in rounds for task in of_round if task.state.device == name)


def stage_row(cut: Cut, part: Part, tasks: list[PlannedTask], examples: int) -> dict[str, Any]:
    """Return what the clients of a device train in a stage and, for excluded ones, the missing bytes and swapping seconds."""
    out = [task for task in tasks if not task.parts]
    poorest = min(out, key=lambda task: task.state.budget_bytes, default=None)
    return {
        "participation": (len(tasks) - len(out)) / len(tasks),
        "trains": trained_parts(cut, tasks),
        "needed_bytes": poorest.needed if poorest else None,
        "missing_bytes": poorest.needed - poorest.state.budget_bytes if poorest else 0,
        "seconds": max((task.seconds for task in tasks if task.parts), default=None),
        "swap_seconds": swap_seconds(cut, part, poorest.state, examples) if poorest else None,
    }
