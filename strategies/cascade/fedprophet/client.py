"""FedProphet, the client's side: adversarial cascade learning (section 5; Algorithm 2, the lines of clients).

w_m is module m, theta_m its auxiliary head, and z_{m-1} are the features at its input (z_0 are images). M_k is the last module
that client k trains in this round, epsilon_{m-1} the radius around z_{m-1}, and mu the weight of strong convexity.

Eqs. 9 and 13: w_m .. w_{M_k} and theta_{M_k} minimise the maximum over ||delta|| <= epsilon_{m-1} of l_CE of theta_{M_k}'s
logits of z_{M_k}(z_{m-1} + delta), plus mu/2 ||z_{M_k}||^2 of the un-pooled features. PGD finds delta in evaluation mode, on
the same loss. Eq. 11, when module m is done: the largest ||z_m(z_{m-1} + delta) - z_m(z_{m-1})||_2 of each training example.

Where the paper is silent, we follow the authors' code. Images are attacked in L-infinity. Features are attacked in an L2 ball
(or, with `fedprophet.feature-norm = linf`, in L-infinity with the radius epsilon / sqrt(dimension)), from a random direction
and radius, by steps of 2.5 epsilon / T, and are not moved below 0 if no features are below 0. The regulariser is a mean over
the batch. Momentum starts at zero in every round. psi = 1. Ours: the last module, which has the model's own head and no
auxiliary one, has no regulariser.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from piecework.client_app.client import Client, Update
from piecework.client_app.features import prefix_features
from piecework.client_app.validation import cascade_of, validate
from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece, fits, format_ranges
from piecework.models.recompute_cheap import recompute_cheaply
from piecework.models.work_item import WorkItem
from piecework.strategies.cascade.fedprophet.settings import FedProphetSettings
from piecework.training.answers import Metrics
from piecework.training.attacks import Attack, Loss, pgd
from piecework.training.examples import Examples, batches
from piecework.training.loop import Load, LocalTrainer, MakeLoss, PieceModel, classification_loss, in_precision
from piecework.training.messages import Task, TaskConfig
from piecework.training.scoring import parts_of
from piecework.training.settings import Settings
from piecework.training.setup import image_attack


@dataclass(frozen=True)
class FedProphetTaskConfig(TaskConfig):
    """The server's instructions for a stage: the atoms of all modules, the number of the trained module m, from 0, and M_k.

    `epsilon` is the attack's radius around features. `nonnegative` says that no client has features below 0. With `swaps`, the
    stage's module is trained even if it does not fit.
    """

    modules: list[list[int]]
    stage: int
    last: int
    epsilon: float = 0.0
    nonnegative: bool = False
    swaps: bool = False

    def atoms(self, last: int) -> Piece:
        """Return the atoms of the modules from the trained one to `last`."""
        return tuple(atom for module in self.modules[self.stage : last + 1] for atom in module)

    def before(self) -> list[Piece]:
        """Return the atoms of each module before the trained one."""
        return [tuple(module) for module in self.modules[: self.stage]]

    def fixed_modules(self) -> list[Piece]:
        """Return the atoms of each module that no client trains any more, including the stage's own if `last` is before it."""
        return [
            tuple(module) for module in self.modules[: max(self.stage, self.stage + 1 if self.last < self.stage else 0)]
        ]


def head_behind(blueprint: Blueprint, atom: int) -> str:
    """Return the head of a module that ends with this atom: an auxiliary one, or the model's own after the last atom."""
    return "head" if atom == len(blueprint.atoms) - 1 else f"aux.{atom}"


def module_item(blueprint: Blueprint, atoms: Piece) -> WorkItem:
    """Return the work item that trains the atoms of modules with the head behind them."""
    return WorkItem(atoms, head_behind(blueprint, atoms[-1]))


@cache
def module_loss(mu: float) -> MakeLoss:
    """Return the loss l_CE + mu/2 ||z||^2 (Eqs. 9, 13), a mean over the batch; without an auxiliary head, l_CE alone."""

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces

        def loss(z: Tensor, y: Tensor) -> Tensor:
            if piece.head_unit == "head" or not mu:
                return classification_loss(piece.logits(z), y)
            z = piece.features(z)
            return classification_loss(piece.head(z), y) + mu / 2 / len(z) * z.float().square().sum()

        return loss

    return make


def train(task: Task, client: Client) -> Update:
    """Train the assigned modules jointly. Raises MemoryBudgetExceededError if even the stage's module does not fit."""
    task_config = FedProphetTaskConfig.of(task)
    item = task.fit_item(module_item(client.blueprint, choose_atoms(task_config, task, client)), client.allowed)
    examples = stage_examples(client, task, task_config)
    attack = stage_attack(client, task_config) if task.adversarial else None
    training_config = replace(client.config_of(item), attack=attack)
    trainer = LocalTrainer(
        lambda: [PieceModel(client.blueprint, item.atoms, item.head, client.load())],
        training_config,
        module_loss(client.settings.of(FedProphetSettings).convexity),
    )
    for epoch in trainer.epochs():
        trainer.epoch(examples, client.rng("batches", epoch), client.cap, f"train {format_ranges(item.atoms)}")
    (piece,) = trainer.finish()
    client.save(piece)
    metrics: Metrics = {"train-loss": trainer.total_loss / trainer.seen, "predicted-peak": task.costs.get(item, 0)}
    return Update([*piece.units()], metrics, [item], [trainer.seen])


def choose_atoms(task_config: FedProphetTaskConfig, task: Task, client: Client) -> Piece:
    """Return the atoms to train: as many of the assigned modules as fit this client, and at least the stage's module.

    Raises MemoryBudgetExceededError if the stage's module does not fit.
    """
    for last in range(task_config.last, task_config.stage, -1):
        if fits(task.needed_bytes(module_item(client.blueprint, task_config.atoms(last))), client.allowed):
            return task_config.atoms(last)
    atoms = task_config.atoms(task_config.stage)
    item = module_item(client.blueprint, atoms)
    if not task_config.swaps and not fits(task.needed_bytes(item), client.allowed):
        raise task.refusal(item, client.allowed, f"training module {task_config.stage + 1}")
    return atoms


def stage_examples(client: Client, task: Task, task_config: FedProphetTaskConfig, at_once: int = 0) -> Examples:
    """Return z_{m-1} of the training data: images, or features behind the fixed modules.

    The modules compute `at_once` examples at once, by default as many as in their training.
    """
    if not task_config.stage:
        return client.local_data(0)
    before = task_config.before()
    trained = [task.fit_item(module_item(client.blueprint, module), client.allowed).micro_batch for module in before]
    sizes = [at_once or micro_batch for micro_batch in trained]
    return prefix_features(client, before, sizes)


def stage_attack(client: Client, task_config: FedProphetTaskConfig) -> Attack:
    """Return the attack on a stage's inputs: on images in the first stage, else on features."""
    settings = client.settings
    images = image_attack(settings, client.data, settings.attack.steps)
    if not task_config.stage:
        return images
    epsilon = task_config.epsilon
    if settings.of(FedProphetSettings).feature_norm == "linf":
        epsilon /= math.sqrt(math.prod(client.blueprint.shape_before(task_config.atoms(task_config.stage)[0])))
    low = 0.0 if task_config.nonnegative else -math.inf
    return Attack(
        settings.of(FedProphetSettings).feature_norm,
        epsilon,
        2.5 * epsilon / settings.attack.steps,
        settings.attack.steps,
        low,
    )


def evaluate(task: Task, client: Client) -> Metrics:
    """Return C_m and A_m: clean and adversarial accuracy of w_1 .. w_m with theta_m on the validation data, with the loss.

    Raises MemoryBudgetExceededError if no step that the task lists fits.
    """
    if not len(client.validation):
        return {}
    task_config = FedProphetTaskConfig.of(task)
    step = task.choose_evaluation(client.allowed, "validating the modules")
    pieces, held = pieces_held([*task_config.before(), task_config.atoms(task_config.stage)], step.held)
    cascade = cascade_of(client, pieces, head_behind(client.blueprint, pieces[-1][-1]), held=held)
    attack = image_attack(client.settings, client.data, client.settings.evaluation.attack_steps)
    return validate(client, cascade, attack, step.examples) | {"predicted-peak": step.bytes}


WHOLE, MODULES, MODULE, ATOM = "", "modules", "module", "atom"  # what is in memory at a time in validation


def pieces_held(modules: Sequence[Piece], held: str) -> tuple[list[Piece], bool]:
    """Return the pieces in which modules are validated, and whether all of them stay in memory."""
    atoms = tuple(atom for module in modules for atom in module)
    if held == WHOLE:
        return [atoms], True
    return ([(atom,) for atom in atoms] if held == ATOM else list(modules)), held == MODULES


def query(task: Task, client: Client) -> Metrics:
    """Return the mean largest ||Delta z_m||_2 of the fixed module m on the training data (Eq. 11), and its smallest feature.

    Raises MemoryBudgetExceededError if no step that the task lists fits.
    """
    task_config, settings = FedProphetTaskConfig.of(task), client.settings
    step = task.choose_evaluation(client.allowed, "measuring how far attacks move features")
    examples, attack = stage_examples(client, task, task_config, step.examples), stage_attack(client, task_config)
    item = task.fit_item(module_item(client.blueprint, task_config.atoms(task_config.stage)), client.allowed)
    piece: PieceModel | None = None
    total, seen, minimum, rng = 0.0, 0, math.inf, client.rng("perturbation")
    alone = settings.batch_statistics  # a batch of one example has no batch statistics
    size = query_batch(settings, item)
    for batch in batches(len(examples), size, rng, drop_single=alone):
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        for positions in parts_of(batch, step.examples):
            with client.cap.first("perturbation", len(positions)):
                piece = piece or load_fixed(client.blueprint, item, client.load())
                forward = in_precision(piece.features, client.training_config)
                norms, low = largest_perturbation(
                    forward, examples.read(positions), attack, generator, cheap=item.cheap
                )
            total, minimum = total + float(norms.sum()), min(minimum, float(low))
        seen += len(batch)
    if not seen:
        return {}
    return {
        "perturbation": total / seen,
        "min-feature": minimum,
        "num-examples": seen,
        "predicted-peak": step.bytes,
    }


def query_batch(settings: Settings, item: WorkItem) -> int:
    """Return the size of a query's batches: half, because clean features are held in addition to a training step's memory."""
    return max(1 + settings.batch_statistics, (item.micro_batch or settings.training.batch_size) // 2)


def load_fixed(blueprint: Blueprint, item: WorkItem, load: Load) -> PieceModel:
    """Return a work item's atoms in evaluation mode, without gradients of weights."""
    piece = PieceModel(blueprint, item.atoms, None, load)
    piece.train(False)
    piece.recompute, piece.cheap = item.recompute, item.cheap
    for parameter in piece.parameters():
        parameter.requires_grad_(False)
    return piece


def largest_perturbation(
    module: Callable[[Tensor], Tensor], z: Tensor, attack: Attack, generator: torch.Generator, *, cheap: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ||module(z + delta) - module(z)||_2 of each example, [B], for PGD's delta, and the smallest value of module(z).

    With `cheap`, gradients keep no more than models/recompute_cheap.py leaves.
    """
    with torch.no_grad():
        clean = module(z)

    def gradient(z: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of ||module(z) - clean||^2 with respect to z."""
        z = z.detach().requires_grad_()
        with recompute_cheaply(cheap):
            out = module(z)
        (ascent,) = torch.autograd.grad(out, z, out.detach().sub(clean).mul_(2))
        return ascent

    found = pgd(gradient, z, torch.empty(0), attack, generator)
    with torch.no_grad():
        return module(found).sub_(clean).flatten(1).norm(dim=1), clean.min()
