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
    file = find_file(path)
    model = description(file).get("model")
    held = model.get("name") if isinstance(model, dict) else None
    if held != name:
        raise ModelFileError(f"{file} was trained with the model {held!r}, not with {name!r}: name that one, or none")
    if is_imported(name):
        find_make(name)
