"""The packages whose plugins a run uses."""

from piecework.device_profiles.plugins import list_plugins
from piecework.training.settings import Settings


def packages_of_clients(settings: Settings) -> tuple[str, ...]:
    """Return the packages that register the strategy, the model and the data set of a run, as pip takes them.

    Clients need these. Callbacks are the server's alone.
    """
    names = {"methods": settings.strategy, "models": settings.model, "datasets": settings.dataset.partition(":")[0]}
    found = (plugin for kind, name in names.items() for plugin in list_plugins(kind).get(name, ()))
    return tuple(dict.fromkeys(plugin.requirement for plugin in found))
