"""Golden runs: the exact results of every strategy on the digits, before and after a change that should change nothing.

    python -m benchmarks.golden record FILE [--only fedepth,prism]
    python -m benchmarks.golden check FILE [--only fedepth,prism] [--but bytes_down,simulated_seconds]

A case is a run of three rounds: every strategy with each batch norm that it supports, and under attack if it can be. Two cases
train with two workers, and two are interrupted and resumed. Recorded are the digest of the trained arrays and, from the
records, accuracy and loss of each round, bytes of evaluation, and for each client status, peaks and bytes, FLOPs and simulated
seconds. `check` prints each figure that differs and then exits with 1. A run that ends in an error is recorded by the error's
type, whatever its message, which `record` prints. It exits with 1 if that is a system's plain case, which then protects
nothing: add what the system needs to NEEDED. Digests depend on the machine and on the build of torch, so record on the machine
that checks. Both commands use two processes of one thread each, for about four minutes, or twenty where no part was traced
before.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from piecework.engines.launch import launch
from piecework.server_app.records import RunDir, read_arrays
from piecework.training.methods import METHODS
from piecework.training.settings import Settings

ROUNDS = 3
BATCH_NORMS = ("running", "measured", "static", "batch", "local")
TINY = {
    "clients": 8,
    "clients-per-round": 4,
    "num-rounds": ROUNDS,
    "training.local-epochs": 1,
    "engine": "local",
    "workers": 1,
    "evaluation.every": 1,
    "faults.allow-untrained": True,
}
EVERY_DEVICE = {"fleet": "unlimited"}
# Additional settings of strategies: the demo's fleet has no client for systems that train whole models.
NEEDED: dict[str, dict[str, Any]] = {
    "exclusivefl": EVERY_DEVICE,
    "fedavg": EVERY_DEVICE,
    "feddf": {"model": "cnn3", "feddf.family": "convnet", "data.public-fraction": 0.1, "feddf.server-iterations": 4},
    "fedet": EVERY_DEVICE
    | {
        "model": "resnet18",
        "architecture.width": 0.125,
        "feddf.family": "resnet10",
        "data.public-fraction": 0.1,
        "feddf.server-iterations": 4,
    },
    "fedpm": EVERY_DEVICE,
    "fedprophet": {"fedprophet.stage-rounds": 1},
    "fedprox": EVERY_DEVICE,
    "fedrbn": EVERY_DEVICE,
    "fjord": EVERY_DEVICE,
    "jfat": EVERY_DEVICE,
    "local": EVERY_DEVICE,
    "orthdrop": EVERY_DEVICE,
    "profl": {"profl.stage-rounds": 1},
    "slt": {"num-rounds": 6},  # one for each step
    "spafl": EVERY_DEVICE,
}
PERSONAL = ("local", "spafl")  # their clients evaluate in any case
ATTACK = {
    "training.adversarial": True,
    "attack.steps": 2,
    "evaluation.attack-examples": 40,
    "evaluation.attack-steps": 2,
}
OF_A_ROUND = (
    "accuracy",
    "loss",
    "adversarial_accuracy",
    "train_loss",
    "client_accuracy",
    "bytes_evaluation",
    "simulated_seconds",
)
OF_A_CLIENT = (
    "client",
    "status",
    "predicted_peak",
    "measured_peak",
    "bytes_down",
    "bytes_up",
    "flops",
    "simulated_seconds",
    "train_loss",
    "val_accuracy",
    "evaluation_peak",
)

ENDED, MESSAGE = "ended by", "message"  # a message may change, and is not compared

Found = dict[str, Any]


def cases() -> dict[str, dict[str, Any]]:
    """Return the settings of each case by name: `fedepth`, `fedepth batch`, `fedepth adversarial`, `fedepth resumed`, ..."""
    found = {}
    for strategy in METHODS:
        settings = TINY | {"strategy": strategy} | NEEDED.get(strategy, {})
        if strategy not in PERSONAL:
            settings |= {"evaluation.on-clients-every": 1}
        found[strategy] = settings
        found |= {f"{strategy} {kind}": settings | {"architecture.batch-norm": kind} for kind in BATCH_NORMS}
        found[f"{strategy} adversarial"] = settings | ATTACK
    for strategy in ("fedepth", "prism"):
        found[f"{strategy} two workers"] = found[strategy] | {"workers": 2}
    for strategy in ("fedepth", "depthfl"):
        found[f"{strategy} two epochs"] = found[strategy] | {"training.local-epochs": 2}
        found[f"{strategy} iterations"] = found[strategy] | {"training.local-iterations": 3}
    for strategy in ("fedavg", "depthfl"):
        found[f"{strategy} warm-up"] = found[f"{strategy} adversarial"] | {"attack.warmup": 1}
    for strategy in ("fedprophet", "spafl"):
        found[f"{strategy} resumed"] = found[strategy] | {
            "training.lr-schedule": "constant"
        }  # it does not depend on num-rounds
    return found


def run_case(named: tuple[str, dict[str, Any]]) -> tuple[str, Found]:
    """Run a case in a folder of its own."""
    name, values = named
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return name, figures(run(Path(folder), values, resumed=name.endswith(" resumed")))
        except Exception as error:
            return name, {ENDED: type(error).__name__, MESSAGE: str(error)}


def run(folder: Path, values: dict[str, Any], resumed: bool) -> RunDir:
    """Run these settings; `resumed` interrupts the run after its first round. Raises ValueError if it is refused."""
    run_dir = RunDir(folder / "run")
    settings = Settings.from_run_config(values | {"output-dir": str(folder), "run-name": "run"})
    if resumed:
        launch(settings.with_values({"num-rounds": 1}), run_dir, lambda _: None)
        settings = settings.with_values({"resume-from": str(run_dir.path)})
    launch(settings, run_dir, lambda _: None)
    return run_dir


def figures(run_dir: RunDir) -> Found:
    """Return the results of a run by the name of a figure."""
    found: Found = {"model": digest(run_dir.path / "model.safetensors")}
    for record in run_dir.rounds():
        at = f"round {record['round']}"
        found |= {f"{at}: {key}": record[key] for key in OF_A_ROUND}
        for client in record["clients"]:
            found |= {f"{at}, client {client['client']}: {key}": client[key] for key in OF_A_CLIENT}
    return found


def digest(model: Path) -> str:
    """Return a digest of the names, types, shapes and bytes of a file's arrays, in the order of the names."""
    total = hashlib.sha256()
    for name, array in sorted(read_arrays(model).items()):
        values = array.numpy()
        total.update(f"{name} {values.dtype} {values.shape}".encode() + values.tobytes())
    return total.hexdigest()


def run_all(only: list[str]) -> dict[str, Found]:
    """Run all cases, or those of some strategies."""
    chosen = {name: values for name, values in cases().items() if not only or name.split()[0] in only}
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return dict(pool.map(run_case, chosen.items()))


def differences(expected: dict[str, Found], found: dict[str, Found], but: Collection[str] = ()) -> Iterator[str]:
    """Yield a line per figure that differs from the expected one in the cases that were run, except for kinds in `but`."""
    for name in expected.keys() - found.keys():
        yield f"{name}: was not run"
    for name, values in found.items():
        before = expected.get(name, {})
        for key in dict.fromkeys([*before, *values]):
            was, now = before.get(key), values.get(key)
            if key != MESSAGE and json.dumps(was) != json.dumps(now) and key.rpartition(": ")[2] not in but:
                yield f"{name}: {key}: {was} before, {now} now"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--but", default="", help="kinds of figures that may differ, separated by commas: bytes_down,simulated_seconds"
    )
    parser.add_argument("--only", default="", help="strategies, separated by commas; default: all")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    if unknown := sorted(set(only) - set(METHODS)):
        parser.error(f"--only {options.only}: unknown strategies {', '.join(unknown)}")
    if options.action == "check" and not options.file.is_file():
        parser.error(f"{options.file} is not there: record it first, with the code from before the change")
    found = run_all(only)
    if options.action == "record":
        options.file.write_text(json.dumps(found, indent=1), encoding="utf-8")
        for name, values in found.items():
            if ENDED in values:
                print(f"{name}: {values[ENDED]}: {values[MESSAGE]}")
        print(f"{len(found)} cases in {options.file}")
        if untrained := [name for name in METHODS if ENDED in found.get(name, {})]:
            sys.exit(f"{', '.join(untrained)} did not train, so that nothing is compared: add what it needs to NEEDED")
        return
    expected = json.loads(options.file.read_text(encoding="utf-8"))
    expected = {name: values for name, values in expected.items() if not only or name.split()[0] in only}
    if lines := list(differences(expected, found, options.but.split(","))):
        print("\n".join(lines))
        sys.exit(1)


if __name__ == "__main__":
    main()
