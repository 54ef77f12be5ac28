"""Run Flower's SuperLink so that devices reach what they need, no more: `piecework-superlink [--control A,B] ARGUMENTS`.

All of Flower's APIs share one port, and the Control API starts apps for whoever reaches it. Here the paths of devices
(FLEET) answer everybody, and all others only who is admitted: this machine, and what `--control` names. These are addresses,
networks (10.8.0.0/24) and hosts; network-of:HOST is the network in which this machine is HOST. Everybody else gets 403,
before the body of a request is read. A proxy on this machine that names whom it forwards for (X-Forwarded-For) does not admit
them. The other arguments are those of `flower-superlink`.
"""

import argparse
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from importlib.metadata import entry_points
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_interface, ip_network
from typing import Any

import psutil
import uvicorn
from starlette.responses import JSONResponse

from piecework.deploy import busy_superlink

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Any, Send], Awaitable[None]]
FLEET = "/v1/fleet/"
HEALTH = "/health"
NETWORK_OF = "network-of:"
PROXIES = "127.0.0.0/8,::1"  # whose X-Forwarded-For is believed, whatever FORWARDED_ALLOW_IPS of the environment says
OLD_APIS = "FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"  # they open ports that nothing guards
REFUSED = (
    "{} may use the Fleet API alone: start runs and register keys on the SuperLink's machine, or let the --control of "
    "its piecework-superlink name this address"
)


def main() -> None:
    """Run `flower-superlink` behind the gate. A network that cannot be found ends it with exit code 2."""
    parser = argparse.ArgumentParser(prog="piecework-superlink", add_help=False, allow_abbrev=False)
    parser.add_argument("--control", default="")
    known, rest = parser.parse_known_args()
    if {"-h", "--help"} & {*rest}:
        print(__doc__)
    try:
        networks = {network for name in filter(None, known.control.split(",")) for network in networks_of(name)}
    except ValueError as error:
        parser.exit(2, f"--control {known.control}: {error}\n")
    sys.argv[1:] = rest
    for name in OLD_APIS:
        os.environ.pop(name, None)
    busy_superlink.prepare()
    run = uvicorn.run
    uvicorn.run = lambda app, **options: run(Gate(app, networks), **options | {"forwarded_allow_ips": PROXIES})
    (command,) = entry_points(group="console_scripts", name="flower-superlink")
    command.load()()


def networks_of(name: str) -> set[Network]:
    """Return what `--control` admits by a name: a network (10.8.0.0/24), an address, or the addresses of a host.

    `network-of:` in front of an address or a host, which must be this machine's, stands for the network that it has there.
    Raises ValueError.
    """
    host = name.removeprefix(NETWORK_OF)
    if "/" in host:
        return {ip_network(name)}
    try:
        found = {plain(ip_address(entry[4][0])) for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ValueError(
            f"{host!r} is no address, no network such as 10.8.0.0/24, and no host that is known here: {error}"
        ) from None
    if host == name:
        return {ip_network(address) for address in found}
    own = own_networks()
    if strange := sorted(map(str, found - own.keys())):
        raise ValueError(
            f"{name!r}: this machine does not have {strange[0]}; write the network itself, as in 10.8.0.0/24"
        )
    return {own[address] for address in found}


def own_networks() -> dict[Address, Network]:
    """Return the network at each address of this machine."""
    found: dict[Address, Network] = {}
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask:
                address = plain(ip_address(entry.address.partition("%")[0]))
                bits = int(ip_address(entry.netmask)).bit_count()
                found[address] = ip_interface(f"{address}/{bits}").network
    return found


def plain(address: Address) -> Address:
    """Return an address of IPv4 as such, also if it came as one of IPv6; of IPv6, without the interface's name."""
    if isinstance(address, IPv6Address):
        return address.ipv4_mapped or IPv6Address(int(address))
    return address


def open_to_all(path: str) -> bool:
    """Return whether devices need a path."""
    return path == HEALTH or path.startswith(FLEET)


def is_admitted(peer: object, ours: object, networks: Collection[Network]) -> bool:
    """Return whether a connection from host `peer` to `ours` may use every path: from this machine, or one of the networks."""
    try:
        address = plain(ip_address(str(peer)))
    except ValueError:  # none is known, or a proxy's word for one
        return False
    own = address.is_loopback or str(peer) == str(ours)  # a machine calls its own address from that address
    return own or any(address in network for network in networks)


class Gate:
    """An ASGI app in front of Flower's. `networks` are admitted to all paths."""

    def __init__(self, app: AsgiApp, networks: Collection[Network]) -> None:
        self.app, self.networks = app, networks

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        """Pass a request on, or refuse it."""
        peer = (scope.get("client") or ("this address", 0))[0]
        if scope["type"] == "lifespan" or open_to_all(scope["path"]) or self._admits(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await JSONResponse({"detail": REFUSED.format(peer)}, 403)(scope, receive, send)
        else:
            await send({"type": "websocket.close"})  # which uvicorn answers with 403

    def _admits(self, scope: Scope) -> bool:
        (peer, _), (ours, _) = scope.get("client") or (None, 0), scope.get("server") or (None, 0)
        return is_admitted(peer, ours, self.networks)


if __name__ == "__main__":
    main()
