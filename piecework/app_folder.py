"""Locate the Flower app and the presets: at the top of a checkout, or in `piecework/shipped` of an installed wheel."""

import shutil
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "shipped"  # the wheel's build makes it from the files at the top of a checkout
TOP = SHIPPED if SHIPPED.is_dir() else PACKAGE.parent
PRESETS = TOP / "conf"


def app_folder(folder: Path) -> Path:
    """Return a folder that `flwr run` accepts: the checkout itself, or `folder`, filled from the installed wheel.

    Raises FileNotFoundError if neither a checkout nor a wheel is complete.
    """
    project = TOP / "pyproject.toml"
    if not project.is_file():
        raise FileNotFoundError(f"{project} is missing: install Piecework again, from its wheel or by `pip install -e`")
    if TOP != SHIPPED:
        return TOP
    shutil.copytree(SHIPPED, folder)
    packages = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"][
        "packages"
    ]
    for package in packages:
        source = PACKAGE if package == PACKAGE.name else PACKAGE / package
        shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__", SHIPPED.name, *packages))
    return folder
