"""FeDepth, the client's side (Algorithm 1, ClientUpdate): the blocks of the full model are trained one after another.

This device's own decomposition has J blocks. theta_j is the j-th block, phi the head, and z_j are the features behind block j.

Eq. 1: theta_j, phi_j in argmin L(theta_j, phi; {z_{j-1}, y}), starting from (theta_j of the server, phi_{j-1}). Every
sub-problem runs all local epochs. z_j is computed when block j is trained, and is kept in the store (section 4.1's buffered
activations). Before the shared head, features skip the remaining blocks by zero padding. m-FeDepth has a head for each block.

Where the paper is silent, we decide as follows. Frozen blocks run in evaluation mode. Each sub-problem starts with zero
momentum (the authors keep one optimiser, which is equivalent for the parameters of blocks and carries the head's momentum
over). In mutual distillation the other model's logits are constants, as in the authors' code.

`fedepth.sub-problem = network` is how the authors fine-tune transformers: every sub-problem runs the whole network and trains
its block, the first atom (embedding, class token, positions) and the head. Gradients pass back through all blocks, which saves
hardly any memory. By default only the first sub-problem trains the first atom, and frozen blocks are not in memory.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

from piecework.client_app.client import Client, Update
from piecework.client_app.features import teacher_logits
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import allowance, budget_of
from piecework.models.cascade import Blueprint, can_fit
from piecework.models.partition import (
    AtomTooLargeError,
    Cost,
    Piece,
    atom_names,
    exclude_input_side,
    fits,
    format_ranges,
    greedy_partition,
)
from piecework.models.work_item import WorkItem
from piecework.strategies.cascade.fedepth.mutual import (
    Mutual,
    Taught,
    companion_folder,
    mutual_item,
    soft_targets,
    taught,
    taught_loss,
    train_mutually,
    without_examples,
)
from piecework.strategies.cascade.fedepth.settings import FeDepthSettings
from piecework.training.answers import Metrics
from piecework.training.examples import Examples
from piecework.training.loop import (
    LocalTrainer,
    MakeLoss,
    PieceModel,
    single_loss,
)
from piecework.training.memory_cap import return_free_memory
from piecework.training.messages import Task
from piecework.training.settings import Settings


def decompose(count: int, cost: Cost, allowed: int, names: list[str]) -> list[Piece]:
    """Return the blocks of a device, cut from all atoms except those at the input side that do not fit alone (section 4.2).

    `cost` returns the bytes of training a block, and `names` are the atoms' names. Raises AtomTooLargeError if even the last
    atom does not fit.
    """
    return greedy_partition(exclude_input_side(range(count), cost, allowed), cost, allowed, names)


ItemCost = Callable[[WorkItem], int | None]  # bytes of a work item; None = unknown, so that it must not be trained


def choose_items(
    names: list[str],
    cost: ItemCost,
    allowed: int,
    mutual_models: int,
    item: Callable[[Piece], WorkItem] = WorkItem,
    tolerance: float = 0.0,
) -> list[WorkItem]:
    """Return the work items of a device: its blocks, or what a surplus of memory allows if `mutual_models` > 1 (section 4.3).

    These are up to `mutual_models` whole models. If not even two fit, they are a pair: the blocks of a second model, cut for
    the bytes that the whole model leaves, and the whole model. `allowed` includes the fraction `tolerance` of the budget, which
    is no surplus. Raises AtomTooLargeError if even the last atom does not fit.
    """
    pieces = decompose(len(names), lambda atoms: cost(item(atoms)), allowed, names)
    whole, budget = tuple(range(len(names))), budget_of(allowed, tolerance)
    if pieces != [whole] or mutual_models == 1:
        return [item(piece) for piece in pieces]
    for copies in range(mutual_models, 1, -1):
        if fits(cost(mutual := mutual_item(len(names), copies)), budget):
            return [mutual]
    return pair_items(names, cost, budget, item, tolerance) or [item(whole)]


def as_pupil(item: WorkItem) -> WorkItem:
    """Return an item that also learns from another model."""
    return replace(item, mode=Taught(True))


def pair_items(
    names: list[str], cost: ItemCost, budget: int, item: Callable[[Piece], WorkItem], tolerance: float = 0.0
) -> list[WorkItem]:
    """Return the items of a depth-wise and a whole model that teach each other, or none if they do not fit together.

    The second model has all blocks. Each fits what the whole model leaves of the budget, with the same `tolerance`.
    """
    whole = as_pupil(item(tuple(range(len(names)))))
    if whole.learns or (needed := cost(whole)) is None or needed >= budget:
        return []
    with suppress(AtomTooLargeError):
        surplus = allowance(budget - needed, tolerance)
        blocks = greedy_partition(whole.atoms, lambda atoms: cost(as_pupil(item(atoms))), surplus, names)
        return [*(as_pupil(item(block)) for block in blocks), whole]
    return []


def sub_problem(blueprint: Blueprint, settings: Settings, atoms: Piece, *, own_heads: bool = False) -> WorkItem:
    """Return the work item that trains a block: with the shared head, with its own head, or within the whole network."""
    last = len(blueprint.atoms) - 1
    if settings.of(FeDepthSettings).sub_problem == "network":
        return WorkItem(tuple(range(last + 1)), learns=atoms)
    return WorkItem(atoms, f"exits.{atoms[-1]}" if own_heads and atoms[-1] != last else "head")


def items_of(
    blueprint: Blueprint, settings: Settings, cost: ItemCost, allowed: int, *, own_heads: bool = False
) -> list[WorkItem]:
    """Return the work items that train a model within `allowed` bytes.

    Raises AtomTooLargeError for an atom that does not fit and cannot be excluded.
    """
    names, item = atom_names(blueprint), partial(sub_problem, blueprint, settings, own_heads=own_heads)
    items = choose_items(names, cost, allowed, settings.of(FeDepthSettings).mutual_models, item, settings.memory.excess)
    if settings.of(FeDepthSettings).sub_problem == "network" or len(items[-1].atoms) == len(names):
        return items
    needed = indispensable(blueprint, [atom for each in items for atom in each.atoms])
    if needed is None:
        return items
    raise AtomTooLargeError(names[needed], cost(item((needed,))), allowed)


def indispensable(blueprint: Blueprint, atoms: list[int]) -> int | None:
    """Return the first atom that is missing in `atoms` but necessary for them, or None.

    Without the first atom of a transformer or an LSTM, the input cannot be fitted to the shape that the next atom takes.
    """
    shape, following = blueprint.input_shape, 0
    for atom in atoms:
        tokens = following == 0 and blueprint.vocabulary
        if atom > following and (tokens or not can_fit(shape, blueprint.shape_before(atom))):
            return following
        shape, following = blueprint.atoms[atom].shape, atom + 1
    return None


@cache
def network_piece(trained: Piece) -> type[PieceModel]:
    """Return the piece class for the whole network, in which only these atoms, the first one and the head learn."""

    class NetworkPiece(PieceModel):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for number, atom in enumerate(self.modules.values()):
                atom.requires_grad_(number in (0, *trained))

        def train(self, mode: bool) -> None:
            """Set the mode of learning atoms and the head; frozen atoms stay in evaluation mode."""
            super().train(mode)
            for atom in self.modules.values():
                if not any(parameter.requires_grad for parameter in atom.parameters()):
                    atom.eval()

    return NetworkPiece


def train(task: Task, client: Client, *, own_heads: bool = False) -> Update:
    """Train by FeDepth, or by m-FeDepth with `own_heads`. Raises MemoryBudgetExceededError if no decomposition fits."""
    try:
        items = items_of(client.blueprint, client.settings, task.needed_bytes, client.allowed, own_heads=own_heads)
    except AtomTooLargeError as error:
        raise MemoryBudgetExceededError(error.needed or 0, client.allowed, f"training atom {error.name!r}") from error
    items = [task.fit_item(item, client.allowed) for item in items]
    mode = items[0].mode
    if isinstance(mode, Mutual):
        update = train_mutually(client, items[0], mode.copies)
    elif isinstance(mode, Taught):
        update = train_pair(client, items, own_heads=own_heads)
    elif client.settings.of(FeDepthSettings).sub_problem == "network":
        update = train_network(client, items)
    else:
        update = train_blocks(client, items)
        if client.settings.of(FeDepthSettings).partial_training == "dilute":
            update = replace(update, units=[*dict.fromkeys([*update.units, *client.blueprint.units()])])
    return replace(update, metrics=update.metrics | {"predicted-peak": max(task.costs.get(item, 0) for item in items)})


def train_blocks(client: Client, items: list[WorkItem], make_loss: MakeLoss = single_loss) -> Update:
    """Train one block after another, each on the features behind the last one."""
    pieces = [item.atoms for item in items]
    trained: dict[str, None] = {}
    metrics: Metrics = {}
    loss, seen = 0.0, []
    entrance = client.blueprint.shape_before(pieces[0][0])
    examples, validation = client.local_data(0).entering(entrance), client.validation.entering(entrance)
    for j, item in enumerate(items):
        trainer = LocalTrainer(partial(_load_piece, client, item.atoms, item.head), client.config_of(item), make_loss)
        for epoch in trainer.epochs():
            if epoch and not client.settings.memory.feature_cache:
                fresh = client.local_data(epoch).entering(entrance)
                examples = _stream_again(client, trainer, items[: j + 1], fresh) if j else fresh
            trainer.epoch(
                examples, client.rng("batches", j, epoch), client.cap, f"train piece {format_ranges(item.atoms)}"
            )
        (piece,) = trainer.finish()
        client.save(piece)
        trained |= dict.fromkeys(piece.units())
        loss += trainer.total_loss
        seen.append(trainer.seen)
        if j + 1 < len(pieces):
            examples, validation = (
                client.stream(piece, source, f"{name}-{j}", pieces[j + 1][0], item.micro_batch)
                for name, source in (("train", examples), ("validation", validation))
            )
            client.store.drop_features(f"train-{j - 1}", f"validation-{j - 1}")
        else:
            metrics |= client.evaluate(piece.logits, validation, item.micro_batch)
        del piece, trainer
        return_free_memory()
    return Update([*trained], metrics | {"train-loss": loss / sum(seen)}, items, seen)


def train_pair(client: Client, items: list[WorkItem], *, own_heads: bool) -> Update:
    """Train a second model block after block, taught by the whole one, which it then teaches; upload the whole one.

    The second model stays in the client's state from round to round. Logits of the teacher are computed before its pupil
    trains, so that the two are never in memory together.
    """
    *blocks, whole = items
    kind, examples = client.settings.of(FeDepthSettings).mutual_loss, client.local_data(0)
    make_loss = taught_loss(kind)
    folder = companion_folder(client, 1, client.blueprint.units(exits=own_heads))
    second = replace(client, folder=folder, validation=without_examples(client.validation))
    targets = soft_targets(teacher_logits(client, [whole.atoms], examples, whole.micro_batch), examples.labels, kind)
    learnt = train_blocks(replace(second, local_data=lambda _: taught(examples, targets)), blocks, make_loss)

    answers = soft_targets(teacher_logits(second, [whole.atoms], examples, whole.micro_batch), examples.labels, kind)
    update = train_blocks(replace(client, local_data=lambda _: taught(examples, answers)), [whole], make_loss)
    return replace(update, done=items, seen=[*learnt.seen, *update.seen])


def train_network(client: Client, items: list[WorkItem]) -> Update:
    """Train one sub-problem after another within the whole network."""
    loss, seen, units = 0.0, list[int](), dict[str, None]()
    for j, item in enumerate(items):
        make = partial(_load_piece, client, item.atoms, item.head, network_piece(item.learns))
        trainer = LocalTrainer(make, client.config_of(item))
        for epoch in trainer.epochs():
            examples = client.local_data(0 if client.settings.memory.feature_cache else epoch)
            trainer.epoch(
                examples, client.rng("batches", j, epoch), client.cap, f"train piece {format_ranges(item.learns)}"
            )
        (piece,) = trainer.finish()
        client.save(piece)
        units |= dict.fromkeys(["atoms.0", *(f"atoms.{atom}" for atom in item.learns), "head"])
        loss, seen = loss + trainer.total_loss, [*seen, trainer.seen]
        metrics = client.evaluate(piece.logits, client.validation, item.micro_batch) if j + 1 == len(items) else {}
        del piece, trainer
        return_free_memory()
    return Update([*units], metrics | {"train-loss": loss / sum(seen)}, items, seen)


def _load_piece(
    client: Client, atoms: Piece, head: str, piece_class: type[PieceModel] = PieceModel
) -> list[PieceModel]:
    return [piece_class(client.blueprint, atoms, head, client.load())]


def _stream_again(client: Client, trainer: LocalTrainer, items: list[WorkItem], examples: Examples) -> Examples:
    """Return the last piece's input for freshly augmented data.

    Meanwhile the state of its training is on disk, because it may not fit beside the earlier pieces.
    """
    client.save(trainer.pieces[0])
    trainer.pause(client.store.task / "optimiser")
    for j, (item, following) in enumerate(pairwise(items)):
        piece = PieceModel(client.blueprint, item.atoms, None, client.load())
        piece.train(False)
        examples = client.stream(piece, examples, f"train-{j}", following.atoms[0], item.micro_batch)
        del piece
    return examples
