"""Compare which pieces train within a container's memory limit, by the planner and by a trial in one container per piece.

    python -m benchmarks.containers [--image piecework] [--limits 512MB,768MB,1GB,2GB] [--models resnet18,vgg16]
                                    [--batch-size 128] [--fit recompute,micro-batch] [--optimiser-state float32]
                                    [--slack 24MB] [--steps 2] [--whole] [--json]

The floor is the anonymous memory of a container in which an executor waits and a client has imported what it needs, before it
trains; it is measured first. Budget = limit - floor - slack. FeDepth's pieces for that budget (images of 3x32x32, 10 classes,
the shared head) must train. Each of them with one more atom, and what the planner excludes, must not train. The whole model is
always tried: with the plain step and, if that is too large, with the step that `memory.fit` (--fit) finds for the budget. With
--whole nothing else is. A limit such as 0.3x is that of a container whose budget is 0.3 of the plain step of the whole model.
A container is `docker run --memory LIMIT --memory-swap LIMIT` with this checkout's sources (`container_piece`); either it
trains or the kernel kills it. A piece that exceeds the budget by less than the slack may train; it is marked, and is no error,
because a trial holds no messages. Requires Docker and an image made from the Dockerfile. The exit code is 1 if planner and
trial disagree.
"""

import argparse
import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from piecework.device_profiles.profile import format_bytes, parse_bytes
from piecework.models.partition import AtomTooLargeError, Piece

if TYPE_CHECKING:
    from piecework.models.cascade import Blueprint
    from piecework.planning.costs import CostModel
    from piecework.planning.part import Part

ROOT = Path(__file__).resolve().parents[1]
SHAPE, CLASSES = (3, 32, 32), 10
TRAINED, KILLED = "trained", "killed"
WHOLE = "the whole model"
SECONDS = 900  # timeout of a container


@dataclass(frozen=True)
class Trial:
    """One container: the planner's prediction for a piece and the outcome. Figures are bytes; `largest` is anonymous memory."""

    limit: int
    model: str
    piece: str
    predicted: int
    budget: int
    fits: bool
    outcome: str
    largest: int
    kernel: int
    counted: int
    seconds: float
    weights: int = 0

    @property
    def over(self) -> int:
        """Bytes above the budget."""
        return max(self.predicted - self.budget, 0)

    @property
    def agrees(self) -> bool:
        """Whether the piece trained if and only if it fits."""
        return self.fits == (self.outcome == TRAINED)

    def in_slack(self, slack: int) -> bool:
        """Return whether it exceeded the budget by no more than the slack and trained."""
        return self.outcome == TRAINED and 0 < self.over <= slack


def pieces_to_try(count: int, cost: Callable[[Piece], int], budget: int, names: list[str]) -> dict[Piece, bool]:
    """Return the planner's pieces, each with one more atom, what it excludes, and the whole model; True = it fits."""
    from piecework.strategies.cascade.fedepth.client import decompose

    try:
        pieces = decompose(count, cost, budget, names)
    except AtomTooLargeError:
        pieces = []
    kept = [atom for piece in pieces for atom in piece]
    asked: list[Piece] = [(atom,) for atom in range(count) if atom not in kept]
    for piece, following in pairwise([*pieces, ()]):
        asked += [piece, *([(*piece, following[0])] if following else [])]
    asked.append(tuple(range(count)))
    return {piece: cost(piece) <= budget for piece in dict.fromkeys(asked)}


def amounts(text: str) -> list[int]:
    """Parse "512MB,1GB" to bytes."""
    return [parse_bytes(part) for part in text.split(",")]


def budget_under(limit: str, plain: int, beside: int) -> int:
    """Return the budget in a container with the limit "512MB", of which `beside` bytes are kept free, or "0.3x" of `plain`."""
    if limit.endswith("x"):
        return int(float(limit[:-1]) * plain)
    return parse_bytes(limit) - beside


def piece_name(piece: Piece, names: Sequence[str]) -> str:
    """Return the piece's runs of atoms by name."""
    if len(piece) == len(names):
        return WHOLE
    starts = [atom for atom in piece if atom - 1 not in piece]
    stops = [atom for atom in piece if atom + 1 not in piece]
    spans = zip(starts, stops, strict=True)
    return " and ".join(names[a] if a == b else f"{names[a]} to {names[b]}" for a, b in spans)


def parts_to_try(
    cost_model: "CostModel", blueprint: "Blueprint", budget: int, *, whole: bool = False
) -> "dict[Part, bool]":
    """Return the parts of `pieces_to_try`, and the whole model with the step that `memory.fit` finds; True = it fits.

    With `whole`, nothing but the whole model is tried.
    """
    from piecework.models.partition import atom_names
    from piecework.planning.part import Part

    def cost(piece: Piece) -> int:
        return cost_model.bytes(Part(blueprint, piece))

    names = atom_names(blueprint)
    plain = Part(blueprint, tuple(range(len(names))))
    pieces = {plain.atoms: cost(plain.atoms) <= budget} if whole else pieces_to_try(len(names), cost, budget, names)
    found = {Part(blueprint, piece): fits for piece, fits in pieces.items()}
    fitted = replace(cost_model.fit_part(replace(plain, pageable=True), budget), pageable=False)
    return found | {fitted: cost_model.bytes(fitted) <= budget}


def part_name(part: "Part", names: Sequence[str]) -> str:
    """Return the piece's name and its step, as in "the whole model, micro-batches of 8"."""
    return ", ".join(filter(None, (piece_name(part.atoms, names), part.step)))


def maxima(lines: Iterable[str]) -> dict[str, float]:
    """Return the maximum of each figure in the JSON lines of a container; an incomplete last line is skipped."""
    found: dict[str, float] = {}
    for line in lines:
        try:
            figures = json.loads(line)
        except json.JSONDecodeError:
            continue
        for key, value in figures.items():
            found[key] = max(value, found.get(key, value))
    return found


def run_container(image: str, limit: int, task: dict[str, object]) -> tuple[str, dict[str, float]]:
    """Return the outcome of a task in a container with a memory limit (bytes; 0 = none), and its figures."""
    name = f"piecework-trial-{uuid.uuid4().hex[:8]}"
    limits = ["--memory", str(limit), "--memory-swap", str(limit)] if limit else []
    command = ["docker", "run", "--name", name, "--network", "none", *limits, "--volume", f"{ROOT}:/app:ro"]
    command += ["--workdir", "/app", image, "python", "-m", "benchmarks.container_piece", json.dumps(task)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        state = subprocess.run(
            ["docker", "inspect", "--format", "{{.State.ExitCode}} {{.State.OOMKilled}}", name],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split()
    except subprocess.TimeoutExpired:
        sys.exit(f"{json.dumps(task)} under {limit:,} bytes did not end within {SECONDS} s")
    finally:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False)
    if state != ["0", "false"] and state != ["137", "true"]:
        sys.exit(f"{json.dumps(task)} under {limit:,} bytes ended with {state}:\n{done.stderr[-2000:]}")
    return (TRAINED if state[0] == "0" else KILLED), maxima(done.stdout.splitlines())


def trials(options: argparse.Namespace, model: str, floor: int) -> Iterable[Trial]:
    """Yield all trials of a model, the smallest limit first."""
    from piecework.models.partition import atom_names
    from piecework.models.step import step_fields
    from piecework.planning.costs import cost_model_for
    from piecework.training.settings import Settings
    from piecework.training.setup import blueprint_of_shape

    config = {"model": model, "training.batch-size": options.batch_size}
    config |= {"training.optimiser-state": options.optimiser_state}
    settings = Settings.from_run_config(config | {"memory.fit": options.fit})
    blueprint = blueprint_of_shape(settings, SHAPE, CLASSES)
    cost_model, names = cost_model_for(settings, blueprint), atom_names(blueprint)
    for asked in options.limits.split(","):
        budget = budget_under(asked, cost_model.reference_bytes, floor + options.slack)
        limit = budget + floor + options.slack
        for part, fits in parts_to_try(cost_model, blueprint, budget, whole=options.whole).items():
            task = {"settings": config, "atoms": part.atoms, "steps": options.steps, "budget": max(budget, 0)}
            task |= step_fields(part)
            outcome, found = run_container(options.image, limit, task)
            yield Trial(
                limit=limit,
                model=model,
                piece=part_name(part, names),
                predicted=cost_model.bytes(part),
                budget=budget,
                fits=fits,
                outcome=outcome,
                largest=int(found["anonymous"]),
                kernel=int(found["kernel"]),
                counted=int(found.get("done", 0)),
                seconds=found.get("seconds", 0.0),
                weights=int(found.get("weights", 0)),
            )


HEAD = ("limit", "budget", "model", "piece", "predicted", "over by", "planner", "tried", "largest anonymous")


def row(trial: Trial, slack: int) -> tuple[str, ...]:
    """Return a table row."""
    sizes = [format_bytes(size) for size in (trial.limit, trial.budget, trial.predicted, trial.largest)]
    planner, over = ("fits", "") if trial.fits else ("too large", format_bytes(trial.over))
    tried = trial.outcome + (", in the slack" if trial.in_slack(slack) else "")
    return sizes[0], sizes[1], trial.model, trial.piece, sizes[2], over, planner, tried, sizes[3]


def table(rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(cells) for cells in (HEAD, ("---",) * len(HEAD), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def summary(done: list[Trial], floor: int, slack: int) -> list[str]:
    """Return the conclusions from the table."""
    trained = [trial for trial in done if trial.outcome == TRAINED]
    killed = [trial.over for trial in done if trial.outcome == KILLED]
    in_slack = [trial.over for trial in done if trial.in_slack(slack)]
    lines = [f"{sum(trial.agrees for trial in done)} of {len(done)} agree"]
    if in_slack:
        lines[0] += f", {len(in_slack)} trained in the slack (at most {format_bytes(max(in_slack))} over the budget)"
    if killed:
        lines.append(f"the smallest excess over the budget that was killed: {format_bytes(min(killed))}")
    if trained:
        above = max(trial.largest - floor - trial.predicted for trial in trained)
        kernel = max(trial.kernel for trial in trained)
        differ = max(abs(trial.counted - trial.predicted) for trial in trained)
        lines.append(
            f"where it trained: anonymous memory at most {format_bytes(above)} above floor + predicted, the kernel's own at "
            f"most {format_bytes(kernel)}; what the client counted and what was predicted differ by at most {differ} bytes"
        )
    return lines


def same_weights(done: list[Trial]) -> list[str]:
    """Say for each model whether the whole of it had the same weights in the end, wherever it trained."""
    found: dict[str, list[int]] = {}
    for trial in done:
        if trial.outcome == TRAINED and trial.piece.startswith(WHOLE):
            found.setdefault(trial.model, []).append(trial.weights)
    return [
        f"{model}: where the whole model trained ({len(weights)} times), different weights in the end: {len(set(weights))}"
        for model, weights in found.items()
    ]


def main() -> None:
    """Print a line per trial, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="piecework")
    parser.add_argument("--limits", default="512MB,768MB,1GB,2GB")
    parser.add_argument("--models", default="resnet18,vgg16")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--fit", default="recompute,micro-batch", help="memory.fit for the whole model")
    parser.add_argument("--optimiser-state", default="float32", choices=["float32", "bfloat16", "8-bit"])
    parser.add_argument("--slack", type=parse_bytes, default="24MB", help="for the kernel, the allocator, messages")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="try nothing but the whole model")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    _, found = run_container(options.image, 0, {"atoms": []})
    floor, done = int(found["floor"]), []
    if not options.json:
        print(f"floor {format_bytes(floor)}, slack {format_bytes(options.slack)}, batch size {options.batch_size}\n")
        print(table([]), flush=True)
    for model in options.models.split(","):
        for trial in trials(options, model, floor):
            done.append(trial)
            if not options.json:
                print(f"| {' | '.join(row(trial, options.slack))} |", flush=True)
    if options.json:
        print(json.dumps({"floor": floor, "slack": options.slack, "trials": [asdict(trial) for trial in done]}))
    else:
        print("", *summary(done, floor, options.slack), *same_weights(done), sep="\n")
    sys.exit(any(not (trial.agrees or trial.in_slack(options.slack)) for trial in done))


if __name__ == "__main__":
    main()
