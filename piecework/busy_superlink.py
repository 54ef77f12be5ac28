"""What Flower's SuperLink needs where many nodes answer at once: writes to its database in turn, and no idle middleware.

SQLite lets one transaction write. The SuperLink serves 40 requests at once, and a transaction that has waited five seconds for
the others is refused ("database is locked"). The request then fails, and what the node wanted to send is lost, because a
SuperNode tries again only if it is told 502, 503 or 504. Here a transaction waits until the one before it has ended.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

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
    chosen = link._get_middleware
    link._get_middleware = lambda: [concerned(each) for each in chosen()]


def in_turn(session: Any) -> Any:
    """Return a method like Flower's `session`, of which one is open in this process at a time; within it others are nested."""
    turn, within = threading.Lock(), ContextVar("within", default=False)

    @contextmanager
    def taken(self: Any) -> Iterator[Any]:
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

    return taken


class Only:
    """ASGI middleware that hands requests to another one if their path begins with `prefix`, and else past it."""

    def __init__(self, app: ASGIApp, middleware: Middleware, prefix: str) -> None:
        self.app, self.prefix = app, prefix
        self.inner: ASGIApp = middleware.cls(app, *middleware.args, **middleware.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        concerned = scope["type"] == "http" and scope["path"].startswith(self.prefix)
        await (self.inner if concerned else self.app)(scope, receive, send)


def concerned(middleware: Middleware) -> Middleware:
    """Return middleware that costs nothing for the paths with which Flower's does nothing.

    Each layer takes a request half a millisecond of the SuperLink's only core, with a task and two channels of its own.
    """
    prefix = CONCERNS.get(getattr(middleware.cls, "__name__", ""))
    return Middleware(Only, middleware=middleware, prefix=prefix) if prefix else middleware
