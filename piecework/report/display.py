"""Show a finished run in the terminal: tables and their figures.

All figures come from round records (server_app/rounds.py) and the evaluation of the trained model. The table by device class is
also part of the report.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.device_profiles.profile import format_bytes, format_compared, format_percent, is_limit
from piecework.device_profiles.units import format_seconds, format_share
from piecework.planning.coverage import consecutive
from piecework.report.participation import participation
from piecework.report.privacy_view import privacy_rows
from piecework.report.read_records import read_summary
from piecework.server_app.failures import excluded_classes, failure_text, failures
from piecework.server_app.records import RunDir
from piecework.server_app.round_line import accuracy_name
from piecework.server_app.summary import best_round, disk_use_of_rounds, late_answers, worst_and_mean

Record = dict[str, Any]
BATCH_NORMS = {
    "running": "running statistics, averaged with their layers",
    "measured": "statistics that clients measured after training",
    "static": "statistics that clients measured after training, all clients after the last round",
    "batch": "statistics of each batch: a prediction depends on the other examples",
    "local": "kept by the clients; the server's average is evaluated",
}
NEVER = "never trained"
MAX_REASONS = 20


def summary_table(summary: Record, rounds: Sequence[Record], final: Record | None = None) -> Table:
    """Return a table of how a run ended, short if it could not start. `final` is `RunDir.final()`."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    evaluated = accuracies(rounds, final)
    rows = [
        *((key, str(summary[key])) for key in ("status", "rounds")),
        (accuracy_name(rounds), f"{evaluated[-1]:.2%} ({best_text(rounds, final)})" if evaluated else "-"),
        *under_attack_rows(final),
        *device_model_rows(summary.get("models", {})),
        *batch_norm_rows(rounds, ("batch",)),
        ("clients", ", ".join(f"{key} {summary.get(f'clients_{key}', 0)}" for key in COUNTS)),
        *late_rows(rounds),
        *privacy_rows(rounds),
        *(("failed", failure_text(row)) for row in failures(rounds)),
        *(
            ("left out", f"node {each.get('name') or each['node']}: {each['reason']}")
            for each in unusable_nodes(rounds)
        ),
        *trained_rows(summary.get("trained", [])),
        ("bytes down", format_bytes(summary.get("bytes_down", 0))),
        ("bytes up", format_bytes(summary.get("bytes_up", 0))),
        *disk_rows(rounds),
        ("time", format_seconds(summary["seconds"]) if "seconds" in summary else "-"),
        ("simulated time", simulated_time(rounds)),
    ]
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value, style="bold" if NEVER in value else ""))
    for text in excluded_classes(rounds).values():
        table.add_row(Text("excluded", style="dim"), Text(text, style="bold"))
    return table


def device_model_rows(models: Mapping[str, Record]) -> list[tuple[str, str]]:
    """Return a row with the worst and the mean accuracy of the models that devices deploy, and one for each model."""
    if not models:
        return []
    found, clients = worst_and_mean(models), sum(each["clients"] for each in models.values())
    rows = [(name, f"{format_percent(each['accuracy'])} on {each['clients']} clients") for name, each in models.items()]
    message = f"worst {format_percent(found['worst'])}, mean over {clients} clients {format_percent(found['mean'])}"
    return [("devices' models", message), *rows]


def batch_norm_rows(rounds: Sequence[Record], shown: Iterable[str] = BATCH_NORMS) -> list[tuple[str, str]]:
    """Return a row with the statistics that evaluated the model, if they are among `shown`."""
    norms = rounds[-1].get("batch_norm", "none") if rounds else "none"
    return [("batch norm", BATCH_NORMS[norms])] if norms in BATCH_NORMS and norms in shown else []


def late_rows(rounds: Sequence[Record]) -> list[tuple[str, str]]:
    """Return a row that counts the answers that came after their round; none if there was no such answer."""
    found = late_answers(rounds)
    return [("late answers", ", ".join(f"{name} {n}" for name, n in found.items()))] if any(found.values()) else []


def disk_rows(rounds: Sequence[Record]) -> list[tuple[str, str]]:
    """Return rows with what paged steps read and wrote a round; none if no client paged."""
    if (found := disk_use_of_rounds(rounds)) is None:
        return []
    size = {key: format_bytes(round(value)) for key, value in found.items()}
    return [
        (f"disk {done}", f"{size[done]} a round, by one client at most {size[f'most_{done}']}")
        for done in ("read", "written")
    ]


def trained_rows(parts: Sequence[Record]) -> list[tuple[str, str]]:
    """Return one row about which parts of the model were trained; none if the records do not say."""
    if not parts:
        return []
    names = [row["part"] for row in parts]
    if never := [row["part"] for row in parts if not row["rounds"]]:
        return [("trained", f"{NEVER}: {consecutive(never, names)}")]
    minimum = min(row["clients"] for row in parts)
    fewest = [row for row in parts if row["clients"] == minimum]
    by = f"{minimum} clients with {format_share(fewest[0]['fraction'])} of the data"
    if len(fewest) == len(parts):
        return [("trained", f"every part by {by}")]
    which = consecutive([row["part"] for row in fewest], names)
    return [("trained", f"every part; {which} by the fewest, {by}")]


TRAINED_COLUMNS = ("part of the model", "clients", "fraction of the training data", "rounds")


def trained_table(parts: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return `TRAINED_COLUMNS` as text, a row per part."""
    return [
        (
            row["part"],
            str(row["clients"]),
            format_share(row["fraction"]),
            str(row["rounds"]) if row["rounds"] else NEVER,
        )
        for row in parts
    ]


def best_text(rounds: Sequence[Record], final: Record | None = None) -> str:
    """Return the accuracy of the run's best round, and under attack if that was evaluated; or that nobody trained the model."""
    if not participation(rounds).trained:
        return "of the untrained model"
    best = best_round(rounds, final)
    assert best is not None
    attacked = best["adversarial_accuracy"]
    under = "" if attacked is None else f", {format_percent(attacked)} under attack,"
    when = "at the end" if best["round"] is None else f"in round {best['round']}"
    return f"best {format_percent(best['accuracy'])}{under} {when}"


def unusable_nodes(rounds: Sequence[Record]) -> list[Record]:
    """Return the nodes whose answer could not be used when the last round ended; records of older versions name none."""
    return rounds[-1].get("unusable_nodes", []) if rounds else []


def memory_table(rounds: Sequence[Record]) -> Table:
    """Return a table of budgets, peaks and failures by device class."""
    table = Table(title="training memory by device class", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in MEMORY_COLUMNS:
        table.add_column(name, justify="left" if name == "device" else "right")
    for row in memory_rows(rounds):
        table.add_row(*map(Text, row))
    return table


def step_table(rounds: Sequence[Record]) -> Table:
    """Return a table of how the steps of each device class fit its memory."""
    table = Table(title="steps that fit (memory.fit)", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in STEP_COLUMNS:
        table.add_column(name, justify="right" if name == "tasks" else "left")
    for row in step_rows(rounds):
        table.add_row(*map(Text, row))
    return table


@dataclass
class DeviceClass:
    """The clients with one kind of device in a run. Figures are bytes; peaks are the largest, including evaluation."""

    name: str
    clients: set[int] = field(default_factory=set)
    budgets: set[int] = field(default_factory=set)
    predicted_peak: int = 0
    measured_peak: int = 0
    peak_over_budget: float | None = None
    asked: int = 0
    answered: int = 0


def device_classes(rounds: Iterable[Record]) -> list[DeviceClass]:
    """List device classes by name. A client whose device changes between rounds is in several."""
    classes: dict[str, DeviceClass] = {}
    for record in rounds:
        for client in record["clients"]:
            row = classes.setdefault(client["device"], DeviceClass(client["device"]))
            row.clients.add(client["client"])
            row.budgets.add(client["budget"])
            row.predicted_peak = max(row.predicted_peak, client["predicted_peak"])
            row.measured_peak = max(row.measured_peak, largest_peak(client))
            row.asked += 1
            row.answered += client["status"] == "ok"
            peak = largest_peak(client) if client["status"] == "ok" else client.get("evaluation_peak", 0)
            if is_limit(client["budget"]) and (peak or client["status"] == "ok"):
                row.peak_over_budget = max(row.peak_over_budget or 0.0, peak / client["budget"])
    return [classes[name] for name in sorted(classes)]


COUNTS = ("asked", "answered", "failed")
MEMORY_COLUMNS = ("device", "clients", "budget", "predicted", "measured", "of budget", "asked", "ok", "failed")


def memory_rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return `MEMORY_COLUMNS` as text, a row per device class."""
    enforced, found = is_enforced(rounds), []
    for row in device_classes(rounds):
        peaks = row.predicted_peak, row.measured_peak
        low, high, *shown = format_compared(min(row.budgets), max(row.budgets), *peaks)
        found.append(
            (
                row.name,
                str(len(row.clients)),
                low if low == high else f"{low} to {high}",
                *(text if peak else "-" for text, peak in zip(shown, peaks, strict=True)),
                format_percent(row.peak_over_budget, 1) if enforced else "not enforced",
                str(row.asked),
                str(row.answered),
                str(row.asked - row.answered),
            )
        )
    return found


STEP_COLUMNS = ("device", "step", "FLOPs of plain steps", "tasks")


def step_rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return `STEP_COLUMNS` as text, how the steps of each device class fit; none if all steps were plain."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for client in (client for record in rounds for client in record["clients"] if client["status"] == "ok"):
        found[client["device"], client.get("step", "")].append(client.get("step_flops", 1.0))
    if not any(step for _, step in found):
        return []
    return [
        (device, step or "plain", f"{max(factors):.2f} x", str(len(factors)))
        for (device, step), factors in sorted(found.items())
    ]


def closest_to_budget(rounds: Iterable[Record]) -> list[Record]:
    """Return, by device and client, each client's record of its fullest round (else of its largest need)."""
    closest: dict[int, Record] = {}
    for row in (row for record in rounds for row in record["clients"]):
        old = closest.setdefault(row["client"], row)
        if fullness(row) > fullness(old):
            closest[row["client"]] = row
    return sorted(closest.values(), key=lambda row: (row["device"], row["client"]))


def fullness(row: Record) -> tuple[float, float]:
    """Return fractions of the budget: the measured one, and the needed one after a refusal."""
    budget = row["budget"] or 1
    return largest_peak(row) / budget, row["needed"] / budget


def largest_peak(row: Record) -> int:
    """Return the largest peak of a client's training and, if it evaluated, of its evaluation."""
    return int(max(row["measured_peak"], row.get("evaluation_peak", 0)))


def reasons(rounds: Iterable[Record]) -> list[tuple[str, str, str]]:
    """List why clients failed, the most frequent reason first; reasons that differ only in numbers are merged."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in rounds:
        for client in record["clients"]:
            if client["status"] != "ok":
                kind = (client["status"], re.sub(r"\d[\d.,]*", "#", client["reason"]))
                found[kind].append(f"{client['reason']} (client {client['client']}, round {record['round']})")
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))
    rows = [(status, str(len(texts)), texts[0]) for (status, _), texts in ranked[:MAX_REASONS]]
    rest = sum(len(texts) for _, texts in ranked[MAX_REASONS:])
    return [*rows, ("", str(rest), "other reasons")] if rest else rows


def accuracies(rounds: Iterable[Record], final: Record | None = None) -> list[float]:
    """List the central accuracies of the evaluated rounds, then that of the trained model if it was evaluated separately."""
    found = [record["accuracy"] for record in rounds if record["accuracy"] is not None]
    return [*found, final["accuracy"]] if final else found


@dataclass(frozen=True)
class UnderAttack:
    """The trained model under attack: `accuracy` is the fraction of `images` that is classified correctly."""

    attack: str
    images: int
    accuracy: float


def under_attack(final: Record | None) -> dict[str, UnderAttack]:
    """Return the results under attack by the summary's names."""
    found = {}
    if final and final["adversarial_accuracy"] is not None:
        attack = f"PGD-{final['attack_steps']}"
        found["adversarial_accuracy"] = UnderAttack(attack, final["attacked"], final["adversarial_accuracy"])
    if final and (ensemble := final.get("autoattack")):
        found["autoattack_accuracy"] = UnderAttack("AutoAttack", ensemble["images"], ensemble["accuracy"])
    return found


def under_attack_rows(final: Record | None) -> list[tuple[str, str]]:
    """Return the results under attack as text."""
    found = under_attack(final).values()
    return [(f"under {each.attack}", f"{format_percent(each.accuracy)} of {each.images} images") for each in found]


def totals(rounds: Iterable[Record]) -> dict[str, int]:
    """Sum the figures over the rounds."""
    records = list(rounds)
    return {key: sum(r[key] for r in records) for key in (*COUNTS, "bytes_down", "bytes_up", "bytes_evaluation")}


def simulated_seconds(rounds: Iterable[Record]) -> float | None:
    """Return the seconds that the rounds would have taken on the fleet's devices; None if no round has a figure."""
    found = [record["simulated_seconds"] for record in rounds if "simulated_seconds" in record]
    return sum(found) if found else None


def simulated_time(rounds: Iterable[Record]) -> str:
    """Return the simulated seconds as text."""
    seconds = simulated_seconds(rounds)
    return "-" if seconds is None else format_seconds(seconds)


def is_enforced(rounds: Iterable[Record]) -> bool:
    """Return whether budgets were enforced in every round."""
    return all(record["enforced"] for record in rounds)


def how_it_ended(run_dir: RunDir, rounds: Sequence[Record]) -> tuple[str, str, float]:
    """Return status, reason and seconds of a run. A summary older than the records belongs to an earlier attempt."""
    summary = read_summary(run_dir)
    seconds = float(sum(record["seconds"] for record in rounds))
    if summary is None or summary["rounds"] != len(rounds):
        return "unfinished", "", seconds
    # The summary also counts the start, but that of an older version only the last process of a resumed run.
    return summary["status"], summary["reason"], max(summary["seconds"], seconds)
