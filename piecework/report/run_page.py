"""One HTML page per run: tables and figures from the round records and the evaluation of the trained model."""

from collections.abc import Sequence
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path

from piecework.client_app.disk import write_atomically
from piecework.device_profiles.profile import format_bytes, format_percent
from piecework.device_profiles.units import format_seconds
from piecework.planning.coverage import consecutive
from piecework.report import display
from piecework.report.compare import fleet_name
from piecework.report.display import Record
from piecework.report.draw_panels import section
from piecework.report.first_sentence import first_sentence
from piecework.report.page import (
    Section,
    bars,
    page,
    sections_html,
    table,
)
from piecework.report.privacy_view import privacy_panels, privacy_rows
from piecework.report.read_records import (
    MODEL,
    read_coverage,
    read_final,
    read_models,
    read_rounds,
    read_size,
    with_details,
)
from piecework.report.run_figures import (
    bytes_figure,
    device_figure,
    disk_figure,
    draw_curves,
    failure_figure,
    memory_figure,
    rate_figure,
)
from piecework.report.under_attack import final_section, is_adversarial, robust_curves
from piecework.report.who_trained import who_trained
from piecework.server_app.failures import excluded_classes, failures
from piecework.server_app.records import RunDir
from piecework.server_app.summary import disk_use, peak_over_budget, trained_parts
from piecework.strategies.panels import panels_of

LISTED = 100  # rounds of a table


def write_report(run_dir: RunDir, *, plotly: bool = True) -> Path:
    """Write `<run>/report.html`, without interactive figures and their 5 MB if not `plotly`.

    Raises CheckpointError if there is no run, ReportError if plotly is wanted and missing.
    """
    path = run_dir.path / "report.html"
    write_atomically(path, report_html(run_dir, plotly=plotly).encode())
    return path


def report_html(run_dir: RunDir, above: str = "", *, plotly: bool = True) -> str:
    """Return the page about a run, with the HTML `above` before its heading. Raises CheckpointError, ReportError."""
    with with_details(run_dir):
        content = _content(run_dir, plotly)
    return page(f"{run_dir.path.name}: Piecework", f"{above}{content}")


def _content(run_dir: RunDir, plotly: bool) -> str:
    """Return the HTML of a run's tables and figures."""
    settings, rounds, final = run_dir.settings(), read_rounds(run_dir), read_final(run_dir)
    status, reason, seconds = display.how_it_ended(run_dir, rounds)
    found = sections(run_dir, settings, rounds) or [Section("Rounds", "No round was finished.")]
    parts = [
        f'<h1>{escape(run_dir.path.name)} <small class="{escape(status)}">{escape(status)}</small></h1>',
        f'<p class="says">{escape(first_sentence(settings, rounds, final, status))}</p>',
        f"<pre>{escape(reason)}</pre>" if reason else "",
        *(f"<p><strong>{escape(text)}</strong></p>" for text in excluded_classes(rounds).values()),
        table(overview(settings, rounds, final, read_models(run_dir), read_size(run_dir), seconds)),
        sections_html(found, plotly=plotly),
        "<h2>Settings</h2><details><summary>all settings of the run</summary>",
        table((key, str(value)) for key, value in settings.items()),
        "</details>",
    ]
    return "\n".join(parts)


def overview(
    settings: Record, rounds: Sequence[Record], final: Record | None, models: Record, size: int | None, seconds: float
) -> list[tuple[str, str]]:
    """Return the run in a few rows. `size` is the number of parameters of the trained model, if there is one."""
    evaluated, total = display.accuracies(rounds, final), display.totals(rounds)
    peak = format_percent(peak_over_budget(rounds)) if display.is_enforced(rounds) else "not enforced"
    trained = "" if size is None else f"; trained: {size:,} parameters"
    setting = {key: str(settings.get(key, "-")) for key in ("strategy", "model", "dataset", "num-rounds")}
    clients, a_round = settings.get("clients") or "all", settings.get("clients-per-round") or "all"
    return [
        ("Strategy", setting["strategy"]),
        ("Model", f"{setting['model']}, width {settings.get('architecture.width', 1.0)}{trained}"),
        ("Data set", setting["dataset"]),
        ("Fleet", fleet_name(str(settings.get("fleet", "-")))),
        ("Clients", f"{clients}, {a_round} a round"),
        ("Rounds", f"{len(rounds)} of {setting['num-rounds']}"),
        (
            "Accuracy",
            f"{'trained model' if final else 'last'} {format_percent(evaluated[-1])}, {display.best_text(rounds, final)}"
            if evaluated
            else "-",
        ),
        *((name[0].upper() + name[1:], value) for name, value in display.under_attack_rows(final)),
        *((name[0].upper() + name[1:], value) for name, value in display.device_model_rows(models)),
        *((name[0].upper() + name[1:], value) for name, value in display.batch_norm_rows(rounds)),
        *([("Learning rate", plan)] if (plan := rate_plan(rounds)) else []),
        ("Requests", f"{total['asked']} clients asked, {total['answered']} answered, {total['failed']} failed"),
        *((name[0].upper() + name[1:], value) for name, value in display.late_rows(rounds)),
        *((name[0].upper() + name[1:], value) for name, value in privacy_rows(rounds)),
        ("Bytes down / up", f"{format_bytes(total['bytes_down'])} / {format_bytes(total['bytes_up'])}"),
        ("Bytes for evaluation", format_bytes(total["bytes_evaluation"])),
        *([("Bytes before stages", format_bytes(query))] if (query := query_bytes(rounds)) else []),
        *((name[0].upper() + name[1:], value) for name, value in display.disk_rows(rounds)),
        ("Largest peak / budget", peak),
        ("Time", format_seconds(seconds)),
        ("Simulated time", display.simulated_time(rounds)),
    ]


def sections(run_dir: RunDir, settings: Record, rounds: Sequence[Record]) -> list[Section]:
    """Return the sections of a run; none if it has no round."""
    if not rounds:
        return []
    final, robust = read_final(run_dir), is_adversarial(rounds)
    found = [final_section(final, settings, run_dir.path / MODEL)] if final and display.under_attack(final) else []
    first = len(found)
    if robust:
        found += robust_curves(rounds, settings)
    else:
        where = "the clients' own parts of the test data" if rounds[-1].get("personal") else "the central test data"
        told = any(r["train_loss"] is not None for r in rounds)  # not in a private run
        caption = f"On {where}{'; training loss: mean of the clients' if told else ''}."
        found.append(Section("Accuracy and loss", caption, partial(draw_curves, rounds)))
    panels = [*privacy_panels(rounds), *panels_of(str(settings["strategy"]), rounds, settings)]
    found += [section(panel, rounds) for panel in panels]
    if any(r["accuracy_by_device"] for r in rounds) or not robust:  # adversarial training validates after averaging
        found.append(device_section(rounds))
    if picture := who_trained(rounds):
        found.insert(first, picture)
    if parts := trained_parts(rounds):
        found.append(trained_section(parts, read_coverage(run_dir)))
    found += [memory_section(rounds), bytes_section(rounds), *disk_section(rounds), failure_section(rounds)]
    return [*found, time_section(rounds), *rate_section(rounds), rounds_section(rounds)]


def rounds_section(rounds: Sequence[Record]) -> Section:
    """Return a table of the rounds, closed at first: at most LISTED of them, evenly chosen, with the last."""
    step = -(-len(rounds) // LISTED)
    chosen = rounds[(len(rounds) - 1) % step :: step]
    rows = [
        (
            f"{r['round']}{' ' + r['stage'] if r['stage'] else ''}",
            format_percent(r["accuracy"]),
            "-" if r["loss"] is None else f"{r['loss']:.3f}",
            "-" if r["train_loss"] is None else f"{r['train_loss']:.3f}",
            f"{r['answered']} of {r['asked']}",
            format_seconds(r["seconds"]),
        )
        for r in chosen
    ]
    names = ("round", "accuracy", "test loss", "training loss", "clients that answered", "time")
    which = "every round" if step == 1 else f"one of every {step} rounds"
    below = f"<details><summary>{which} in a table</summary>{table(rows, names)}</details>"
    return Section("Rounds", "The figures behind the curves.", below=below)


def device_section(rounds: Sequence[Record]) -> Section:
    """Return the section of validation before aggregation."""
    by_device = any(r["accuracy_by_device"] for r in rounds)
    caption = (
        "After local training, before averaging, on the clients' own validation data; over all validation examples of the "
        "clients that a class had in the round."
        if by_device
        else "No client reported a validation accuracy."
    )
    figure = partial(device_figure, rounds) if by_device else None
    return Section("Validation accuracy by device class", caption, figure)


def memory_section(rounds: Sequence[Record]) -> Section:
    """Return the section of every client's budget and peaks."""
    if not any(r["clients"] for r in rounds):  # no coin of a private round fell so, or no client had the resources
        return Section("Training memory by client", "No client was asked in any round.")
    caption = "Each client in the round in which its measured peak came closest to its budget"
    if any(c.get("evaluation_peak") for r in rounds for c in r["clients"]):
        caption += "; in the table, measured is the larger of the peaks in training and in evaluation"
    caption += "."
    if not display.is_enforced(rounds):
        caption += " This run's memory model decides, but its budgets are not enforced."
    below = f'<div class="memory">{table(display.memory_rows(rounds), display.MEMORY_COLUMNS)}</div>'
    if steps := display.step_rows(rounds):
        below += f"<p>How steps fit these budgets (memory.fit):</p>{table(steps, display.STEP_COLUMNS)}"
    return Section("Training memory by client", caption, partial(memory_figure, rounds), below)


def bytes_section(rounds: Sequence[Record]) -> Section:
    """Return the section of message bytes."""
    caption = "Training messages of all clients; evaluation messages apart"
    query = ", and those before a stage, by which all clients measure what it starts from"
    caption += f"{query if query_bytes(rounds) else ''}."
    return Section("Bytes per round", caption, partial(bytes_figure, rounds))


def disk_section(rounds: Sequence[Record]) -> list[Section]:
    """Return the section of what paged steps read and wrote; none if no client paged."""
    uses = [disk_use(record["clients"]) or {} for record in rounds]
    if not any(uses):
        return []
    caption = "What the steps of all clients that page read from their disks and wrote to them; writing wears flash."
    return [Section("Bytes on disks per round", caption, partial(disk_figure, rounds, uses))]


def query_bytes(rounds: Sequence[Record]) -> int:
    """Sum the messages that queried clients before a round; 0 in older records."""
    return sum(r.get("bytes_query", 0) for r in rounds)


def failure_section(rounds: Sequence[Record]) -> Section:
    """Return the section of clients that did not answer, with reasons."""
    if not any(c["status"] != "ok" for r in rounds for c in r["clients"]):
        return Section("Failures", "No client failed.")
    caption = "Clients that were asked and whose answer did not enter the model."
    by_device = table(
        (
            (row["device"], f"{row['failed']} of {row['asked']}", f"{r['status']} {r['count']}: {r['reason']}")
            for row in failures(rounds)
            for r in row["reasons"]
        ),
        ("device", "failed", "reason"),
    )
    below = by_device + table(display.reasons(rounds), ("status", "count", "reason (the first of its kind)"))
    return Section("Failures", caption, partial(failure_figure, rounds), below)


def rate_section(rounds: Sequence[Record]) -> list[Section]:
    """Return the section of the learning rates of clients; none if the records do not contain them."""
    points = [(r["round"], r["lr"]) for r in rounds if "lr" in r]
    if not points:
        return []
    return [Section("Learning rate", f"{rate_plan(rounds)}.", partial(rate_figure, rounds, points))]


def rate_plan(rounds: Sequence[Record]) -> str:
    """Return the schedules of the rounds with their first and last rates.

    An example is `0.1 in round 1 to 0.0006 in round 20: cosine over 20 rounds`.
    """
    with_rate = [r for r in rounds if "lr" in r]
    parts = []
    for schedule, group in groupby(with_rate, key=lambda r: str(r["lr_schedule"])):
        same = list(group)
        ends = [same[0], same[-1]] if len(same) > 1 else same
        rates = " to ".join(f"{r['lr']:.3g} in round {r['round']}" for r in ends)
        parts.append(f"{rates} ({schedule})")
    return ", then ".join(parts)


def trained_section(parts: Sequence[Record], coverage: Record | None) -> Section:
    """Return which parts of the model were trained by how many clients, untrained ones in bold, and the initial coverage."""
    caption = (
        "Clients whose updates entered the model in any round, and their fraction of all clients' training examples."
    )
    never = [row["part"] for row in parts if not row["rounds"]]
    messages = [f"Never trained in this run: {consecutive(never, [row['part'] for row in parts])}."] if never else []
    messages += [f"At the start: {coverage['says']}."] if coverage and coverage["says"] else []
    bold = "".join(f"<p><strong>{escape(line)}</strong></p>" for line in messages)
    below = bold + table(display.trained_table(parts), display.TRAINED_COLUMNS)
    return Section("What was trained", caption, below=below)


def time_section(rounds: Sequence[Record]) -> Section:
    """Return the section of simulated times."""
    heading, simulated = "Simulated seconds per round", [r.get("simulated_seconds", 0.0) for r in rounds]
    if not any(simulated):
        return Section(heading, "No simulated times were recorded.")
    caption = "The slowest client's time by the fleet's speeds and bandwidths, not the time of this emulation."
    return Section(heading, caption, partial(bars, rounds, {"seconds": simulated}, "seconds"))
