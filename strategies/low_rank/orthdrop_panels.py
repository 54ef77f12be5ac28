"""OrthDrop in a run's page: its records are those of PriSM."""

from piecework.strategies.low_rank.prism.panels import panels

__all__ = ["panels"]
