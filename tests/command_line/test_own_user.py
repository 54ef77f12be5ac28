"""Whose connection it is: a launched SuperLink, on a port that all users of a machine can reach, serves its own user alone."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from flwr.supernode import start_client_internal
from other_users import NOBODY, status_for

from piecework.deploy import supernode
from piecework.engines import own_user, processes
from piecework.engines.own_user import OwnUserProtocol, in_hex, owner, possible
from piecework.engines.processes import superlink

# The server of user 1000 on 127.0.0.1:8000; clients of users 1000 and 1001, and one that its process has closed.
CONNECTIONS = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 639 1 0 100 0 0 10 0
   1: 0100007F:D431 0100007F:1F40 01 00000000:00000000 00:00000000 00000000  1000        0 640 1 0 20 4 30 10 -1
   2: 0100007F:1F40 0100007F:D432 01 00000000:00000000 00:00000000 00000000  1000        0 641 1 0 20 4 30 10 -1
   3: 0100007F:D432 0100007F:1F40 01 00000000:00000000 00:00000000 00000000  1001        0 642 1 0 20 4 30 10 -1
   4: 0100007F:D433 0100007F:1F40 05 00000000:00000000 00:00000000 00000000     0        0 0 1 0 20 4 30 10 -1
"""


@pytest.mark.skipif(in_hex("1.0.0.0", 0) != "00000001:0000", reason="the list is of a little-endian machine")
@pytest.mark.parametrize(("port", "user"), [(0xD431, 1000), (0xD432, 1001), (0xD433, None), (0xD434, None)])
def test_the_kernel_tells_whose_a_connection_is(port: int, user: int | None) -> None:
    assert owner(CONNECTIONS, ("127.0.0.1", port), ("127.0.0.1", 8000)) == user


async def app(_: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server that is guarded as a launched SuperLink is."""
    if not possible():
        pytest.skip("this system does not tell users apart")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        settings = uvicorn.Config(
            app, http=OwnUserProtocol, loop="asyncio", ws="none", lifespan="off", log_level="error"
        )
        server = uvicorn.Server(settings)
        thread = Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


def test_other_users_are_refused(port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert status_for(port) == "200"
    if os.getuid() == 0:
        assert status_for(port, NOBODY) == "403"
    with monkeypatch.context() as patch:
        patch.setattr(own_user, "os", SimpleNamespace(geteuid=lambda: os.geteuid() + 1))
        assert status_for(port) == "403"
    monkeypatch.setattr(own_user, "CONNECTIONS", tmp_path / "cannot-be-opened")
    assert status_for(port) == "403"


def test_a_run_says_when_users_cannot_be_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "process", lambda *_: nullcontext())
    monkeypatch.setattr(processes, "wait_until_healthy", lambda *_: None)
    for connections, warnings in ((own_user.CONNECTIONS, 0 if possible() else 1), (tmp_path / "none", 1)):
        caplog.clear()
        monkeypatch.setattr(own_user, "CONNECTIONS", connections)
        with superlink(SimpleNamespace(port=1)):  # type: ignore[arg-type]
            assert caplog.text.count("every user of this machine can start apps as you") == warnings


def test_a_supernode_looks_for_messages_more_often_than_flower_says(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(start_client_internal, "time", time)  # put back afterwards
    monkeypatch.setattr(time, "sleep", slept.append)
    supernode.look_every(own_user.LOOK_SECONDS)
    for seconds in (3, 0.5, 0.1):
        start_client_internal.time.sleep(seconds)
    assert slept == [0.2, 0.2, 0.1]
    assert start_client_internal.time.time is time.time
