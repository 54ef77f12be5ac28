"""The command that shows runs in a browser while they go on."""

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piecework.commands.base import Json, err, out, user_errors
from piecework.commands.results import results

if TYPE_CHECKING:
    from uvicorn import Server

PORT = 8321  # the same whenever it is started, so that an open page finds the next server


@results.command()
def serve(
    runs: Annotated[Path, typer.Argument(help="a folder in or below which runs are")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="the address to listen on; others than this make the runs readable to others")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = PORT,
    as_json: Json = False,
) -> None:
    """Show runs in a browser while they go on: their states, curves, clients and failures. It changes nothing."""
    with user_errors(as_json):
        from piecework.serve.app import is_local

        listening = listen_on(host, port, runs)
        address = url_of(listening, host)
        if not is_local(host):
            warning = f"warning: whoever reaches {address} can read the runs in {runs}: there is no password"
            err.print(warning, style="bold", soft_wrap=True, highlight=False)
        if as_json:
            print(json.dumps({"url": address}), flush=True)
        else:
            out.print(f"{runs}: {address} (Ctrl-C ends it)", soft_wrap=True, highlight=False)
        make_server(runs, host).run(sockets=[listening])


def listen_on(host: str, port: int, runs: Path) -> socket.socket:
    """Return a listening socket. Raises ValueError, which says what to do, if that or the folder is not possible."""
    from piecework.report.page import graph_objects

    if not runs.is_dir():
        raise ValueError(f"{runs} is not a folder: name the folder in which runs are (piecework run writes to runs)")
    graph_objects()  # says what to install
    family, *_ = _resolve(host, port)
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise ValueError(f"{host}, port {port}: {error.strerror}; --port 0 takes a free one") from error
    return listening


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"--host {host}: {error.strerror}; give an address of this machine") from error
    return family, str(address[0])


def url_of(listening: socket.socket, host: str) -> str:
    """Return the address of the pages; of all addresses of this machine, one by its name."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"http://{name}:{listening.getsockname()[1]}/"


def make_server(runs: Path, host: str) -> "Server":
    """Return a server of the pages about these runs; its `run` takes the sockets and answers until a signal ends it."""
    import uvicorn

    from piecework.serve.app import make_app

    config = uvicorn.Config(
        make_app(runs, host),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)
