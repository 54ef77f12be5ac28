"""Turn a command line into settings: presets, assignments, options, the environment."""

import logging
import os
import shlex
from pathlib import Path
from typing import Any

from piecework.app_folder import PRESETS
from piecework.commands.own_app import find_app
from piecework.device_profiles.documents import abbreviate, read_toml
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.names import did_you_mean
from piecework.engines.cluster.address import RayCluster, require_address
from piecework.engines.processes import Connection
from piecework.models.imported.source import is_own
from piecework.server_app.packages import missing_package
from piecework.server_app.used_settings import drop_unused, find_unused, keep_known, require_used
from piecework.training.methods import find_entry
from piecework.training.settings import Scalar, Settings, SettingsError
from piecework.training.settings.run import fields
from piecework.training.settings.table import flat

Scalars = dict[str, Scalar]
DIGITS = 19  # of a seed, which is a number of 64 bits
LOG = logging.getLogger("piecework")
# The command line's shorthands of --set.
OPTIONS = {
    "strategy": "--strategy",
    "model": "--model",
    "dataset": "--dataset",
    "fleet": "--fleet",
    "num-rounds": "--rounds",
    "seed": "--seed",
    "engine": "--engine",
    "clients": "--nodes",
    "output-dir": "--output-dir",
    "memory.model": "--memory-model",
    "training.batch-size": "--batch-size",
    "run.superlink": "--superlink",
}


def settings_from(
    preset: str,
    assignments: list[str],
    *,
    engine: str = "",
    nodes: int = 0,
    output_dir: str = "",
    named: Scalars | None = None,
    connection: Connection | RayCluster | None = None,
) -> Settings:
    """Apply defaults, then the preset, then --set and the options. Paths become absolute, as engines run elsewhere.

    The settings of the app in this folder are the preset where none is named (`find_app`). `named` are the options that stand
    for settings, by setting; one that contradicts --set raises SettingsError.

    With `resume-from`, that run's settings replace the defaults. Otherwise the number of clients defaults to that of the fleet,
    or 20; to 4 if real processes are started; and to the number of nodes if the `connection` is to a SuperLink's.
    """
    there = isinstance(connection, Connection)
    link: Scalars = {"run.superlink": connection.address} if isinstance(connection, Connection) else {}
    asked_for = merge_assignments(assignments, options_given(engine, nodes, output_dir) | (named or {}) | link)
    app = "" if preset else find_app(asked_for)
    find_entry(str(asked_for.get("strategy", fields()["strategy"].default)))
    if there and asked_for.get("engine", "deployment") != "deployment":
        raise SettingsError(f"engine = {asked_for['engine']} with --superlink: a SuperLink's nodes are real processes")
    settings = complete(add_preset(asked_for, preset or app), there=there)
    if isinstance(connection, RayCluster) and settings.engine != "ray":
        raise SettingsError(f"{connection} with engine = {settings.engine}: only --engine ray joins a Ray cluster")
    return settings


def options_given(engine: str, nodes: int, output_dir: str) -> Scalars:
    """Return the settings of these options, as far as they are given."""
    options: Scalars = {"engine": engine, "clients": nodes, "output-dir": output_dir}
    return {key: value for key, value in options.items() if value}


def complete(given_values: Scalars, *, there: bool = False) -> Settings:
    """Return the settings of a run that was given these values, checked, with what `settings_from` adds to them."""
    from piecework.server_app.local_grid import default_workers

    values = given_values | ({"engine": "deployment"} if there else {})
    given, resumed = set(values), str(values.get("resume-from", ""))
    if not there and values.get("run.superlink"):
        raise SettingsError(
            f"run.superlink = {values['run.superlink']!r}: --superlink sets it, and says how to trust it; to do without its "
            "nodes, with emulated clients, give --set run.superlink="
        )
    if resumed not in ("", "auto"):
        of_run = settings_of_run(resumed)
        values = of_run | values
        given |= {"workers"}  # as many as this machine has cores
        if not there and (of_run["run.superlink"] or not values["clients"]):
            raise SettingsError(
                f"resume-from = {resumed!r}: that run had the clients of a SuperLink, whose data and devices are not here: go "
                f"on with them by --superlink {of_run['run.superlink'] or 'HOST:PORT'}, and --root-certificates or --insecure"
            )
    elif not values.get("clients"):
        values["clients"] = default_clients(values, there)
    if os.environ.get("PIECEWORK_DATA"):
        values.setdefault("data-dir", os.environ["PIECEWORK_DATA"])
    settings = Settings.from_run_config(values)
    require_engine(settings, there)
    # The settings that a run started with do not prevent its resumption.
    require_used(settings, None if resumed in ("", "auto") else given)
    resolved = readable_anywhere(settings) | {"workers": default_workers(settings.workers)}
    kept = resolved.keys() - given if resumed not in ("", "auto") else set()  # as the run has them
    return settings.with_values({key: value for key, value in resolved.items() if key not in kept})


def add_preset(asked_for: Scalars, preset: str) -> Scalars:
    """Return the settings of a preset, if one is named, beneath those that were asked for."""
    if not preset:
        return dict(asked_for)
    values, dropped = drop_unused(asked_for, read_preset(preset))
    if dropped:
        LOG.warning("--preset %s: these have no effect with what was given: %s", preset, ", ".join(dropped))
    return values


def require_engine(settings: Settings, there: bool) -> None:
    """Raise SettingsError for a strategy, a model or a callback of one's own that the engine does not have.

    `there`: the engine is an external SuperLink. What an installed package registers has a name, and is allowed everywhere.
    """
    if ":" in settings.strategy and (there or settings.engine != "local"):
        raise SettingsError(
            f"strategy = {settings.strategy!r} is a file of your own, and other engines do not have it: use engine = local"
        )
    if is_own(settings.model) and (there or settings.engine != "local"):
        raise SettingsError(
            f"model = {settings.model!r} is code of your own, and other engines do not have it: use engine = local"
        )
    if ":" in settings.callbacks and (there or settings.engine != "local"):
        raise SettingsError(
            f"callbacks = {settings.callbacks!r} names your own code, and other engines do not have it: use engine = local"
        )


def default_clients(values: Scalars, there: bool) -> int:
    """Return the number of clients of a run that names none, as `settings_from` says. Raises FleetError."""
    fleet = load_fleet(str(values.get("fleet", fields()["fleet"].default)))
    return fleet.prescribed_clients or (0 if there else 4 if values.get("engine") == "deployment" else 20)


def merge_assignments(assignments: list[str], options: Scalars) -> Scalars:
    """Return the settings of --set and of other options. Raises SettingsError if an option and --set differ in one."""
    own = next((text.partition("=")[2] for text in assignments if text.startswith("strategy=")), "")
    own = own or str(options.get("strategy", ""))
    assigned = dict(parse_assignment(text, own) for text in assignments)
    for key, value in options.items():
        if assigned.get(key, value) != value:
            option = OPTIONS[key]
            raise SettingsError(f"{option} {value} contradicts --set {key}={assigned[key]}: give one of them")
    return assigned | options


def run_command(preset: str, assignments: list[str], options: Scalars, nodes: int = 0) -> str:
    """Return the command line of a run with a preset, settings of --set, and options, which replace them.

    Settings that have no effect with the options, as those of another strategy, are left out.
    """
    words = ["piecework", "run", *(["--preset", preset] if preset else [])]
    asked = dict(map(parse_assignment, assignments)) | options
    assigned = dict(map(parse_assignment, assignments))
    asked, _ = keep_known(asked, str(assigned.get("strategy", "")))
    known = {key: value for key, value in asked.items() if key != "dataset"}  # which may be a placeholder
    without_effect = find_unused(Settings.from_run_config((read_preset(preset) if preset else {}) | known))
    for key, value in asked.items():
        if key in without_effect:
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        words += [OPTIONS[key], text] if key in OPTIONS and "." not in key else ["--set", f"{key}={text}"]
    return shlex.join([*words, *(["--nodes", str(nodes)] if nodes else [])])


def readable_anywhere(settings: Settings) -> Scalars:
    """Return the settings that name files so that they can be read from anywhere: absolute paths, and the fleet itself.

    Raises DatasetError for a data set of one's own that is not where `data-dir` says, but in the working directory.
    """
    from piecework.federated_data.sources import own_place  # lists of options need no numpy

    kind, colon, source = settings.dataset.partition(":")
    path = own_place(kind, source, settings.data_dir).resolve() if colon else Path()
    dataset = f"{kind}:{path}" if colon and (kind != "hub" or path.is_dir()) else settings.dataset
    found: Scalars = {"dataset": dataset, "fleet": load_fleet(settings.fleet).to_json()}
    values = settings.to_run_config()
    file, _, function = settings.model.rpartition(":")
    if file.endswith(".py"):
        found["model"] = f"{Path(file).resolve()}:{function}"
    for key in ("output-dir", "data-dir", "state-dir", "resume-from", "training.init-weights"):
        if values[key] not in ("", "auto"):
            found[key] = str(Path(str(values[key])).resolve())
    return found


def settings_of_run(folder: str) -> Scalars:
    """Return all settings of the run in a folder, as it was last started. Raises SettingsError."""
    from piecework.server_app.records import RunDir

    run_dir = RunDir(Path(folder))
    if not (run_dir.path / "settings.toml").is_file():
        raise SettingsError(f"resume-from = {folder!r}: not the folder of a run")
    if missing := missing_package(run_dir.path):
        raise SettingsError(f"resume-from = {folder!r}: {missing}")
    try:
        return Settings.from_run_config(run_dir.settings()).to_run_config()
    except SettingsError as error:
        raise SettingsError(
            f"resume-from = {folder!r}: this version of Piecework cannot read its settings: {error}"
        ) from error


def read_preset(preset: str) -> Scalars:
    """Return the settings of a preset, a file or the name of a shipped one, on top of those that it extends.

    `extends = NAME` names a preset beside it or a shipped one, which extends none itself. Raises SettingsError.
    """
    path = preset_path(preset)
    own = read_tables(path)
    if "extends" not in own:
        return own
    extended = str(own.pop("extends"))
    beside = path.with_name(f"{extended}.toml")
    base = read_tables(beside if beside.is_file() else preset_path(extended))
    if "extends" in base:
        raise SettingsError(
            f"preset {path}: it extends {extended!r}, which extends {base['extends']!r}: a preset may extend only one that "
            "extends none"
        )
    return base | own


def preset_path(preset: str) -> Path:
    """Return the file of a preset. Raises SettingsError."""
    path, shipped = Path(preset), PRESETS / f"{preset}.toml"
    if path.is_file() or shipped.is_file():
        return path if path.is_file() else shipped
    near = did_you_mean(preset, sorted(found.stem for found in PRESETS.glob("*.toml")))
    raise SettingsError(f"preset {preset}: no such file, and no shipped preset; `piecework presets` lists them{near}")


def read_tables(path: Path) -> Scalars:
    """Return the settings in a TOML file by their keys, without `paper`, the rows that it runs. Raises SettingsError.

    Those of a Flower app are in its pyproject.toml, where `flwr run` reads them.
    """
    try:
        tables: Any = read_toml(path.read_text(encoding="utf-8"))
        for name in ("tool", "flwr", "app", "config") if path.name == "pyproject.toml" else ():
            if not isinstance(tables := tables.get(name), dict):
                raise ValueError("it has no table [tool.flwr.app.config], where a Flower app has its settings")
        values = flat(tables)
        return {key: value for key, value in values.items() if key != "paper"}
    except (ValueError, OSError) as error:  # ValueError: no TOML, or no UTF-8
        raise SettingsError(f"preset {path}: {error}") from None


def parse_assignment(text: str, strategy: str = "") -> tuple[str, Scalar]:
    """Parse `key=value`, with the value as TOML reads it, or plain text; `strategy` may be one's own. Raises SettingsError."""
    key, equals, raw = text.partition("=")
    if not equals:
        raise SettingsError(f"--set {abbreviate(text)}: expected KEY=VALUE")
    field = fields(strategy).get(key.strip())
    try:
        value = read_toml(f"value = {raw}")["value"]
    except ValueError:
        value = raw
    if field is not None and isinstance(field.default, str) and not isinstance(value, str):
        value = raw
    return key.strip(), value


def connection_to(
    superlink: str, root_certificates: Path | None, insecure: bool, ray_address: str = ""
) -> Connection | RayCluster | None:
    """Return where to submit a run or which Ray it joins, or None to run it here.

    Raises SettingsError; no TLS must be requested explicitly.
    """
    if superlink and ray_address:
        raise SettingsError(f"--superlink {superlink} contradicts --ray-address {ray_address}: give one of them")
    if ray_address and not (root_certificates or insecure):
        return ray_cluster_at(ray_address)
    if not superlink:
        if root_certificates or insecure:
            raise SettingsError(
                "--root-certificates and --insecure say how to reach a SuperLink: give --superlink HOST:PORT too"
            )
        return None
    host, _, port = superlink.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise SettingsError(f"--superlink {superlink}: expected HOST:PORT, with a port from 1 to 65535")
    if insecure == (root_certificates is not None):
        raise SettingsError(f"--superlink {superlink}: give either --root-certificates FILE or --insecure")
    if root_certificates is not None and not root_certificates.is_file():
        raise SettingsError(f"--root-certificates {root_certificates}: no such file")
    return Connection(superlink, root_certificates)


def words_of(connection: Connection | RayCluster | None) -> list[str]:
    """Return the options with which the command line gives a connection."""
    if connection is None:
        return []
    if isinstance(connection, RayCluster):
        return ["--ray-address", connection.address]
    certificates = connection.root_certificates
    trust = ["--root-certificates", str(certificates.resolve())] if certificates else ["--insecure"]
    return ["--superlink", connection.address, *trust]


def ray_cluster_at(address: str) -> RayCluster:
    """Return the Ray cluster with an address (HOST:PORT, auto, local). Raises SettingsError."""
    cluster = RayCluster(address)
    try:
        require_address(cluster)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return cluster


def seeds_from(seeds: str, assignments: list[str], named: Scalars, settings: Settings) -> list[int]:
    """Return the seeds of the runs: those of `--seeds`, else that of the settings. Raises SettingsError for both."""
    if not seeds:
        return [settings.seed]
    asked_for = merge_assignments(assignments, named)
    if "seed" in asked_for:
        option = f"--seed {named['seed']}" if "seed" in named else f"--set seed={asked_for['seed']}"
        raise SettingsError(f"--seeds {seeds} contradicts {option}: give one of them")
    return parse_seeds(seeds)


def parse_seeds(seeds: str) -> list[int]:
    """Parse `1,2,3`. Raises SettingsError."""
    parts = [part.strip() for part in seeds.split(",")]
    if not all(part.isdecimal() and len(part) < DIGITS for part in parts) or len(set(parts)) < len(parts):
        raise SettingsError(
            f"--seeds {abbreviate(seeds)}: expected different whole numbers from 0 of less than {DIGITS} digits, separated by "
            "commas"
        )
    return [int(part) for part in parts]
