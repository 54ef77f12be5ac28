"""What a private run would spend, for a plan."""

from typing import Any

from piecework.planning.cut import Cut
from piecework.strategies.private_rounds import begin_privacy


def privacy_row(cut: Cut) -> dict[str, Any] | None:
    """Return what a run would spend of its clients' privacy, None if it is not private. Raises ValueError."""
    if (privacy := begin_privacy(cut.settings, cut.model, {})) is None:
        return None
    asked = cut.settings.num_rounds
    rounds = privacy.affordable(asked)
    return {
        "noise_multiplier": privacy.release.noise_multiplier,
        "sampling_rate": privacy.rate,
        "delta": privacy.release.delta,
        "asked": asked,
        "rounds": rounds,
        "epsilon": privacy.epsilon(rounds),
    }


def foresight(plan: dict[str, Any]) -> list[str]:
    """Return a sentence about what a private run would spend, none about another."""
    found = plan.get("privacy")
    if found is None:
        return []
    all_rounds = f"{found['rounds']} rounds spend epsilon {found['epsilon']:.3g} with delta {found['delta']:.2g}"
    rate = f"{found['sampling_rate']:.3g} of the clients a round on average"
    fewer = f"; it ends before the others of num-rounds = {found['asked']}" if found["rounds"] < found["asked"] else ""
    return [f"private: noise of {found['noise_multiplier']:.3g} x the clip, {rate}: {all_rounds}{fewer}"]
