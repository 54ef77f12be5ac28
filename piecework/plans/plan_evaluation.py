"""Whether clients can evaluate what they train, for plans: some systems evaluate more of the model than a client trains."""

from typing import Any

from piecework.device_profiles.profile import format_compared
from piecework.planning.cut import Cut


def evaluation_row(cut: Cut, trained: dict[int, int], examples: int) -> dict[str, Any] | None:
    """Return how many clients train but cannot evaluate, and the bytes that this takes; None if there are none.

    `trained` are the smallest allowed bytes of each client that trains something.
    """
    if not trained or not (needed := cut.evaluation_bytes(examples)):
        return None
    short = [allowed for allowed in trained.values() if allowed < needed]
    return {"clients": len(short), "of": len(trained), "needed": needed, "least": min(short)} if short else None


def evaluation_warning(found: dict[str, Any] | None) -> str:
    """Return the warning that belongs to an `evaluation_row`, or an empty string."""
    if found is None:
        return ""
    needed, least = format_compared(found["needed"], found["least"])
    return (
        f"warning: {found['clients']} of {found['of']} clients that train have no memory to evaluate the model: that takes "
        f"{needed}, and the poorest has {least}; they will refuse, and the others' results count"
    )
