"""What this process is doing now, for a display that wants to show it. Where nothing listens, nothing is said."""

import logging
from collections.abc import Callable

NOW = logging.getLogger("piecework.now")
NOW.propagate = False  # it would repeat itself in the log of the run
NOW.setLevel(logging.DEBUG)


def tracing(model: str) -> None:
    """Say that a part of a model is about to be traced, which can take seconds each."""
    NOW.info("tracing the parts of %s", model)


def doing(text: str, *values: object, details: Callable[[], str] = str) -> None:
    """Say what a run is doing. Unlike tracing, this changes within a round.

    `details` returns more, for a display that has room: what is left of the time, which changes while nothing is said.
    """
    NOW.debug(text, *values, extra={"details": details})
