"""Measure seconds and memory of `piecework plan`, each in its own process, for every model and system, the slowest first.

    python -m benchmarks.plans [--models resnet34,vit] [--strategies fedavg,fedepth] [--top 10] [-- OPTIONS OF piecework plan]

The fleet is the demo's unless the options name another. The first line is a plan of the smallest model: the cost of starting.
"""

import argparse
import resource
import subprocess
import sys
import time

from piecework.models.zoo import MODELS, is_token_model
from piecework.training.methods import METHODS


def main() -> None:
    """Print a line per plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--strategies", default=",".join(METHODS))
    parser.add_argument("--top", type=int, default=10, help="how many lines")
    parser.add_argument("options", nargs="*", help="passed on to piecework plan")
    asked = parser.parse_args()
    models, strategies = asked.models.split(","), asked.strategies.split(",")
    print(f"{seconds('lenet5', 'fedavg', asked.options):6.1f} s  lenet5, fedavg: importing and one trace")
    found = [(seconds(m, s, asked.options), m, s) for m in models for s in strategies]
    for took, model, strategy in sorted(found, reverse=True)[: asked.top]:
        print(f"{took:6.1f} s  {model}, {strategy}")
    print(
        f"{len(found)} plans; largest resident set {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MiB"
    )


def seconds(model: str, strategy: str, options: list[str]) -> float:
    """Return the seconds of one plan process; a system that refuses the model counts too."""
    command = [
        sys.executable,
        "-m",
        "piecework.cli",
        "plan",
        "--json",
        "--model",
        model,
        "--strategy",
        strategy,
        *options,
    ]
    if is_token_model(model):
        command += ["--attack-steps", "0"]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2):
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
