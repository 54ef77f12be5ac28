"""A SuperLink whose transactions take turns, that hears its nodes, and whose requests pass no middleware that does nothing."""

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.proto.fleet_pb2 import DeactivateNodeRequest, PullMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkState, LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore import sql_mixin
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.date import now
from flwr.supercore.dependencies import runtime
from flwr.supercore.dependencies.task import authenticate_task
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.run import Run
from flwr.superlink import main
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.routers.control.middlewares import ControlAuthenticationMiddleware
from flwr.superlink.routers.fleet import node_auth
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.middleware import Middleware

from piecework.deploy import busy_superlink
from piecework.deploy.busy_superlink import CONCERNS, Only, in_turn, limit_middleware, node_heard, task_heard


class InTurn(SqlObjectStore):
    """Flower's store as `prepare` changes it."""

    session = in_turn(sql_mixin.SqlMixin.session)


def opened(kind: type[SqlObjectStore], folder: Path, monkeypatch: pytest.MonkeyPatch) -> SqlObjectStore:
    """A store in a file, whose transactions are refused when they have waited a millisecond for another, instead of 5 s."""
    pragmas = dict(sql_mixin.SQLITE_PRAGMAS) | {"busy_timeout": "1"}
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", tuple(pragmas.items()))
    store = kind(str(folder / "state.db"))
    store.initialize()
    return store


def test_flower_refuses_a_write_that_waited_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that costs answers. If this fails some day, the turns are no longer needed."""
    store = opened(SqlObjectStore, tmp_path, monkeypatch)
    with store.session(), ThreadPoolExecutor(1) as other:
        store.clear()
        with pytest.raises(OperationalError, match="database is locked"):
            other.submit(store.clear).result()


def test_writes_in_turn_are_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each clears the store in an outer transaction and in one within; the threads cannot all come at different times."""
    store = opened(InTurn, tmp_path, monkeypatch)

    def write() -> int:
        with store.session():
            store.clear()
            return len(store)

    with ThreadPoolExecutor(16) as threads:
        assert [each.result() for each in [threads.submit(write) for _ in range(200)]] == [0] * 200


def test_a_turn_ends_with_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(InTurn, tmp_path, monkeypatch)
    with pytest.raises(ZeroDivisionError), store.session():
        store.clear()
        raise ZeroDivisionError
    with ThreadPoolExecutor(1) as other:
        other.submit(store.clear).result(30)


@pytest.fixture
def state() -> LinkState:
    """Flower's own, in memory."""
    return LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()).state()


def request_of(message: Any) -> Any:
    return SimpleNamespace(state=SimpleNamespace(protobuf_request=message))


def status_of(state: LinkState, node: int) -> str:
    (found,) = state.get_node_info(node_ids=[node])
    return str(found.status)


def test_a_request_is_a_sign_of_life_of_its_node(state: LinkState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node that signed it, unless it says that the node goes; the next ten seconds nothing is noted."""
    node = state.create_node("", "", secrets.token_bytes(32), heartbeat_interval=30)
    noted = list[int]()
    acknowledge = state.acknowledge_node_heartbeat

    def noting(node_id: int, interval: float) -> bool:
        noted.append(node_id)
        return acknowledge(node_id, interval)

    monkeypatch.setattr(state, "acknowledge_node_heartbeat", noting)
    check = node_heard(lambda request: None, lambda request: state)
    check(request_of(DeactivateNodeRequest(node_id=node)))
    assert (status_of(state, node), noted) == ("registered", [])
    for _ in range(3):
        check(request_of(PullMessagesRequest(node=Node(node_id=node))))
    assert (status_of(state, node), noted) == ("online", [node])


def test_a_request_that_is_not_signed_is_none(state: LinkState) -> None:
    node = state.create_node("", "", secrets.token_bytes(32), heartbeat_interval=30)

    def refuse(request: Any) -> None:
        raise PermissionError

    with pytest.raises(PermissionError):
        node_heard(refuse, lambda request: state)(request_of(PullMessagesRequest(node=Node(node_id=node))))
    assert status_of(state, node) == "registered"


def test_a_request_is_a_sign_of_life_of_its_task(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ServerApp's, which Flower ends when a minute has passed without one; here by a clock that is put forward."""
    clock = {"ahead": 0.0}
    monkeypatch.setattr(in_memory_corestate, "now", lambda: now() + timedelta(seconds=clock["ahead"]))
    monkeypatch.setattr(busy_superlink, "HEARD_SECONDS", -1)
    state.run_ids[1] = RunRecord(run=Run.create_empty(run_id=1))
    task = state.create_task(TaskType.SERVER_APP, run_id=1)
    token = state.claim_task(task)
    assert state.activate_task(task)

    def task_of(_: Any, token: str, state: Any) -> Any:
        if (found := state.get_task_by_token(token)) is None:
            raise PermissionError
        return found

    check = task_heard(task_of)
    for clock["ahead"] in (50.0, 100.0, 150.0):
        assert check(None, token, state).task_id == task
    clock["ahead"] = 220.0
    with pytest.raises(PermissionError):
        check(None, token, state)


def test_the_superlink_is_changed_and_all_its_middleware_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are those of Flower 1.41 and 1.42."""
    chosen, session, authenticate = main._get_middleware(), sql_mixin.SqlMixin.session, node_auth.authenticate_node
    monkeypatch.setattr(main, "_get_middleware", lambda: chosen)
    monkeypatch.setattr(sql_mixin.SqlMixin, "session", session)
    monkeypatch.setattr(node_auth, "authenticate_node", authenticate)
    monkeypatch.setattr(runtime, "authenticate_task", authenticate_task)
    busy_superlink.prepare()
    assert node_auth.authenticate_node is not authenticate
    assert runtime.authenticate_task is not authenticate_task
    assert sql_mixin.SqlMixin.session is not session
    names = [each.cls.__name__ for each in chosen]
    assert set(CONCERNS) <= set(names)
    assert [each.cls.__name__ for each in main._get_middleware()] == [
        "Only" if name in CONCERNS else name for name in names
    ]


@pytest.mark.parametrize(("path", "passed"), [("/v1/fleet/pull-messages", 204), ("/v1/control/list-runs", 500)])
def test_middleware_sees_the_requests_that_concern_it(path: str, passed: int) -> None:
    """Flower's own: without an account plugin it refuses every request of the Control API."""
    sent = list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    middleware = limit_middleware(Middleware(ControlAuthenticationMiddleware))
    guarded = middleware.cls(app, *middleware.args, **middleware.kwargs)
    assert isinstance(guarded, Only)
    scope = {"type": "http", "path": path, "method": "POST", "headers": [], "query_string": b"", "app": Starlette()}
    try:
        asyncio.run(guarded(scope, receive, send))
        status = sent[0]["status"]
    except Exception as error:
        status = 500
        assert "not initialized" in str(error)
    assert status == passed
