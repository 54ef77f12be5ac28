"""Run the code of a user's own model again, which a file cannot ask for: the user names it."""

from pathlib import Path

from piecework.models.imported.source import find_make, is_imported
from piecework.models.model_file import ModelFileError, description, find_file


def import_code(path: Path, name: str) -> None:
    """Import the code that makes the model of a run, if `name` says that the user trusts it: it is that of the run.

    Raises ModelFileError if the run has another model, and ValueError if the code cannot be imported.
    """
    if not name:
        return
    if not isinstance(name, str):
        raise ValueError(
            f"model = {name!r:.100}: expected its name in the run, as in my_net.py:make; into= takes a module"
        )
    file = find_file(path)
    model = description(file).get("model")
    held = model.get("name") if isinstance(model, dict) else None
    if not isinstance(held, str) or _resolve(held) != _resolve(name):
        raise ModelFileError(f"{file} was trained with the model {held!r}, not with {name!r}: name that one, or none")
    if is_imported(name):
        find_make(held)  # as the file names it, so that loading it finds the code


def _resolve(name: str) -> str:
    """Return the name of a model with the absolute path of its file, as runs keep it; other names as they are."""
    file, _, function = name.rpartition(":")
    return f"{Path(file).resolve()}:{function}" if file.endswith(".py") else name
