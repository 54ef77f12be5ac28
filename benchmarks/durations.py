"""How long presets take on this machine: the line `# Takes:` of their headers.

    python -m benchmarks.durations [PRESET ...] [--write] [--whole 60] [--data-dir FOLDER]

Without names all presets are measured, which takes about 20 minutes on two cores. Three ways, by what a round takes:

    measured                  the whole run, if it is estimated to take at most `--whole` seconds
    estimated                 two rounds of the run; training is multiplied by the rounds of each stage and by the FLOPs of a
                              client in it, evaluation by its number, and clients' validation by the rounds
    random data               where two rounds would take long or data are absent: the FLOPs of the whole run, divided by the
                              FLOP/s of two clients that train for a few batches on random examples of the same shape

All stages are counted at their maximum of rounds, and AutoAttack is left out. FLOPs of clean rounds before adversarial ones are
counted as such. `--write` writes the line into the header.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from piecework.app_folder import PRESETS
from piecework.commands.options import settings_from
from piecework.commands.presets import preset_rows
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import DeviceState
from piecework.federated_data.datasets import PUBLISHED
from piecework.models.partition import AtomTooLargeError
from piecework.models.zoo import is_token_model
from piecework.planning.assignment import Planner
from piecework.planning.cut import Cut
from piecework.planning.part import Part, whole_model
from piecework.planning.timing import round_flops
from piecework.plans.plan import planner_for
from piecework.plans.question import PlanQuestion, ask
from piecework.strategies.cascade.fedprophet.settings import FedProphetSettings
from piecework.strategies.cascade.profl.settings import ProFLSettings
from piecework.strategies.cascade.slt.cut import SLTCut
from piecework.strategies.cascade.slt.steps import allot
from piecework.strategies.low_rank.prism.settings import PriSMSettings
from piecework.training.settings import Settings

SPEED = 1e11  # FLOP/s of two cores, which decides only how a preset is measured
ROUND = 10.0  # seconds of a round that is still run as it is
WORKERS = 2  # of a run
BATCHES = 6.0  # seconds of a client's batches on random data
FEMNIST = ((1, 28, 28), 62, 70_000)  # shape, classes and about as many training examples of prism-femnist's own file
TEST = {
    "fashion-mnist": 10_000,
    "cifar10": 10_000,
    "cifar10-16": 10_000,
    "cifar100": 10_000,
    "caltech256": 6_400,
    "femnist": 80_526,
    "tiny-imagenet": 10_000,
    "imdb": 25_000,
    "imdb-pooled": 12_500,
}
QUICK = ("evaluation.autoattack-examples=0", "evaluation.every=2", "attack.warmup=0")
SHORT = {"profl": ("profl.shrinking=false", "num-rounds=4")}  # others have two rounds; ProFL's are of its first step


class Work(NamedTuple):
    """FLOPs of a run: of a client by stage, how many rounds each stage has at most, and of all that is not training."""

    client: list[float]
    rounds: list[int]
    other: float
    step: float


def main() -> None:
    """Print, and with `--write` write, the line of each preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--whole", type=float, default=60.0, help="run those whole that take at most that many seconds")
    parser.add_argument("--data-dir", default="")
    asked = parser.parse_args()
    given = [f"data-dir={asked.data_dir}"] if asked.data_dir else []
    for name in asked.presets or [row["preset"] for row in preset_rows()]:
        try:
            seconds, way = duration(name, given, asked.whole)
        except subprocess.CalledProcessError as error:
            print(f"{name:40s} failed: {error.cmd}", flush=True)
            continue
        line = f"# Takes: {in_words(seconds)} on 2 cores ({way})"
        print(f"{name:40s} {line}", flush=True)
        if asked.write:
            write(PRESETS / f"{name}.toml", line)


def duration(name: str, given: list[str], whole: float) -> tuple[float, str]:
    """Return the seconds of a preset, and how they were found."""
    settings = settings_from(name, given)
    work = work_of(settings)
    asked = settings.clients_per_round or settings.clients
    if asked * max(work.client) / SPEED > ROUND or settings.dataset.startswith(("npz:", "cifar100", "caltech256")):
        total = asked * sum(n * flops for n, flops in zip(work.rounds, work.client, strict=True)) + work.other
        return total / speed(*random_run(settings, work)), "random data"
    started = time.perf_counter()
    first, second = run(name, [*given, *QUICK, *SHORT.get(settings.strategy, ("num-rounds=2",))])[-2:]
    start = max(0.0, time.perf_counter() - started - 2 * second["seconds"])
    validation = first["seconds"] - first["train_seconds"]
    evaluation = max(0.0, second["seconds"] - second["train_seconds"] - validation)
    rounds = sum(n * flops / work.client[0] for n, flops in zip(work.rounds, work.client, strict=True))
    evaluations = -(-settings.num_rounds // settings.evaluation.every)
    seconds = start + second["train_seconds"] * rounds + validation * settings.num_rounds + evaluation * evaluations
    if seconds > whole:
        return seconds, "estimated"
    started = time.perf_counter()
    run(name, [*given, "evaluation.autoattack-examples=0"])
    return time.perf_counter() - started, "measured"


def run(preset: str, assignments: list[str]) -> list[dict[str, Any]]:
    """Run a preset, and return the records of its rounds."""
    with tempfile.TemporaryDirectory() as folder:
        sets = [
            part for text in (*assignments, f"output-dir={folder}", f"workers={WORKERS}") for part in ("--set", text)
        ]
        command = [sys.executable, "-m", "piecework.cli", "run", "--preset", preset, *sets]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        (records,) = Path(folder).glob("*/rounds.jsonl")
        return [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]


def random_run(settings: Settings, work: Work) -> tuple[tuple[str, ...], tuple[int, ...], int, bool]:
    """Return the assignments of a short run of two clients on random data, and the data's shape, classes and kind."""
    shape, classes = shape_of(settings)
    batches = max(1, min(int(BATCHES * SPEED / 2 / work.step), max(1, int(work.client[0] / work.step))))
    values = {
        "strategy": settings.strategy,
        "model": settings.model,
        "architecture.options": settings.architecture.options,
        "architecture.width": settings.architecture.width,
        "training.batch-size": settings.training.batch_size,
        "training.momentum": settings.training.momentum,
        "training.local-iterations": batches,
        "training.lr": 1e-4,
        "fleet": "unlimited",
        "clients": 2,
        "clients-per-round": 2,
        "data.partition": "iid",
        "evaluation.batch-size": 10,
    }
    if settings.strategy in ("fedprophet", "jfat"):
        values |= {"attack.steps": settings.attack.steps, "evaluation.attack-steps": 1, "evaluation.attack-examples": 2}
        values["memory.model"] = settings.memory.model
    if settings.strategy == "fedprophet":
        values |= {"fedprophet.r-min": settings.of(FedProphetSettings).r_min}
    if settings.strategy == "prism":
        values |= {"prism.keep-ratios": settings.of(PriSMSettings).keep_ratios}
    found = tuple(f"{key}={value}" for key, value in values.items() if value != "")
    found += SHORT.get(settings.strategy, ("num-rounds=2",))
    return found, shape, classes, is_token_model(settings.model)


@cache
def speed(assignments: tuple[str, ...], shape: tuple[int, ...], classes: int, tokens: bool) -> float:
    """Return the FLOP/s of two clients that train at once on random examples, in the second round of a run."""
    rng, batch = np.random.default_rng(0), int(dict(text.split("=", 1) for text in assignments)["training.batch-size"])
    count = max(4 * batch, 2 * classes)
    high = 1000 if tokens else 256
    dtype = np.int64 if tokens else np.uint8
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.npz"
        arrays = {"train": count, "test": max(20, classes)}
        data = {f"x_{part}": rng.integers(0, high, (n, *shape)).astype(dtype) for part, n in arrays.items()}
        labels = {f"y_{part}": np.arange(n) % classes for part, n in arrays.items()}
        np.savez(file, **data, **labels)
        preset = Path(folder) / "random.toml"
        preset.write_text("", encoding="utf-8")
        record = run(str(preset), [*assignments, f"dataset=npz:{file}"])[-1]
    return sum(float(client["flops"]) for client in record["clients"]) / float(record["train_seconds"])


def work_of(settings: Settings) -> Work:
    """Return the FLOPs of a run, by its plan."""
    shape, classes = shape_of(settings)
    own = settings.dataset.startswith("npz:")
    question = PlanQuestion(shape, classes, FEMNIST[2] // settings.clients) if own else ask(settings)
    planner, states = planner_for(load_fleet(settings.fleet), settings, question)
    cut = planner.cut
    rounds = stage_rounds(settings, cut)
    clean = settings.attack.warmup / max(1, rounds[0]) if cut.cost_model.training_config.attack else 0.0
    client, asked = [], states[0] if load_fleet(settings.fleet).memories else states[0][:20]
    slowest = min(state.flops_per_second for state in asked)
    for stage in range(len(cut.stages)):
        parts = [parts_of(planner, stage, state, slowest) for state in asked]
        flops = [
            clean * round_flops(settings, cut.cost_model.unattacked, some, question.examples)
            + (1 - clean) * round_flops(settings, cut.cost_model, some, question.examples)
            for some in parts
            if some
        ]
        client.append(fmean(flops))
    step = cut.cost_model.trace(whole_model(cut.blueprint)).flops  # random data train all that they can
    return Work(client, rounds, other_flops(settings, cut, question.examples), step)


def parts_of(planner: Planner, stage: int, state: DeviceState, slowest: float) -> list[Part]:
    """Return what a device trains in a stage; nothing if it has no memory for it."""
    try:
        return planner.parts(stage, state, slowest)
    except (MemoryBudgetExceededError, AtomTooLargeError):
        return []


def stage_rounds(settings: Settings, cut: Cut) -> list[int]:
    """Return how many rounds train each stage of a plan at most; a map of ProFL counts as a round of its block."""
    count, own = len(cut.stages), settings.of(ProFLSettings)
    if settings.strategy == "fedprophet":
        return [settings.of(FedProphetSettings).stage_rounds or settings.num_rounds // count] * count
    if isinstance(cut, SLTCut):
        return allot(cut.weights, settings.num_rounds)
    if settings.strategy != "profl":
        return [settings.num_rounds]
    twice = own.shrinking
    return [own.stage_rounds] + [own.stage_rounds * (1 + twice) + own.distil_rounds * twice] * (count - 1)


def other_flops(settings: Settings, cut: Cut, examples: int) -> float:
    """Return the FLOPs of evaluating, of measuring norms, and of the validation that steers FedProphet and jFAT."""
    forward = whole_model(cut.model).forward_flops
    each = TEST.get(settings.dataset, 10_000) * forward
    if settings.measures_norms:
        each += (settings.clients_per_round or settings.clients) * examples * forward
    attacks = cut.cost_model.training_config.attack is not None
    per_attack = (2 * settings.evaluation.attack_steps + 1) * forward
    each += settings.evaluation.attack_examples * per_attack if attacks else 0
    total = each * settings.num_rounds / settings.evaluation.every
    if settings.strategy in ("fedprophet", "jfat"):
        everyone = settings.of(FedProphetSettings).validation_clients == "all"
        clients = settings.clients if everyone else settings.clients_per_round
        fraction = settings.data.validation_fraction
        images = clients * examples * fraction / (1 - fraction)
        lengths, done = [], 0.0  # the attack goes through all modules up to the stage's
        for stage in cut.stages:
            done += stage.parts[0].forward_flops
            lengths.append(done / forward)
        total += settings.num_rounds * fmean(lengths) * images * (per_attack + forward)
    return total


def shape_of(settings: Settings) -> tuple[tuple[int, ...], int]:
    """Return the shape of an example and the number of classes."""
    if settings.dataset.startswith("npz:"):
        return FEMNIST[:2]
    if settings.dataset in PUBLISHED:
        return PUBLISHED[settings.dataset][:2]
    question = ask(settings)
    return question.input_shape, question.num_classes


def in_words(seconds: float) -> str:
    """Return a duration with one or two digits: `45 s`, `8 min`, `3.5 h`, `12 d`, `9.6 years`."""
    for size, unit in ((365 * 86_400, "years"), (86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 1.5 * size or (unit == "min" and seconds >= 60):
            amount = seconds / size
            return f"{amount:.1f} {unit}" if amount < 10 and unit != "min" else f"{amount:.0f} {unit}"
    return f"{seconds:.0f} s"


def write(path: Path, line: str) -> None:
    """Write the line of the duration into a preset's header."""
    lines = path.read_text(encoding="utf-8").splitlines()
    place = next(n for n, text in enumerate(lines) if text.startswith("# Takes: "))
    path.write_text("\n".join([*lines[:place], line, *lines[place + 1 :]]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
