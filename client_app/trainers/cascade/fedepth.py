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
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from piecework.client_app.client import Client, Update, fill_from
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.models.cascade import Blueprint, can_fit, isolated_rng
from piecework.models.partition import (
    AtomTooLargeError,
    Cost,
    Piece,
    atom_names,
    exclude_input_side,
    fits,
    greedy_partition,
    runs,
)
from piecework.models.work_item import WorkItem
from piecework.training.attacks import Loss
from piecework.training.examples import Examples
from piecework.training.loop import (
    LocalTrainer,
    MakeLoss,
    PieceModel,
    channels_last,
    classification_loss,
    load_for_device,
)
from piecework.training.memory_cap import return_free_memory
from piecework.training.messages import Metrics, Task
from piecework.training.randomness import integer
from piecework.training.settings import Settings


def decompose(count: int, cost: Cost, allowed: int, names: list[str]) -> list[Piece]:
    """Return the blocks of a device, cut from all atoms except those at the input side that do not fit alone (section 4.2).

    `cost` returns the bytes of training a block, and `names` are the atoms' names. Raises AtomTooLargeError if even the last
    atom does not fit.
    """
    return greedy_partition(exclude_input_side(range(count), cost, allowed), cost, allowed, names)


ItemCost = Callable[[WorkItem], int | None]  # bytes of a work item; None = unknown, so that it must not be trained


def mutual_item(count: int, copies: int) -> WorkItem:
    """Return the work item of `copies` whole models, of `count` atoms each, that teach each other."""
    return WorkItem(tuple(range(count)), copies=copies)


def choose_items(
    names: list[str], cost: ItemCost, allowed: int, mutual_models: int, item: Callable[[Piece], WorkItem] = WorkItem
) -> list[WorkItem]:
    """Return the work items of a device: up to `mutual_models` > 1 whole models if they fit (section 4.3), else its blocks.

    Raises AtomTooLargeError if even the last atom does not fit.
    """
    pieces = decompose(len(names), lambda atoms: cost(item(atoms)), allowed, names)
    if len(pieces) == 1 and len(pieces[0]) == len(names):
        for copies in range(mutual_models, 1, -1):
            if fits(cost(mutual := mutual_item(len(names), copies)), allowed):
                return [mutual]
    return [item(piece) for piece in pieces]


def sub_problem(blueprint: Blueprint, settings: Settings, atoms: Piece, *, own_heads: bool = False) -> WorkItem:
    """Return the work item that trains a block: with the shared head, with its own head, or within the whole network."""
    last = len(blueprint.atoms) - 1
    if settings.fedepth.sub_problem == "network":
        return WorkItem(tuple(range(last + 1)), learns=atoms)
    return WorkItem(atoms, f"exits.{atoms[-1]}" if own_heads and atoms[-1] != last else "head")


def items_of(
    blueprint: Blueprint, settings: Settings, cost: ItemCost, allowed: int, *, own_heads: bool = False
) -> list[WorkItem]:
    """Return the work items that train a model within `allowed` bytes.

    Raises AtomTooLargeError for an atom that does not fit and cannot be excluded.
    """
    names, item = atom_names(blueprint), partial(sub_problem, blueprint, settings, own_heads=own_heads)
    items = choose_items(names, cost, allowed, settings.fedepth.mutual_models, item)
    if settings.fedepth.sub_problem == "network" or items[0].copies > 1:
        return items
    if (needed := indispensable(blueprint, [atom for each in items for atom in each.atoms])) is not None:
        raise AtomTooLargeError(names[needed], cost(item((needed,))), allowed)
    return items


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
        items = items_of(client.blueprint, client.settings, task.cost, client.allowed, own_heads=own_heads)
    except AtomTooLargeError as error:
        raise MemoryBudgetExceededError(error.needed or 0, client.allowed, f"training atom {error.name!r}") from error
    if items[0].copies > 1:
        return train_mutually(client, items[0], task.cost(items[0]) or 0)
    if client.settings.fedepth.sub_problem == "network":
        return train_network(task, client, items)
    pieces = [item.atoms for item in items]
    trained: dict[str, None] = {}
    metrics: Metrics = {}
    loss, seen = 0.0, []
    entrance = client.blueprint.shape_before(pieces[0][0])
    examples, validation = client.local_data(0).entering(entrance), client.validation.entering(entrance)
    for j, item in enumerate(items):
        trainer = LocalTrainer(partial(_load_piece, client, item.atoms, item.head), client.training_config)
        for epoch in trainer.epochs():
            if epoch and not client.settings.memory.feature_cache:
                fresh = client.local_data(epoch).entering(entrance)
                examples = _stream_again(client, trainer, pieces[: j + 1], fresh) if j else fresh
            trainer.epoch(examples, client.rng("batches", j, epoch), client.cap, f"train piece {runs(item.atoms)}")
        (piece,) = trainer.finish()
        client.save(piece)
        trained |= dict.fromkeys(piece.units())
        loss += trainer.total_loss
        seen.append(trainer.seen)
        if j + 1 < len(pieces):
            examples, validation = (
                client.stream(piece, examples, f"train-{j}", pieces[j + 1][0]),
                client.stream(piece, validation, f"validation-{j}", pieces[j + 1][0]),
            )
            client.store.drop_features(f"train-{j - 1}", f"validation-{j - 1}")
        else:
            metrics |= client.evaluate(piece.logits, validation)
        del piece, trainer
        return_free_memory()
    metrics |= {"train-loss": loss / sum(seen), "predicted-peak": max(task.cost(item) or 0 for item in items)}
    skipped = [] if client.settings.fedepth.partial_training == "leave-out" else client.blueprint.units()
    return Update([*dict.fromkeys([*trained, *skipped])], metrics, items, seen)


def train_network(task: Task, client: Client, items: list[WorkItem]) -> Update:
    """Train one sub-problem after another within the whole network."""
    loss, seen, units = 0.0, list[int](), dict[str, None]()
    for j, item in enumerate(items):
        make = partial(_load_piece, client, item.atoms, item.head, network_piece(item.learns))
        trainer = LocalTrainer(make, client.training_config)
        for epoch in trainer.epochs():
            examples = client.local_data(0 if client.settings.memory.feature_cache else epoch)
            trainer.epoch(examples, client.rng("batches", j, epoch), client.cap, f"train piece {runs(item.learns)}")
        (piece,) = trainer.finish()
        client.save(piece)
        units |= dict.fromkeys(["atoms.0", *(f"atoms.{atom}" for atom in item.learns), "head"])
        loss, seen = loss + trainer.total_loss, [*seen, trainer.seen]
        metrics = client.evaluate(piece.logits, client.validation) if j + 1 == len(items) else {}
        del piece, trainer
        return_free_memory()
    metrics |= {"train-loss": loss / sum(seen), "predicted-peak": max(task.cost(item) or 0 for item in items)}
    return Update([*units], metrics, items, seen)


def _load_piece(
    client: Client, atoms: Piece, head: str, piece_class: type[PieceModel] = PieceModel
) -> list[PieceModel]:
    return [piece_class(client.blueprint, atoms, head, client.load())]


def _stream_again(client: Client, trainer: LocalTrainer, pieces: list[Piece], examples: Examples) -> Examples:
    """Return the last piece's input for freshly augmented data.

    Meanwhile the state of its training is on disk, because it may not fit beside the earlier pieces.
    """
    client.save(trainer.pieces[0])
    trainer.pause(client.store.task / "momentum.safetensors")
    for j, (atoms, following) in enumerate(pairwise(pieces)):
        piece = PieceModel(client.blueprint, atoms, None, client.load())
        piece.train(False)
        examples = client.stream(piece, examples, f"train-{j}", following[0])
        del piece
    return examples


def train_mutually(client: Client, item: WorkItem, needed: int) -> Update:
    """Train M whole models that teach each other (mutual knowledge distillation, section 4.3), and upload the first one.

    The other models stay in the client's state from round to round.
    """
    copies = item.copies
    loads = [client.load(), *(_load_companion(client, m) for m in range(1, copies))]
    trainer = LocalTrainer(
        lambda: [PieceModel(client.blueprint, item.atoms, item.head, load) for load in loads],
        client.training_config,
        mutual_loss(client.settings.fedepth.mutual_loss),
    )
    examples = client.local_data(0)
    for epoch in trainer.epochs():
        trainer.epoch(examples, client.rng("batches", 0, epoch), client.cap, f"train {copies} models mutually")
    first, *others = trainer.finish()
    client.save(first)
    for m, piece in enumerate(others, start=1):
        folder = _companion_folder(client.new_state(), m)
        folder.mkdir(exist_ok=True)
        for unit, module in piece.units().items():
            client.store.save(unit, module, folder)
    metrics = client.evaluate(first.logits, client.validation)
    metrics |= {"train-loss": trainer.total_loss / trainer.seen, "predicted-peak": needed}
    return Update([*first.units()], metrics, [item], [trainer.seen])


def _companion_folder(state: Path, m: int) -> Path:
    return state / f"companion-{m}"


def _load_companion(client: Client, m: int) -> Callable[[str], torch.nn.Module]:
    """Return a function that loads the m-th companion from the client's state, or draws it by seed, client, m and unit."""
    if client.old_state is not None and _companion_folder(client.old_state, m).is_dir():
        fill = fill_from(client.store, _companion_folder(client.old_state, m))
        return load_for_device(client.blueprint, fill, client.device)

    def make(unit: str) -> torch.nn.Module:
        with isolated_rng(integer(client.settings.seed, "companion", client.number, m, unit)):
            return channels_last(client.blueprint.build_unit(unit)).to(client.device)

    return make


@cache
def mutual_loss(kind: str) -> MakeLoss:
    """Return the loss of M models: 1/M sum_m CE(h^m) + 1/(M-1) sum_m sum_{m' != m} KL(h^{m'} || h^m).

    With kind `authors`, CE has no factor 1/M, as in the authors' code.
    """

    def make(pieces: list[PieceModel]) -> Loss:
        def loss(z: Tensor, y: Tensor) -> Tensor:
            return mutual_objective([piece.logits(z) for piece in pieces], y, kind)

        return loss

    return make


def mutual_objective(logits: list[Tensor], y: Tensor, kind: str) -> Tensor:
    """Return the objective of section 4.3 for logits[M][B, classes] and labels y[B]; KL is the mean over the batch."""
    logits, M = [h.float() for h in logits], len(logits)
    ce = torch.stack([classification_loss(h, y) for h in logits]).sum() / (M if kind == "paper" else 1)
    if logits[0].shape[1] == 1:  # one logit means two classes, of which the other has logit 0
        logits = [F.pad(h, (0, 1)) for h in logits]
    kl = [
        F.kl_div(h.log_softmax(1), other.detach().log_softmax(1), reduction="batchmean", log_target=True)
        for m, h in enumerate(logits)
        for n, other in enumerate(logits)
        if n != m
    ]
    return ce + torch.stack(kl).sum() / (M - 1)
