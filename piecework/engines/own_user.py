"""Run a Flower command whose server answers this user's processes alone: `own_user.py flower-superlink ARGUMENTS`.

Without TLS, Flower's servers trust whoever connects. A launched run listens on 127.0.0.1, where all users of the machine can
connect, and its Control API starts apps as the launching user. On Linux the kernel tells whose each end of a local connection
is, so that no password is needed, which Flower's own clients could not send.

A SuperNode of such a run also looks for messages, and for its task's reply, more often than Flower lets one choose.
"""

import os
import socket
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from uvicorn import config
from uvicorn.protocols.http.auto import AutoHTTPProtocol

CONNECTIONS = Path("/proc/net/tcp")
LOOK_SECONDS = 0.2  # instead of 3 for the next message and 0.5 for the reply: the SuperLink is on this machine
REFUSAL = b"HTTP/1.1 403 Forbidden\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def possible() -> bool:
    """Return whether this system tells whose a connection is, tried on one of our own."""
    if not CONNECTIONS.is_file():
        return False
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = server.getsockname()
        with socket.create_connection(ours) as client:
            return owner(CONNECTIONS.read_text(encoding="ascii"), client.getsockname(), ours) == os.geteuid()


def in_hex(host: str, port: int) -> str:
    """Return an IPv4 address as the kernel lists it: the address in the byte order of the machine, and the port."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


def owner(connections: str, peer: tuple[str, int], ours: tuple[str, int]) -> int | None:
    """Return the user id of the process that holds the peer's end of a connection to `ours`; None if no process does.

    `connections` is the kernel's list. An end whose process has closed it is listed with inode 0, as if it were root's.
    """
    pair = f" {in_hex(*peer)} {in_hex(*ours)} "
    for line in connections.splitlines():
        if pair in line and (words := line.split())[9] != "0":
            return int(words[7])
    return None


class OwnUserProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Refuses connections of other users, root included, before a request is read."""

    def connection_made(self, transport: Any) -> None:
        """Look whose the connection is; one that is not certainly this user's is told 403 and closed."""
        peer, ours = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        try:
            admitted = owner(CONNECTIONS.read_text(encoding="ascii"), peer[:2], ours[:2]) == os.geteuid()
        except (OSError, TypeError, ValueError):  # no file descriptor is left, or it is no connection of IPv4
            admitted = False
        super().connection_made(transport)
        if not admitted:
            transport.write(REFUSAL)
            transport.close()


def main() -> None:
    """Run the command; where the system does not tell users apart, as it is."""
    name = sys.argv[1]
    sys.argv = sys.argv[1:]
    if possible():
        cast(dict[str, Any], config.HTTP_PROTOCOLS)["auto"] = OwnUserProtocol
    if name == "flower-supernode":
        from piecework.deploy.supernode import look_every

        look_every(LOOK_SECONDS)
    if name == "flower-superlink":
        from piecework.deploy.busy_superlink import prepare

        prepare()
    (command,) = entry_points(group="console_scripts", name=name)
    command.load()()


if __name__ == "__main__":
    main()
