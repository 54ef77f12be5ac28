"""Chaos: what becomes of runs that are killed, whose disk is full, whose clock jumps, or whose files are damaged.

    python -m benchmarks.chaos kills --engine local --runs 2 --folder FOLDER     # of each system
    python -m benchmarks.chaos kills --engine ray --kills 2,2 --folder FOLDER    # also superlink, deployment
    python -m benchmarks.chaos disk --folder FOLDER                              # every write; --real 65536: mounted by root
    python -m benchmarks.chaos clocks --trials 1 --folder FOLDER
    python -m benchmarks.chaos damage --trials 2 --folder FOLDER
    python -m benchmarks.chaos table --folder FOLDER

Every trial is drawn from `--seed`. It is noted in FOLDER/chaos.jsonl, so that an interrupted benchmark goes on with the next.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: children are forked

import argparse
from pathlib import Path

from benchmarks.chaos.children import warm_up
from benchmarks.chaos.clocks import jumping_clocks
from benchmarks.chaos.damage import damage_runs
from benchmarks.chaos.disk import full_disks, real_disks
from benchmarks.chaos.kills import kill_runs
from benchmarks.chaos.table import table
from piecework.training.methods import METHODS


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "disk", "clocks", "damage", "table"])
    parser.add_argument("--folder", type=Path, required=True, help="of the runs and of what came of them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="systems, or words in the kinds of files, separated by commas")
    parser.add_argument("--engine", default="local", choices=["local", "ray", "deployment", "superlink"])
    parser.add_argument("--runs", type=int, default=1, help="runs that are killed, of each system")
    parser.add_argument("--trials", type=int, default=2, help="of each kind of file in each way that it is damaged")
    parser.add_argument("--stride", type=int, default=1, help="each N-th write is the one that meets a full disk")
    parser.add_argument("--real", type=int, default=0, help="disks of so many bytes more each time, mounted by root")
    parser.add_argument("--kills", default="2,4", help="the least and the most times that a run is killed")
    options = parser.parse_args()
    warm_up()
    folder, only = options.folder.resolve(), [word for word in options.only.split(",") if word]
    if options.what == "kills":
        least, most = map(int, options.kills.split(","))
        kill_runs(folder, options.engine, only or list(METHODS), options.runs, options.seed, (least, most))
    if options.what == "disk" and options.real:
        real_disks(folder, options.real)
    elif options.what == "disk":
        full_disks(folder, options.stride, only)
    if options.what == "clocks":
        jumping_clocks(folder, options.seed, options.trials, only or list(METHODS))
    if options.what == "damage":
        damage_runs(folder, options.seed, options.trials, only)
    if options.what == "table":
        print(table(folder))


if __name__ == "__main__":
    main()
