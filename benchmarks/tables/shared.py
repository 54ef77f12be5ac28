"""Helpers of all sections: the cut and figures for the command line of a plan, and the comparison of figures.

Each section gives the command line of `piecework plan`, and `cut_for` reads the same text.
"""

import shlex
import textwrap
from collections.abc import Iterable
from functools import cache
from math import prod
from typing import Any

import typer

from piecework.cli import app
from piecework.commands.options import settings_from
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import Layer, layer_statistics
from piecework.planning.costs import cost_model_for
from piecework.planning.cut import Cut
from piecework.planning.part import Part, whole_model
from piecework.plans.plan import fleet_states
from piecework.plans.question import PlanQuestion, ask, budget_bytes
from piecework.strategies import find_method
from piecework.training.settings import Settings
from piecework.training.setup import blueprint_of_shape

PLAN: Any = typer.main.get_command(app)
MB, MIB = 10**6, 2**20
OF_PROFL = "--set architecture.options=pooling=profl,classifier=profl"  # a VGG as in ProFL's code
Rows = Iterable[Iterable[str]]


# ---- what a command line of `piecework plan` is about


def asked(flags: str) -> tuple[Settings, PlanQuestion]:
    """Return the settings and the question of `piecework plan FLAGS`, for a model's usual input or --input-shape."""
    given = PLAN.commands["plan"].make_context("plan", shlex.split(flags)).params
    keys = {"memory_model": "memory.model", "batch_size": "training.batch-size"}
    keys |= {f"{name}_": name for name in ("model", "strategy", "fleet")}  # `with_shorthands` appends the underscore
    chosen = {key: given[name] for name, key in keys.items() if given[name]}
    settings = settings_from("", list(given["assignments"]), named=chosen)
    return settings, ask(settings, True, given["input_shape"], given["classes"], budget=given["budget"])


@cache
def cut_for(flags: str) -> Cut:
    """Return the cut that `piecework plan FLAGS` describes, for the budget in the flags."""
    settings, question = asked(flags)
    about = question.input_shape, question.num_classes
    blueprint = blueprint_of_shape(settings, *about)
    reference = blueprint_of_shape(settings.with_values({"architecture.width": 1.0}), *about)
    cost_model = cost_model_for(settings, reference)
    budget = budget_bytes(question.budget, cost_model.bytes(whole_model(blueprint))) if question.budget else 0
    return find_method(settings.strategy).make_cut(blueprint, cost_model, settings, budget)


def full_bytes(flags: str) -> int:
    """Return `full_memory_bytes` of the plan."""
    cut = cut_for(flags)
    return cut.cost_model.bytes(whole_model(cut.blueprint))


def participation(flags: str, stage: int = 0) -> float:
    """Return `participation` of a stage: the fraction of the fleet's devices that have something to train."""
    cut = cut_for(flags)
    states = fleet_states(load_fleet(cut.settings.fleet), cut.settings, cut.cost_model.reference_bytes)[0]
    slowest, taking_part = min(state.flops_per_second for state in states), 0
    for state in states:
        try:
            taking_part += bool(find_method(cut.settings.strategy)(cut).parts(stage, state, slowest))
        except MemoryBudgetExceededError:
            continue
    return taking_part / len(states)


def layers_of(part: Part) -> list[Layer]:
    """List all layers of a part, including the head's."""
    return [layer for unit in part.units for layer in layer_statistics(part.blueprint, unit).layers]


def count(blueprint: Blueprint, what: str) -> int:
    """Count a model as papers do.

    `parameters` are all; `weights` those of convolutions and linear layers; `convolutions` their weights; `norms` their
    parameters; `entries` those of the state dict, including buffers.
    """
    whole = whole_model(blueprint)
    layers, norms = layers_of(whole), [layer for layer in layers_of(whole) if layer.kind.startswith("BatchNorm")]
    if what == "entries":  # all have 4 bytes except a norm's batch counter, which has 8
        return whole.state_bytes // 4 - len(norms)
    if what == "norms":
        return sum(layer.parameters for layer in norms)
    kinds = {"weights": ("Conv2d", "Linear"), "convolutions": ("Conv2d",)}
    if what in kinds:
        return sum(prod(layer.weight) for layer in layers if layer.kind in kinds[what])
    return whole.parameters


# ---- how figures are laid beside each other

COMPARED = ("paper", "computed", "deviation", "as printed")


def beside(printed: str, computed: float) -> list[str]:
    """Return the printed figure, the computed one with more digits, the deviation, and whether it rounds to the printed one."""
    digits, paper = len(printed.partition(".")[2]), float(printed.replace(",", ""))
    shown = f"{computed:,}" if isinstance(computed, int) else f"{computed:,.{max(2, digits + 1)}f}"
    same = "yes" if round(computed, digits) == paper else "no"
    return [printed, shown, deviation(computed, paper), same]


def deviation(computed: float, paper: float) -> str:
    """Return the deviation in percent of the paper's figure."""
    percent = round(100 * (computed / paper - 1), 2)
    return f"{percent:+.2f} %" if percent else "0"


def table(header: Iterable[str], rows: Rows) -> str:
    """Return a table in Markdown."""
    names = list(header)
    lines = [names, ["---"] * len(names), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def commands(*flags: str) -> str:
    """Return the commands of a section."""
    return "\n".join(f"    piecework plan {each}" for each in flags)


def section(*blocks: str) -> str:
    """Join a heading, paragraphs, which are filled, and tables and commands, which are not."""
    return "\n\n".join(block if block[0] in "#| " else prose(block) for block in blocks)


def prose(text: str) -> str:
    """Return a filled paragraph."""
    return textwrap.fill(" ".join(text.split()), 128, break_on_hyphens=False, break_long_words=False)
