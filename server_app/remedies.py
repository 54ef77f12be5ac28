"""What to change after every client refused for memory, with what it would cost, the gentlest remedy first."""

from collections.abc import Sequence
from typing import Any

from piecework.device_profiles.profile import format_bytes
from piecework.planning.coverage import Trainer, coverage
from piecework.planning.less_memory import FIT, in_less_memory
from piecework.planning.page_plan import speed_of
from piecework.strategies import find_method
from piecework.strategies.server import MethodServer
from piecework.training.methods import in_pieces
from piecework.training.settings.cases import require_accepted


def remedies(server: MethodServer, refused: Sequence[dict[str, Any]], server_round: int) -> list[str]:
    """Return the remedies, a line each; `refused` are the clients' entries of a round's record."""
    cut = server.method.cut
    whole = cut.stage_count == 1 and not (cut.can.cuts or cut.can.adapts or cut.cost_model.ways)
    found = whole_in_less(server, refused, server_round) if whole else []
    if uncut := cut.model.uncut:
        found.append(f"the model is one piece, which no strategy trains in parts, because of {uncut}")
    elif not cut.can.cuts and fits_in_pieces(server, in_pieces(server.attacks), refused, server_round):
        found.append(f"strategy = {in_pieces(server.attacks)} trains the whole model in pieces")
    found.append("training.batch-size or architecture.width may be smaller, or the fleet may have more memory")
    return [f"{'try' if number == 0 else 'or'}: {remedy}" for number, remedy in enumerate(found)]


def fits_in_pieces(server: MethodServer, name: str, refused: Sequence[dict[str, Any]], server_round: int) -> bool:
    """Return whether the refusing clients can train every part of the model with the strategy of that name."""
    cut, method = server.method.cut, find_method(name)
    settings = cut.settings.with_values({"strategy": name})
    states = {client["client"]: server.resources.state(client["client"], server_round) for client in refused}
    budgets = [state.budget_bytes for state in states.values()]
    try:
        require_accepted(settings, method.refuses, name)
        pieces = method.make_cut(cut.blueprint, cut.cost_model, settings)
        pieces.require_model()
        planner = method(pieces.fit(max(min(budgets), pieces.min_budget()), max(budgets)))
        rows = coverage(planner, {client: Trainer(state) for client, state in states.items()})
    except ValueError:  # it refuses the settings or the model, or no client could train anything
        return False
    return all(row["clients"] for row in rows)


def whole_in_less(server: MethodServer, refused: Sequence[dict[str, Any]], server_round: int) -> list[str]:
    """Return what `memory.fit` would do, in a list of at most one remedy; none if it helps no refusing client."""
    allowed = [client.get("allowed") or client["budget"] for client in refused]
    speeds = [speed_of(server.resources.state(client["client"], server_round)) for client in refused]
    devices = zip(allowed, speeds, strict=True)
    found = in_less_memory(server.method.cut.cost_model, server.method.cut.part(server.method.cut.whole), devices)
    able = {c["device"] for c, amount in zip(refused, allowed, strict=True) if found and amount >= found.least}
    if found is None or not able:
        return []
    unable = sorted({client["device"] for client in refused} - able)
    beyond = f"; the smallest step takes {found.least:,}, too much for {', '.join(unable)}" if unable else ""
    return [
        f"memory.fit = {FIT} ({', '.join(sorted(able))} can then train the whole model, in {found.bytes:,} bytes instead of "
        f"{found.plain:,} ({format_bytes(found.plain - found.bytes)} less) for {found.flops:.2f} times the FLOPs: "
        f"{found.part.step}{beyond})"
    ]
