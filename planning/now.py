"""What this process is doing now, for a display that wants to show it. Where nothing listens, nothing is said."""

import logging

NOW = logging.getLogger("piecework.now")
NOW.propagate = False  # it would repeat itself in the log of the run
NOW.setLevel(logging.DEBUG)


def tracing(model: str) -> None:
    """Say that a part of a model is about to be traced, which can take seconds each."""
    NOW.info("tracing the parts of %s", model)


def doing(text: str, *values: object, details: str = "") -> None:
    """Say what a run is doing, with details for a display that has room. Unlike tracing, this changes within a round."""
    NOW.debug(text, *values, extra={"details": details})
