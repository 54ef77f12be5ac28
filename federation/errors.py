"""Errors that end a run. They are apart, so that the command line can name them without importing torch."""


class TooFewNodesError(RuntimeError):
    """Fewer nodes connected in time than the run needs."""


class RunAbortedError(RuntimeError):
    """The run cannot continue. The message says why."""
