"""Summaries of a round and of a run from its records, in figures and in words."""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from piecework.device_profiles.profile import is_limit
from piecework.federation.reports import ClientReport
from piecework.server_app.failures import excluded_classes, failures
from piecework.server_app.records import RunDir
from piecework.server_app.remedies import remedies
from piecework.server_app.run_folder import COMPLETED, STOPPED, all_written
from piecework.strategies.server import MethodServer
from piecework.training.settings import Settings


def accuracy_by_device(reports: list[ClientReport]) -> dict[str, float]:
    """Return by device class the validation accuracy after local training, over all validation examples of its clients."""
    by_device: dict[str, tuple[float, int]] = {}
    for report in reports:
        if report.status == "ok" and report.val_accuracy is not None and report.val_examples:
            correct, count = by_device.get(report.device, (0.0, 0))
            by_device[report.device] = (
                correct + report.val_accuracy * report.val_examples,
                count + report.val_examples,
            )
    return {device: correct / count for device, (correct, count) in sorted(by_device.items())}


def empty_round_message(record: dict[str, Any], server: MethodServer) -> str:
    """Return the error message for a round without a new model, which says why, and what to change."""
    settings, clients, trained = server.settings, record["clients"], record["answered"]
    refused = [c for c in clients if c["status"] == "memory"]
    who = (
        f"only {trained} clients trained (faults.min-clients = {settings.faults.min_clients})"
        if trained
        else "no client trained"
    )
    lines = [f"{who} in round {record['round']}: {len(clients)} asked, {len(refused)} refused for memory"]
    if not clients and not record["excluded"] and not record["busy"]:
        lines[0] += f": no connected client has the resources that {settings.strategy} needs in this round"
    if record["excluded"]:
        lines[0] += f", {len(record['excluded'])} excluded because their processes had died"
    if record["busy"]:
        lines[0] += f", {len(record['busy'])} still at an earlier task"
    # `needed` is 0 if a device ran out of memory, because the missing amount is then unknown.
    if counted := [c for c in refused if c["needed"]]:
        nearest = min(counted, key=lambda c: c["needed"] - c["budget"])
        lines.append(f"closest to fitting: client {nearest['client']} ({nearest['device']}): {nearest['reason']}")
        lines += remedies(server, counted, record["round"])
    others = [c for c in clients if c["status"] not in ("ok", "memory")]
    lines += sorted({f"client {c['client']}: {c['reason']}" for c in others})[:3]
    return "\n".join(lines)


def how_stopped(run_dir: RunDir) -> tuple[str, str]:
    """Return status and reason of a run that a signal ended: completed if that came after all was written."""
    if all_written(run_dir):
        return COMPLETED, ""
    last = run_dir.last_complete_round()
    return STOPPED, f"stopped by a signal, {f'after round {last}' if last else 'before its first round was complete'}"


def stage_warnings(server: MethodServer, settings: Settings, last_round: int) -> list[str]:
    """Return warnings if a run's stages and its rounds did not end together; an empty list if they did."""
    if server.method.progress.finished:
        if not settings.resume_from or last_round >= settings.num_rounds:
            return []
        return [
            f"all stages ended after round {last_round} of num-rounds = {settings.num_rounds}: their lengths were planned when "
            "the run began, and a longer run begins again"
        ]
    stage = server.method.progress.stage
    if not stage or last_round != settings.num_rounds:
        return []
    return [f"num-rounds = {settings.num_rounds} ended before {stage} did: the model is the one trained so far"]


def trained_parts(rounds: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each part of the model how many clients trained it in any round, and their fraction of all examples.

    `rounds` is the number of rounds in which it was trained, by clients or by the server's distillation. Records of older
    versions, which do not list trained parts, are ignored.
    """
    found: dict[str, dict[str, Any]] = {}
    examples: dict[int, int] = {}
    for record in (each for each in rounds if each.get("trained")):
        learned = [c for c in record["clients"] if c["status"] == "ok" and record["aggregated"]]
        learned += record.get("late_used", [])
        examples |= {c["client"]: c["examples"] for c in learned}
        for row in record["trained"]:
            part = found.setdefault(row["part"], {"part": row["part"], "clients": set(), "fraction": 0.0, "rounds": 0})
            own = {c["client"] for c in learned if row["part"] in c["trained"]}
            part["clients"] |= own
            part["rounds"] += bool(own) or row["distilled"]
            part["fraction"] = sum(examples[c] for c in part["clients"]) / record["examples"]
    return [part | {"clients": len(part["clients"])} for part in found.values()]


def best_round(rounds: Iterable[dict[str, Any]], final: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Return `accuracy`, `adversarial_accuracy` and `round` of the first evaluation with the highest accuracy, or None.

    `final` is the evaluation of the trained model if it was evaluated separately; if that is the best, `round` is None.
    """
    keys = ("round", "accuracy", "adversarial_accuracy")
    evaluated = [{key: each.get(key) for key in keys} for each in rounds if each["accuracy"] is not None]
    if final:
        evaluated.append({key: final.get(key) for key in keys} | {"round": None})
    return max(evaluated, key=itemgetter("accuracy"), default=None)


def worst_and_mean(models: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the `worst` and the `mean` accuracy of devices' models, the mean over clients; an empty one without models."""
    if not models:
        return {}
    total = sum(each["clients"] for each in models.values())
    mean = sum(each["accuracy"] * each["clients"] for each in models.values()) / total
    return {"worst": min(each["accuracy"] for each in models.values()), "mean": mean}


def peak_over_budget(rounds: Sequence[dict[str, Any]]) -> float | None:
    """Return the largest measured peak as a fraction of its budget: of a client that trained, or of any that evaluated.

    Evaluation includes queries between rounds and measuring batch norms. The result is None if there was no peak, nothing was
    enforced, or all budgets are unlimited.
    """
    if not all(record["enforced"] for record in rounds):
        return None
    limited = [c for record in rounds for c in record["clients"] if is_limit(c["budget"])]
    found = [c["measured_peak"] / c["budget"] for c in limited if c["status"] == "ok"]
    found += [peak / c["budget"] for c in limited if (peak := c.get("evaluation_peak", 0))]
    for record in rounds:  # records of older versions have no such keys
        answers = (record.get(kind) or {} for kind in ("evaluation", "query", "statistics"))
        found += [each["peak_over_budget"] for each in answers if each.get("peak_over_budget")]
    return max(found, default=None)


def describe_unpredicted(record: Mapping[str, Any]) -> str:
    """Return a warning if a client took more memory than was predicted, which budgets rest on, else an empty text."""
    for client in record["clients"]:
        if client["status"] == "ok" and 0 < client["predicted_peak"] < client["measured_peak"]:
            return (
                f"round {record['round']}: client {client['client']} took {client['measured_peak']:,} bytes, and "
                f"{client['predicted_peak']:,} were predicted: the cost of its step lacks something (in your own strategy, "
                "plain_part of its cut_class)"
            )
    return ""


def late_answers(rounds: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return how many answers `arrived` after their round was closed, and how many of them were `used` and `dropped`.

    What was neither could not enter a model: an error, an evaluation, or any answer without `faults.accept-late`.
    """
    records = list(rounds)  # those of older versions lack some of these lists
    keys = {"arrived": "late_replies", "used": "late_used", "dropped": "late_dropped"}
    return {name: sum(len(record.get(key, [])) for record in records) for name, key in keys.items()}


def disk_use(clients: Iterable[Mapping[str, Any]]) -> dict[str, int] | None:
    """Return the bytes that paged steps of a round's clients read and wrote, and the most by one; None if none paged.

    What is written wears flash. Clients are as the records have them; those of older versions page nothing.
    """
    moved = [(client.get("disk_read", 0), client.get("disk_written", 0)) for client in clients]
    if not any(map(any, moved)):
        return None
    read, written = zip(*moved, strict=True)
    return {"read": sum(read), "written": sum(written), "most_read": max(read), "most_written": max(written)}


def disk_use_of_rounds(rounds: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return the mean bytes that paged steps read and wrote a round, and the most by one client; None if none paged."""
    records = list(rounds)
    found = [use for record in records if (use := disk_use(record["clients"])) is not None]
    if not found:
        return None
    means = {key: sum(use[key] for use in found) / len(records) for key in ("read", "written")}
    return means | {key: max(use[key] for use in found) for key in ("most_read", "most_written")}


def summarise(run_dir: RunDir, status: str, reason: str, seconds: float) -> dict[str, Any]:
    """Return the content of `summary.json` from the round records; `seconds` is the duration of all processes of the run."""
    rounds = run_dir.rounds()
    evaluated = [record["accuracy"] for record in rounds if record["accuracy"] is not None]
    final = run_dir.final() or {}
    best = best_round(rounds, final) or {}
    robust = (
        {
            "adversarial_accuracy": final["adversarial_accuracy"],
            "autoattack_accuracy": final.get("autoattack", {}).get("accuracy"),
        }
        if final
        else {}
    )
    return {
        "run_dir": str(run_dir.path),
        "status": status,
        "reason": reason,
        "rounds": len(rounds),
        "last_complete_round": run_dir.last_complete_round(),
        "accuracy": final.get("accuracy", evaluated[-1] if evaluated else None),
        **robust,
        "models": run_dir.models(),
        "best_accuracy": best.get("accuracy"),
        "best_round": best.get("round"),
        "clients_asked": sum(record["asked"] for record in rounds),
        "clients_answered": sum(record["answered"] for record in rounds),
        "clients_failed": sum(record["failed"] for record in rounds),
        "late_answers": late_answers(rounds),
        "failures": failures(rounds),
        "excluded_classes": excluded_classes(rounds),
        "bytes_down": sum(record["bytes_down"] for record in rounds),
        "bytes_up": sum(record["bytes_up"] for record in rounds),
        "disk_a_round": disk_use_of_rounds(rounds),
        "trained": trained_parts(rounds),
        "max_peak_over_budget": peak_over_budget(rounds),
        "seconds": seconds,
        # Records of older versions have no time.
        "simulated_seconds": sum(record.get("simulated_seconds", 0.0) for record in rounds),
    }
