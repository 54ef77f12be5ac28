"""The Flower app in the working directory, whose settings a run has."""

import logging
import shlex
from pathlib import Path
from typing import Any

from piecework.device_profiles.documents import read_toml
from piecework.device_profiles.plugins import KINDS, list_plugins
from piecework.training.settings import Scalar, SettingsError

FILE = "pyproject.toml"
PROJECT, SERVER_APP = "piecework", "piecework.flower_server:app"
LOG = logging.getLogger("piecework")


def find_app(asked_for: dict[str, Scalar]) -> str:
    """Return the pyproject.toml of the working directory if it is a Flower app on Piecework's, as `flwr run .` reads it.

    The result is empty for Piecework itself, whose settings are the defaults, and for a run to resume, which has its own.
    Raises SettingsError if the app, or what was asked for, names a plugin of the app, whose package is not installed.
    """
    file = Path(FILE)
    if asked_for.get("resume-from", "") not in ("", "auto") or not file.is_file():
        return ""
    try:
        found: Any = read_toml(file.read_text(encoding="utf-8"))
        served = found["tool"]["flwr"]["app"]["components"]["serverapp"]
        project = found["project"]
        name = project["name"]
    except (OSError, ValueError, KeyError, TypeError):  # another project, which is not ours to judge
        return ""
    if served != SERVER_APP or name == PROJECT:
        return ""
    settings = found["tool"]["flwr"]["app"].get("config")
    _require_installed(project, (settings if isinstance(settings, dict) else {}) | asked_for)
    LOG.info("settings: those of the app %s in this folder, as `flwr run .` has them", name)
    return str(file)


def _require_installed(project: Any, settings: dict[str, Any]) -> None:
    """Raise SettingsError if settings name what the project registers, and no installed package does."""
    points = project.get("entry-points")
    for kind, key in KINDS.items():
        own = points.get(f"piecework.{kind}", {}) if isinstance(points, dict) else {}
        names = [name.strip().partition(":")[0] for name in str(settings.get(key, "")).split(",")]
        for name in names:
            if name in own and name not in list_plugins(kind):
                raise SettingsError(
                    f"{key} = {name!r}: the app {project['name']} in this folder registers it, and is not installed, or was "
                    f"before its pyproject.toml named it. Install it: pip install -e {shlex.quote(str(Path.cwd()))}"
                )
