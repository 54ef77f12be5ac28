"""Compose files: a federation in containers, in which the kernel limits each client to its device's memory.

There are two services per client, as on a real device: `node-I` (a SuperNode) and `client-I` (the executor that trains, which
is limited). The files are text templates rather than dumped structures, so that people can read and change them. They use only
what both docker-compose 1.29 and Compose v2 understand.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from piecework.device_profiles.fleet import device_of, find_device, load_fleet
from piecework.device_profiles.profile import format_bytes, is_unlimited, parse_bytes
from piecework.planning.costs import cost_model_for
from piecework.plans.question import data_shape
from piecework.training.settings import Settings, SettingsError
from piecework.training.setup import blueprint_of_shape

CPUS = 1.0  # if the profile has no figure
AUTHORITY = "/certs/ca.crt"  # in the containers
FLOOR = "320MB"  # of a client, before it trains: docs/howto/containers.md has the measurement
NAME = re.compile(r"[\w .()+-]+")  # of a device, as it can stand in a node-config inside YAML

HEAD = """\
# {what} Made by
{command}
# docs/howto/containers.md says how to use it.
"""

BASE = """\
x-piecework: &piecework
  image: ${{PIECEWORK_IMAGE:-piecework}}
  user: "${{PIECEWORK_UID:-10001}}:0"
  restart: unless-stopped
  init: true
  read_only: true
  tmpfs: [/tmp]
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]

services:
  superlink:
    <<: *piecework
    build:
      context: .
      network: "${{PIECEWORK_BUILD_NETWORK:-default}}"
      args:
        BASE: "${{BASE:-python:3.11-slim-bookworm}}"
        PIECEWORK_TORCH: "${{PIECEWORK_TORCH:-torch>=2.11}}"
        PIP_OPTIONS: "${{PIP_OPTIONS:-}}"
    # Nodes reach the Fleet API alone, and starting a run is for the network in which this name is known.
    command: >-
      piecework-superlink --control network-of:control.superlink --insecure --isolation process --host 0.0.0.0 --port 8000
      --database /state/state.db
    # The clients train on the same cores; an answer that waits for the processor longer than 5 s is lost.
    cpu_shares: 4096
    ports: ["127.0.0.1:${{PIECEWORK_PORT:-8000}}:8000"]
    networks:
      control: {{aliases: [control.superlink]}}
      fleet: {{}}
    volumes: ["state:/state"]
{superlink_health}

  server:
    <<: *piecework
    depends_on: {{superlink: {{condition: service_healthy}}}}
    command: flower-superexec --insecure --runtime-api-address superlink:8000
    networks: [control]
    environment: {{PIECEWORK_DATA: /data}}
    volumes:
      - runs:/runs
      - {{type: bind, source: {server_data}, target: /data, read_only: true}}

  # docker-compose run --rm piecework run --superlink superlink:8000 --insecure ...
  piecework:
    <<: *piecework
    profiles: [cli]
    restart: "no"
    depends_on: {{superlink: {{condition: service_healthy}}}}
    entrypoint: [piecework]
    networks: [control]
    environment: {{PIECEWORK_DATA: /data}}
    volumes:
      - runs:/runs
      - {{type: bind, source: {server_data}, target: /data, read_only: true}}
"""

CLIENT = """
  node-{i}:
    <<: *piecework
    depends_on: {{superlink: {{condition: service_healthy}}}}
    command: >-
      piecework-supernode --look-seconds 0.5 --insecure --isolation process --superlink superlink:8000
      --host 0.0.0.0 --port 9094
      --node-config {node_config}
    networks: [fleet]
{node_health}

  client-{i}:
    <<: *piecework
    depends_on: {{node-{i}: {{condition: service_healthy}}}}
    command: piecework-executor --insecure --runtime-api-address node-{i}:9094
    networks: [fleet]
    # {about}
    mem_limit: {limit}
    memswap_limit: {limit}
    cpus: {cpus:g}
    environment: {{FLWR_HOME: /store/flower}}
    volumes:
      - store-{i}:/store
      - {{type: bind, source: {node_data}, target: /data, read_only: true}}
"""

NETWORKS = """
networks:
  control: {}
  fleet: {}
"""

TLS = """\
services:
  superlink:
    command: >-
      piecework-superlink --control network-of:control.superlink --isolation process --host 0.0.0.0 --port 8000
      --database /state/state.db
      --ssl-ca-certfile /certs/ca.crt --ssl-certfile /certs/server.crt --ssl-keyfile /certs/server.key
      --enable-supernode-auth --superexec-auth-secret-file /certs/executor.secret
    volumes:
{superlink_files}
{superlink_health}

  server:
    command: >-
      flower-superexec --runtime-api-address superlink:8000 --root-certificates /certs/ca.crt
      --superexec-auth-secret-file /certs/executor.secret
    volumes:
{server_files}

  # docker-compose -f ... -f ... run --rm piecework register /certs --superlink superlink:8000 --root-certificates /certs/ca.crt
  piecework:
    volumes:
{cli_files}
"""

TLS_CLIENT = """
  node-{i}:
    command: >-
      piecework-supernode --look-seconds 0.5 --isolation process --superlink superlink:8000 --root-certificates /certs/ca.crt
      --auth-supernode-private-key /certs/node-{i}.key --host 0.0.0.0 --port 9094
      --ssl-ca-certfile /certs/ca.crt --ssl-certfile /certs/node-{i}.crt --ssl-keyfile /certs/node-{i}.tls.key
      --superexec-auth-secret-file /certs/node-{i}.secret
      --node-config {node_config}
    volumes:
{node_files}
{node_health}

  client-{i}:
    command: >-
      piecework-executor --runtime-api-address node-{i}:9094 --root-certificates /certs/ca.crt
      --superexec-auth-secret-file /certs/node-{i}.secret
    volumes:
{client_files}
"""

HEALTH = """\
    healthcheck:
      test: {words}
      interval: 10s
      timeout: 10s
      retries: 3
      start_period: 60s"""


@dataclass(frozen=True)
class Place:
    """One client in the files: its number, the bytes and processors that the kernel allows it, and a comment on them."""

    number: int
    limit_bytes: int
    cpus: float
    about: str
    node_config: str


def command_line(options: Mapping[str, object], assignments: list[str], tls: bool) -> str:
    """Return the command that makes a file again."""
    words = [str(word) for option, value in options.items() if value for word in (option, value)]
    words += [word for assignment in assignments for word in ("--set", assignment)]
    return shlex.join(["piecework", "compose", *words, *(["--tls"] if tls else [])])


def option_bytes(option: str, text: str) -> int:
    """Parse the bytes of an option, such as --floor. Raises SettingsError, which names it."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise SettingsError(f"{option} {text}: {error}") from None


def clients_in_containers(settings: Settings, memory: Mapping[str, str]) -> list[Place]:
    """Return the clients of a run as containers, by --floor or by --limit. Raises SettingsError, FleetError."""
    if len(memory) > 1:
        words = " ".join(word for option in memory.items() for word in option)
        raise SettingsError(
            f"{words}: give one of them; with --limit a client measures what its container leaves to train with, so nothing "
            "is added to it"
        )
    if "--limit" in memory:
        return self_measuring_places(settings, option_bytes("--limit", memory["--limit"]))
    return places(settings, option_bytes("--floor", memory["--floor"]))


def self_measuring_places(settings: Settings, limit: int) -> list[Place]:
    """Return the clients of a run as containers of `limit` bytes in which devices measure themselves. Raises SettingsError."""
    require_traced(settings)
    if limit <= parse_bytes(FLOOR):
        raise SettingsError(
            f"--limit {format_bytes(limit)}: a client takes up to {FLOOR} before it trains: name more than that"
        )
    about = "it measures what this leaves to train with"
    clients = settings.clients
    return [Place(i, limit, CPUS, about, node_config(i, clients, "auto")) for i in range(clients)]


def require_traced(settings: Settings) -> None:
    """Raise SettingsError if clients would train with a paper's memory model."""
    if settings.memory.model != "traced":
        raise SettingsError(
            f"memory.model = {settings.memory.model!r} counts less than training takes, and the kernel would end every "
            "client: containers need memory.model = 'traced'"
        )


def node_config(client: int, clients: int, device: str) -> str:
    """Return the node-config of a client's container; without `device` the run's fleet assigns one."""
    named = f' device="{device}"' if device else ""
    return f'partition-id={client} num-partitions={clients}{named} data-dir="/data" state-dir="/store"'


def places(settings: Settings, floor: int) -> list[Place]:
    """Return the clients of a run as containers, whose limit is the device's training memory plus `floor`, in bytes.

    Raises SettingsError, FleetError.
    """
    require_traced(settings)
    fleet, clients = load_fleet(settings.fleet), settings.clients
    devices = [device_of(fleet, client, clients, settings.seed) for client in range(clients)]
    ratios = any(device.memory_ratio is not None for device in devices)
    reference = reference_bytes(settings) if ratios else 0
    found = []
    for client, device in enumerate(devices):
        if not NAME.fullmatch(device.name):
            raise SettingsError(
                f"fleet {fleet.name!r}: device {device.name!r} cannot be named in a node-config: use letters, digits, "
                "spaces and . ( ) + -"
            )
        # If the fleet gives each client its own figure, the client's number identifies it, not the device's name.
        config = node_config(client, clients, device.name if find_device(fleet, device.name) == device else "")
        memory = device.budget(reference)
        if is_unlimited(memory):
            raise SettingsError(
                f"fleet {fleet.name!r}: the memory of device {device.name!r} is unlimited, and a container is held to its "
                "device's memory: choose a fleet whose devices have a limit"
            )
        about = f"{device.name}: {format_bytes(memory)} to train with, {format_bytes(floor)} for the process"
        found.append(Place(client, memory + floor, device.cpus or CPUS, about, config))
    return found


def reference_bytes(settings: Settings) -> int:
    """Return the bytes of one reference step, of which ratio budgets are fractions."""
    shape, classes, _ = data_shape(settings)
    full = settings.with_values({"architecture.width": 1.0})
    return cost_model_for(settings, blueprint_of_shape(full, shape, classes)).reference_bytes


def compose_file(clients: list[Place], data: str, command: str) -> str:
    """Return the file of a federation without TLS, for a trusted host. `data` is the folder written by `export-data`."""
    what = "A federation in containers, each client with its device's memory as the kernel's limit."
    folder = source("PIECEWORK_EXPORT", data)
    text = HEAD.format(what=what, command=comment_out(command)) + "\n"
    text += BASE.format(server_data=json.dumps(f"{folder}/server"), superlink_health=health(8000))
    for client in clients:
        text += CLIENT.format(
            i=client.number,
            node_config=shlex.quote(client.node_config),
            node_health=health(9094),
            about=client.about,
            limit=client.limit_bytes,
            cpus=client.cpus,
            node_data=json.dumps(f"{folder}/node-{client.number}"),
        )
    volumes = ["state", "runs", *(f"store-{client.number}" for client in clients)]
    return text + NETWORKS + "\nvolumes:\n" + "".join(f"  {volume}: {{}}\n" for volume in volumes)


def tls_overlay(clients: list[Place], certs: str, command: str) -> str:
    """Return the overlay with TLS, node keys and executor secrets. `certs` is the folder written by `piecework certs`."""
    what = "Over the compose file of the same fleet: TLS, nodes known by their keys, executors by secrets."
    nodes = [client.number for client in clients]
    public = [f"nodes/node-{i}.pub" for i in nodes]
    text = HEAD.format(what=what, command=comment_out(command)) + "\n"
    text += TLS.format(
        superlink_files=files(certs, "ca.crt", "server.crt", "server.key", "executor.secret"),
        superlink_health=health(8000, AUTHORITY),
        server_files=files(certs, "ca.crt", "executor.secret"),
        cli_files=files(certs, "ca.crt", *public, flat=False),
    )
    for client in clients:
        i = client.number
        own = [f"nodes/node-{i}.{kind}" for kind in ("key", "crt", "tls.key", "secret")]
        text += TLS_CLIENT.format(
            i=i,
            node_config=shlex.quote(client.node_config),
            node_files=files(certs, "ca.crt", *own),
            node_health=health(9094, AUTHORITY),
            client_files=files(certs, "ca.crt", f"nodes/node-{i}.secret"),
        )
    return text


def comment_out(text: str) -> str:
    """Return text as comments of YAML, each of its lines in one; what no YAML file may contain is shown as Python writes it."""
    lines = text.splitlines() or [""]
    return "\n".join(f"#   {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}" for line in lines)


def source(variable: str, folder: str) -> str:
    """Return a folder of the host that an environment variable may override."""
    return "${" + variable + ":-" + folder.replace("$", "$$") + "}"


def files(certs: str, *names: str, flat: bool = True) -> str:
    """Return bind mounts of single files into /certs, so that each service gets only what it needs."""
    folder = source("PIECEWORK_CERTS", certs)
    targets = [name.rsplit("/", 1)[-1] if flat else name for name in names]
    return "\n".join(
        f"      - {{type: bind, source: {json.dumps(f'{folder}/{name}')}, target: /certs/{target}, read_only: true}}"
        for name, target in zip(names, targets, strict=True)
    )


def health(port: int, authority: str = "") -> str:
    """Return the health check of a SuperLink or SuperNode, by TLS if there is an authority; deploy/piecework-health is run."""
    return HEALTH.format(
        words=json.dumps(["CMD", "piecework-health", str(port), "5", *([authority] if authority else [])])
    )
