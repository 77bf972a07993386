"""Serve an environment by HTTP: `python serve.py ENVIRONMENT.py`.

This file runs in the environment's own Python, 3.9 or newer, and needs the standard library alone. The environment is
a Python file with four functions, and perhaps a fifth:

    tasks(split, seed, count, **options)    yields tasks: dicts with a `prompt`, perhaps `tools`, and anything else
    start(task, seed)                       returns (episode, observation); the observation may be None
    step(episode, action)                   returns {"observation": text, "reward": number, "done": bool, ...}
    score(episode)                          returns a number, or a dict with `score` and further numbers; None: no score
    close(episode)                          optional
    configured(task, **options)             optional: returns what a task takes from the entry's options

Tasks are rows of data, which may come from anywhere: no task names a module, a server, a file or a data set. The dict
that `configured` returns is added to the task that `start` gets. A row is refused where it has another value under a
name of that dict, or where `configured` raises. A `start` that raises BlockingIOError has no place now; it is asked
again until it has one.

A file whose code asks the policy itself has, in place of `start`, `step` and `score`:

    async play(task, seed, ask)             plays an episode and returns what `score` returns

`await ask(messages, tools)` returns the policy's turn, {"text": text, "calls": [{"id", "name", "arguments"}]}. The
messages are the whole conversation: the last request's, the turn, and the answer to it. It raises EOFError where
the episode is cut, at a limit of turns or tokens. A task without a `prompt` gets its first request's.

A task with several players lists their `roles`. Then `start` returns (episode, {"role": ..., "observation": ...}), a
step names the `role` that moves next, whose observation it has, and `score` returns {"scores": {role: number}}.

Each episode has a thread of its own, in which its functions are called; all `play` share one event loop. With
`SERIAL = True` in the file, one call runs at a time. A request names its session and its number in the session, so a
repeated request gets the same answer.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import importlib.util
import ipaddress
import json
import os
import queue
import re
import resource
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

PROTOCOL = 2
KEY = "AGENTRL_ENVIRONMENT_KEY"
"""Environment variable with the key that requests must bring; without it one is made and printed."""
MARK = "AGENTRL_SIDECAR"
"""Environment variable by which the processes that a sidecar started are found again."""
MOST_BODY = 64 << 20
MOST_HANGING = 64
"""Closed episodes whose last call still runs, from which on no episode is begun."""
IDLE_SECONDS = 3600.0
"""Seconds without a request after which an episode is closed: its client is gone."""
CLOSE_SECONDS = 2.0
"""Most seconds that the answer to a close waits for the user's `close`."""
MOST_ERROR = 16 << 10
MOST_TEXT = 1 << 19
"""Characters of an observation or of an answer, more than any turn is shown; a longer one keeps both ends."""
MOST_CAUSES = 100
"""Most errors of one chain of causes that are named."""
MOST_LOG = 4 << 20
"""Bytes of the log from which on all but its end are cut away."""
REQUEST_SECONDS = 30.0
"""Seconds in which the head and the body of a request must arrive; an idle connection is closed after them, too."""
ANSWER_SECONDS = 600.0
"""Seconds in which a client must take an answer."""
LOOK_EVERY = 0.5
GONE = "no such session: it was closed, or the server was started again"


class Refused(Exception):
    """Request that breaks the protocol."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class RefusedRow(Exception):
    """Row whose task the entry does not have."""


class Session:
    """One episode: its state, and the thread in which the environment is called."""

    def __init__(self, call: Callable[..., bytes]) -> None:
        self.used = time.monotonic()
        self.state: Any = None
        self.ended_at: int | None = None
        self._call = call
        self._jobs: queue.SimpleQueue[tuple[Future[bytes], Callable[[], object]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._number, self._ended = -1, False
        self._answer: Future[bytes] = Future()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def ask(self, number: int, work: Callable[[], object]) -> bytes:
        """Run request `number` in the session's thread; a repeated one gets the answer of the first."""
        with self._lock:
            self.used = time.monotonic()
            if number != self._number:
                if self._ended:
                    raise Refused(410, GONE)
                if number != self._number + 1:
                    raise Refused(409, f"expected request {self._number + 1} of the session, found {number}")
                self._number, self._answer = number, Future()
                self._jobs.put((self._answer, work))
            answer = self._answer
        return answer.result()

    def end(self, close: Callable[[Any], object] | None) -> Future[bytes]:
        """Close the episode after the call that runs. Returns a future, done when `close` has ended."""
        closed: Future[bytes] = Future()
        with self._lock:  # what is asked after it finds no thread
            self._ended = True
            self._jobs.put((closed, lambda: None if self.state is None or close is None else close(self.state)))
            self._jobs.put(None)
        return closed

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            answer, work = job
            answer.set_result(self._call(work))


@dataclass
class Asked:
    """An episode of `play`, which calls it for a turn: the request that waits, and the coroutine."""

    messages: list[dict[str, Any]] | None = None
    """Conversation of the request; None: `play` has ended."""
    tools: list[Any] = field(default_factory=list)
    answer: Any = None
    """Future of the turn."""
    running: Future[Any] = field(default_factory=Future)
    requests: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    async def __call__(self, messages: list[dict[str, Any]], tools: list[Any] | tuple[()] = ()) -> Any:
        """Wait for the policy's turn."""
        answer = asyncio.get_running_loop().create_future()
        self.requests.put((*json.loads(json.dumps([messages, tools])), answer))  # a copy: the caller's list grows
        return await answer

    def wait(self) -> None:
        """Wait for the next request, or for the end, whose error is raised."""
        self.messages, self.tools, self.answer = self.requests.get()
        if self.messages is None:
            self.running.result()


class Asking:
    """The functions `tasks`, `start`, `step`, `score` and `close`, made of a file's `tasks` and `play`."""

    def __init__(self, module: Any) -> None:
        self._module, self._loop = module, asyncio.new_event_loop()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:  # SystemExit and KeyboardInterrupt of an episode leave the loop of all, and are its error already
            with suppress(BaseException):
                self._loop.run_forever()

    def tasks(self, split: str, seed: int, count: int, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield tasks. The first one is played with an empty turn, so that errors of `play` come before training."""
        for number, task in enumerate(islice(self._module.tasks(split, seed, count, **options), count)):
            if "prompt" in task:  # which its row keeps apart
                task = {**task, "prompt_digest": _said(task["prompt"])}
            if number == 0 or "prompt" not in task:
                episode, _ = self.start(with_configured(self._module, task, options), seed)
                try:
                    if "prompt" not in task:
                        known = {"prompt": episode.messages, "tools": episode.tools, "request": _digest(episode)}
                        task = {**task, **known}
                    if number == 0 and episode.messages is not None:
                        self.step(episode, {"text": "", "calls": []})
                        self.score(episode)
                finally:
                    self.close(episode)
            yield task

    def start(self, task: dict[str, Any], seed: int) -> tuple[Asked, None]:
        episode = Asked()
        episode.running = asyncio.run_coroutine_threadsafe(self._module.play(task, seed, episode), self._loop)
        episode.running.add_done_callback(lambda _: episode.requests.put((None, [], None)))
        episode.wait()
        if episode.messages is None:
            raise RuntimeError("play ended before it asked for a turn")
        if task.get("request", found := _digest(episode)) != found:
            self.close(episode)
            raise ValueError("the task's first request is another one than when its row was made; make the rows again")
        if task.get("prompt_digest", found := _said(episode.messages)) != found:
            self.close(episode)
            raise ValueError(
                f"expected the task's prompt as the first request, found {episode.messages!r:.300}; leave `prompt` out "
                "of the task, so that the first request is its prompt"
            )
        if "prompt_digest" in task and episode.tools and episode.tools != task.get("tools"):
            self.close(episode)
            raise ValueError("its first request has other tools than the task; give the task the same `tools`")
        return episode, None

    def step(self, episode: Asked, action: dict[str, Any]) -> dict[str, Any]:
        before, tools, calls = episode.messages or [], episode.tools, action["calls"]
        self._loop.call_soon_threadsafe(_answer, episode.answer, action)
        episode.wait()
        if episode.messages is None:
            return {"answers": [""] * len(calls), "done": True}
        now = len(before)
        turn = episode.messages[now]["role"] if len(episode.messages) > now else None
        if episode.messages[:now] != before or turn != "assistant":
            raise ValueError(
                "it asks for a turn with messages that do not continue those of its last request, e.g. a summary, or "
                "a second conversation, as rewards that compare several answers need: not supported"
            )
        if episode.tools != tools:
            raise ValueError(
                "it asks with other tools than before the turn; a conversation keeps the tools of its task"
            )
        answers, user = _answers(episode.messages[now + 1 :], [call["id"] for call in calls])
        return {"answers": answers, "observation": user}

    def score(self, episode: Asked) -> Any:
        if episode.messages is not None:
            self._loop.call_soon_threadsafe(_answer, episode.answer, EOFError("the episode is over"))
            episode.wait()
            if episode.messages is not None:
                raise RuntimeError("play asks for another turn after the episode was cut")
        return episode.running.result()

    def close(self, episode: Asked) -> None:
        episode.running.cancel()


def _said(prompt: Any) -> int:
    """Digest what a prompt says, a text or messages."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return zlib.crc32(json.dumps([(one.get("role"), one.get("content") or "") for one in messages]).encode())


def _answers(messages: list[dict[str, Any]], ids: list[str]) -> tuple[list[str], str | None]:
    """Read the answers to a turn: a text for each call of `ids`, and the next user turn. Raises ValueError."""
    answers, user = dict.fromkeys(ids, ""), list[str]()
    for one in messages:
        role, content, call = one["role"], one.get("content"), str(one.get("tool_call_id"))
        if not isinstance(content, str) or not (role == "user" or (role == "tool" and call in ids)):
            raise ValueError(
                "expected texts of the role `tool`, each with the `tool_call_id` of a call of the turn, and `user` "
                f"after the turn, found {one!r:.200}"
            )
        if role == "user":
            user.append(content)
        else:
            answers[call] = content
    return [answers[one] for one in ids], "\n\n".join(user) or None


def _answer(waiting: asyncio.Future[Any], answer: Any) -> None:
    if waiting.done():  # of an episode that was closed
        return
    if isinstance(answer, EOFError):
        waiting.set_exception(answer)
    else:
        waiting.set_result(answer)


def with_configured(module: Any, task: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return a row's task with what it takes from the entry's options. Raises RefusedRow."""
    if not callable(configured := getattr(module, "configured", None)):
        return task
    try:
        own = configured(task, **options)
    except Exception as error:
        raise RefusedRow(f"{type(error).__name__}: {error}") from error
    for name, value in own.items():
        if (found := task.get(name, value)) != value:
            raise RefusedRow(f"its {name} is {found!r:.80}, and the entry's is {value!r:.80}")
    return {**task, **own}


def _digest(episode: Asked) -> int:
    return zlib.crc32(json.dumps([episode.messages, episode.tools]).encode())


class Environment:
    """Functions of the user's file, and the sessions that use them."""

    def __init__(self, file: str) -> None:
        self.file = file
        # At the end, so that a file called like a package that it imports does not hide it. An adapter is called like
        # its package, and must not stand for a package that is missing.
        own, folder = Path(__file__).resolve().parent, Path(file).resolve().parent
        beside = [] if folder == own / "adapters" else [str(folder)]
        sys.path[:] = [*(one for one in sys.path if one != str(own)), *beside, str(Path.cwd())]
        spec = importlib.util.spec_from_file_location("environment_file", file)
        if spec is None or spec.loader is None:
            raise SystemExit(f"{file}: expected a Python file")
        module = sys.modules["environment_file"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        plays = callable(getattr(module, "play", None))
        wanted = ("tasks",) if plays else ("tasks", "start", "step", "score")
        missing = [name for name in wanted if not callable(getattr(module, name, None))]
        if missing:
            raise SystemExit(
                f"{file}: it has no function {', '.join(missing)}; needed are tasks, and start, step and score or play"
            )
        self.module: Any = Asking(module) if plays else module
        self._file_module = module
        self._serial = threading.Lock() if getattr(module, "SERIAL", False) and not plays else None
        self._sessions: dict[str, Session] = {}
        self._closed: list[Session] = []
        self._lock = threading.Lock()

    def answer(self, path: str, asked: dict[str, Any]) -> bytes:
        """Answer one request. Raises Refused."""
        if path == "/v1/environment":
            return _encoded({"protocol": PROTOCOL, "file": self.file, "python": sys.version.split()[0]})
        if path == "/v1/tasks":
            return self._call(lambda: self._tasks(asked))
        if path == "/v1/start":
            return self._start(asked)
        if path == "/v1/close":
            with self._lock:
                closed = self._close(self._sessions.pop(asked["session"], None))
            if closed is not None:  # the process may be ended after the answer
                wait([closed], CLOSE_SECONDS)
            return b"{}"
        with self._lock:
            session = self._sessions.get(asked["session"])
        if session is None:
            raise Refused(410, GONE)
        if path == "/v1/step":
            return session.ask(asked["number"], lambda: self._step(session, asked["number"], asked["action"]))
        if path == "/v1/score":
            return session.ask(asked["number"], lambda: self._score(session))
        raise Refused(404, f"no such path: {path}")

    def _tasks(self, asked: dict[str, Any]) -> object:
        given = self.module.tasks(asked["split"], asked["seed"], asked["count"], **asked.get("options", {}))
        found: list[Any] = []
        for task in given:
            if len(found) == asked["count"]:
                break
            found.append(task)
        return {"tasks": found}

    def _start(self, asked: dict[str, Any]) -> bytes:
        with self._lock:
            now = time.monotonic()
            for name in [name for name, one in self._sessions.items() if now - one.used > IDLE_SECONDS]:
                self._close(self._sessions.pop(name))
            self._closed = [one for one in self._closed if one.thread.is_alive()]
            if len(self._closed) >= MOST_HANGING:
                raise Refused(503, f"the last calls of {len(self._closed)} closed episodes still run")
            session = self._sessions.get(asked["session"])
            if session is None:
                session = self._sessions[asked["session"]] = Session(self._call)

        def begin() -> object:
            try:
                task = with_configured(self._file_module, asked["task"], asked.get("options", {}))
                made = self.module.start(task, asked["seed"])
            except BlockingIOError as error:
                with self._lock:
                    self._close(self._sessions.pop(asked["session"], None))
                return {"full": str(error)}
            if not isinstance(made, tuple) or len(made) != 2:
                raise TypeError(f"start must return (episode, observation), found {made!r:.100}")
            session.state = made[0]
            return bounded(made[1] if isinstance(made[1], dict) else {"observation": made[1]})

        return session.ask(0, begin)

    def _step(self, session: Session, number: int, action: object) -> object:
        if session.ended_at is not None:
            raise RuntimeError(f"step {number} was asked for, but the episode ended at step {session.ended_at}")
        found = self.module.step(session.state, action)
        if not isinstance(found, dict):
            raise TypeError(f"step must return a dict, found {found!r:.100}")
        if found.get("done"):
            session.ended_at = number
        return bounded(found)

    def _score(self, session: Session) -> object:
        found = self.module.score(session.state)
        return found if isinstance(found, dict) else {"score": found}

    def _close(self, session: Session | None) -> Future[bytes] | None:
        if session is None:
            return None
        self._closed.append(session)
        return session.end(getattr(self.module, "close", None))

    def _call(self, work: Callable[[], object]) -> bytes:
        """Encode the result of `work`, or the traceback of its error."""
        try:
            if self._serial is None:
                return _encoded(work())
            with self._serial:
                return _encoded(work())
        except RefusedRow as refused:
            return _encoded({"refused": str(refused)})
        except BaseException as error:  # what ends this thread would leave its request without an answer
            text = traceback.format_exc()
            print(text, file=sys.stderr, flush=True)
            shown = text if len(text) <= MOST_ERROR else "...\n" + text[-MOST_ERROR:]
            return _encoded({"error": shown, "raised": list(map(chain_of, leaves(error)))})


def bounded(found: dict[str, Any]) -> dict[str, Any]:
    """Cut the middle out of long texts of a step: a policy may make them as long as it wants."""

    def cut(value: Any) -> Any:
        is_long = isinstance(value, str) and len(value) > MOST_TEXT
        return value[: MOST_TEXT // 2] + value[-MOST_TEXT // 2 :] if is_long else value

    answers = found.get("answers")
    return {
        **found,
        **({"observation": cut(found["observation"])} if "observation" in found else {}),
        **({"answers": list(map(cut, answers))} if isinstance(answers, (list, tuple)) else {}),
    }


def leaves(error: Any) -> Iterator[BaseException]:
    """Yield the errors of a group of errors; any other error itself."""
    if any(kind.__name__ == "BaseExceptionGroup" for kind in type(error).__mro__):  # which 3.9 does not have
        for one in error.exceptions:
            yield from leaves(one)
    else:
        yield error


def chain_of(error: BaseException | None) -> list[dict[str, Any]]:
    """Name the classes of an error and of those that it was raised from, apart from texts, which may be a policy's."""
    chain: list[dict[str, Any]] = []
    while error is not None and len(chain) < MOST_CAUSES:
        classes = [[kind.__module__.partition(".")[0], kind.__name__] for kind in type(error).__mro__]
        sqlite = str(getattr(error, "sqlite_errorname", ""))
        chain.append({"classes": classes, "status": http_status(error), "sqlite": sqlite})
        error = error.__cause__
    return chain


def http_status(error: BaseException) -> int | None:
    """Find the HTTP status that an error holds, under the names of httpx, aiohttp, requests, urllib and openai."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 400 <= value <= 599:
                return value
    return None


def _encoded(value: object) -> bytes:
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> object:
    """Convert numbers of other libraries."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r:.100} has no form in JSON")


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 with connections that stay open until a request is refused: its body may be no body at all."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    timeout = ANSWER_SECONDS
    server: Server
    environment: Environment
    key = ""
    names: tuple[str, ...] = ("localhost",)
    """Names by which the server may be asked; addresses may always be."""

    def handle_one_request(self) -> None:
        self.server.limit(self.connection, REQUEST_SECONDS)
        super().handle_one_request()

    def finish(self) -> None:
        self.server.limit(self.connection, None)
        super().finish()

    def do_POST(self) -> None:
        try:
            asked = self._read()
            self.server.limit(self.connection, None)
            status, body = 200, self.environment.answer(self.path, asked)
        except Refused as refused:
            status, body = refused.status, _encoded({"detail": str(refused)})
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            status, body = 400, _encoded({"detail": f"no request of this protocol: {type(error).__name__}: {error}"})
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status != 200:
            self.send_header("Connection", "close")  # which closes it here, too
        self.end_headers()
        self.wfile.write(body)
        if status != 200:  # let the answer arrive: a connection that is closed with unread bytes is reset
            with suppress(OSError):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_WR)
                self.connection.settimeout(LOOK_EVERY)
                self.rfile.read1(MOST_ERROR)

    def _read(self) -> dict[str, Any]:
        """Read the request's JSON. Raises Refused, and ValueError where the body is no JSON."""
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
            raise Refused(401, "the key is missing or another")
        host = self.headers.get("Host", "")
        if not _is_address(name := re.sub(r":\d*$", "", host).strip("[]").lower()) and name not in self.names:
            raise Refused(421, f"this is not the server {host!r:.80}; give its name by --name, or ask it by address")
        if (kind := self.headers.get_content_type()) != "application/json":
            raise Refused(415, f"expected Content-Type: application/json, found {kind!r:.80}")
        lengths = self.headers.get_all("Content-Length", [])
        if len(lengths) != 1 or not re.fullmatch(r"\d{1,18}", lengths[0]) or "Transfer-Encoding" in self.headers:
            raise Refused(411, "expected one Content-Length, and no Transfer-Encoding")
        if (length := int(lengths[0])) > MOST_BODY:
            raise Refused(413, f"a request has at most {MOST_BODY} bytes, found {length}")
        content = self.rfile.read(length)
        if len(content) < length:
            raise Refused(400, f"expected {length} bytes, found {len(content)}")
        asked = json.loads(content)
        if not isinstance(asked, dict):
            raise Refused(400, "expected a JSON object")
        return asked

    def log_message(self, format: str, *args: object) -> None:
        pass


def most_connections() -> int:
    """Return three quarters of the files that this process may have open, 8,192 at most."""
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4, 8192)


class Server(ThreadingHTTPServer):
    """Server with a thread for each connection."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._limits: dict[socket.socket, float] = {}
        """Times at which connections are cut, unless their requests have arrived: the next one first."""
        self._open: dict[socket.socket, str] = {}
        """Connections, each with its address."""
        super().__init__(address, handler)
        threading.Thread(target=self._cut_late, daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a connection. Without room for it, the one ends that has waited for a request of its address longest,
        else this one: each connection is a file and a thread."""
        client = str(client_address[0])
        self._open[request] = client
        addresses = list(self._open.values())
        if len(addresses) + addresses.count(client) > most_connections():  # of one address as many as are still free
            ending = next((one for one in list(self._limits) if self._open.get(one) == client), request)
            self._limits.pop(ending, None)
            with suppress(OSError):
                ending.shutdown(socket.SHUT_RDWR)
            if ending is request:
                self.shutdown_request(request)
                return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def limit(self, connection: socket.socket, seconds: float | None) -> None:
        """Cut a connection in so many seconds, or no more."""
        self._limits.pop(connection, None)
        if seconds is not None:
            self._limits[connection] = time.monotonic() + seconds

    def _cut_late(self) -> None:
        while True:
            time.sleep(LOOK_EVERY)
            for connection, ends in list(self._limits.items()):
                if ends < time.monotonic():
                    self._limits.pop(connection, None)
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Leave out broken connections: the client repeats the request."""
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def end_children(mark: str) -> None:
    """Kill the processes that a sidecar started, also those in sessions of their own; `mark`: its value of MARK."""
    wanted, found = f"{MARK}={mark}".encode(), True
    while found:
        found = False
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # of a process that has ended, or another user's
                if wanted in file.read_bytes().split(b"\0") and int(file.parent.name) != os.getpid():
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    found = True


def cut_log() -> None:
    """Keep the end of a long log, the file that the starter reads its last lines of."""
    if (size := os.fstat(2).st_size) > MOST_LOG:  # 0 for a pipe
        end = os.pread(2, MOST_ERROR, size - MOST_ERROR)
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        os.write(2, end)


def end_with(starter: int) -> None:
    """Kill this process, its group and its children when process `starter` is gone or closes our stdin."""
    while os.getppid() == starter:
        readable, _, _ = select.select([0], [], [], LOOK_EVERY)
        if readable and not os.read(0, 1):
            break
        with suppress(OSError):
            cut_log()
    end_children(os.environ.get(MARK, ""))
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Load the environment, then serve it; the first line of stdout is the address, as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("environment", help="Python file with the functions tasks, start, step and score")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: one that is free")
    parser.add_argument("--name", action="append", default=[], help="a further name by which it may be asked")
    parser.add_argument("--starter", type=int, help="id of the process to end with; it holds the other end of stdin")
    given = parser.parse_args()
    if given.starter is not None:
        threading.Thread(target=end_with, args=(given.starter,), daemon=True).start()
    announced = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the environment prints is no announcement
    key = os.environ.pop(KEY, "")
    Handler.environment, Handler.key = Environment(given.environment), key or secrets.token_urlsafe(24)
    names = ("localhost", given.host, socket.gethostname(), *given.name)
    Handler.names = tuple(name.lower() for name in names)
    server = Server((given.host, given.port), Handler)
    told = {"protocol": PROTOCOL, "port": server.server_address[1], **({} if key else {"key": Handler.key})}
    print(json.dumps(told), file=announced, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
