"""Which device classes failed, how often and why, and which classes never trained, computed from round records alone."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
LONGEST = 120  # maximum number of characters of a reason


def failures(rounds: Sequence[Record]) -> list[Record]:
    """Return a row for each device class that failed, the one with the most failures first.

    A row has `device`, the numbers of requests `asked` and `failed`, and `reasons`, each with its `status`, `count` and a
    `reason` in words.
    """
    asked: dict[str, int] = defaultdict(int)
    failed: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for client in (client for record in rounds for client in record["clients"]):
        asked[client["device"]] += 1
        if client["status"] != "ok":
            failed[client["device"]][client["status"]].append(client)
    rows = [
        {
            "device": device,
            "asked": asked[device],
            "failed": sum(map(len, by_status.values())),
            "reasons": [
                {"status": status, "count": len(clients), "reason": in_words(clients)}
                for status, clients in sorted(by_status.items(), key=lambda item: -len(item[1]))
            ],
        }
        for device, by_status in failed.items()
    ]
    return sorted(rows, key=lambda row: (-row["failed"], row["device"]))


def in_words(clients: Sequence[Record]) -> str:
    """Return why these clients, all of one status, failed. For memory, return the bytes of the one closest to fitting."""
    counted = [client for client in clients if client["needed"]]  # `needed` is 0 if the device itself ran out of memory
    if not counted:
        return str(clients[0]["reason"])[:LONGEST]
    missing = {(c["needed"], c.get("allowed") or c["budget"]) for c in counted}
    needed, allowed = min(missing, key=lambda pair: pair[0] - pair[1])
    return f"needed {needed:,} bytes, allowed {allowed:,}" + (" in the closest case" if len(missing) > 1 else "")


def failure_text(row: Record) -> str:
    """Return a row of `failures` in one line: `pi-zero 14 of 14 (memory: needed 9,014,480 bytes, allowed 9,000,000)`."""
    several = len(row["reasons"]) > 1
    why = [r["status"] + (f" {r['count']}" if several else "") + f": {r['reason']}" for r in row["reasons"]]
    return f"{row['device']} {row['failed']} of {row['asked']} ({'; '.join(why)})"


def excluded_classes(rounds: Sequence[Record]) -> dict[str, str]:
    """Return the device classes of which no client ever trained, each with the reason; empty if there was no round."""
    asked: dict[str, int] = defaultdict(int)
    trained = set()
    for record in rounds:
        for device in record.get("devices", {}):  # records of older versions have no `devices`
            asked[device] += 0
        for client in record["clients"]:
            asked[client["device"]] += 1
            if client["status"] == "ok":
                trained.add(client["device"])
        trained |= {late["device"] for late in record.get("late_used", [])}  # records of older versions have none
    return {
        device: f"no client of {device} ever trained: "
        + (
            "none was asked to"
            if not count
            else "its only request failed"
            if count == 1
            else f"all {count} requests failed"
        )
        for device, count in sorted(asked.items())
        if device not in trained
    }
