"""All settings of a run: those of the run itself at the top, all others in tables; and how they are read and written.

Flower hands over a flat run configuration (`training.lr`) and does not check types (`training.lr=abc` arrives as a
string), so it is only read through `Settings.from_run_config`. An error names the key, the value and what is allowed.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import PureWindowsPath
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from piecework.device_profiles.documents import abbreviate
from piecework.training.capabilities import Scalar
from piecework.training.methods import METHODS, SIMPLEST, find_entry, is_own, table_class
from piecework.training.settings.changeable import CHANGEABLE
from piecework.training.settings.errors import (
    KINDS,
    REMOVED,
    SettingsError,
    describe_error,
    describe_unknown_key,
    require_table_name,
    too_many_asked,
)
from piecework.training.settings.privacy import PrivacySettings
from piecework.training.settings.shared import (
    ArchitectureSettings,
    AttackSettings,
    DataSettings,
    EvaluationSettings,
    FaultsSettings,
    MemorySettings,
    MessagesSettings,
    TrainingSettings,
)
from piecework.training.settings.table import AtLeastOne, Count, Seed, Table, flat, nest, setting
from piecework.training.settings.track import RunSettings

T = TypeVar("T", bound=Table)


class Settings(Table):
    """The settings of one run. Defaults are the demo: FeDepth on the embedded digits over 20 emulated boards."""

    strategy: str = setting("fedepth", "name of the strategy: `piecework strategies` lists them")
    model: str = setting(
        "convnet",
        "name of the model, such as resnet18: models/zoo.py lists them in MODELS; or a torch module of your own, as "
        "FILE.py:FUNCTION or MODULE:FUNCTION, or of a library, as torchvision:NAME or timm:NAME",
    )
    dataset: str = setting("digits", "name of the data set, or npz:FILE, table:FILE, folder:DIR, text:DIR, hub:NAME")
    fleet: str = setting(
        "demo", "the clients' devices: a shipped fleet, a .toml file, also PACKAGE/FILE.toml, or a fleet as JSON"
    )
    clients: Annotated[int, Field(ge=0, le=10**6)] = setting(
        0, "number of clients; 0 = as many as the federation has, for `piecework run` the fleet's number or 20"
    )
    clients_per_round: Count = setting(
        10, "clients asked per round; 0 = all; at most as many as there are, though the default then means all"
    )
    num_rounds: AtLeastOne = setting(20, "rounds of the run")
    seed: Seed = setting(1, "seed of all random choices")
    engine: Literal["local", "ray", "deployment"] = setting(
        "local",
        "where clients run: processes of ours, workers on Ray, or Flower's SuperLink and SuperNodes",
    )
    workers: Count = setting(0, "client processes at once; 0 = one per core")
    data_dir: str = setting("", "folder of downloaded data sets, in torchvision's layout, or of a part of an export")
    output_dir: str = setting("runs", "folder in which each run gets a folder of its own")
    run_name: str = setting("", "name of that folder; empty = strategy, data set, seed and time")
    state_dir: str = setting("", "folder of the clients' stores; empty = RUN/clients")
    resume_from: str = setting(
        "", "a run's folder, or auto = the newest unfinished run in output-dir with these settings"
    )

    callbacks: str = setting(
        "", "callbacks of installed packages, which the server tells of each round: names, with commas; or MODULE:CLASS"
    )

    data: DataSettings = DataSettings()
    architecture: ArchitectureSettings = ArchitectureSettings()
    training: TrainingSettings = TrainingSettings()
    attack: AttackSettings = AttackSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    memory: MemorySettings = MemorySettings()
    messages: MessagesSettings = MessagesSettings()
    faults: FaultsSettings = FaultsSettings()
    privacy: PrivacySettings = PrivacySettings()
    run: RunSettings = RunSettings()

    _tables: dict[str, Table] = PrivateAttr(
        default_factory=dict
    )  # those of methods that differ from their defaults, by name

    @model_validator(mode="after")
    def _tolerance_is_for_papers(self) -> Self:
        if self.memory.tolerance and self.memory.model == "traced":
            raise ValueError(
                f"memory.tolerance = {self.memory.tolerance} exists for a paper's memory.model only: traced budgets are "
                "enforced as they are"
            )
        return self

    @model_validator(mode="after")
    def _papers_count_in_float32(self) -> Self:
        if self.training.precision != "float32" and self.memory.model != "traced":
            raise ValueError(
                f"training.precision = {self.training.precision!r}: memory.model {self.memory.model} knows float32 only, "
                "use traced"
            )
        return self

    @model_validator(mode="after")
    def _require_frozen_statistics(self) -> Self:
        if self.architecture.norm == "frozen" and not self.training.init_weights:
            raise ValueError(
                "architecture.norm = 'frozen' keeps the statistics of a pretrained model: set training.init-weights"
            )
        return self

    @model_validator(mode="after")
    def _enough_are_asked(self) -> Self:
        for key, asked in (("clients", self.clients), ("clients-per-round", self.clients_per_round)):
            if 0 < asked < self.faults.min_clients:
                raise ValueError(f"faults.min-clients = {self.faults.min_clients} is more than {key} = {asked}")
        return self

    @model_validator(mode="after")
    def _no_more_are_asked_than_there_are(self) -> Self:
        if self.clients and (error := too_many_asked(self, self.clients)):
            raise ValueError(error)
        return self

    @model_validator(mode="after")
    def _clients_evaluate_one_thing(self) -> Self:
        own = self.evaluation
        if own.mode == "personal" and own.on_clients_every:
            raise ValueError(
                f"evaluation.on-clients-every = {own.on_clients_every}: with evaluation.mode = 'personal' clients evaluate on "
                "their parts of the test split, by evaluation.every; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _a_run_stays_in_output_dir(self) -> Self:
        name = self.run_name
        if PureWindowsPath(name).name != name or name == ".." or not name.isprintable():  # it knows / and \\ and drives
            raise ValueError(
                f"run-name = {name!r} must be the name of one folder, which lies in output-dir: neither a path nor .., and "
                "without control characters"
            )
        if (length := len(name.encode(errors="replace"))) > 255:
            raise ValueError(f"run-name = {abbreviate(name)} has {length} bytes; the name of a folder has at most 255")
        return self

    @model_validator(mode="after")
    def _options_are_readable(self) -> Self:
        self.architecture.parse_options()
        return self

    @model_validator(mode="after")
    def _more_than_all_cannot_be_asked(self) -> Self:
        if self.faults.over_sample and not self.clients_per_round:
            raise ValueError(
                f"faults.over-sample = {self.faults.over_sample}: with clients-per-round = 0 a round asks all clients, and "
                "there are no more; set it to the number of answers that are enough"
            )
        return self

    @property
    def least(self) -> int:
        """The least number of clients whose updates make a new model."""
        return max(1, self.faults.min_clients)

    @property
    def asked(self) -> int:
        """The number of clients that a round asks; 0 = all."""
        return self.clients_per_round + self.faults.over_sample

    @property
    def enough(self) -> int:
        """The number of updates with which a round's training ends at once, or 0 if it waits for all clients."""
        return self.clients_per_round if self.faults.over_sample else 0

    @property
    def simulated(self) -> bool:
        """Whether the simulated clock decides which answers are late: always where one machine emulates the clients."""
        return self.engine != "deployment"

    def evaluation_due(self, server_round: int) -> bool:
        """Return whether a round ends with an evaluation: every `evaluation.every`-th round does, and the last one."""
        every = self.evaluation.every
        return server_round == self.num_rounds or bool(every and server_round % every == 0)

    @property
    def norms(self) -> str:
        """The value of `architecture.batch-norm`, `auto` resolved for the strategy, or of `architecture.norm` if not batch."""
        if self.architecture.norm != "batch":
            return self.architecture.norm
        if self.architecture.batch_norm != "auto":
            return self.architecture.batch_norm
        return find_entry(self.strategy).can.norms

    @property
    def measures_norms(self) -> bool:
        """Whether clients measure the statistics of the served model's batch norms after training."""
        return self.norms in ("measured", "static")

    @property
    def norms_in_training(self) -> str:
        """The kind of batch norms in the model as clients train it."""
        return "batch" if self.measures_norms else self.norms

    @property
    def batch_statistics(self) -> bool:
        """Whether clients always run batch norms with the statistics of the batch."""
        return self.norms_in_training == "batch"

    def of(self, table: type[T]) -> T:
        """Return the settings of a method, by the class of their table."""
        found = self._tables.get(table.name)
        return found if isinstance(found, table) else _defaults(table)

    @classmethod
    def from_run_config(cls, config: Mapping[str, Scalar]) -> Self:
        """Validate a flat run configuration. Raises SettingsError."""
        known = fields(str(config.get("strategy", "")))
        config = {key: value for key, value in config.items() if key not in REMOVED or value != REMOVED[key]}
        for key, value in config.items():
            if key not in known:
                raise SettingsError(_describe_unknown(key, str(config.get("strategy", ""))))
            if not isinstance(value, Scalar):
                raise SettingsError(f"setting {key} = {abbreviate(value)}: should be {KINDS[type(known[key].default)]}")
        # with their types, because a cache treats True, 1 and 1.0 as equal
        items = tuple((key, type(config[key]), config[key]) for key in sorted(config))
        return _validate(cls, items)  # type: ignore[return-value]

    def to_run_config(self) -> dict[str, Scalar]:
        """Return the flat form, `training.lr`, with every key."""
        own = {name: self.of(table).model_dump(by_alias=True) for name, table in method_tables(self.strategy).items()}
        return flat(self.model_dump(by_alias=True) | own)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return these settings with other values, by key, which are not validated. Raises SettingsError for an unknown key."""
        strategy = str(values.get("strategy", self.strategy))
        update, tables = dict[str, Any](), dict(self._tables)
        for key, value in values.items():
            if key not in fields(strategy):
                raise SettingsError(describe_unknown_key(key, fields(strategy)))
            name, _, field = key.replace("-", "_").rpartition(".")
            if not name:
                update[field] = value
            elif own := method_tables(strategy).get(name.replace("_", "-")):
                tables[own.name] = tables.get(own.name, _defaults(own)).model_copy(update={field: value})
            else:
                update[name] = update.get(name, getattr(self, name)).model_copy(update={field: value})
        return self.model_copy(update=update)._with(tables)

    def _with(self, tables: Mapping[str, Table]) -> Self:
        """Return these settings with the tables of methods; those with their defaults are left out, as in a new run."""
        found = self.model_copy()
        found._tables = {name: table for name, table in tables.items() if table != _defaults(type(table))}
        return found

    def hash(self) -> str:
        """Return a short digest of the settings that affect a run's numbers; equal for a run and its resumption."""
        kept = {key: value for key, value in self.to_run_config().items() if key not in CHANGEABLE}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


@cache
def _defaults(table: type[T]) -> T:
    return table()


@cache
def method_tables(strategy: str = "") -> dict[str, type[Table]]:
    """Return the classes of the methods' tables by name, with that of a strategy of one's own. Raises SettingsError."""
    named = [name for entry in METHODS.values() for name in entry.tables]
    try:
        own = find_entry(strategy).tables if is_own(strategy) else ()
        found = {table.name: table for table in map(table_class, sorted(set(named)))}
        for table in map(table_class, own):
            if found.get(table.name) is not table:
                require_table_name(table.name, {*Settings.model_fields, *found}, strategy)
            found[table.name] = table
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return found


@cache
def tables(strategy: str = "") -> dict[str, type[Table]]:
    """Return the classes of all tables by name, in their order; Settings itself has no name. Raises SettingsError."""
    kinds = {name: field.annotation for name, field in Settings.model_fields.items()}
    shared = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Table)}
    return {"": Settings} | shared | method_tables(strategy)


@cache
def fields(strategy: str = "") -> dict[str, FieldInfo]:
    """Return the declaration of every setting by its key, with those of a strategy of one's own. Raises SettingsError."""
    return dict(_fields(tables(strategy)))


def _describe_unknown(key: str, strategy: str) -> str:
    """Return the error for an unknown key: of a strategy that is not there, such as a plugin's, no key is known."""
    try:
        find_entry(strategy or SIMPLEST)
    except ValueError as error:
        return str(error)
    return describe_unknown_key(key, fields(strategy))


def _fields(tables: Mapping[str, type[Table]]) -> Iterator[tuple[str, FieldInfo]]:
    for name, table in tables.items():
        for field, info in table.model_fields.items():
            if field not in tables:
                key = field.replace("_", "-")
                yield f"{name}.{key}" if name else key, info


@lru_cache(maxsize=64)
def _validate(cls: type[Settings], items: tuple[tuple[str, type, Scalar], ...]) -> Settings:
    values = {key: value for key, _, value in items}
    strategy = str(values.get("strategy", ""))
    for key, value in values.items():
        default = fields(strategy)[key].default
        if isinstance(value, int) and not isinstance(value, bool) and isinstance(default, float) and abs(value) < 2**63:
            values[key] = float(value)
    given, own, errors = nest(values), dict[str, Table](), list[Mapping[str, Any]]()
    for name, table in method_tables(strategy).items():
        try:
            own[name] = table.model_validate(given.pop(name, {}), by_alias=True, by_name=False)
        except ValidationError as error:
            errors += [dict(each) | {"loc": (name, *each["loc"]) if each["loc"] else ()} for each in error.errors()]
    try:
        settings = cls.model_validate(given, by_alias=True, by_name=False)
    except ValidationError as error:
        errors = [*error.errors(), *errors]
    if errors:
        raise SettingsError("\n".join(map(describe_error, errors)))
    return settings._with(own)
