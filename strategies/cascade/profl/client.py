"""ProFL, the client's side (section 2): one block and its output module are trained over frozen blocks.

theta_t is block t. Its output module theta_op has a basic layer theta_{t+1,b} .. theta_{T,b} for each block behind it and the
output layer theta_L. F marks frozen blocks, and z_{t-1} are the features of the images behind the frozen blocks.

Growing and shrinking: [theta_{1,F}, .., theta_t, theta_op] is run, and theta_t and theta_op are trained by cross-entropy. A
device that cannot afford that, and is asked all the same, trains theta_L alone (section 3.1), on the features of all layers
before it.
Map: distillation transfers theta_t's information to theta_{t,b}. The student [theta_{t,b}, theta_{t+1,b}, ..] learns the logits
of the teacher [theta_t, theta_{t+1,b}, ..] by the mean squared error.

Statistics (ours): before shrinking begins, the blocks that it leaves random get running statistics for their batch norms.

Where the paper is silent, we follow the authors' code: of the student only theta_{t,b} learns, and theta_L too in the map of
the last block; momentum starts at zero in every round. Ours: frozen blocks and the teacher run in evaluation mode, so that
z_{t-1} is computed once per step and kept in the store. With `profl.frozen-mode = training`, frozen blocks run in training mode
as the authors' do. Their batch norms then use the statistics of each batch, and their running statistics stay as the block's
own step left them (the authors' continue to average). The teacher's logits are computed first, one atom after another, so that
teacher and student are never in memory together.
"""

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from piecework.client_app.client import Client, Update
from piecework.client_app.features import measure_statistics, prefix_features, teacher_logits
from piecework.client_app.validation import behind, evaluate_cascade
from piecework.models.basic_layers import BasicLayers, cascade_at, step_atoms, student_atoms
from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece, fits, format_ranges
from piecework.models.work_item import WorkItem
from piecework.strategies.cascade.profl.settings import ProFLSettings
from piecework.training.answers import Metrics
from piecework.training.attacks import Loss
from piecework.training.examples import Examples
from piecework.training.loop import LocalTrainer, MakeLoss, PieceModel, single_loss
from piecework.training.messages import Task, TaskConfig

OUTPUT_LAYER: Piece = ()  # theta_L alone, which has no atoms


@dataclass(frozen=True)
class ProFLTaskConfig(TaskConfig):
    """The server's instructions: the block t, from 1, and what to do.

    `doing` is `shrinking` or `growing` in step t, the `map` of block t, or the `statistics` of the blocks before it.
    """

    step: int
    doing: str


def blocks_of(task: Task) -> tuple[Piece, ...]:
    """Return the blocks of the model, for which its variant has basic layers."""
    return task.variant.find(BasicLayers).basic_layers


def frozen_atoms(task: Task) -> Piece:
    """Return the atoms of the frozen blocks before block t."""
    return tuple(atom for block in blocks_of(task)[: ProFLTaskConfig.of(task).step - 1] for atom in block)


def train(task: Task, client: Client) -> Update:
    """Run the task's phase: train block t, or theta_L alone if that does not fit; map block t; or measure statistics.

    Raises MemoryBudgetExceededError if not even theta_L fits, or the map's student, or the measurement.
    """
    task_config, blocks = ProFLTaskConfig.of(task), blocks_of(task)
    if task_config.doing == "statistics":
        return measure(task, client, frozen_atoms(task))
    atoms = step_atoms(client.blueprint, blocks, task_config.step)
    whole = fits(task.needed_bytes(item_of(task, atoms)), client.allowed)
    if task_config.doing == "map":
        student = item_of(task, student_atoms(client.blueprint, task_config.step))
        require_fitting(task, client, student, f"mapping block {task_config.step} into its basic layer")
    elif not whole:
        require_fitting(task, client, item_of(task, OUTPUT_LAYER), "training the output layer")
    frozen = [(atom,) for atom in frozen_atoms(task)]
    training = client.settings.of(ProFLSettings).frozen_mode == "training"
    # images are augmented again in every round, but stored features are not
    z = prefix_features(client, frozen, training=training) if frozen else client.local_data(0)
    if task_config.doing == "map":
        return integrate(task, client, task_config.step, z)
    if whole:
        return learn(task, client, atoms, z)
    return learn(task, client, OUTPUT_LAYER, behind(client, z, atoms, None, "output"))


def measure(task: Task, client: Client, atoms: Piece) -> Update:
    """Measure the running statistics of atoms that stay random, without training.

    Raises MemoryBudgetExceededError if one atom at a time does not fit.
    """
    item = WorkItem(atoms, variant=task.variant, measured=True)
    require_fitting(task, client, item, "measuring the statistics of random blocks")
    measure_statistics(client, atoms)
    return Update([f"atoms.{atom}" for atom in atoms], {"predicted-peak": task.costs[item]}, [item], [0])


def integrate(task: Task, client: Client, t: int, z: Examples) -> Update:
    """Run the map of block t: train its basic layer to replace it, on z_{t-1}."""
    blocks = blocks_of(task)
    student = student_atoms(client.blueprint, t)
    teacher = teacher_logits(client, [(atom,) for atom in step_atoms(client.blueprint, blocks, t)], z)
    trained = learners(student, t == len(blocks))
    return learn(task, client, student, Examples(z.read, teacher, z.device), trained, distillation(trained))


def learners(student: Piece, last: bool) -> tuple[str, ...]:
    """Return the units of a student that learn: its first basic layer, and theta_L in the map of the `last` block."""
    return f"atoms.{student[0]}", *(["head"] if last else [])


@cache
def distillation(trained: tuple[str, ...]) -> MakeLoss:
    """Return the mean squared error to a teacher's logits[B, classes]; units that are not `trained` are frozen."""

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces
        for unit, module in piece.units().items():
            module.requires_grad_(unit in trained)

        def loss(z: Tensor, teacher: Tensor) -> Tensor:
            return (piece.logits(z).float() - teacher).square().mean()

        return loss

    return make


def learn(
    task: Task,
    client: Client,
    atoms: Piece,
    examples: Examples,
    trained: tuple[str, ...] = (),
    make_loss: MakeLoss = single_loss,
) -> Update:
    """Train these atoms and theta_L for the local epochs. The update has the units `trained`, or all if that is empty."""
    item = task.fit_item(item_of(task, atoms), client.allowed)
    trainer = LocalTrainer(
        lambda: [PieceModel(client.blueprint, atoms, "head", client.load())], client.config_of(item), make_loss
    )
    for epoch in trainer.epochs():
        trainer.epoch(
            examples, client.rng("batches", epoch), client.cap, f"train {format_ranges(atoms) or 'the output layer'}"
        )
    (piece,) = trainer.finish()
    client.save(piece)
    metrics: Metrics = {
        "train-loss": trainer.total_loss / trainer.seen,
        "predicted-peak": task.costs[item],
    }
    return Update(list(trained or piece.units()), metrics, [item], [trainer.seen])


def item_of(task: Task, atoms: Piece) -> WorkItem:
    """Return the work item that trains these atoms and theta_L."""
    return WorkItem(atoms, variant=task.variant)


def require_fitting(task: Task, client: Client, item: WorkItem, doing: str) -> None:
    """Raise MemoryBudgetExceededError if a work item does not fit; `doing` names it in the message."""
    if not fits(task.needed_bytes(item), client.allowed):
        raise task.refusal(item, client.allowed, doing)


def evaluated_atoms(blueprint: Blueprint, task: Task) -> Piece:
    """Return the atoms of the step's model, which clients evaluate with the head."""
    task_config, blocks = ProFLTaskConfig.of(task), blocks_of(task)
    return tuple(cascade_at(blueprint, blocks, task_config.step - (task_config.doing == "map")))


def evaluate(task: Task, client: Client) -> Metrics:
    """Return loss and accuracy of the step's model on the validation data, with one atom in memory at a time."""
    return evaluate_cascade(task, client, evaluated_atoms(client.blueprint, task))
