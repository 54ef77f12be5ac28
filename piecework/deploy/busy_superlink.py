"""What Flower's SuperLink needs where many nodes answer at once: turns at its database, signs of life, no idle middleware.

SQLite lets one transaction write. The SuperLink serves 40 requests at once, and a transaction that has waited five seconds for
the others is refused ("database is locked"). The request then fails, and what the node wanted to send is lost, because a
SuperNode tries again only if it is told 502, 503 or 504. Here a transaction waits until the one before it has ended.

Nodes and the ServerApp wait five seconds for the answer to a heartbeat. Where all requests take longer, a node that sends one
request after another counts as offline after a minute, and messages to it as failed; the run itself ends in the same way. Here
every request that proves whose it is counts as a heartbeat.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

HEARTBEAT_SECONDS = 30.0  # the interval that SuperNodes promise; after twice the time without one a node is offline
HEARD_SECONDS = 10.0  # for so long who was heard is not noted again
# Middleware of Flower that only passes requests on, but for paths that begin so.
CONTROL, FLEET = "/v1/control/", "/v1/fleet/"
CONCERNS = {
    "ControlSensitiveResponseMiddleware": CONTROL,
    "ControlAuthenticationMiddleware": CONTROL,
    "ControlLicenseMiddleware": CONTROL,
    "ControlEventLogMiddleware": CONTROL,
    "NodeAuthMiddleware": FLEET,
    "FleetEventLogMiddleware": FLEET,
}


def prepare() -> None:
    """Change the SuperLink that this process is about to start."""
    database: Any = import_module("flwr.supercore.sql_mixin")
    link: Any = import_module("flwr.superlink.main")
    database.SqlMixin.session = in_turn(database.SqlMixin.session)
    nodes: Any = import_module("flwr.superlink.routers.fleet.node_auth")
    nodes.authenticate_node = node_heard(nodes.authenticate_node, nodes.get_linkstate)
    tasks: Any = import_module("flwr.supercore.dependencies.runtime")
    tasks.authenticate_task = task_heard(tasks.authenticate_task)
    chosen = link._get_middleware
    link._get_middleware = lambda: [limit_middleware(each) for each in chosen()]


def in_turn(session: Any) -> Any:
    """Return a method like Flower's `session`, of which one is open in this process at a time; within it others are nested."""
    turn, within = threading.Lock(), ContextVar("within", default=False)

    @contextmanager
    def take_turn(self: Any) -> Iterator[Any]:
        if within.get():
            with session(self) as nested:
                yield nested
            return
        with turn:
            token = within.set(True)
            try:
                with session(self) as outer:
                    yield outer
            finally:
                within.reset(token)

    return take_turn


class Heard:
    """When nodes, or tasks, were last noted to be alive, by their numbers."""

    def __init__(self) -> None:
        self.last = dict[int, float]()

    def again(self, number: int) -> bool:
        """Return whether this sign of life is to be noted."""
        due = time.monotonic() - self.last.get(number, -math.inf) > HEARD_SECONDS
        if due:
            self.last[number] = time.monotonic()
        return due


def node_heard(authenticate: Callable[[Any], None], state_of: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return Flower's check of who signed a request, after which the request counts as a heartbeat of its node.

    A request by which a node comes or goes names no node, and is none.
    """
    heard = Heard()

    def check(request: Any) -> None:
        authenticate(request)  # raises HTTPException
        node = getattr(request.state.protobuf_request, "node", None)
        if node is not None and heard.again(node.node_id):
            state_of(request).acknowledge_node_heartbeat(node.node_id, HEARTBEAT_SECONDS)

    return check


def task_heard(authenticate: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's check of whose task a request is of, such as a ServerApp, after which it counts as its heartbeat."""
    heard = Heard()

    def check(request: Any, token: Any, state: Any) -> Any:
        task = authenticate(request, token, state)  # raises HTTPException
        if heard.again(task.task_id):
            state.acknowledge_task_heartbeat(task.task_id)
        return task

    return check


class Only:
    """ASGI middleware that hands requests to another one if their path begins with `prefix`, and else past it."""

    def __init__(self, app: ASGIApp, middleware: Middleware, prefix: str) -> None:
        self.app, self.prefix = app, prefix
        self.inner: ASGIApp = middleware.cls(app, *middleware.args, **middleware.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        concerned = scope["type"] == "http" and scope["path"].startswith(self.prefix)
        await (self.inner if concerned else self.app)(scope, receive, send)


def limit_middleware(middleware: Middleware) -> Middleware:
    """Return middleware that costs nothing for the paths with which Flower's does nothing.

    Each layer takes a request half a millisecond of the SuperLink's only core, with a task and two channels of its own.
    """
    prefix = CONCERNS.get(getattr(middleware.cls, "__name__", ""))
    return Middleware(Only, middleware=middleware, prefix=prefix) if prefix else middleware
