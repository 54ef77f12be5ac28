"""Measure the time that PriSM's sub-models save, and the cost of decomposing: ResNet-18, 3x32x32, batch 32, one thread.

    python -m benchmarks.prism_step [--steps 3] [--width 1.0] [--json]

A step is forward, backward and update as a client does it, for the whole model and each keep ratio; its time is the minimum of
`--steps`. `refresh` is the decomposition of all factorised layers on all threads, as the server does it in every round. It is
compared with the round's training of 20 clients with 500 images, 2 epochs and sub-models of 0.2, computed from the step time.
"""

import argparse
import json
import time

import torch

from piecework.models.cascade import Blueprint, initial_state
from piecework.models.kernels import decompose
from piecework.models.low_rank import factors, low_rank
from piecework.models.zoo import build_blueprint
from piecework.planning.step_cost import fake_load
from piecework.strategies.low_rank.prism.client import LowRankModel, low_rank_loss
from piecework.training.loop import PieceModel, single_loss, start, train_step
from piecework.training.sgd import TrainingConfig

KEEPS = (0.8, 0.6, 0.4, 0.2)
CLIENTS, IMAGES, EPOCHS, BATCH = 20, 500, 2, 32


def step_seconds(blueprint: Blueprint, steps: int, *, thin: bool) -> float:
    """Return the minimum seconds of some steps, after one warm-up step."""
    piece = (LowRankModel if thin else PieceModel)(blueprint, range(len(blueprint.atoms)), "head", fake_load(blueprint))
    training_config = TrainingConfig(lr=0.1, momentum=0.9, weight_decay=2e-4, batch_size=BATCH, epochs=1)
    loss, optimiser = start([piece], training_config, low_rank_loss(2e-4) if thin else single_loss)
    x, y = torch.rand(BATCH, *blueprint.input_shape), torch.randint(10, (BATCH,))
    taken = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        train_step(loss, optimiser, x, y)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def refresh_seconds(blueprint: Blueprint) -> float:
    """Return the seconds of all layers' decompositions."""
    arrays = {name: value.numpy() for name, value in initial_state(blueprint, 0)}
    layers = [arrays[layer.weight] for layer in factors(low_rank(blueprint, 1.0))]
    started = time.perf_counter()
    for weight in layers:
        decompose(weight)
    return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=float, default=1.0, help="fraction of ResNet-18's channels")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    blueprint = build_blueprint(
        "resnet18", num_classes=10, input_shape=(3, 32, 32), batch_norm="batch", width=given.width
    )
    refresh = refresh_seconds(blueprint)
    torch.set_num_threads(1)
    full = step_seconds(blueprint, given.steps, thin=False)
    thin = {keep: step_seconds(low_rank(blueprint, keep), given.steps, thin=True) for keep in KEEPS}
    training = CLIENTS * EPOCHS * (IMAGES // BATCH) * thin[0.2]
    if given.json:
        print(json.dumps({"full": full, "keep": thin, "refresh": refresh, "training": training}))
        return
    print(f"full step {full:.3f} s")
    for keep, seconds in thin.items():
        print(f"keep {keep}  {seconds:.3f} s  {seconds / full:.3f} of the full model's")
    print(f"refresh {refresh:.2f} s, {refresh / training:.1%} of a round's local training ({training:.0f} s)")


if __name__ == "__main__":
    main()
