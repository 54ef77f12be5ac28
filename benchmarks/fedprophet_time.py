"""Compare the simulated time of FedProphet and jFAT for the paper's two workloads, balanced and unbalanced: Markdown tables.

    python -m benchmarks.fedprophet_time [--rounds 200] [--seeds 1,2,3]

Nothing is trained (benchmarks/fedprophet_rounds.py defines a round). FLOPs are the authors' unless a table says otherwise: 2 x
the multiply-accumulates of a forward pass, for each of T + 1 passes.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean, median
from typing import Any

from benchmarks.fedprophet_rounds import (
    SETTINGS,
    How,
    Seconds,
    batches,
    client_seconds,
    cut_for,
    draw,
    fedprophet,
    fleet_of,
    jfat,
    whole_model,
)
from benchmarks.tables.shared import table
from piecework.planning.cut import label

LONGEST = 500  # rounds of jFAT, and the maximum of a FedProphet stage
WARM_UP = 100  # clean rounds of a stage in the authors' code


def mean(rounds: Sequence[Seconds]) -> float:
    """Return the mean seconds of a round."""
    return fmean(map(sum, rounds))


def split(rounds: Sequence[Seconds]) -> str:
    """Format the mean seconds of a round, in two parts."""
    return f"{fmean(r[0] for r in rounds):,.1f} + {fmean(r[1] for r in rounds):,.1f}"


def stage_length(total: float, adversarial: float, clean: float, warm_up: int) -> float:
    """Return the rounds per stage, the first `warm_up` of them clean, with which all stages take `total` seconds.

    `adversarial` and `clean` are the seconds of such a round, summed over the stages.
    """
    return total / clean if total < warm_up * clean else warm_up + (total - warm_up * clean) / adversarial


def round_table(seeds: Sequence[int], rounds: int, authors: bool) -> str:
    """Tabulate seconds per round by both counts of FLOPs; the total is of 500 rounds over 7 x 500, all alike."""
    rows = []
    for setting in SETTINGS:
        drawn, row = draw(fleet_of(setting, authors), seeds, rounds), [setting.name]
        for how in (How(), How(true_flops=True)):
            whole, stages = jfat(setting, drawn, how), fedprophet(setting, drawn, how)
            modules = list(chain(*stages))
            ratio, middle = mean(whole) / mean(modules), median(map(sum, whole)) / median(map(sum, modules))
            row += [split(whole), split(modules), f"{ratio:.1f} ({middle:.1f})", f"{ratio / len(stages):.2f}"]
        rows.append(row)
    names = ["jFAT", "FedProphet", "speed-up (of medians)", "in total"]
    return table(["setting", *names, *(f"{name}, true FLOPs" for name in names)], rows)


def stage_table(seeds: Sequence[int], rounds: int) -> str:
    """Tabulate seconds per round by stage, with Differentiated Module Assignment and without."""
    rows = []
    for setting in SETTINGS:
        drawn = draw(fleet_of(setting, True), seeds, rounds)
        modules = [f"{m} {label(stage.parts[0])}" for m, stage in enumerate(cut_for(setting.flags).stages, start=1)]
        found = [map(split, fedprophet(setting, drawn, How(), dma)) for dma in (True, False)]
        rows += [[setting.name, *row] for row in zip(modules, *found, strict=True)]
    return table(["setting", "module", "with DMA", "without"], rows)


def total_table(seeds: Sequence[int], rounds: int, authors: bool) -> str:
    """Tabulate totals, with all rounds adversarial and all batches full, or with the authors' warm-up and loader."""
    rows, warm_up = [], WARM_UP if authors else 0
    hows = How(remainder=authors), How(attack_steps=0, remainder=authors)
    for setting in SETTINGS:
        drawn = draw(fleet_of(setting, True), seeds, rounds)
        of_seeds = [drawn[at : at + rounds] for at in range(0, len(drawn), rounds)]
        hard, soft = ([mean(jfat(setting, some, how)) for some in of_seeds] for how in hows)
        jfats = [(LONGEST - warm_up) * h + warm_up * s for h, s in zip(hard, soft, strict=True)]
        stages = [sum(map(mean, fedprophet(setting, drawn, how))) for how in hows]
        longest, total = (LONGEST - warm_up) * stages[0] + warm_up * stages[1], fmean(jfats)
        row = [setting.name, f"{total:.2e}", f"{min(jfats):.2e} to {max(jfats):.2e}"]
        row += [f"{setting.speedup * setting.with_dma:.2e}", f"{longest:.2e}", f"{total / longest:.2f}"]
        row += [f"{stage_length(seconds, *stages, warm_up):.0f}" for seconds in (setting.with_dma, setting.without)]
        rows.append([*row, f"{total / setting.with_dma:.1f}", f"{setting.speedup}"])
    names = ["jFAT, 500 rounds", "by seed", "jFAT, from the paper", "FedProphet, 7 x 500", "speed-up"]
    ends = ["rounds a stage that give Table 4", "and without DMA", "speed-up then", "paper's"]
    return table(["setting", *names, *ends], rows)


def short_table(seeds: Sequence[int], rounds: int) -> str:
    """Tabulate which clients are short of memory for jFAT, and which decide its round."""
    rows = []
    for setting in SETTINGS:
        fleet, whole = fleet_of(setting, True), whole_model(setting)
        drawn, work = draw(fleet, seeds, rounds), batches(setting, whole, How())
        slowest = [max(states, key=lambda state: sum(client_seconds(state, work))) for states in drawn]
        budgets = [[state.budget_bytes for state in states] for states in (chain(*drawn), slowest)]
        cut = cut_for(setting.flags)
        limits = cut.bytes(cut.item(whole)) - 1, fleet.memory_floor
        rows.append([setting.name, *(f"{fmean(b <= limit for b in some):.0%}" for some in budgets for limit in limits)])
    return table(["setting", "short", "on the floor", "slowest is short", "slowest is on the floor"], rows)


# Other assumptions: about the fleet, about what a client has in a round, about its work.
ASSUMPTIONS: tuple[tuple[str, dict[str, Any], dict[str, Any], How], ...] = (
    ("as above", {}, {}, How()),
    ("memory for the whole model everywhere", {}, {"budget_bytes": 10**12}, How()),
    ("an access takes 0 s instead of 0.17", {}, {"disk_latency": 0.0}, How()),
    ("only training steps swap", {}, {}, How(attack_swaps=False)),
    ("clean training", {}, {}, How(attack_steps=0)),
    ("the mean client's time", {}, {}, How(mean=True)),
    ("idle devices", {"flops_left": (1.0,)}, {}, How()),
    ("performance U(0, 1)", {"flops_left": (), "flops_loss": (0.0, 1.0)}, {}, How()),
    ("no floor of memory", {"memory_floor": 0}, {}, How()),
)


def assumption_table(seeds: Sequence[int], rounds: int) -> str:
    """Tabulate seconds per round of jFAT and of FedProphet and their ratio, with one assumption changed at a time."""
    rows = []
    for text, of_fleet, of_state, how in ASSUMPTIONS:
        row = [text]
        for setting in SETTINGS:
            drawn = draw(replace(fleet_of(setting, True), **of_fleet), seeds, rounds)
            drawn = [[replace(state, **of_state) for state in states] for states in drawn]
            whole, module = mean(jfat(setting, drawn, how)), mean(list(chain(*fedprophet(setting, drawn, how))))
            row.append(f"{whole:,.0f} / {module:,.1f} = {whole / module:.1f}")
        rows.append(row)
    return table(["assumed", *(setting.name for setting in SETTINGS)], rows)


def main() -> None:
    """Print all tables."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--rounds", type=int, default=200, help="rounds per seed")
    parser.add_argument("--seeds", default="1,2,3", help="seeds of fleets and of client selection")
    given = parser.parse_args()
    drawn = [int(seed) for seed in given.seeds.split(",")], given.rounds
    print(f"Seconds of a round, computing + data access. The authors' fleet:\n\n{round_table(*drawn, True)}")
    print(f"\nThe paper's fleet:\n\n{round_table(*drawn, False)}")
    print(f"\nAll that follows is on the authors' fleet. By stage:\n\n{stage_table(*drawn)}")
    print(f"\nFraction of clients, and of rounds, short of memory for jFAT:\n\n{short_table(*drawn)}")
    print(f"\nIn total, seconds, every round adversarial, full batches:\n\n{total_table(*drawn, False)}")
    print(f"\nIn total, seconds, with the authors' warm-up and loader:\n\n{total_table(*drawn, True)}")
    print(f"\nOne assumption changed, seconds of a round, jFAT / FedProphet:\n\n{assumption_table(*drawn)}")


if __name__ == "__main__":
    main()
