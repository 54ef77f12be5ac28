"""Whether clients can evaluate what they train, for plans: some systems evaluate more of the model than a client trains."""

from typing import Any

from piecework.device_profiles.profile import format_compared
from piecework.planning.cut import Cut
from piecework.planning.evaluation_cost import evaluation_steps
from piecework.strategies.cascade.fedprophet.cut import FedProphetCut
from piecework.strategies.cascade.fedprophet.evaluation import validation_steps


def needed_to_evaluate(policy: Cut, examples: int) -> int:
    """Return the fewest bytes with which a client evaluates the whole model; 0 if it needs less than what it trains.

    FeDepth's clients also evaluate the atoms that they leave out, and FedProphet's attack all modules.
    """
    if isinstance(policy, FedProphetCut):
        modules = [stage.parts[0].atoms for stage in policy.stages]
        return validation_steps(policy, modules, 0, examples)[0].bytes
    evaluation = policy.settings.evaluation
    if policy.can.single_atoms and (evaluation.on_clients_every or evaluation.mode == "personal"):
        atoms = tuple(range(len(policy.model.atoms)))
        return evaluation_steps(policy, policy.model, atoms, "head", 0, examples)[0].bytes
    return 0


def evaluation_row(policy: Cut, trained: dict[int, int], examples: int) -> dict[str, Any] | None:
    """Return how many clients train but cannot evaluate, and the bytes that this takes; None if there are none.

    `trained` are the smallest allowed bytes of each client that trains something.
    """
    if not trained or not (needed := needed_to_evaluate(policy, examples)):
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
