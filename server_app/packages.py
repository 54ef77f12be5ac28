"""The packages whose plugins a run uses, and those that a run of which only the folder is here would need."""

from pathlib import Path

from piecework.device_profiles.documents import read_json
from piecework.device_profiles.plugins import KINDS, Plugin, list_plugins
from piecework.training.settings import Settings

FILE = "packages.json"  # in the folder of a run that uses plugins
KEYS = ("kind", "name", "package", "version")


def _plugins_of_clients(settings: Settings) -> list[Plugin]:
    names = {"methods": settings.strategy, "models": settings.model, "datasets": settings.dataset.partition(":")[0]}
    return [plugin for kind, name in names.items() for plugin in list_plugins(kind).get(name, ())]


def packages_of_clients(settings: Settings) -> tuple[str, ...]:
    """Return the packages that register the strategy, the model and the data set of a run, as pip takes them.

    Clients need these. Callbacks are the server's alone.
    """
    return tuple(dict.fromkeys(plugin.requirement for plugin in _plugins_of_clients(settings)))


def describe_plugins(settings: Settings) -> list[dict[str, str]]:
    """Return the plugins that a run uses: the kind (a key of KINDS) and name of each, and its package with the version."""
    callbacks = [name.strip() for name in settings.callbacks.split(",")]
    of_server = [plugin for name in callbacks for plugin in list_plugins("callbacks").get(name, ())]
    return [{key: getattr(each, key) for key in KEYS} for each in (*_plugins_of_clients(settings), *of_server)]


def missing_package(folder: Path) -> str:
    """Return which package a run needs that is not installed, and how to install it; empty if none is known to be missing.

    A run without plugins, or from before they were recorded, names none. One without its callback goes on without it.
    """
    try:
        found = read_json((folder / FILE).read_text(encoding="utf-8"))
        used = [{key: str(each[key]) for key in KEYS} for each in found]
    except (OSError, ValueError, KeyError, TypeError):  # it only explains an error, and is no result that could be lost
        return ""
    for each in used:
        kind, name = each["kind"], each["name"]
        if kind in KINDS and kind != "callbacks" and name not in list_plugins(kind):
            package, version = each["package"], each["version"]
            return (
                f"this run needs {KINDS[kind]} = {name!r} of the package {package} {version}, which is not installed: pip "
                f"install {package}=={version}"
            )
    return ""
