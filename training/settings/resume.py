"""Compare the settings of a run with those that it is to be resumed with."""

from collections.abc import Mapping

from piecework.device_profiles.documents import abbreviate
from piecework.training.capabilities import Scalar
from piecework.training.settings.changeable import CHANGEABLE, EXTENDABLE
from piecework.training.settings.errors import SettingsError
from piecework.training.settings.run import Settings


def check_resume(old: Mapping[str, Scalar], new: Settings) -> None:
    """Raise SettingsError, which names the first key, unless `new` may resume a run with the settings `old`."""
    for key, value in new.to_run_config().items():
        may_change = key in CHANGEABLE or (key in EXTENDABLE and value)
        if not may_change and key in old and old[key] != value:
            differs = f"setting {key} = {abbreviate(value)} differs from {abbreviate(old[key])} of the run to resume"
            raise SettingsError(
                f"{differs}: a resumed run may only change {', '.join(sorted(CHANGEABLE | EXTENDABLE))}. `piecework run --set "
                "resume-from=DIR` takes all others from the run; plain `flwr run` gives each its default unless it is named"
            )
