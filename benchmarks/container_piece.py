"""The program of `benchmarks.containers` in each container: a waiting executor, and beside it a client that trains one piece.

    python -m benchmarks.container_piece \\
        '{"settings": {"model": "resnet18"}, "atoms": [0, 1], "steps": 2, "budget": 200000000,
          "micro_batch": 8, "recompute": [[0, 1]]}'

The other keys of a step (models/step.py) may be given as well. With "pages" the whole model is trained in pages, whose files
are in the folder for temporary files, which must be on a disk.

It writes JSON lines: `anonymous` and `kernel` (bytes of the container's control group, each new maximum), `floor` (once the
client has imported what Flower's `flwr-clientapp` and our ClientApp import), and `done` (what the accounting counted) with the
CPU `seconds`, the `wall` ones, the `loss`, and `weights`, a number that tells trained weights apart. Weights and random
examples are read from files, as on a device. Without `atoms` it ends at the floor.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from piecework.client_app.store import Store
    from piecework.models.cascade import Blueprint
    from piecework.models.partition import Piece
    from piecework.training.examples import Examples
    from piecework.training.loop import LocalTrainer
    from piecework.training.settings import Settings
    from piecework.training.sgd import TrainingConfig

CGROUP_V1, CGROUP_V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
SAMPLE_SECONDS = 0.003
START_SECONDS = 300.0
REPORTED = 1_000_000  # bytes by which a maximum must exceed the last reported one
CLASSES, SHAPE = 10, (3, 32, 32)


def figure(text: str, *keys: str) -> int:
    """Sum these lines of a memory.stat, in bytes. Raises ValueError if one is missing."""
    lines = dict(line.split() for line in text.splitlines())
    if missing := [key for key in keys if key not in lines]:
        raise ValueError(f"memory.stat has no {', '.join(missing)}: this kernel's control groups are not known here")
    return sum(int(lines[key]) for key in keys)


def group_memory() -> dict[str, int]:
    """Return anonymous and kernel memory of the container, in bytes, from control groups of version 1 or 2."""
    if (CGROUP_V1 / "memory.stat").is_file():
        kernel = int((CGROUP_V1 / "memory.kmem.usage_in_bytes").read_text(encoding="ascii"))
        return {
            "anonymous": figure((CGROUP_V1 / "memory.stat").read_text(encoding="ascii"), "total_rss"),
            "kernel": kernel,
        }
    text = (CGROUP_V2 / "memory.stat").read_text(encoding="ascii")
    return {"anonymous": figure(text, "anon"), "kernel": figure(text, "kernel_stack", "pagetables", "slab", "sock")}


def say(**figures: float) -> None:
    """Print a JSON line without buffering, because the kernel may end this process, and at once, because two threads print."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def watch() -> None:
    """Report every new maximum of anonymous and of kernel memory."""
    largest = {"anonymous": 0, "kernel": 0}
    while True:
        for key, size in group_memory().items():
            if size > largest[key] + REPORTED:
                largest[key] = size
                say(**{key: size})
        time.sleep(SAMPLE_SECONDS)


def start_executor(log: Path) -> subprocess.Popen[bytes]:
    """Start an executor that imports all it needs and tries to reach a SuperNode that does not exist."""
    program = str(Path(sys.executable).with_name("piecework-executor"))  # beside this Python, which need not be in PATH
    with log.open("wb") as file:
        process = subprocess.Popen(
            [program, "--insecure", "--runtime-api-address", "127.0.0.1:9094"], stdout=file, stderr=file
        )
    deadline = time.monotonic() + START_SECONDS
    while b"retrying" not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"piecework-executor did not start: {log.read_text(encoding='utf-8', errors='replace')}")
        time.sleep(0.1)
    return process


def filled_store(folder: Path, blueprint: "Blueprint", atoms: tuple[int, ...]) -> "Store":
    """A client's store that holds the weights of some atoms and of the head."""
    from piecework.client_app.store import Store
    from piecework.models.cascade import isolate_rng

    store = Store(folder, "benchmark", 0, "train-1")
    for unit in [*(f"atoms.{atom}" for atom in atoms), "head"]:
        with isolate_rng(0):
            store.save(unit, blueprint.build_unit(unit))
    return store


def trainer_of(blueprint: "Blueprint", atoms: "Piece", config: "TrainingConfig", store: "Store") -> "LocalTrainer":
    """Return what trains a piece with its weights in a store, and with a paged step from files beside them."""
    from piecework.client_app.paged import PagedTrainer
    from piecework.training.loop import LocalTrainer, PieceModel, load_for_device
    from piecework.training.paged import PagedCascade
    from piecework.training.pages import PageFiles

    load = load_for_device(blueprint, store.load)
    if config.pages:
        pages = PageFiles(store.task / "pages")
        return PagedTrainer(PagedCascade(blueprint, atoms, "head", load, config, pages), config)
    return LocalTrainer(lambda: [PieceModel(blueprint, atoms, "head", load)], config)


def trained(trainer: "LocalTrainer") -> "Iterator[tuple[str, nn.Module]]":
    """Yield the units with their trained weights, the pages' one after another."""
    from piecework.client_app.paged import PagedTrainer

    if not isinstance(trainer, PagedTrainer):
        yield from trainer.finish()[0].units().items()
        return
    cascade = trainer.cascade
    cascade.streamed.release()
    for unit in [*(f"atoms.{atom}" for segment in cascade.segments for atom in segment), cascade.head]:
        yield unit, cascade.load_unit(unit)


def make_examples(
    settings: "Settings",
    store: "Store",
    folder: Path,
    steps: int,
    shape: tuple[int, ...],
    rng: "np.random.Generator",
    first: bool,
) -> "Examples":
    """Write examples for so many steps to the disk, images for the `first` atom and else features, and return them."""
    import numpy as np

    from piecework.client_app.store import FeatureWriter
    from piecework.federated_data.datasets import ArrayDataset
    from piecework.training.examples import feature_examples, training_examples

    count = steps * settings.training.batch_size
    labels = rng.integers(0, CLASSES, count)
    if first:
        np.save(folder / "images.npy", rng.integers(0, 256, (count, *shape[1:], shape[0]), dtype=np.uint8))
        mapped = np.load(folder / "images.npy", mmap_mode="r")
        mean_std = (0.5,) * shape[0]
        data = ArrayDataset("random", mapped, labels, CLASSES, mean_std, mean_std, mapped[:0], labels[:0])
        return training_examples(data, np.arange(count))
    stored = (*shape[1:], shape[0]) if len(shape) == 3 else shape
    writer = FeatureWriter(store.feature_path("train-0"), count, stored, settings.memory.feature_cache_bytes)
    for row in range(count):
        writer.put(np.array([row]), rng.standard_normal((1, *stored), dtype=np.float32))
    return feature_examples(writer.close(), labels)


def train(task: dict[str, Any], folder: Path) -> None:
    """Write the piece's weights and examples to the disk, then train it as a client does."""
    import numpy as np
    import torch
    from pydantic import TypeAdapter

    from piecework.device_profiles.profile import available_memory
    from piecework.models.step import Step, with_step
    from piecework.training.memory_cap import MemoryCap, keep_heap_tight, return_free_memory
    from piecework.training.settings import Settings
    from piecework.training.setup import blueprint_of_shape, training_config_for

    settings = Settings.from_run_config(task["settings"])
    torch.set_num_threads(settings.training.torch_threads)
    blueprint = blueprint_of_shape(settings, SHAPE, CLASSES)
    atoms, rng = tuple(task["atoms"]), np.random.default_rng(0)
    store = filled_store(folder, blueprint, atoms)
    examples = make_examples(
        settings, store, folder, task["steps"], blueprint.shape_before(atoms[0]), rng, atoms[0] == 0
    )
    return_free_memory()
    keep_heap_tight(task["budget"], available_memory())
    cap = MemoryCap(task["budget"], enforced=False)
    step = TypeAdapter(Step).validate_python(
        {field.name: task[field.name] for field in fields(Step) if field.name in task}
    )
    trainer = trainer_of(blueprint, atoms, with_step(training_config_for(settings, settings.training.lr), step), store)
    started, began = time.process_time(), time.perf_counter()
    trainer.epoch(examples, rng, cap, "train")
    seconds, wall = time.process_time() - started, time.perf_counter() - began
    weights = hashlib.sha256()
    for unit, module in trained(trainer):
        store.save(unit, module)
        for array in module.state_dict().values():
            weights.update(array.numpy().tobytes())
    digest = int.from_bytes(weights.digest()[:6])
    say(done=cap.peak_bytes, seconds=seconds, wall=wall, loss=trainer.total_loss / trainer.seen, weights=digest)


def main() -> None:
    """Do one container's work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=json.loads)
    task = parser.parse_args().task
    threading.Thread(target=watch, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        executor = start_executor(Path(name) / "executor.log")
        try:
            import flwr.supernode.cli.flwr_clientapp  # noqa: F401

            import piecework.client_app.app  # noqa: F401

            now = group_memory()
            say(floor=now["anonymous"], floor_kernel=now["kernel"])
            if task["atoms"]:
                train(task, Path(name))
            say(**group_memory())
        finally:
            executor.kill()
            executor.wait()


if __name__ == "__main__":
    main()
