"""What a fleet can train of a model, before anything is trained: prices, pieces, times."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from client_app.setup import blueprint_for, client_shares
from device_profiles.clock import simulated_seconds
from device_profiles.fleet import load_fleet, shipped_fleets
from device_profiles.memory import MemoryBudgetExceededError
from device_profiles.profile import DeviceState, format_bytes, measure_device
from federated_data.partition import split
from models.cascade import Cascade, isolated_rng
from server_app.roster import Member, Roster
from server_app.rounds import preflight
from server_app.settings import Settings
from strategies.base import Experiment, PieceStrategy


def make_plan(settings: Settings) -> dict[str, Any]:
    """For the whole model, each atom, and each device class: bytes, FLOPs of a step, pieces, seconds of a round.

    Seconds are simulated: they come from the fleet's speeds and the largest share of a client of the class.
    """
    fleet, strategy_class, data, blueprint = preflight(settings)
    clients = settings.clients or 1
    members = {client: Member(client, client, "", "") for client in range(clients)}
    roster = Roster(fleet, settings.seed, clients, settings.reserve, members)
    reference = blueprint_for(settings.model_copy(update={"model_width": 1.0}), data)
    strategy = strategy_class(Experiment(settings, blueprint, reference, roster, "plan", ""))
    with isolated_rng(0):
        model_bytes = sum(v.numel() * v.element_size() for v in Cascade(blueprint).state_dict().values())
    shares = client_shares(settings, data.labels, clients)
    classes: dict[tuple[str, int], list[int]] = {}
    for client in range(clients):
        state = roster.state(client, 1, strategy.reference_bytes, model_bytes)
        classes.setdefault((state.device, state.budget_bytes), []).append(client)
    devices = []
    for (_, _), own in sorted(classes.items(), key=lambda item: item[0][1]):
        examples = max(len(split(shares[c], settings.validation_share, settings.seed, c)[0]) for c in own)
        state = roster.state(own[0], 1, strategy.reference_bytes, model_bytes)
        devices.append({"clients": len(own), **plan_device(strategy, state, examples, model_bytes)})
    return {
        "strategy": settings.strategy,
        "model": settings.model,
        "dataset": settings.dataset,
        "memory_model": settings.memory_model,
        "batch_size": settings.batch_size,
        "reference_bytes": strategy.reference_bytes,
        "model_bytes": model_bytes,
        "atoms": [
            {"name": atom.name, "shape": list(atom.shape), "bytes": strategy.price((index,))}
            for index, atom in enumerate(blueprint.atoms)
        ],
        "devices": devices,
    }


def plan_device(strategy: PieceStrategy, state: DeviceState, examples: int, model_bytes: int) -> dict[str, Any]:
    """The cut of one device class, or why there is none."""
    row: dict[str, Any] = {"device": state.device, "budget": state.budget_bytes}
    try:
        pieces = strategy.cut(state.budget_bytes)
    except (MemoryBudgetExceededError, ValueError) as error:
        return row | {"fits": False, "reason": str(error), "pieces": [], "peak": None, "seconds": None}
    steps = examples / strategy.settings.batch_size * strategy.settings.local_epochs
    flops = sum(strategy.step_price(piece).flops * steps for piece in pieces)
    return row | {
        "fits": True,
        "reason": "",
        "pieces": [
            {
                "atoms": strategy.describe(piece),
                "bytes": strategy.price(piece),
                "flops": strategy.step_price(piece).flops,
            }
            for piece in pieces
        ],
        "peak": max(strategy.price(piece) for piece in pieces),
        "seconds": simulated_seconds(state, flops, model_bytes, model_bytes),
    }


def plan_tables(plan: dict[str, Any]) -> list[Table]:
    """The plan for people."""
    title = (
        f"{plan['strategy']} on {plan['model']}, {plan['dataset']}, batch {plan['batch_size']}, "
        f"memory-model {plan['memory_model']}: a whole step takes {format_bytes(plan['reference_bytes'])}"
    )
    atoms = Table("atom", "output", "bytes alone", "of a whole step", title=title, title_justify="left")
    for atom in plan["atoms"]:
        share = f"{atom['bytes'] / plan['reference_bytes']:.1%}"
        atoms.add_row(atom["name"], " x ".join(map(str, atom["shape"])), format_bytes(atom["bytes"]), share)
    devices = Table("device", "clients", "budget", "peak", "pieces", "a round")
    for row in plan["devices"]:
        if row["fits"]:
            pieces = " | ".join(piece["atoms"] for piece in row["pieces"])
            peak, seconds = format_bytes(row["peak"]), f"{row['seconds']:.1f} s"
        else:
            pieces, peak, seconds = f"left out: {row['reason']}", "-", "-"
        devices.add_row(row["device"], str(row["clients"]), format_bytes(row["budget"]), peak, pieces, seconds)
    return [atoms, devices]


def fleet_rows(name: str) -> list[dict[str, Any]]:
    """The devices of a fleet, or of every shipped one. Raises FleetError."""
    fleets = [load_fleet(name)] if name else [load_fleet(shipped) for shipped in shipped_fleets()]
    return [
        {"fleet": fleet.name, "assignment": fleet.assignment, **asdict(device)}
        for fleet in fleets
        for device in fleet.devices
    ]


def measured_here() -> list[dict[str, Any]]:
    """The figures of this machine, as a device with `device = auto` finds them."""
    measured = measure_device(Path.cwd())
    return [
        {
            "fleet": "-",
            "assignment": "-",
            "name": "this machine",
            "memory_bytes": measured.memory_available_bytes,
            "memory_ratio": None,
            "flops_per_second": measured.flops_per_second,
            "bandwidth": None,
            "disk_bandwidth": measured.disk_bandwidth,
        }
    ]


def fleet_table(rows: list[dict[str, Any]]) -> Table:
    """Devices for people."""
    table = Table("fleet", "assignment", "device", "memory", "FLOP/s", "network", "disk")
    for row in rows:
        ratio = row["memory_ratio"]
        memory = format_bytes(row["memory_bytes"]) if ratio is None else f"{ratio:.2f} x reference step"
        network = f"{format_bytes(int(row['bandwidth']))}/s" if row["bandwidth"] else "-"
        disk = f"{format_bytes(int(row['disk_bandwidth']))}/s"
        table.add_row(
            row["fleet"], row["assignment"], row["name"], memory, f"{row['flops_per_second']:.2g}", network, disk
        )
    return table
