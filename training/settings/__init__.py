"""The settings of a run: a frozen class for each table, with the default, range and meaning of each setting.

The tables of the methods lie here, a file for each family as in `strategies/`, because clients read them too, and import no
strategy.
"""

from piecework.training.settings.rates import learning_rate
from piecework.training.settings.run import (
    CHANGEABLE,
    EXTENDABLE,
    Settings,
    SettingsError,
    check_resume,
    too_many_asked,
)
from piecework.training.settings.table import Scalar

__all__ = [
    "CHANGEABLE",
    "EXTENDABLE",
    "Scalar",
    "Settings",
    "SettingsError",
    "check_resume",
    "learning_rate",
    "too_many_asked",
]
