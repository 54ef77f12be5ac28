"""Present a plan: tables, and a picture of memory per piece against the fleet's budgets."""

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.device_profiles.profile import format_bytes, format_compared
from piecework.device_profiles.units import format_count, format_flops, format_seconds, format_share
from piecework.planning.coverage import coverage_lines, coverage_sentence
from piecework.planning.part import OUTPUT_LAYER_NAME
from piecework.plans.plan_evaluation import evaluation_warning
from piecework.plans.plan_privacy import foresight

SHOWN = 3  # ways of training that are listed for one device


def plan_tables(plan: dict[str, Any]) -> list[str | Text | Table]:
    """Return the tables of pieces and devices, each after a sentence."""
    shape, fleet = "x".join(map(str, plan["input_shape"])), plan["fleet"]
    full, budget = format_compared(plan["full_memory_bytes"], plan["budget_bytes"])
    return [
        f"{plan['strategy']} on {plan['model']}: {plan['parameters']:,} parameters, {shape} to {plan['classes']} classes",
        f"memory.model {plan['memory_model']}, batch {plan['batch_size']}: a step of the whole model takes {full}; "
        + (f"cut for {budget}" if plan["cuts"] else f"{plan['strategy']} does not cut it by a budget"),
        piece_table(plan),
        *([f"the model is one piece, because of {plan['uncut']}"] if plan["uncut"] else []),
        *swapping_warning(plan),
        f"fleet {fleet['name']}: {fleet['clients']} clients, {fleet['clients_per_round']} a round, "
        f"{format_share(fleet['participation'])} can take part",
        device_table(plan),
        *over_sampling(plan["fleet"]),
        *evaluation_text(plan),
        *rates_warning(plan),
        *coverage_text(plan["coverage"]),
        *foresight(plan),
    ]


def swapping_warning(plan: dict[str, Any]) -> list[str]:
    """Return a warning that names the memory which devices with simulated swapping would really need."""
    found = plan["swapping"]
    if found is None:
        return []
    step = "an attacked step" if plan["attack_steps"] else "a step"
    amounts = found["needed_bytes"], plan["full_memory_bytes"], found["poorest_bytes"]
    needed, full, poorest = format_compared(*amounts)
    return [
        f"Swapping is only simulated: {format_share(found['fraction'])} of the clients train what does not fit their "
        f"budgets. Real ones would need up to {needed}; the poorest has {poorest}. The whole model takes {full} for {step}, "
        f"which {format_share(found['whole_fits'])} of the clients have. The times below add swapping as FedProphet models it."
    ]


def over_sampling(fleet: dict[str, Any]) -> list[str]:
    """Return what a round gains if it does not wait for all of the clients that it asks; nothing if it does."""
    enough, more, factor = fleet["clients_per_round"], fleet["over_sample"], fleet["deadline_factor"]
    if not (more or factor):
        return []
    how = []
    if more:
        how.append(f"faults.over-sample = {more}: a round asks {enough + more} clients and ends with {enough} answers")
    if factor:
        how.append(
            f"faults.deadline-factor = {factor:g}: a round awaits each client for {factor:g} times its predicted time"
        )
    ends, all_there = (max(stage[key] for stage in fleet["stages"]) for key in ("round_seconds", "awaited_seconds"))
    late = max(stage["late"] for stage in fleet["stages"])
    return [
        f"{'; '.join(how)}. It takes {format_seconds(ends)}, and {format_share(late)} of the clients that it asks are "
        f"late; if it asked {enough} and waited for all, it would take {format_seconds(all_there)}"
    ]


def evaluation_text(plan: dict[str, Any]) -> list[Text]:
    """Return a bold warning if clients train but have no memory to evaluate."""
    message = evaluation_warning(plan["evaluation"])
    return [Text(message, "bold", no_wrap=True)] if message else []


def rates_warning(plan: dict[str, Any]) -> list[Text]:
    """Return a bold warning if the schedule leaves stages next to no learning rate."""
    message = plan["learning_rates"]["says"]
    return [Text(f"warning: {message}", "bold", no_wrap=True)] if message else []


def coverage_text(found: dict[str, Any]) -> list[str | Text | Table]:
    """Return which clients can train which part, with problems in bold."""
    lines = coverage_lines(found["parts"], found["clients"])
    if len(lines) == 1:
        shown: list[str | Text | Table] = [coverage_sentence(found["parts"], found["clients"])]
    else:
        table = columns("part of the model", "can be trained by", left=2)
        for parts, by in lines:
            table.add_row(parts, by)
        shown = [table]
    return [*shown, *emphasise(found)]


def emphasise(found: dict[str, Any]) -> list[Text]:
    """Return what a coverage means for the trained model: a bold warning, a plain note, or nothing."""
    if not found["says"]:
        return []
    return [Text(f"{found['level']}: {found['says']}", "" if found["level"] == "note" else "bold", no_wrap=True)]


def columns(*names: str, left: int = 1) -> Table:
    """Return a table without lines; the first `left` columns hold words, the others figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(names):
        table.add_column(
            name, justify="left" if number < left else "right", no_wrap=number != left - 1, overflow="fold"
        )
    return table


def piece_table(plan: dict[str, Any]) -> Table:
    """Return a table with a row per piece."""
    several, macs = len(plan["fleet"]["stages"]) > 1, plan["modules"][0]["macs"] is not None
    names = ["stage", "piece"] if several else ["piece"]
    figures = ["parameters", "memory", "forward", "training", *(["MACs"] if macs else []), "bytes sent"]
    table = columns(*names, *figures, left=len(names))
    for row in plan["modules"]:
        cells = [row["stage"], row["name"]] if several else [row["name"]]
        cells += [format_count(row["parameters"]), format_bytes(row["memory_bytes"])]
        cells += [format_flops(row["forward_flops"]), format_flops(row["training_flops"])]
        cells += [format_flops(row["macs"], "MAC")] if macs else []
        down, up = format_bytes(row["bytes_down"]), format_bytes(row["bytes_up"])
        table.add_row(*cells, down if down == up else f"{down} / {up}")
    return table


def device_table(plan: dict[str, Any]) -> Table:
    """Return who can train what: in words for one stage, as percentages for several."""
    fleet = plan["fleet"]
    several = len(fleet["stages"]) > 1
    names = ["device", "clients", "budget", "time a round", "take part, stage by stage" if several else "trains"]
    table = Table(*names, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in plan["devices"]:
        needed = [stage["needed_bytes"] or 0 for stage in row["stages"]]
        low, high, *said_needed = format_compared(*row["budget_bytes"], *needed)
        times = [stage["seconds"] for stage in row["stages"] if stage["seconds"] is not None]
        said = several_words(row["stages"], fleet) if several else stage_words(row["stages"][0], fleet, said_needed[0])
        budget = low if low == high else f"{low} - {high}"
        table.add_row(row["device"], str(row["clients"]), budget, format_seconds(max(times)) if times else "-", said)
    slowest = max(stage["round_seconds"] for stage in fleet["stages"])
    table.add_row("all", str(fleet["clients"]), "", format_seconds(slowest), participation(fleet["stages"]))
    return table


def participation(stages: list[dict[str, Any]]) -> str:
    """Return the fraction of clients and rounds that take part; by stage if stages differ."""
    found = [format_share(stage["participation"]) for stage in stages]
    return found[0] if len(set(found)) == 1 else " ".join(found)


def several_words(stages: list[dict[str, Any]], fleet: dict[str, Any]) -> str:
    """Return who takes part and, if a device trains several pieces or the output layer alone in the first stage, which."""
    first = stages[0]
    shown = len(first["trains"]) > 1 or any(row["what"] == OUTPUT_LAYER_NAME for row in first["trains"])
    more = f"\nin {first['stage']}: {'; '.join(map(words, first['trains'][:SHOWN]))}" if shown else ""
    return participation_text(stages, fleet) + more


def participation_text(stages: list[dict[str, Any]], fleet: dict[str, Any]) -> str:
    """Return who takes part, and the missing memory of the client with the least."""
    missing = max(stage["missing_bytes"] for stage in stages)
    said = participation(stages)
    return (
        said
        if missing <= 0
        else f"{said}; the poorest needs {format_bytes(missing)} more and {singular(fleet['excluded'])}"
    )


def singular(excluded: str) -> str:
    """Return what happens to a client that cannot train."""
    return excluded if excluded.startswith("trains") else f"is {excluded}"


def words(row: dict[str, Any]) -> str:
    """Return what is trained, and which atoms are excluded."""
    said: str = row["what"] if row["fraction"] == 1 else f"{format_share(row['fraction'])} {row['what']}"
    return f"{said} (leaves out {', '.join(row['leaves_out'])})" if row["leaves_out"] else said


def stage_words(stage: dict[str, Any], fleet: dict[str, Any], needed: str) -> str:
    """Return what a device trains, the most common first, then what excluded clients need (`needed`) and are missing."""
    lines = [words(row) for row in stage["trains"][:SHOWN]]
    if len(stage["trains"]) > SHOWN:
        lines.append(f"{format_share(sum(row['fraction'] for row in stage['trains'][SHOWN:]))} otherwise")
    if stage["participation"] < 1:
        swap = f"; by swapping, {format_seconds(stage['swap_seconds'])} a round" if stage["swap_seconds"] else ""
        lines.append(
            f"{format_share(1 - stage['participation'])} {fleet['excluded']}: needs {needed}, "
            f"up to {format_bytes(stage['missing_bytes'])} more than there is{swap}"
        )
    return "\n".join(lines)


def draw(plan: dict[str, Any], path: Path) -> None:
    """Write a picture (.svg, .png or .pdf): memory of each piece, and beside it how many clients have that much.

    Raises ValueError for another kind of file or one that cannot be written, ImportError without the extra `report`.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a picture needs matplotlib: install the extra `report`") from None
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise ValueError(f"picture {path}: the file's name must end in .svg, .png or .pdf")
    if not path.parent.is_dir():
        raise ValueError(f"picture {path}: there is no folder {path.parent}: make it, or name another")
    modules, fleet = plan["modules"], plan["fleet"]
    figure = Figure(figsize=(max(5.0, len(modules)) + 3, 4.5), layout="constrained")
    pieces, clients = figure.subplots(1, 2, sharey=True, width_ratios=(max(4, len(modules)), 2))
    sizes = [row["memory_bytes"] / 1e6 for row in modules]
    bars = pieces.bar(range(len(modules)), sizes, color="#4878a8", width=0.65)
    pieces.bar_label(bars, [format_bytes(row["memory_bytes"]) for row in modules], fontsize=8, padding=2)
    pieces.set_xticks(range(len(modules)), [row["name"].replace(" ", "\n") for row in modules], fontsize=8)
    pieces.set_ylabel("memory of a training step, MB")
    full = plan["full_memory_bytes"] / 1e6
    pieces.axhline(full, color="black", linewidth=1, linestyle="--")
    pieces.text(-0.4, full, f"the whole model, {format_bytes(plan['full_memory_bytes'])}", fontsize=8, va="bottom")
    quantiles = [amount / 1e6 for amount in fleet["budget_quantiles_bytes"]]
    top = 1.15 * max(*sizes, full)
    have, amounts = [100.0], [0.0]  # a step function: as many clients have it, up to the next quantile
    for number, amount in enumerate(quantiles):
        percent = min(100, 105 - 5 * number)
        have += [percent, percent]
        amounts += [amounts[-1], amount]
    clients.plot([*have, 0, 0], [*amounts, amounts[-1], max(top, amounts[-1])], color="#b84a32")
    clients.axhline(full, color="black", linewidth=1, linestyle="--")
    clients.set_xlabel("% of clients that have it", fontsize=9)
    clients.set_xlim(-3, 105)
    clients.grid(alpha=0.3)
    pieces.set_ylim(0, top)
    figure.suptitle(
        f"{plan['strategy']} on {plan['model']}, batch {plan['batch_size']}; fleet {fleet['name']}", fontsize=10
    )
    try:
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters instead of their outlines
            figure.savefig(path)
    except OSError as error:
        raise ValueError(f"picture {path} cannot be written: {error}") from error
