"""The viewer's web server: pages for whoever has the token, on one address.

Every answer forbids scripts that are not the viewer's own files. A request is let in by the token in its address, once,
and by the cookie that it then gets. What does more than read is asked for by POST, and by the viewer's own pages alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, RedirectResponse
from jinja2 import Environment, PackageLoader
from pydantic import BaseModel

from agentrl.errors import UserError
from agentrl.view.export import PAGES, SCRIPTS, Export, Hidden, exported
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


class ReplayBody(BaseModel):
    """Body of the request that starts a replay; see `Wanted`."""

    place: str
    turn: int | None = None
    call: int | None = None
    text: str = ""
    checkpoint: str | None = None
    own_device: bool = False


def page_text(*, follow: bool, replay: bool) -> str:
    """Render the one page, whose scripts show everything else."""
    environment = Environment(loader=PackageLoader("agentrl.view", "pages"), autoescape=True)
    return environment.get_template("page.html").render(follow=follow, replay=replay, scripts=SCRIPTS)


def make_app(viewer: Viewer, token: str, *, follow: bool = False, replays: Replays | None = None) -> FastAPI:
    """Make the server's application; `token` opens it. Without `replays` it reads, and does nothing else."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    cookie, page = f"agentrl_view_{secrets.token_hex(4)}", page_text(follow=follow, replay=replays is not None)

    @app.middleware("http")
    async def guard(request: Request, go_on: Next) -> Response:
        given = request.query_params.get("token")
        if given is not None and _same(given, token):
            response: Response = RedirectResponse(request.url.path, status_code=303)
            response.set_cookie(cookie, token, httponly=True, samesite="strict", path="/")
        elif _same(request.cookies.get(cookie, ""), token):
            if request.method in ("GET", "HEAD") or _is_own(request):
                response = await go_on(request)
            else:
                response = _json({"error": "only the viewer's own pages can ask for this"}, 403)
        else:
            text = "This page opens with the address that the command printed: it ends in ?token=...\n"
            response = Response(text, 403, media_type="text/plain")
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(UserError)
    async def explain(request: Request, error: Exception) -> Response:
        return _json({"error": str(error)}, 404)

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
    def curves(number: int) -> Response:
        return _json(viewer.curves(number))

    @app.get("/api/run/{number}/step/{set}/{step}")
    def step(number: int, set: str, step: int) -> Response:
        return _json(viewer.step(number, set, step))

    @app.get("/api/run/{number}/trajectory/{part}/{row}")
    def one(number: int, part: str, row: int) -> Response:
        return _json(viewer.trajectory((number, part, row)))

    @app.get("/api/run/{number}/prompt/{part}/{row}")
    def same_prompt(number: int, part: str, row: int) -> Response:
        return _json(viewer.same_prompt((number, part, row)))

    @app.get("/api/run/{number}/group/{part}/{group}")
    def group(number: int, part: str, group: int) -> Response:
        return _json(viewer.group(number, part, group))

    @app.get("/api/side")
    def side(m: Annotated[list[str], Query()], window: int | None = None) -> Response:
        return _json(viewer.side_by_side([place_of(one) for one in m], window))


def _add_questions(app: FastAPI, viewer: Viewer) -> None:
    """Add what is chosen among all trajectories: searches, and the file of an export."""

    @app.get("/api/run/{number}/search")
    async def search(
        number: int,
        where: str = "",
        text: str = "",
        regex: str = "",
        status: str = "",
        tool: str = "",
        error: str = "",
        source: str = "",
        reward_from: float | None = None,
        reward_to: float | None = None,
        order: str = "",
        limit: int = 200,
        set: str = "",
        first: int | None = None,
        last: int | None = None,
    ) -> Response:
        question = Question(
            where, text, regex, status, tool, error, source, reward_from, reward_to, order=order, limit=limit
        )
        return _json(await run_in_threadpool(viewer.search, number, question, set, first, last))

    @app.get("/export")
    def export(
        m: Annotated[list[str], Query()],
        leave_out: Annotated[list[str], Query()] = [],  # noqa: B006 - FastAPI copies it
        mask: Annotated[list[str], Query()] = [],  # noqa: B006
    ) -> Response:
        hidden = Hidden.of(leave_out, mask)
        text = exported(viewer, Export([place_of(one) for one in m], hidden))
        headers = {"Content-Disposition": 'attachment; filename="trajectories.html"'}
        return Response(text, media_type="text/html", headers=headers)


def _add_replays(app: FastAPI, replays: Replays) -> None:
    """Add what starts processes."""

    @app.get("/api/run/{number}/replay")
    def options(number: int) -> Response:
        return _json(replays.options(number))

    @app.post("/api/replay")
    def start(body: ReplayBody) -> Response:
        values = body.model_dump() | {"place": place_of(body.place)}
        return _json({"number": replays.start(Wanted(**values))})

    @app.get("/api/replay/{number}")
    def state(number: int) -> Response:
        return _json(replays.answer(number))

    @app.post("/api/replay/{number}/cancel")
    def cancel(number: int) -> Response:
        replays.cancel(number)
        return _json(replays.answer(number))


def place_of(text: str) -> Place:
    """Read a place such as 0/train_000012/17. Raises UserError."""
    number, _, rest = text.partition("/")
    part, _, row = rest.rpartition("/")
    if not (number.isdecimal() and row.isdecimal() and part):
        raise UserError(f"{text!r}: want a trajectory such as 0/train_000012/17: number of the run, file, row")
    return int(number), part, int(row)


def _is_own(request: Request) -> bool:
    """True for a request of the viewer's own pages: other servers of this machine are the same site to a cookie."""
    origin = request.headers.get("origin", "").partition("://")[2]
    return bool(origin) and origin == request.headers.get("host")


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _json(value: object, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")
