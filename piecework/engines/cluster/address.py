"""The Ray cluster that the user names, and the token of a Ray of our own. This module imports Ray only to look for one."""

import logging
import os
import re
import secrets
import socket
import sys
from typing import NamedTuple

from piecework.engines.processes import EngineError

OWN_RAY = "local"  # the address with which Ray starts a cluster
CONNECT_SECONDS = 5.0
UNPROTECTED = (
    "Ray was imported before this run, without a token, so every user of this machine can run code through the run's Ray: set "
    "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before you import it"
)
ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})")
OWN_INSTEAD = "Without it, or with local as the address, the run starts a Ray of its own"
VARIABLE = "RAY_ADDRESS"
LOG = logging.getLogger("piecework")


def protect() -> None:
    """Give this process's own Rays a token, without which any user of this machine could have them run code.

    Ray reads how it is protected once, when it is imported.
    """
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    elif os.environ.get("RAY_AUTH_MODE") != "token":
        LOG.warning(UNPROTECTED)


class RayCluster(NamedTuple):
    """The address of a Ray cluster, as the user gave it, and what the user gave it by."""

    address: str
    named: str = "--ray-address"

    def __str__(self) -> str:
        return f"{self.named} {self.address}" if self.named.startswith("-") else f"{self.named} = {self.address!r}"


def ray_cluster(option: str = "") -> RayCluster | None:
    """Return the Ray cluster of `--ray-address`, else that of RAY_ADDRESS; None if Ray is to be started.

    Raises ValueError if that is no address.
    """
    found = RayCluster(option) if option else RayCluster(os.environ.get(VARIABLE, ""), VARIABLE)
    if found.address in ("", OWN_RAY):
        return None
    require_address(found)
    return found


def require_address(cluster: RayCluster) -> None:
    """Raise ValueError if this is no address of Ray's that a run can have: HOST:PORT, auto, local."""
    if cluster.address.startswith("ray://"):
        raise ValueError(
            f"{cluster}: a run is no client of Ray's, it must share memory with a node of the cluster. Start it on a machine "
            "that is one, with auto as the address, or with HOST:PORT without ray://, the port of `ray start` (6379)"
        )
    form = ADDRESS.fullmatch(cluster.address)
    if cluster.address not in ("auto", OWN_RAY) and (form is None or not 0 < int(form["port"]) < 2**16):
        raise ValueError(f"{cluster} is not HOST:PORT or auto. {OWN_INSTEAD}")


def find_cluster(cluster: RayCluster) -> str:
    """Return a cluster's HOST:PORT, which `auto` stands for on its nodes. Raises EngineError if none answers there."""
    address = find_here(cluster) if cluster.address == "auto" else cluster.address
    if (form := ADDRESS.fullmatch(address)) is None:
        raise EngineError(
            f"{cluster}: the Ray cluster on this machine has the address {address!r}, which is not HOST:PORT"
        )
    try:
        socket.create_connection((form["v6"] or form["host"], int(form["port"])), CONNECT_SECONDS).close()
    except OSError as error:
        raise EngineError(f"{cluster}: no Ray cluster answers there ({error}). {OWN_INSTEAD}") from None
    return address


def find_here(cluster: RayCluster) -> str:
    """Return the address of the Ray cluster of which this machine is a node. Raises EngineError if it is of none."""
    from ray._private.services import canonicalize_bootstrap_address  # takes a second, and asks nobody

    others = os.environ.pop(VARIABLE, None)  # which Ray would take before `auto`
    try:
        return str(canonicalize_bootstrap_address("auto"))
    except ConnectionError:
        raise EngineError(f"{cluster}: no Ray cluster runs on this machine. {OWN_INSTEAD}") from None
    finally:
        if others is not None:
            os.environ[VARIABLE] = others
