"""A study: some settings swept over their values, each combination run with each seed, in the folder `<output-dir>/NAME/`.

study.toml                 the study: seeds, swept settings with their values, the settings of all runs
STRATEGY-seed1-0f3c9a1b/   the folder of a run, as every run's, and beside it its note, settings and log (notes.py)
compare.html               the runs compared, and why others have no result
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piecework.client_app.disk import write_atomically
from piecework.commands.options import complete, readable_anywhere
from piecework.device_profiles.documents import abbreviate, read_toml
from piecework.report.compare import fleet_names, short
from piecework.server_app.used_settings import find_settable, keep_known
from piecework.studies.jobs import Given, hash_of, slug
from piecework.studies.queue import Queue
from piecework.training.methods import find_entry
from piecework.training.settings import Scalar, Settings, SettingsError
from piecework.training.settings.cases import cases, default

FILE = "study.toml"
HEAD = "# Written by `piecework run --study`, which goes on with the study. The settings are those of all runs.\n\n"
# What is decided for each run of a study, and nobody else may set.
OWN = ("seed", "output-dir", "run-name", "resume-from")
# How and where runs are carried out, which changes none of their numbers: the last given values count.
FREE = (
    *("engine", "workers", "messages.max-in-flight", "memory.keep-experiments"),
    *("callbacks", "run.track", "data-dir"),
)
FILES = ("dataset", "fleet", "model", "data-dir", "state-dir", "training.init-weights")  # may name files
Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(strict=False, min_length=1)]
Swept = Annotated[tuple[Scalar, ...], Field(strict=False, min_length=1)]


class Study(BaseModel):
    """What a study's file says. Settings have their full keys, and files are named so that they can be read from anywhere."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    seeds: Seeds
    sweep: dict[str, Swept] = {}
    settings: dict[str, Scalar] = {}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the study in a folder. Raises SettingsError, which names the file and the entry."""
        path = folder / FILE
        if not path.is_file():
            raise SettingsError(f"{folder} is not the folder of a study: it has no {FILE}")
        try:
            return cls.model_validate(read_toml(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            first = error.errors()[0]
            where = " ".join(str(part + 1) if isinstance(part, int) else str(part) for part in first["loc"])
            raise SettingsError(f"{path}: {where} = {abbreviate(first['input'])}: {first['msg']}") from None
        except (OSError, ValueError) as error:
            raise SettingsError(f"{path}: {error}") from None

    def write(self, folder: Path) -> None:
        """Write the study's file."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = {"seeds": list(self.seeds), "sweep": {k: list(v) for k, v in self.sweep.items()}}
        text = tomli_w.dumps({**tables, "settings": self.settings})
        write_atomically(folder / FILE, f"{HEAD}{text}".encode())

    @cached_property
    def rows(self) -> list["Row"]:
        """The combinations of the swept values, each once: a value that has no effect in one is left out of it.

        Raises SettingsError, which names the row, where Piecework refuses settings.
        """
        found: dict[str, Row] = {}
        for values in product(*self.sweep.values()):
            row = self._row(dict(zip(self.sweep, values, strict=True)))
            found.setdefault(row.hash, row)
        return list(found.values())

    def unused(self) -> list[str]:
        """Return the settings that no run uses."""
        used = {key for row in self.rows for key in row.settings}
        return sorted({*self.settings, *self.sweep} - used)

    def _row(self, swept: Given) -> "Row":
        values = {**self.settings, **swept}
        for strategy in self.strategies:  # one of a user's own may have settings that no other knows
            values, _ = keep_known(values, strategy)
        fleets = fleet_names(map(str, self.sweep.get("fleet", ())))
        label = label_of(swept, fleets) or f"strategy={values.get('strategy', default('strategy'))}"
        try:
            settings = Settings.from_run_config(values)
            find_entry(settings.strategy)
            known, settable = cases(settings.strategy), find_settable(settings)
            used = {key: value for key, value in values.items() if key not in known or key in settable}
            complete(used)
            typed = Settings.from_run_config(used).to_run_config()  # 1.0 where 1 was written
        except ValueError as error:
            raise SettingsError(f"{label}: {error}") from None
        label = label_of({key: value for key, value in swept.items() if key in used}, fleets) or label
        return Row(label, settings.strategy, {key: typed[key] for key in used})

    @property
    def strategies(self) -> Sequence[str]:
        """The systems of the rows."""
        return [str(name) for name in self.sweep.get("strategy", [self.settings.get("strategy", default("strategy"))])]

    def jobs(self) -> list["StudyJob"]:
        """List the runs: one seed of every row before the second of any."""
        return [StudyJob(row, seed) for seed in self.seeds for row in self.rows]


@dataclass(frozen=True)
class Row:
    """A combination: its swept settings in words, its system, and all that was given for it."""

    label: str
    strategy: str
    settings: Given

    @cached_property
    def hash(self) -> str:
        """Eight characters that identify the settings of which a run's numbers depend, where they are not the defaults."""
        return hash_of(self.deciding)

    @property
    def deciding(self) -> dict[str, Scalar]:
        """The settings of which a run's numbers depend, where they are not the defaults."""
        given = {key: value for key, value in self.settings.items() if key not in FREE}
        return {key: value for key, value in given.items() if value != default_of(key, self.strategy)}


@dataclass(frozen=True)
class StudyJob:
    """A run of a study."""

    row: Row
    seed: int

    @property
    def settings(self) -> dict[str, Scalar]:
        """All that is given for it."""
        return {**self.row.settings, "seed": self.seed}

    @cached_property
    def hash(self) -> str:
        """Eight characters that identify it."""
        return hash_of(self.row.deciding | {"seed": self.seed})

    @property
    def label(self) -> str:
        """The run in words."""
        return f"{self.row.label} seed={self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """What the note beside the run says it is."""
        return {"row": self.row.label, "seed": self.seed, "hash": self.hash}

    def folder(self, out: Path) -> Path:
        """Return the folder of the run in that of the study."""
        return out / f"{slug(self.row.strategy.rpartition(':')[2])}-seed{self.seed}-{self.hash}"


@dataclass(frozen=True)
class StudyPlan:
    """The runs of a study, for the queue."""

    study: Study

    def jobs(self, queue: Queue) -> Iterator[StudyJob]:
        """Yield all runs in order."""
        yield from self.study.jobs()

    def is_recorded(self, job: object) -> bool:
        """Return False: a study has the results of its own runs alone."""
        return False


def label_of(values: Given, fleets: Mapping[str, str]) -> str:
    """Return settings in words, `strategy=NAME training.lr=0.05`, with the names of `fleets`."""
    return " ".join(f"{key}={short(fleets[str(v)] if key == 'fleet' else v)}" for key, v in values.items())


def readable(values: Given) -> dict[str, Scalar]:
    """Return settings with files named so that they can be read from anywhere, and the fleet itself. Raises SettingsError."""
    files = {key: value for key, value in values.items() if key in FILES}
    found = readable_anywhere(Settings.from_run_config(files)) if files else {}
    return {**values, **{key: value for key, value in found.items() if key in files}}


@cache
def default_of(key: str, strategy: str) -> Scalar:
    """Return the default of a setting as a study has its value."""
    return readable({key: default(key, strategy)})[key] if key == "fleet" else default(key, strategy)


def extended(study: Study, sweep: Mapping[str, Sequence[Scalar]], settings: Given, seeds: Sequence[int]) -> Study:
    """Return a study with further values and seeds. Raises SettingsError for settings that contradict those of its runs."""
    base, swept = dict(study.settings), {key: list(values) for key, values in study.sweep.items()}
    strategy = study.strategies[0]
    for key, values in {**{key: [value] for key, value in settings.items()}, **sweep}.items():
        have = base.get(key, default_of(key, strategy))
        if key in swept:
            swept[key] += [value for value in values if value not in swept[key]]
        elif key in FREE and key not in sweep:
            base[key] = values[0]
        elif have not in values:
            names = fleet_names([str(have), *map(str, values)]) if key == "fleet" else {}
            asked, had = (", ".join(str(names.get(str(v), v)) for v in each) for each in (values, [have]))
            raise SettingsError(
                f"{key} = {asked} contradicts {key} = {had} of the study's runs: leave it out to go on with the study, or "
                "give another one a name of its own"
            )
        elif len(values) > 1:
            swept[key] = [have, *(value for value in values if value != have)]
            base.pop(key, None)
    all_seeds = (*study.seeds, *(seed for seed in seeds if seed not in study.seeds))
    return Study(seeds=all_seeds, sweep={key: tuple(values) for key, values in swept.items()}, settings=base)
