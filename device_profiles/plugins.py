"""Plugins: methods, models, data sets and callbacks of other packages, which register them by entry points.

Names are read from the metadata of installed packages. A plugin is imported only when it is asked for by its name, so that a
message or a file can have no module imported that the owner of this machine has not installed for this purpose. This lowest
package has the plugins because data sets, models and methods all look here.
"""

import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from piecework.device_profiles.names import did_you_mean

KINDS = {
    "methods": "strategy",
    "models": "model",
    "datasets": "dataset",
    "callbacks": "callbacks",
}  # and their settings


class PluginError(ValueError):
    """A name stands for two things, or what stands behind it cannot be imported. The message names the packages."""


class EndedProcessError(RuntimeError):
    """Code of a user's or of a package's asked to end the process that it runs in."""


@dataclass(frozen=True)
class Plugin:
    """What a package registers: its `name` among those of a kind, the `package` with its `version`, and where it lies."""

    kind: str
    name: str
    package: str
    version: str
    about: str
    point: metadata.EntryPoint

    @property
    def requirement(self) -> str:
        """The package as pip takes it."""
        return f"{self.package}=={self.version}"


@contextmanager
def refuse_exit() -> Iterator[None]:
    """Turn sys.exit() of code that is not ours into EndedProcessError, which is treated as its other failures are.

    The SystemExit of a signal's handler that interrupts this code passes: it is the user who ends the run.
    """
    try:
        yield
    except SystemExit as error:
        handlers = {getattr(signal.getsignal(each), "__code__", None) for each in signal.valid_signals()}
        frame = error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code in handlers:
                raise
            frame = frame.tb_next
        raise EndedProcessError(f"it calls sys.exit({error.code!r}), which would end this process") from error


@cache
def _entry_points() -> Any:  # EntryPoints, or what has the same `select` before Python 3.12
    return metadata.entry_points()  # all at once: each look reads a file of every installed package


@cache
def list_plugins(kind: str) -> Mapping[str, tuple[Plugin, ...]]:
    """Return the plugins of a kind (a key of KINDS) by name, without importing them. More than one of a name is an error."""
    found: dict[str, tuple[Plugin, ...]] = {}
    for point in sorted(_entry_points().select(group=f"piecework.{kind}"), key=lambda each: each.name):
        about = point.dist.metadata.json if point.dist is not None else {}
        package, version, summary = (str(about.get(key, "")) for key in ("name", "version", "summary"))
        plugin = Plugin(kind, point.name, package, version, summary, point)
        found[point.name] = (*found.get(point.name, ()), plugin)
    return found


def find_plugin(kind: str, name: str, shipped: Collection[str] = ()) -> Plugin | None:
    """Return the plugin of this name, or None. Raises PluginError if it is not the only one, or `shipped` has the name too."""
    found = list_plugins(kind).get(name, ())
    owners = [*(["piecework"] if name in shipped else []), *(plugin.package for plugin in found)]
    if found and len(owners) > 1:
        raise PluginError(
            f"{KINDS[kind]} = {name!r} is registered by {len(owners)} packages, {' and '.join(owners)}: uninstall one of them, "
            f"or have it register another name under piecework.{kind}"
        )
    return found[0] if found else None


def load_plugin(kind: str, name: str) -> Any:
    """Import what a plugin's entry point names. Raises PluginError, which names its package."""
    plugin = find_plugin(kind, name)
    if plugin is None:
        known = ", ".join(list_plugins(kind)) or "none"
        raise PluginError(
            f"{KINDS[kind]} = {name!r}: no installed package registers it under piecework.{kind}, where there are: {known}"
            + did_you_mean(name, list_plugins(kind))
        )
    try:
        with refuse_exit():
            return plugin.point.load()
    except Exception as error:  # whatever the package's code raises
        raise PluginError(
            f"{KINDS[kind]} = {name!r} of the package {plugin.package} {plugin.version} cannot be imported "
            f"({plugin.point.value}): {type(error).__name__}: {error}. Install that package again, or uninstall it"
        ) from error


def forget_plugins() -> None:
    """Have the names read again, after a package was installed into this process."""
    _entry_points.cache_clear()
    list_plugins.cache_clear()
