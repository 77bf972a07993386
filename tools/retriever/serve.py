"""Start and supervision of a server's worker processes.

Each worker listens on the port for itself (SO_REUSEPORT): the system spreads connections evenly. One that dies is
started anew; when the parent is gone, whatever ended it, the workers end too.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import resource
import signal
import socket
import sys
import threading
import time
from types import FrameType

import uvicorn

from agentrl.errors import ConfigError
from agentrl.system.client_bounds import ACCEPTED_AT_ONCE, Listener
from agentrl.system.front import metered
from tools.retriever.server import Worker, mode_of, open_index
from tools.retriever.settings import Settings

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60
"""Seconds that an idle connection is kept: longer than clients keep theirs, who must be the ones to close it."""
STOP_SECONDS = 5
"""Seconds for requests under way when the server is stopped."""
_HOPELESS = 3
"""Number of workers, dying one after the other within seconds of their start, at which the server gives up."""
_EARLY = 5.0


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises ConfigError, DataError: the index cannot be served, or the port is taken.
    """
    begun = time.perf_counter()
    index = open_index(settings)
    mode = mode_of(settings, index)
    with _listener(settings, shared=False) as probe:
        settings = settings.model_copy(update={"port": probe.getsockname()[1]})
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    opened = time.perf_counter() - begun
    print(
        f"{settings.index}: {len(index):,} documents, {mode} search, opened in {opened:.1f} s; "
        f"POST http://{host}:{settings.port}/retrieve, {settings.workers} worker{'s' * (settings.workers > 1)}",
        flush=True,
    )
    if settings.workers == 1:
        _work(settings, parent=None)
    else:
        with _listener(settings, shared=True):  # holds the port; only workers listen
            _supervise(settings)


def _supervise(settings: Settings) -> None:
    context = multiprocessing.get_context("spawn")
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)

    def start() -> tuple[multiprocessing.process.BaseProcess, float]:
        process = context.Process(target=_work, args=(settings, os.getpid()), daemon=True)
        process.start()
        return process, time.monotonic()

    workers = [start() for _ in range(settings.workers)]
    early = 0
    try:
        while not stopped:
            multiprocessing.connection.wait([process.sentinel for process, _ in workers], timeout=0.5)
            for place, (process, since) in enumerate(workers):
                if process.is_alive() or stopped:
                    continue
                early = early + 1 if time.monotonic() - since < _EARLY else 0
                if early >= _HOPELESS:
                    raise ConfigError(f"workers end as soon as they start (status {process.exitcode}): see above")
                print(f"worker {process.pid} ended with status {process.exitcode}; starting another", file=sys.stderr)
                workers[place] = start()
    finally:
        for process, _ in workers:
            process.terminate()
        for process, _ in workers:
            process.join(STOP_SECONDS + 2)
            process.kill()


def _work(settings: Settings, parent: int | None) -> None:
    """Run one worker, in this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is one
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    config = uvicorn.Config(
        Worker(settings).app(),
        http=metered(settings.max_body),
        log_config=None,
        access_log=False,
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        backlog=ACCEPTED_AT_ONCE,
    )
    with _listener(settings, shared=parent is not None) as listener:
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            return


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _listener(settings: Settings, *, shared: bool) -> socket.socket:
    """Bind a socket that does not listen yet. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = Listener(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen at {settings.host} port {settings.port}: {error.strerror}") from error
    return listener
