"""Devices as a fleet's tables have them."""

from typing import Any

from helpers import SPEEDS


def device(name: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, **SPEEDS} | {key.replace("_", "-"): value for key, value in keys.items()}


A, B = device("a", memory="64MB"), device("b", memory="128MB", weight=3.0)
