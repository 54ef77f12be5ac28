"""Locate the Flower app and the presets: at the top of a checkout, or in `piecework/shipped` of an installed wheel."""

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from piecework.training.capabilities import Scalar
from piecework.training.settings.table import flat, nest

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "shipped"  # the wheel's build makes it from the files at the top of a checkout
TOP = SHIPPED if SHIPPED.is_dir() else PACKAGE.parent
PRESETS = TOP / "conf"


def app_folder(folder: Path, values: Mapping[str, Scalar] | None = None) -> Path:
    """Return a folder that `flwr run` accepts: the checkout itself, or `folder`, filled from it or from the installed wheel.

    Flower refuses settings that an app's pyproject.toml lacks, such as those of a plugin. So if there are any among the
    `values` of a run, by key, the app is filled and lists them. Raises FileNotFoundError if no app is complete.
    """
    project = TOP / "pyproject.toml"
    if not project.is_file():
        raise FileNotFoundError(f"{project} is missing: install Piecework again, from its wheel or by `pip install -e`")
    tool = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]
    known = flat(tool["flwr"]["app"]["config"])
    own = {key: value for key, value in (values or {}).items() if key not in known}
    if TOP != SHIPPED and not own:
        return TOP
    folder.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(TOP / name, folder)
    shutil.copytree(PRESETS, folder / PRESETS.name)
    packages = tool["hatch"]["build"]["targets"]["wheel"]["packages"]
    for package in packages:
        source = PACKAGE if package == PACKAGE.name else PACKAGE / package
        shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__", SHIPPED.name, *packages))
    if own:
        with (folder / project.name).open("a", encoding="utf-8") as file:
            file.write("\n" + tomli_w.dumps({"tool": {"flwr": {"app": {"config": nest(own)}}}}))
    return folder
