"""Simulated seconds of rounds of jFAT and of FedProphet on the paper's fleets; nothing is trained.

A round's seconds are a function of (fleet, seed, round) and of the cost of a batch: FLOPs, and the authors' data access
(device_profiles/clock.py). jFAT trains the whole model and swaps if memory is short; FedProphet trains modules that fit. A
round lasts as long as its slowest client.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from statistics import fmean

from benchmarks.tables.fedprophet import TABLE7, TABLE8
from benchmarks.tables.shared import asked
from piecework.device_profiles.clock import Batch, batch_access_seconds, task_seconds
from piecework.device_profiles.fleet import Fleet, device_state, load_fleet
from piecework.device_profiles.profile import DeviceState
from piecework.federation.registry import sample_clients
from piecework.models.partition import Piece
from piecework.planning.costs import cost_model_for
from piecework.planning.paper_memory.fedprophet import macs
from piecework.plans.question import budget_bytes
from piecework.strategies.cascade.fedprophet.cut import FedProphetCut
from piecework.strategies.cascade.fedprophet.server import FedProphet
from piecework.training.setup import blueprint_of_shape

CLIENTS, ASKED, ITERATIONS, ATTACK_STEPS = 100, 10, 30, 10
Seconds = tuple[float, float]  # computing, data access
Rounds = list[list[DeviceState]]  # what the clients of each round have


@dataclass(frozen=True)
class Setting:
    """A part of the paper's Figure 7.

    `examples` is a client's training examples in the authors' code, 80 % of its data. `speedup` is in the total, over jFAT.
    `with_dma` and `without` are total seconds of FedProphet in Table 4.
    """

    name: str
    flags: str
    examples: int
    speedup: float
    with_dma: float
    without: float


SETTINGS = (
    Setting("cifar10-balanced", TABLE7, 400, 2.4, 9.2e4, 9.1e4),
    Setting("cifar10-unbalanced", TABLE7, 400, 1.9, 1.8e5, 1.9e5),
    Setting("caltech-balanced", TABLE8, 187, 10.8, 3.6e4, 4.2e4),
    Setting("caltech-unbalanced", TABLE8, 187, 7.7, 6.2e4, 6.5e4),
)


@dataclass(frozen=True)
class How:
    """Assumptions about a client's work.

    `attack_steps` is 0 for clean rounds. With `attack_swaps`, attack steps that do not fit are swapped. `true_flops` are
    traced, 2 per multiply-accumulate of all passes. With `remainder`, an epoch ends with a smaller batch, as in the authors'
    loader, instead of 30 full ones. With `mean`, a round takes the time of the mean client, not of the slowest.
    """

    attack_steps: int = ATTACK_STEPS
    attack_swaps: bool = True
    true_flops: bool = False
    remainder: bool = False
    mean: bool = False


@cache
def cut_for(flags: str) -> FedProphetCut:
    """Return FedProphet's cut for a table's model and R_min, with the authors' memory model."""
    settings, question = asked(flags)
    blueprint = blueprint_of_shape(settings, question.input_shape, question.num_classes)
    cost_model = cost_model_for(settings, blueprint, ATTACK_STEPS)
    return FedProphetCut(blueprint, cost_model, settings, budget_bytes(question.budget, 0), method=FedProphet)


@cache
def batches(setting: Setting, atoms: Piece, how: How) -> tuple[tuple[Batch, int], ...]:
    """Return the batches of a client's round on a piece with their counts. The memory of a full batch is MemReq."""
    cut = cut_for(setting.flags)
    part, size = cut.part(cut.item(atoms)), cut.settings.training.batch_size
    features = cut.cost_model.bytes(part) // 4 - 3 * part.parameters
    flops = cut.cost_model.trace(part).flops if how.true_flops else 2 * macs(part, size) * (1 + how.attack_steps)
    full, left_over = divmod(setting.examples, size)
    short = ITERATIONS // (full + 1) if how.remainder else 0
    steps = how.attack_steps if how.attack_swaps else 0
    return tuple(
        (Batch(flops * n / size, part.input_bytes * n, part.parameters, features * n // size, steps), count)
        for n, count in ((size, ITERATIONS - short), (left_over, short))
        if count
    )


def client_seconds(state: DeviceState, work: Sequence[tuple[Batch, int]]) -> Seconds:
    """Return the two parts of `task_seconds` for these batches and counts."""
    first, _ = work[0]
    once = task_seconds(state, [replace(first, flops=0.0)]) - batch_access_seconds(state, first)
    access = once + sum(count * batch_access_seconds(state, batch) for batch, count in work)
    return sum(count * batch.flops for batch, count in work) / state.flops_per_second, access


@cache
def fleet_of(setting: Setting, authors: bool) -> Fleet:
    """Return the fleet as the paper describes it, or as the authors' code has it."""
    return load_fleet(f"fedprophet-{setting.name}" + ("-authors" if authors else ""))


def draw(fleet: Fleet, seeds: Sequence[int], rounds: int) -> Rounds:
    """Draw the clients of all rounds, seed after seed; each seed gives the clients other devices."""
    return [
        [device_state(fleet, client, CLIENTS, seed, r, 1) for client in sample_clients(range(CLIENTS), ASKED, seed, r)]
        for seed in seeds
        for r in range(1, rounds + 1)
    ]


def whole_model(setting: Setting) -> Piece:
    """Return all atoms."""
    return tuple(chain(*(stage.parts[0].atoms for stage in cut_for(setting.flags).stages)))


def of_round(tasks: Sequence[Seconds], how: How) -> Seconds:
    """Return the seconds of the slowest client, or of the mean one."""
    return (fmean(t[0] for t in tasks), fmean(t[1] for t in tasks)) if how.mean else max(tasks, key=sum)


def jfat(setting: Setting, drawn: Rounds, how: How) -> list[Seconds]:
    """Return the seconds of jFAT's rounds."""
    work = batches(setting, whole_model(setting), how)
    return [of_round([client_seconds(state, work) for state in states], how) for states in drawn]


def fedprophet(setting: Setting, drawn: Rounds, how: How, dma: bool = True) -> list[list[Seconds]]:
    """Return the seconds of FedProphet's rounds, as if all were of stage 1, of stage 2, ..."""
    cut, stages = cut_for(setting.flags), []
    for stage, (module, *_) in enumerate(each.parts for each in cut.stages):
        rounds = []
        for states in drawn:
            slowest = min(state.flops_per_second for state in states)
            pieces = [cut.choose_atoms(stage, state, slowest) if dma else module.atoms for state in states]
            work = [batches(setting, piece, how) for piece in pieces]
            rounds.append(of_round(list(map(client_seconds, states, work)), how))
        stages.append(rounds)
    return stages
