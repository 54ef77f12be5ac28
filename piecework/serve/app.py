"""The application: pages, JSON and the two kinds of reports. It answers GET and HEAD alone, and writes nothing.

A web page of elsewhere cannot read it through a visitor's browser: on a local address only local names are answered (a name
of elsewhere may be made to lead here), and what another site embeds or fetches is refused.
"""

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from piecework.commands.console import printable
from piecework.report.compare import group_runs
from piecework.report.page import POLICY as REPORT_POLICY
from piecework.report.page import STYLE
from piecework.serve import pages
from piecework.serve.describe import address, details, row
from piecework.serve.figures import figures
from piecework.serve.folders import require_plain
from piecework.serve.reading import Runs, ServedRun
from piecework.server_app.records import CheckpointError, RunDir

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = {"list.js", "run.js", "live.js"}
HEADERS = {
    "Content-Security-Policy": pages.POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
UNUSABLE = 422  # the status of a page that damaged records prevent
MOST_COMPARED = 50  # runs on one page


class Json(JSONResponse):
    """A JSON answer in ASCII: a file's name, and so a message, may have characters that no encoding has."""

    def render(self, content: Any) -> bytes:
        """Return the bytes of an answer."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class ReadOnly:
    """Refuses all but GET and HEAD, and what pages of other sites embed or fetch; adds headers that protect the pages."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return  # neither WebSockets nor what servers say when they start

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        asked = Headers(scope=scope)
        foreign = asked.get("sec-fetch-site", "none") not in ("none", "same-origin")
        app: ASGIApp = self.app
        if scope["method"] not in ("GET", "HEAD"):
            app = PlainTextResponse("only GET and HEAD are answered", 405, {"Allow": "GET, HEAD"})
        elif foreign and asked.get("sec-fetch-mode") != "navigate":
            app = PlainTextResponse("pages of other sites may link here, and nothing else", 403)
        await app(scope, receive, send_protected)


def is_local(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def allowed_hosts(host: str) -> list[str]:
    """Return the names under which a server that listens on `host` answers: all, unless that is local.

    Of a Host header, Starlette reads what stands before the first colon: `[` of any IPv6 address, which is no name either.
    """
    return ["127.0.0.1", "localhost", host, *(["["] if ":" in host else [])] if is_local(host) else ["*"]


class Pages:
    """The answers about the runs of a folder."""

    def __init__(self, root: Path) -> None:
        self.runs = Runs(root)
        self.making = asyncio.Semaphore(1)  # a report takes a core for seconds

    def front(self, request: Request) -> Response:
        """The list of runs."""
        return HTMLResponse(pages.list_page(printable(str(self.runs.root))))

    def listed(self, request: Request) -> Response:
        """The list of runs as JSON."""
        try:
            rows = self.runs.list_all(row)
        except OSError as error:
            return Json({"problem": f"{self.runs.root} cannot be read: {error.strerror}"}, 503)
        return Json({"runs": rows, "left_out": self.runs.left_out})

    def run(self, request: Request) -> Response:
        """The page of a run."""
        name = request.path_params["name"]
        found = self.runs.look(name, lambda run: run.found.name)
        return missing(name) if found is None else HTMLResponse(pages.run_page(found, address("report", found)))

    def told(self, request: Request) -> Response:
        """A run as JSON, with its figures unless the browser has those of this version."""

        def show(run: ServedRun) -> dict[str, Any]:
            shown = details(run)
            if run.version != request.query_params.get("have"):
                try:
                    shown["figures"] = figures(run)
                except ValueError as error:
                    shown |= {"figures": [], "no_figures": str(error)}
            return shown

        name = request.path_params["name"]
        found = self.runs.look(name, show)
        return Json({"problem": no_run(name)}, 404) if found is None else Json(found)

    async def report(self, request: Request) -> Response:
        """The report of a run, made now."""
        name = request.path_params["name"]
        found = await run_in_threadpool(self.runs.look, name, lambda run: run)
        if found is None:
            return missing(name)

        def make() -> str:
            from piecework.report.run_page import report_html

            return report_html(plain(found), pages.BACK)

        return await self._made("The report cannot be made", make)

    async def compare(self, request: Request) -> Response:
        """The comparison of the runs that were chosen, made now."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 0 < len(names) <= MOST_COMPARED:
            return problem(f"Choose 1 to {MOST_COMPARED} runs in the list; {len(names)} were chosen.", 400)
        found = {name: await run_in_threadpool(self.runs.look, name, lambda run: run) for name in names}
        if lost := [name for name, run in found.items() if run is None]:
            return missing(lost[0])

        def make() -> str:
            from piecework.report.compare_view import curves_html

            return curves_html(group_runs([plain(run) for run in found.values() if run is not None]), pages.BACK)

        return await self._made("The runs cannot be compared", make)

    async def _made(self, title: str, make: Callable[[], str]) -> Response:
        """Return a self-contained page, or the reason why it cannot be made."""
        async with self.making:
            try:
                made = await run_in_threadpool(lambda: make().encode(errors="replace"))
            except (ValueError, OSError, ImportError) as error:
                return HTMLResponse(pages.message_page(title, printable(str(error))), UNUSABLE)
        kept = "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        return HTMLResponse(made, headers={"Content-Security-Policy": REPORT_POLICY + kept})


def plain(run: ServedRun) -> RunDir:
    """Return the folder of a run of which a report may be made. Raises CheckpointError."""
    if run.found.damage:
        raise CheckpointError(run.found.damage)
    require_plain(run.found.path)
    return run.run_dir


def no_run(name: str) -> str:
    """Return the message for a name that no run has."""
    return f"There is no run {name!r:.200} here."


def missing(name: str) -> Response:
    """Answer that there is no such run."""
    return problem(no_run(name), 404)


def problem(text: str, status: int) -> Response:
    """Answer with a page that says what was wrong."""
    return HTMLResponse(pages.message_page("Not found" if status == 404 else "Not possible", text), status)


def style(request: Request) -> Response:
    """The style sheet: that of reports, and what the live pages have besides."""
    own = (ASSETS / "serve.css").read_text(encoding="utf-8")
    return Response(f"{STYLE}\n{own}", media_type="text/css")


def script(request: Request) -> Response:
    """A script of these pages."""
    name = request.path_params["name"]
    if name not in SCRIPTS:
        return problem(f"There is no {name!r:.200}.", 404)
    return FileResponse(ASSETS / name, media_type="text/javascript")


def plotly(request: Request) -> Response:
    """The installed package's plotly.js, which a browser may keep."""
    import plotly as package

    file = Path(package.__file__).parent / "package_data" / "plotly.min.js"
    return FileResponse(file, media_type="text/javascript", headers={"Cache-Control": "private, max-age=3600"})


async def not_found(request: Request, error: Exception) -> Response:
    """Answer for an address that is none."""
    return problem("There is no such page.", 404)


def make_app(root: Path, host: str) -> Starlette:
    """Return the application that shows the runs of the folder `root` to a server which listens on `host`."""
    made = Pages(root)
    Answer = Callable[[Request], Response | Awaitable[Response]]
    routes: dict[str, Answer] = {
        "/": made.front,
        "/api/runs": made.listed,
        "/api/run/{name:path}": made.told,
        "/run/{name:path}": made.run,
        "/report/{name:path}": made.report,
        "/compare": made.compare,
        "/assets/style.css": style,
        "/assets/{name}": script,
        "/plotly.js": plotly,
    }
    return Starlette(
        routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()],
        middleware=[
            Middleware(ReadOnly),
            Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts(host), www_redirect=False),
        ],
        exception_handlers={404: not_found},
    )
