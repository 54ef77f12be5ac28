"""The Ray cluster that RAY_ADDRESS names, and the token of a Ray of our own. This module does not import Ray."""

import logging
import os
import re
import secrets
import socket
import sys

from piecework.engines.processes import EngineError

OWN_RAY = "local"  # the address with which Ray starts a cluster
CONNECT_SECONDS = 5.0
UNPROTECTED = (
    "Ray was imported before this run, without a token, so every user of this machine can run code through the run's Ray: set "
    "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before you import it"
)
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


def ray_address() -> str:
    """Return the Ray cluster of the user's RAY_ADDRESS; empty if Ray is to be started."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == OWN_RAY else address


def require_cluster(address: str) -> None:
    """Raise ValueError if this is no address of Ray's (HOST:PORT, ray://HOST:PORT, auto), EngineError if none answers there."""
    instead = "Without RAY_ADDRESS, or with RAY_ADDRESS=local, the run starts a Ray of its own"
    if address == "auto":
        from ray._private.services import canonicalize_bootstrap_address  # takes a second, and asks nobody

        try:
            canonicalize_bootstrap_address(address)
        except ConnectionError:
            raise EngineError(f"RAY_ADDRESS = 'auto': no Ray cluster runs on this machine. {instead}") from None
        return
    form = re.fullmatch(r"(?:ray://)?(?:\[(?P<v6>[0-9a-fA-F:]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})", address)
    if form is None or not 0 < int(form["port"]) < 2**16:
        raise ValueError(f"RAY_ADDRESS = {address!r} is not HOST:PORT, ray://HOST:PORT or auto. {instead}")
    try:
        socket.create_connection((form["v6"] or form["host"], int(form["port"])), CONNECT_SECONDS).close()
    except OSError as error:
        raise EngineError(f"RAY_ADDRESS = {address!r}: no Ray cluster answers there ({error}). {instead}") from None
