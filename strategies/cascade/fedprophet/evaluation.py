"""What FedProphet's clients need to validate the modules trained so far, and to measure how far attacks move features: traced.

A client validates whole batches with all modules at once, if that fits. Otherwise it runs one module after another, with all
weights in memory or with those of one module or atom, and last it computes fewer examples at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from piecework.client_app.validation import attack_batch
from piecework.device_profiles.memory import trace
from piecework.device_profiles.trace_cache import recall
from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import unit_signature
from piecework.models.partition import Piece
from piecework.models.work_item import WorkItem
from piecework.planning.costs import forward_only, on_images, once
from piecework.planning.evaluation_cost import choose_step
from piecework.planning.now import tracing
from piecework.planning.step_cost import fake_load, read_batch
from piecework.strategies.cascade.fedprophet.client import (
    ATOM,
    MODULE,
    MODULES,
    WHOLE,
    FedProphetTaskConfig,
    head_behind,
    largest_perturbation,
    load_fixed,
    pieces_held,
    query_batch,
)
from piecework.training.attacks import Attack
from piecework.training.evaluation_step import EvaluationStep
from piecework.training.loop import in_precision
from piecework.training.pages import Pages
from piecework.training.sgd import TrainingConfig
from piecework.training.streamed import InMemory, InPages, StreamedCascade

if TYPE_CHECKING:
    from piecework.strategies.cascade.fedprophet.cut import FedProphetCut


def validation_cost(
    blueprint: Blueprint, pieces: Sequence[Piece], training_config: TrainingConfig, attack: Attack, *, held: bool
) -> int:
    """Return the peak bytes of validating pieces on a batch, clean and under an attack, with all pieces `held` or one."""
    tracing(blueprint.name)

    def work() -> None:
        head, inputs = head_behind(blueprint, pieces[-1][-1]), InMemory() if held else InPages(Pages())
        cascade = StreamedCascade(blueprint, pieces, head, fake_load(blueprint), training_config, inputs, held=held)
        size = training_config.batch_size
        x, y = read_batch(blueprint, 0, size, rounded=False), torch.zeros(size, dtype=torch.int64)
        # all steps of the attack are equal
        attack_batch(cascade, x, y, replace(attack, steps=1), torch.Generator(), cascade.gradient)

    return trace(work).peak_bytes


def query_cost(
    blueprint: Blueprint, item: WorkItem, training_config: TrainingConfig, attack: Attack, *, rounded: bool
) -> int:
    """Return the peak bytes of measuring how far an attack moves the features behind a work item's atoms, for a batch."""
    tracing(blueprint.name)

    def work() -> None:
        piece = load_fixed(blueprint, item, fake_load(blueprint))
        z = read_batch(blueprint, item.atoms[0], training_config.batch_size, rounded=rounded)
        forward = in_precision(piece.features, training_config)
        largest_perturbation(forward, z, replace(attack, steps=1), torch.Generator(), cheap=item.cheap)

    return trace(work).peak_bytes


def validation_steps(
    cut: "FedProphetCut", modules: Sequence[Piece], allowed: int, examples: int
) -> list[EvaluationStep]:
    """Return the step in which a client with that many validation `examples` validates modules, for `Task.evaluation`."""
    blueprint = cut.model
    units = tuple(tuple(unit_signature(blueprint, f"atoms.{atom}") for atom in module) for module in modules)
    head, attack = unit_signature(blueprint, head_behind(blueprint, modules[-1][-1])), on_images(blueprint, 1)

    def count_bytes(_: int, size: int, held: str) -> int:
        config, (pieces, all_held) = forward_only(cut.cost_model.training_config, size), pieces_held(modules, held)
        return once(
            ("validation", config, units, head, held),
            lambda: recall(validation_cost, blueprint, pieces, config, attack, held=all_held),
        )

    return choose_step(cut, blueprint, count_bytes, allowed, examples, ways=(WHOLE, MODULES, MODULE, ATOM))


def query_steps(
    cut: "FedProphetCut", listed: Mapping[WorkItem, int], config: FedProphetTaskConfig, allowed: int, examples: int
) -> list[EvaluationStep]:
    """Return the step in which a client with that many training `examples` answers the query, for `Task.evaluation`.

    They include running the modules before. `listed` are the items of the client's task, with their bytes.
    """
    blueprint, costs = cut.model, cut.cost_model

    def fit_item(atoms: Piece) -> WorkItem:
        plain = cut.item(atoms)
        return next((each for each, cost in listed.items() if each.plain == plain and cost <= allowed), plain)

    item = fit_item(config.atoms(config.stage))
    units = tuple(unit_signature(blueprint, f"atoms.{atom}") for atom in item.atoms)
    attack = Attack(costs.feature_norm, 1.0, 0.1, 1, 0.0) if config.stage else on_images(blueprint, 1)

    def count_bytes(at_once: int, size: int, _: str) -> int:
        step = forward_only(costs.training_config, size)
        own = once(
            ("query", step, units, item.recompute, item.cheap, attack, costs.rounded),
            lambda: recall(query_cost, blueprint, item, step, attack, rounded=costs.rounded),
        )
        streams = [
            costs.trace_inference(blueprint, module, evaluated=True, size=at_once or fit_item(module).micro_batch)
            for module in config.before()
        ]
        return max([own, *streams])

    return choose_step(cut, blueprint, count_bytes, allowed, examples, batch=query_batch(cut.settings, item))
