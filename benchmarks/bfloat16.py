"""Where the time of a step in bfloat16 goes, against float32: profiled operators of both, and the seconds of the steps in turn.

    python -m benchmarks.bfloat16 [--models lenet5,resnet18] [--width 0.25] [--batch 32] [--edge 32] [--repeats 20]

One thread. The steps take turns in one process, and their figures are medians of the processor's seconds, so that other work on
the machine counts little. Below are the operators by the milliseconds of a step that they take themselves.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from piecework.models.zoo import build_blueprint
from piecework.training.loop import PieceModel, load_for_device, start, train_step
from piecework.training.loop import single_loss as make_loss
from piecework.training.sgd import Precision, TrainingConfig

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")


def step_of(
    model: str, width: float, shape: tuple[int, int, int], batch: int, precision: Precision
) -> Callable[[], object]:
    """Return a function that trains a model of random weights on one batch, as a client does."""
    torch.manual_seed(0)
    blueprint = build_blueprint(model, num_classes=10, input_shape=shape, width=width)
    built = {unit: blueprint.build_unit(unit) for unit in blueprint.units()}
    load = load_for_device(blueprint, lambda unit, module: module.load_state_dict(built[unit].state_dict()) and None)
    piece = PieceModel(blueprint, range(len(blueprint.atoms)), "head", load)
    loss, optimiser = start([piece], TrainingConfig(0.01, 0.9, 5e-4, batch, 1, precision=precision), make_loss)
    images = torch.randn(batch, *shape).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(batch) % 10
    return partial(train_step, loss, optimiser, images, labels)


def main() -> None:
    """Measure, and print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="lenet5,resnet18")
    parser.add_argument("--width", type=float, default=0.25, help="of models that have widths")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--edge", type=int, default=32, help="pixels of the three-channel images")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    for model in options.models.split(","):
        width = 1.0 if model == "lenet5" else options.width
        shape = (3, options.edge, options.edge)
        steps = {each: step_of(model, width, shape, options.batch, each) for each in PRECISIONS}
        seconds: dict[str, list[float]] = {each: [] for each in PRECISIONS}
        for number in range(options.repeats + 3):  # the first three are a warm-up
            for each, step in steps.items():
                begun = time.process_time()
                step()
                if number >= 3:
                    seconds[each].append(time.process_time() - begun)
        medians = [statistics.median(seconds[each]) for each in PRECISIONS]
        print(
            f"\n{model} x {width:g}: {medians[0] * 1e3:.1f} ms in float32, {medians[1] / medians[0]:.2f} of it in bfloat16"
        )
        own = {each: own_milliseconds(step) for each, step in steps.items()}
        names = sorted(
            own["float32"] | own["bfloat16"], key=lambda name: -max(each.get(name, 0) for each in own.values())
        )
        for name in names[:14]:
            print(f"  {own['float32'].get(name, 0):8.2f} {own['bfloat16'].get(name, 0):8.2f}  {name}")


def own_milliseconds(step: Callable[[], object], steps: int = 5) -> dict[str, float]:
    """Return the milliseconds of a step that each operator takes itself."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
    return {event.key: event.self_cpu_time_total / steps / 1e3 for event in found.key_averages()}


if __name__ == "__main__":
    main()
