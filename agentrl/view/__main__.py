"""`python -m agentrl.view runs/x [runs/y ...]`: look at runs in a browser, on this machine alone."""

from __future__ import annotations

import argparse
import errno
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from agentrl.errors import DataError, UserError
from agentrl.system.addresses import is_loopback
from agentrl.system.client_bounds import ACCEPTED_AT_ONCE, Listener
from agentrl.system.command import exit_status
from agentrl.system.front import fronted, metered
from agentrl.system.publish import published
from agentrl.system.versions import ShowVersion
from agentrl.view.export import COLUMNS, TEXTS, Hidden, chosen, exported
from agentrl.view.questions import CHILDREN
from agentrl.view.replays import Replays
from agentrl.view.run import open_run
from agentrl.view.server import make_app
from agentrl.view.tokens import given_tokens
from agentrl.view.viewer import Viewer

PORT = 8712
MAX_BODY = 8 << 20
"""Bytes of a request: a replay's may have a whole edited answer."""


def parser() -> argparse.ArgumentParser:
    """Make the command line's parser."""
    made = argparse.ArgumentParser(prog="python -m agentrl.view", description=__doc__, allow_abbrev=False)
    made.add_argument("--version", action=ShowVersion, nargs=0, help="print the version of agentrl")
    made.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, s3://bucket/run, or outputs of others")
    made.add_argument("--tokenizer", metavar="FOLDER", type=Path, help="of a model, where none is found by itself")
    made.add_argument("--follow", action="store_true", help="show new steps while the run goes on")
    made.add_argument("--host", default="127.0.0.1", help="address to serve on (%(default)s: this machine alone)")
    made.add_argument("--port", type=int, default=PORT, help="port, 0: any free one (%(default)s)")
    made.add_argument(
        "--replay",
        action=argparse.BooleanOptionalAction,
        help="let pages start replays of runs on this machine (where only this machine reaches the pages: yes)",
    )
    made.add_argument(
        "--trust", action="store_true", help="let replays take code, commands and hosts, too, from a run's config"
    )
    export = made.add_argument_group("write one HTML file instead of serving")
    export.add_argument("--export", metavar="FILE.html", type=Path, help="the file, which opens without a network")
    export.add_argument("--where", default="", help="SQL condition of the trajectories that are exported")
    export.add_argument("--steps", default="", help="only of these steps, e.g. 10,12")
    export.add_argument("--limit", type=int, default=64, help="at most so many, the newest first (%(default)s)")
    export.add_argument("--leave-out", default="", metavar="COLUMNS", help=f"of {', '.join(COLUMNS)}")
    export.add_argument(
        "--mask", default="", metavar="COLUMNS", help=f"of {', '.join(TEXTS)}: show how long it is only"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Serve or export, and return the process's exit status (see `agentrl.system.command`)."""
    options = parser().parse_args(argv)
    return exit_status(lambda: write_export(options) if options.export else serve(options))


def open_runs(options: argparse.Namespace) -> Viewer:
    """Open all runs that are named. Raises UserError."""
    tokens = None if options.tokenizer is None else given_tokens(options.tokenizer)
    return Viewer([open_run(url, tokens) for url in options.runs])


def serve(options: argparse.Namespace) -> None:
    """Serve until interrupted. Raises UserError when a run or the port cannot be opened."""
    viewer = open_runs(options)
    token = secrets.token_urlsafe(24)
    with listening(options.host, options.port) as listener:
        port = listener.getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        if not is_loopback(options.host):
            print(
                f"warning: {options.host} can be reached from other machines, and nothing is encrypted", file=sys.stderr
            )
        print(f"open http://{host}:{port}/?token={token}   (Ctrl-C ends it)", flush=True)
        CHILDREN.ready()
        replays = Replays(viewer, trust=options.trust) if may_replay(options) else None
        app = make_app(viewer, token, names=names_of(options.host), follow=options.follow, replays=replays)
        config = configured(app)
        try:
            with suppress(KeyboardInterrupt):  # it is how the viewer ends
                uvicorn.Server(config).run(sockets=[listener])
        finally:
            if replays is not None:
                replays.close()


def configured(app: ASGIApp) -> uvicorn.Config:
    """Configure the server: bounds on its clients, few words."""
    return uvicorn.Config(
        fronted(app, MAX_BODY, lambda status, detail: PlainTextResponse(f"{detail}\n", status)),
        http=metered(MAX_BODY),
        backlog=ACCEPTED_AT_ONCE,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
    )


def names_of(host: str) -> set[str]:
    """Names by which the viewer may be opened: this machine's names where other machines reach it, and --host."""
    return {host} if is_loopback(host) else {host, socket.gethostname(), socket.getfqdn()}


def may_replay(options: argparse.Namespace) -> bool:
    """Check whether pages may start replays: by default where the address is this machine's alone."""
    return is_loopback(options.host) if options.replay is None else bool(options.replay)


def listening(host: str, port: int) -> socket.socket:
    """Open the socket. Raises UserError in words when it is in use, or the address is not this machine's."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = Listener(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((host, port))
            listener.listen()
        except BaseException:
            listener.close()
            raise
        return listener
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--port={port} is in use, perhaps by another viewer: end that one, or give another port (0: any)"
            ) from error
        raise UserError(f"--host={host} --port={port} cannot be served on: {error}") from error


def write_export(options: argparse.Namespace) -> None:
    """Write the file. Raises UserError for a choice that means nothing."""
    viewer = open_runs(options)
    try:
        steps = [int(one) for one in options.steps.split(",") if one]
    except ValueError as error:
        raise DataError(f"--steps={options.steps}: want numbers such as 10,12") from error
    hidden = Hidden.from_names(_names(options.leave_out), _names(options.mask))
    places = [
        place
        for number in range(len(options.runs))
        for place in chosen(viewer, number, options.where, steps, options.limit)
    ]
    text = exported(viewer, places[: options.limit], hidden)
    with published(options.export) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"{options.export}: {len(places[: options.limit])} trajectories, {len(text) / 1e6:.2f} MB")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    sys.exit(main())
