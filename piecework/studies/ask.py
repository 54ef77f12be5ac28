"""Which study a command line, or Python's keywords, ask for: a new one, or one to go on with, which they may extend."""

import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from piecework.api.keywords import flatten, read_value
from piecework.commands.options import parse_assignment, read_preset
from piecework.commands.own_app import FILE as APP_FILE
from piecework.commands.own_app import find_app
from piecework.device_profiles.documents import abbreviate, read_toml
from piecework.models.imported.objects import is_object
from piecework.studies.study import FILE, FREE, OWN, Study, extended, readable
from piecework.training.settings import Scalar, Settings, SettingsError

Scalars = dict[str, Scalar]
Sweep = dict[str, list[Scalar]]
LOG = logging.getLogger("piecework")


def find_study(name: str, asked_for: Scalars, preset: str, sweep: Sweep, seeds: Sequence[int]) -> tuple[Path, Study]:
    """Return the folder of a study, and the study as it is asked for. Raises SettingsError.

    `name` is a folder below the output-dir, or a path; a name is chosen where it is empty. `asked_for` are the settings of all
    runs on top of those of the preset, or of the app in this folder.
    """
    for key in OWN:
        if key != "output-dir" and (key in asked_for or key in sweep):
            raise SettingsError(f"{key} is decided for each run of a study{': give --seeds' if key == 'seed' else ''}")
    require_compared(sweep)
    if both := asked_for.keys() & sweep.keys():
        raise SettingsError(f"{min(both)} is given one value, and swept over several: give one of them")
    asked = {key: value for key, value in asked_for.items() if key != "output-dir"}
    chosen = name or f"study-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    if "output-dir" in asked_for:
        require_place(chosen, Path(str(asked_for["output-dir"])))
    below = settings_below(preset, {**asked, **{key: values[0] for key, values in sweep.items()}})
    folder = folder_of(chosen, output_dir_of({**below, **asked_for}))
    known = Study.read(folder) if (folder / FILE).is_file() else None
    if known is not None and not (asked or preset or sweep or seeds):
        return folder, known
    if known is None:
        require_new(folder, bool(seeds or sweep))
    else:  # where its runs look for a user's own data
        below = {key: value for key, value in known.settings.items() if key == "data-dir"} | below
    new = requested(asked, preset, below, sweep, seeds)
    return folder, new if known is None else extended(known, new.sweep, new.settings, seeds)


def require_compared(sweep: Sweep) -> None:
    """Raise SettingsError for a swept setting that changes none of a run's numbers: all its values would be one run."""
    for key in FREE:
        if key in sweep:
            given = ", ".join(map(str, sweep[key]))
            raise SettingsError(
                f"{key} = {given}: it changes none of a run's numbers, so it is not swept: give one value"
            )


def require_new(folder: Path, compares: bool) -> None:
    """Raise SettingsError if no study can begin in a folder, or there is nothing that it `compares`."""
    if not compares:
        raise SettingsError(
            f"{folder} is not the folder of a study. A new one needs something to compare: --strategies A,B, "
            "--sweep KEY=VALUE,VALUE or --seeds 1,2,3"
        )
    if folder.is_dir() and (others := sorted(path.name for path in folder.iterdir())):
        raise SettingsError(f"{folder} holds {others[0]!r}, but no {FILE}: choose another name for the study")


def settings_below(preset: str, asked: Scalars) -> Scalars:
    """Return the settings of the preset, or else of the app in this folder, below those that are `asked` for."""
    file = preset or find_app(asked)
    return read_preset(file) if file else {}


def output_dir_of(values: Scalars) -> Path:
    """Return the output-dir of settings. Raises SettingsError."""
    return Path(Settings.from_run_config({key: values[key] for key in values if key == "output-dir"}).output_dir)


def requested(asked: Scalars, preset: str, below: Scalars, sweep: Sweep, seeds: Sequence[int]) -> Study:
    """Return the study that was asked for by itself. Raises SettingsError for a setting that has no effect in any run of it.

    Those `below`, of the preset or the app in this folder, are left out instead, as with a preset whose strategy is replaced.
    """
    below = {key: value for key, value in below.items() if key not in OWN or key == "seed"}
    first = int(below.pop("seed", Settings().seed))
    values = {key: value for key, value in {**below, **asked}.items() if key not in sweep}
    require_files(values, sweep)
    place = place_of(values)
    swept = {key: tuple(readable({**place, key: value})[key] for value in each) for key, each in sweep.items()}
    settings = {key: value for key, value in readable({**place, **values}).items() if key in values}
    study = Study(seeds=tuple(seeds) or (first,), sweep=swept, settings=settings)
    unused = study.unused()
    if wrong := [key for key in unused if key in asked or key in sweep]:
        raise SettingsError(f"{', '.join(wrong)}: no run of this study uses it: leave it out")
    if not unused:
        return study
    LOG.warning("--preset %s: these have no effect with what was given: %s", preset or APP_FILE, ", ".join(unused))
    return study.model_copy(update={"settings": {k: v for k, v in study.settings.items() if k not in unused}})


def place_of(values: Scalars) -> Scalars:
    """Return the data-dir in which a run would look for a user's own data, as settings or PIECEWORK_DATA say; else nothing."""
    place = values.get("data-dir", os.environ.get("PIECEWORK_DATA", ""))
    return {"data-dir": place} if place else {}


def folder_of(name: str, output_dir: Path) -> Path:
    """Return the folder of a study: a name's below the output-dir, a path's itself. Raises SettingsError."""
    path = Path(name)
    if not path.name or path.name.startswith("."):
        raise SettingsError(f"--study {abbreviate(name)}: expected a name, as the study's folder gets it")
    return (path if is_path(name) else output_dir / path).resolve()


def is_path(name: str) -> bool:
    """Return whether a study was given as a path: `./NAME` is one, and NAME is not."""
    return len(Path(name).parts) > 1 or name.startswith("./")


def require_place(name: str, output_dir: Path) -> None:
    """Raise SettingsError if a study was given as a path that leads elsewhere than into the output-dir that was given too."""
    if is_path(name) and folder_of(name, output_dir).parent != output_dir.resolve():
        raise SettingsError(
            f"--study {abbreviate(name)} is a path, and not in output-dir = {output_dir}: give the path alone, or "
            f"--study {Path(name).name} for a folder of this name in the output-dir"
        )


def require_files(values: Scalars, sweep: Sweep) -> None:
    """Raise SettingsError for a model that only this process has: a study's runs are processes of their own."""
    for model in [values.get("model", ""), *sweep.get("model", [])]:
        if is_object(str(model)):
            raise SettingsError(
                "model: a study's runs are processes of their own, which do not have this module: give FILE.py:FUNCTION"
            )


def parse_sweep(strategies: str, texts: Sequence[str], strategy: str = "") -> Sweep:
    """Parse `--strategies a,b` and each `--sweep KEY=v1,v2`; values with commas are in TOML's list. Raises SettingsError."""
    found: Sweep = {}
    for option, text in [*([("--strategies", f"strategy={strategies}")] if strategies else [])] + [
        ("--sweep", text) for text in texts
    ]:
        key, equals, raw = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise SettingsError(f"{option} {abbreviate(text)}: expected KEY=VALUE,VALUE")
        if key in found:
            raise SettingsError(f"{option} {abbreviate(text)}: {key} is swept twice: give all its values at once")
        found[key] = _values(f"{option} {abbreviate(text)}", key, raw, strategy)
    return found


def read_sweep(strategies: Sequence[str], sweep: Mapping[str, Sequence[Any]]) -> Sweep:
    """Return swept settings as Python gives them, by their keys or in tables, `{"training": {"lr": [0.05, 0.1]}}`.

    Raises SettingsError.
    """
    if isinstance(strategies, str):
        raise SettingsError(f"strategies = {strategies!r}: expected a list of names")
    named = {"strategy": list(strategies)} if strategies else {}
    found: Sweep = {}
    for key, values in [*named.items(), *flatten(sweep)]:
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise SettingsError(f"sweep {key} = {values!r:.100}: expected a list of values")
        if key in found:
            raise SettingsError(f"sweep {key} is given twice: give all its values at once")
        found[key] = check_values(f"sweep {key}", [read_value(key, value) for value in values])
    return found


def _values(where: str, key: str, raw: str, strategy: str) -> list[Scalar]:
    if raw.startswith("["):
        try:
            values = read_toml(f"values = {raw}")["values"]
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from None
    else:
        values = [parse_assignment(f"{key}={part.strip()}", strategy)[1] for part in raw.split(",")]
    return check_values(where, values)


def check_values(where: str, values: Sequence[Scalar]) -> list[Scalar]:
    """Return the values of a swept setting. Raises SettingsError where one is empty or stands twice."""
    if not values or "" in values or len({repr(value) for value in values}) < len(values):
        raise SettingsError(f"{where}: expected different values, separated by commas")
    return list(values)
