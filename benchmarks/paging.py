"""Predicted and measured seconds of steps that page through a model, on this machine's processor and disk.

    python -m benchmarks.paging [--models resnet18,preresnet20] [--batch 32] [--budgets 0.5,0.4,0.3] [--folder .] [--repeats 5]
                                [--slow 20e6]

The processor's speed is that of the model's plain step on one thread: traced FLOPs by measured seconds. The disk's bandwidth
and the seconds of an access are those of small and large page files in --folder, which are written with a sync and read back
without the page cache, as paged steps do on devices with little more memory than their budget. For each budget, a fraction of
the plain step's bytes, `memory.fit = page` finds the step, which runs with files in the same folder; if it reads ahead, the
same step without that follows. With --slow, files move at most so many bytes a second, as those of a slower disk do: accesses
end with a sleep. Each figure is the least of --repeats, because other programs disturb timings, and the probes take turns with
the step that they predict.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.fit import step_seconds
from piecework.models.step import with_step
from piecework.models.zoo import build_blueprint, usual_input
from piecework.planning.costs import CostModel, cost_model_for
from piecework.planning.fit import seconds_of
from piecework.planning.page_plan import Speed
from piecework.planning.part import Part, whole_model
from piecework.planning.step_cost import fake_batch
from piecework.training.loop import load_for_device
from piecework.training.paged import PagedCascade
from piecework.training.pages import PageFiles, count_bytes
from piecework.training.settings import Settings

SMALL, LARGE = 1_000, 1_000_000  # values of 4 bytes: pages are as small and as large


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class SlowFiles(PageFiles):
    """Pages of a disk that moves `speed` bytes a second, if this machine's moves more."""

    def __init__(self, folder: Path, speed: float) -> None:
        super().__init__(folder)
        self.speed = speed

    def write(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Keep the values of tensors under a name."""
        began = time.perf_counter()
        super().write(name, tensors)
        self._rest(began, tensors)

    def _fetch(self, name: str, tensors: Sequence[Tensor]) -> None:
        began = time.perf_counter()
        super()._fetch(name, tensors)
        self._rest(began, tensors)

    def _rest(self, began: float, tensors: Sequence[Tensor]) -> None:
        time.sleep(max(0.0, count_bytes(tensors) / self.speed - (time.perf_counter() - began)))


def probe(folder: Path, slow: float) -> tuple[float, float]:
    """Return the mean seconds of an access to a small page and to a large one: steps read about as often as they write.

    The small ones are as many as those of a step, so that the least of several means is as rare.
    """
    pages, found = SlowFiles(folder / "probe", slow), list[float]()
    for tensor, count in ((torch.zeros(SMALL), 80), (torch.randn(LARGE), 8)):
        names = [f"{len(tensor)}-{number}" for number in range(count)]
        written = seconds(lambda names=names, tensor=tensor: [pages.write(name, [tensor]) for name in names])
        read = seconds(lambda names=names, tensor=tensor: [pages.read(name, [tensor]) for name in names])
        found.append((written + read) / 2 / count)
    return found[0], found[1]


def main() -> None:
    """Print a line for each model and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,preresnet20")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--budgets", default="0.5,0.4,0.3")
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow", type=float, default=inf, help="bytes a second that files move at most")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'model':<12}{'of':>5}{'peak':>6}{'GFLOP/s':>8}{'MB/s':>7}{'ms':>6}{'files':>6}{'predicted':>10}{'measured':>9} ratio"
    )
    for name in asked.models.split(","):
        for fraction in map(float, asked.budgets.split(",")):
            with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
                for each in lines(name, asked.batch, fraction, Path(folder), asked.repeats, asked.slow):
                    print(each, flush=True)


def lines(name: str, batch: int, fraction: float, folder: Path, repeats: int, slow: float = inf) -> list[str]:
    """Return the figures of a model and a budget: of the step that fits, and of the same without reading ahead."""
    shape, classes = usual_input(name)
    blueprint = build_blueprint(name, num_classes=classes, input_shape=shape, batch_norm="running")
    settings = Settings.from_run_config({"model": name, "training.batch-size": batch, "memory.fit": "page"})
    costs, plain = cost_model_for(settings, blueprint), replace(whole_model(blueprint), pageable=True)
    part = costs.fit_part(plain, int(fraction * costs.bytes(plain)))
    parts = [part, replace(part, ahead=False)] if part.ahead else [part]
    steps = [paged_step(costs, each, SlowFiles(folder / f"pages-{each.ahead}", slow)) for each in parts]
    probe(folder, slow)  # which writes the files that are written again below
    smalls, larges, computing = list[float](), list[float](), list[float]()
    measured: list[list[float]] = [[] for _ in parts]
    for _ in range(repeats):
        small, large = probe(folder, slow)
        smalls.append(small)
        larges.append(large)
        computing.append(step_seconds(costs, plain))
        for step, taken in zip(steps, measured, strict=True):
            taken.append(seconds(step))
    latency = min(smalls)
    speed = Speed(costs.trace(plain).flops / min(computing), 4 * (LARGE - SMALL) / (min(larges) - latency), latency)
    return [line(costs, plain, each, speed, fraction, min(taken)) for each, taken in zip(parts, measured, strict=True)]


def line(costs: CostModel, plain: Part, part: Part, speed: Speed, fraction: float, measured: float) -> str:
    """Return the figures of a step."""
    cost, predicted = costs.trace(part), seconds_of(costs, part, speed)
    return (
        f"{part.blueprint.name:<12}{fraction:>5}{cost.peak_bytes / costs.bytes(plain):>6.2f}{speed.flops / 1e9:>8.1f}"
        f"{speed.disk / 1e6:>7.0f}{speed.latency * 1e3:>6.2f}{cost.accesses:>6}{predicted:>10.3f}{measured:>9.3f}"
        f"{predicted / measured:>6.2f}  {part.step}"
    )


def paged_step(costs: CostModel, part: Part, pages: PageFiles) -> Callable[[], object]:
    """Return a paged step, whose pages have been written."""
    load = load_for_device(part.blueprint, lambda unit, module: None if pages.holds(unit) else fill(module))
    config = with_step(costs.training_config, part)
    cascade = PagedCascade(part.blueprint, part.atoms, part.head, load, config, pages)
    x = fake_batch(part.blueprint, part.atoms[0], config.batch_size)
    x = x.normal_() if x.is_floating_point() else x.zero_()
    y = torch.zeros(len(x), dtype=torch.int64)
    cascade.step(x, y)
    return lambda: cascade.step(x, y)


def fill(module: torch.nn.Module) -> None:
    """Give a unit its first weights, as a client does; later ones are in pages. Paging does not depend on them."""
    for value in module.state_dict().values():
        value.fill_(0.01)


if __name__ == "__main__":
    main()
