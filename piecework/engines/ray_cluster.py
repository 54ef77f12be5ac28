"""The Ray cluster that RAY_ADDRESS names, and whether it is there: Flower waits for it for minutes, and blames the clients."""

import os
import re
import socket

from piecework.engines.processes import EngineError

OWN_RAY = "local"  # the address with which Ray starts a cluster
CONNECT_SECONDS = 5.0


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
