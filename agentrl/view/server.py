"""The viewer's web server: answers for every holder of the token, on one address.

Every answer forbids scripts that are not the viewer's own files. The page and its scripts are the same for everybody;
all data of a run is requested with the token in a header. A browser sends cookies to every port of a machine, and so to
other users' servers; a header goes where the page's own script sends it. Hosts are named by their address, or by a name
given to the viewer: a name of somebody else's may lead to this machine.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from jinja2 import Environment, PackageLoader
from pydantic import BaseModel, Field

from agentrl.errors import UserError
from agentrl.view.export import PAGES, SCRIPTS, Hidden, exported
from agentrl.view.questions import Question
from agentrl.view.record import to_json
from agentrl.view.replays import Replays, Wanted
from agentrl.view.viewer import Place, Viewer

ASSETS = {
    **{f"{name}.js": ("text/javascript", PAGES / f"{name}.js") for name in SCRIPTS},
    "style.css": ("text/css", PAGES / "style.css"),
    "uplot.js": ("text/javascript", PAGES / "vendor" / "uplot.js"),
    "uplot.css": ("text/css", PAGES / "vendor" / "uplot.css"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Next = Callable[[Request], Awaitable[Response]]
Number: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]
"""Number in a request. Larger numbers name nothing; JSON's writer and the files' readers do not take them."""
PLACE = re.compile(r"(\d{1,18})/(.+)/(\d{1,18})")


class ReplayBody(BaseModel):
    """Body of the request that starts a replay; see `Wanted`."""

    place: str
    turn: Number | None = None
    call: Number | None = None
    text: str = ""
    checkpoint: str | None = None
    own_device: bool = False


def page_text(*, follow: bool, replay: bool) -> str:
    """Render the one page, whose scripts show the data."""
    environment = Environment(loader=PackageLoader("agentrl.view", "pages"), autoescape=True)
    return environment.get_template("page.html").render(follow=follow, replay=replay, scripts=SCRIPTS)


def make_app(
    viewer: Viewer,
    token: str,
    *,
    names: Collection[str] = (),
    follow: bool = False,
    replays: Replays | None = None,
) -> FastAPI:
    """Make the server's application; `token` opens it. Without `replays` it only reads.

    names: names for the machine in an address, apart from localhost and its numbers.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page = page_text(follow=follow, replay=replays is not None)

    @app.middleware("http")
    async def guard(request: Request, go_on: Next) -> Response:
        host, path = request.headers.get("host", ""), request.scope["path"]  # request.url's begins with Host's
        if not is_named(host, names):
            known = ", ".join(["localhost", "an address in numbers", *names])
            text = f"Host is {host[:200]!r}: want {known}. Open the address that the command printed.\n"
            response: Response = Response(text, 403, media_type="text/plain")
        elif path == "/" or path.startswith("/static/") or _has_token(request, token):
            response = await go_on(request)
        else:
            response = _json({"error": "want the header Authorization: Bearer TOKEN"}, 403)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(UserError)
    async def explain(request: Request, error: Exception) -> Response:
        return _json({"error": str(error)}, 404)

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        told = [f"{one['loc'][-1]}={one['input']!r:.80}: {one['msg']}" for one in error.errors()]
        return _json({"error": "; ".join(told)}, 422)

    @app.get("/")
    def start() -> Response:
        return Response(page, media_type="text/html")

    @app.get("/static/{name}")
    def asset(name: str) -> Response:
        if name not in ASSETS:
            return _json({"error": f"there is no file {name}"}, 404)
        kind, path = ASSETS[name]
        return FileResponse(path, media_type=kind)

    _add_answers(app, viewer)
    _add_questions(app, viewer)
    if replays is not None:
        _add_replays(app, replays)
    return app


def _add_answers(app: FastAPI, viewer: Viewer) -> None:
    """Add the answers that the pages' scripts ask for."""

    @app.get("/api/runs")
    def runs() -> Response:
        return _json(viewer.overview())

    @app.get("/api/run/{number}")
    def curves(number: Number) -> Response:
        return _json(viewer.curves(number))

    @app.get("/api/run/{number}/step/{set}/{step}")
    def step(number: Number, set: str, step: Number) -> Response:
        return _json(viewer.step(number, set, step))

    @app.get("/api/run/{number}/trajectory/{part}/{row}")
    def one(number: Number, part: str, row: Number) -> Response:
        return _json(viewer.trajectory((number, part, row)))

    @app.get("/api/run/{number}/prompt/{part}/{row}")
    def same_prompt(number: Number, part: str, row: Number) -> Response:
        return _json(viewer.same_prompt((number, part, row)))

    @app.get("/api/run/{number}/group/{part}/{group}")
    def group(number: Number, part: str, group: Number) -> Response:
        return _json(viewer.group(number, part, group))

    @app.get("/api/side")
    def side(m: Annotated[list[str], Query()], window: Number | None = None) -> Response:
        return _json(viewer.side_by_side([place_of(one) for one in m], window))


def _add_questions(app: FastAPI, viewer: Viewer) -> None:
    """Add the answers about all trajectories: searches, and the file of an export."""

    @app.get("/api/run/{number}/search")
    async def search(
        number: Number,
        question: Annotated[Question, Depends()],
        set: str = "",
        first: Number | None = None,
        last: Number | None = None,
    ) -> Response:
        return _json(await run_in_threadpool(viewer.search, number, question, set, first, last))

    @app.get("/export")
    def export(
        m: Annotated[list[str], Query()],
        leave_out: Annotated[list[str], Query()] = [],  # noqa: B006 - FastAPI copies it
        mask: Annotated[list[str], Query()] = [],  # noqa: B006
    ) -> Response:
        hidden = Hidden.from_names(leave_out, mask)
        text = exported(viewer, [place_of(one) for one in m], hidden)
        headers = {"Content-Disposition": 'attachment; filename="trajectories.html"'}
        return Response(text, media_type="text/html", headers=headers)


def _add_replays(app: FastAPI, replays: Replays) -> None:
    """Add the requests that start processes."""

    @app.get("/api/run/{number}/replay")
    def options(number: Number) -> Response:
        return _json(replays.options(number))

    @app.post("/api/replay")
    def start(body: ReplayBody) -> Response:
        values = body.model_dump() | {"place": place_of(body.place)}
        return _json({"number": replays.start(Wanted(**values))})

    @app.get("/api/replay/{number}")
    def state(number: Number) -> Response:
        return _json(replays.answer(number))

    @app.post("/api/replay/{number}/cancel")
    def cancel(number: Number) -> Response:
        replays.cancel(number)
        return _json(replays.answer(number))


def place_of(text: str) -> Place:
    """Read a place such as 0/train_000012/17. Raises UserError."""
    if (found := PLACE.fullmatch(text)) is None:
        raise UserError(f"{text!r:.200}: want a trajectory such as 0/train_000012/17: number of the run, file, row")
    return int(found[1]), found[2], int(found[3])


def is_named(host: str, names: Collection[str]) -> bool:
    """Check whether a request's Host is an address in numbers, localhost, or one of the names."""
    try:
        parts = urlsplit(f"//{host}")
        name = (parts.hostname or "").rstrip(".") if parts.netloc == host else ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in {"localhost", *(one.lower() for one in names)}
    return True


def _has_token(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "").encode("utf-8", "replace")
    return secrets.compare_digest(given, f"Bearer {token}".encode())


def _json(value: object, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")
