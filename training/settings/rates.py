"""The learning rate of a round."""

import math

from piecework.training.settings.run import Settings


def learning_rate(settings: Settings, server_round: int) -> float:
    """Return the rate of a round, from 1: constant, lr-decay^(round - 1), or a cosine that reaches 0 after the last round."""
    own = settings.training
    if own.lr_schedule == "constant":
        return own.lr
    if own.lr_schedule == "exponential":
        return own.lr * own.lr_decay ** (server_round - 1)
    length = own.lr_rounds or settings.num_rounds
    return own.lr * 0.5 * (1 + math.cos(math.pi * min(server_round - 1, length) / length))
