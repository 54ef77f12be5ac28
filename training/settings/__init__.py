"""The settings of a run: a frozen class for each table, with the default, range and meaning of each setting.

The table of a method lies in its folder (`settings.py`); training/methods.py says which tables a method reads.
"""

from piecework.training.capabilities import Scalar
from piecework.training.settings.changeable import CHANGEABLE, EXTENDABLE
from piecework.training.settings.errors import SettingsError, too_many_asked
from piecework.training.settings.rates import learning_rate
from piecework.training.settings.resume import check_resume
from piecework.training.settings.run import Settings

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
