"""Write a small app of a user's own: a package with a model, a method, data and a callback, which Flower can run."""

import shlex
import sys
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from piecework.app_folder import PACKAGE
from piecework.commands.base import out, user_errors
from piecework.commands.lists import lists
from piecework.training.settings import SettingsError

TEMPLATE = PACKAGE / "new_app"
SUFFIXES = (".py", ".toml", ".md", ".template")  # a pyproject.toml below this project's would be taken for a project
MODULE, NAME = "my_app", "my-app"  # as the template's package and its plugins are called


@lists.command()
def new(
    folder: Annotated[Path, typer.Argument(help="the folder to make; its name becomes that of the package")],
) -> None:
    """Write a small app of your own: a package with a model, a method and data, which Piecework and Flower train."""
    with user_errors(False):
        files = write_app(folder)
        out.print(f"{folder}: {', '.join(files)}", soft_wrap=True)
        out.print(f"next: cd {shlex.quote(str(folder))} && pip install -e . && piecework run", soft_wrap=True)


def write_app(folder: Path) -> list[str]:
    """Write the app and return its files. Raises SettingsError for a folder that has files, or a name that is no package's."""
    name = folder.resolve().name.lower()
    module = name.replace("-", "_")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{folder} exists and is not empty: name a new folder")
    if not module.isidentifier() or not module.isascii() or iskeyword(module) or "_" in (module[0], module[-1]):
        raise SettingsError(
            f"{folder}: {name!r} cannot be the name of a package: use letters, digits and hyphens; it begins with a letter, "
            "and ends with no hyphen"
        )
    if module in sys.stdlib_module_names or find_spec(module) is not None:
        raise SettingsError(
            f"{folder}: there is a module {module!r} already, which Python would find: use another name"
        )
    written = []
    for source in sorted(path for path in TEMPLATE.rglob("*") if path.suffix in SUFFIXES):
        path = str(source.relative_to(TEMPLATE)).removesuffix(".template").replace(MODULE, module)
        text = source.read_text(encoding="utf-8").replace(MODULE, module).replace(NAME, module.replace("_", "-"))
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
        written.append(path)
    return written
