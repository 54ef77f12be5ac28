"""What the pages show, as JSON values: texts that are ready to be shown, and numbers only for bars."""

import time
from typing import Any
from urllib.parse import quote

from piecework.device_profiles.profile import format_bytes, format_percent, is_limit
from piecework.device_profiles.units import format_seconds
from piecework.report.compare import fleet_name, short
from piecework.report.display import largest_peak, under_attack_rows
from piecework.serve.fold import Client
from piecework.serve.now import read_now, show_now
from piecework.serve.reading import ServedRun

Record = dict[str, Any]
LONGEST = 300  # characters of a reason in a table


def address(kind: str, name: str) -> str:
    """Return the path of a page about a run."""
    return f"/{kind}/{quote(name)}"


def row(run: ServedRun) -> Record:
    """Return a run's row of the list."""
    return {
        "name": run.found.name,
        "page": address("run", run.found.name),
        "report": address("report", run.found.name),
        "state": run.state,
        "strategy": short(setting(run, "strategy")),
        "dataset": short(setting(run, "dataset")),
        "rounds": rounds_text(run),
        "accuracy": format_percent(accuracy(run)),
        "left": left_text(run),
        "why": why(run).partition("\n")[0][:LONGEST],
    }


def details(run: ServedRun) -> Record:
    """Return what the page of a run shows, but for its figures."""
    running = run.state == "running"
    now = show_now(read_now(run.found.path), len(run.fold.rounds), run.begun, time.time()) if running else None
    planned = run.settings.get("num-rounds")
    return {
        "name": run.found.name,
        "state": run.state,
        "says": says(run),
        "why": why(run),
        "now": now,
        "rounds": {"done": len(run.fold.rounds), "of": planned if isinstance(planned, int) else 0},
        "facts": facts(run),
        "clients": clients(run),
        "devices": [
            [device, f"{failed} of {asked}"] for device, (asked, failed) in sorted(run.fold.devices.items()) if failed
        ],
        "failures": [
            [failure.status, str(failure.count), failure.example[:LONGEST]]
            for failure in sorted(run.fold.failures.values(), key=lambda each: -each.count)
        ],
        "version": run.version,
    }


def setting(run: ServedRun, key: str) -> str:
    """Return a setting as text."""
    return str(run.settings.get(key, "-"))


def rounds_text(run: ServedRun) -> str:
    """Return how many rounds are done."""
    done, planned = len(run.fold.rounds), run.settings.get("num-rounds")
    return f"{done} of {planned}" if isinstance(planned, int) else str(done or "-")


def accuracy(run: ServedRun) -> float | None:
    """Return the accuracy of the trained model, or of the newest round that was evaluated."""
    return run.final["accuracy"] if run.final else run.fold.last_accuracy


def left_text(run: ServedRun) -> str:
    """Return how long a running run will still take, by its last rounds."""
    planned, seconds = run.settings.get("num-rounds"), run.fold.round_seconds
    if run.state != "running" or seconds is None or not isinstance(planned, int):
        return "-"
    this_round = min(seconds, max(0.0, time.time() - run.rounds.seen[1] / 1e9))
    left = seconds * (planned - len(run.fold.rounds)) - this_round
    return format_seconds(left) if left > 0 else "-"


def says(run: ServedRun) -> str:
    """Return where a run stands, in a sentence that changes only with a round or the state."""
    found = format_percent(accuracy(run))
    done = rounds_text(run)
    return ("no round done" if done == "-" else f"{done} rounds done") + ("" if found == "-" else f", accuracy {found}")


def why(run: ServedRun) -> str:
    """Return why a run ended or cannot be shown; empty if there is nothing to say."""
    if run.damage:
        return run.damage.replace(f"{run.found.path}/", "")
    if run.state == "interrupted":
        return "Its process ended without a word: it was killed, or the machine went down. It can be resumed."
    return str((run.summary or {}).get("reason", "")) if run.state != "running" else ""


def facts(run: ServedRun) -> list[tuple[str, str]]:
    """Return the run in a few rows."""
    fold = run.fold
    spent = max(float(sum(r["seconds"] for r in fold.rounds)), (run.summary or {}).get("seconds", 0.0))
    simulated = sum(r.get("simulated_seconds", 0.0) for r in fold.rounds)
    asked, failed = (sum(r[key] for r in fold.rounds) for key in ("asked", "failed"))
    last = fold.rounds[-1] if fold.rounds else {}
    attacked = last.get("adversarial_accuracy")
    return [
        ("Strategy", setting(run, "strategy")),
        ("Model", setting(run, "model")),
        ("Data set", setting(run, "dataset")),
        ("Fleet", fleet_name(setting(run, "fleet"))),
        *([("Stage", str(last["stage"]))] if last.get("stage") else []),
        ("Accuracy", format_percent(accuracy(run))),
        *([("Accuracy under attack", format_percent(attacked))] if attacked is not None else []),
        *((name[0].upper() + name[1:], value) for name, value in under_attack_rows(run.final)),
        ("Requests", f"{asked} clients asked, {failed} failed"),
        ("Time", format_seconds(spent)),
        *([("Time left", left)] if (left := left_text(run)) != "-" else []),
        *([("Simulated time", format_seconds(simulated))] if simulated else []),
        *([("Written by", run.writer)] if run.writer else []),
    ]


def clients(run: ServedRun) -> list[Record]:
    """Return a row for each client, by device and number."""
    enforced = all(record["enforced"] for record in run.fold.rounds)
    ordered = sorted(run.fold.clients.values(), key=lambda each: (each.closest["device"], each.closest["client"]))
    return [client_row(each, enforced=enforced) for each in ordered]


def client_row(client: Client, *, enforced: bool) -> Record:
    """Return a client's budget and measured peak in the round in which it came closest to its budget, and its last answer.

    `share` is that peak as a fraction of the budget; None without a budget that limits it.
    """
    closest, last = client.closest, client.last
    peak, limited = largest_peak(closest), is_limit(closest["budget"])
    share = peak / closest["budget"] if limited and peak else None
    ended = "trained" if last["status"] == "ok" else f"{last['status']}: {last['reason'][:LONGEST]}"
    return {
        "client": str(closest["client"]),
        "device": closest["device"],
        "budget": format_bytes(closest["budget"]) if closest["budget"] else "-",
        "peak": format_bytes(peak) if peak else "-",
        "share": share,
        "of": "-" if share is None else format_percent(share, 1) + ("" if enforced else " (not enforced)"),
        "ok": last["status"] == "ok",
        "last": f"round {client.round}: {ended}",
        "failed": f"{client.failed} of {client.asked}",
    }
