"""A small run of FedRBN, and its model with two sets of statistics."""

from typing import Any

from helpers import TRIO, a_blueprint, fleet_json

from piecework.models.cascade import Blueprint
from piecework.models.dual_norm import DualNorms
from piecework.models.variant import Variant, vary

# The first and the third client have memory for an adversarial step, the second has not; all train.
SMALL: dict[str, Any] = TRIO | {
    "strategy": "fedrbn",
    "architecture__batch_norm": "running",
    "training__local_iterations": 2,
    "attack__steps": 2,
    "evaluation__attack_steps": 2,
    "evaluation__attack_examples": 40,
    "fleet": fleet_json(rich=2.2, poor=0.3),
}


def a_dual_blueprint() -> Blueprint:
    return vary(a_blueprint(batch_norm="running"), Variant(changes=(DualNorms(True),)))
