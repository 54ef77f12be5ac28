"""What this process is doing now, for a display that wants to show it. Where nothing listens, nothing is said."""

import logging

NOW = logging.getLogger("piecework.now")
NOW.propagate = False  # it would repeat itself in the log of the run
NOW.setLevel(logging.DEBUG)


def tracing(model: str) -> None:
    """Say that a part of a model is about to be traced, which can take seconds each."""
    NOW.info("tracing the parts of %s", model)


def doing(text: str, *values: object) -> None:
    """Say what a run is doing. Unlike tracing, this changes with every round."""
    NOW.debug(text, *values)
