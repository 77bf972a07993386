"""Attribution of failures in user code: to that code, or to the infrastructure that it asked.

Faults of the infrastructure are a closed list; they may pass, and are tried again. Any other error out of a loop, an
interaction, a tool, a scorer or an agent is an error of that code, which would only come again. It becomes a CodeError
that says where. Errors that pass through this package's code alone are not the user's, and stay unchanged.
"""

from __future__ import annotations

import asyncio
import http.client
import inspect
import linecache
import os
import re
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

from agentrl.errors import CodeError, InfrastructureError, UserError
from agentrl.system.cancellation import leaked_cancellation_fails
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.system.metrics import Metrics
from agentrl.system.targets import plain_name

T = TypeVar("T")
Code = Callable[..., object]
Raised: TypeAlias = tuple[set[tuple[str, str]], int | None, str]
"""An error's classes, as package and name, the HTTP status that it holds, and SQLite's name of it."""

FAULTS = (
    *(InfrastructureError, OSError, MemoryError, BrokenExecutor, http.client.HTTPException),  # TimeoutError: OSError
    *(asyncio.IncompleteReadError, subprocess.TimeoutExpired),
    RecursionError,
)
"""Exception classes of Python and of this package by which the infrastructure fails.

RecursionError is among them because any parser raises it for a text that is nested deeply enough. A policy may write
such a text, which must not be able to end a run."""
PATHS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Kinds of OSError about a path that is not as the code expects: errors of the code."""
CLIENTS = frozenset(
    {
        *(("httpx", "HTTPError"), ("httpcore", "NetworkError"), ("aiohttp", "ClientError"), ("urllib3", "HTTPError")),
        *(("openai", "APIError"), ("anthropic", "APIError"), ("grpc", "RpcError"), ("requests", "RequestException")),
        *(("websockets", "WebSocketException"), ("ray", "RayError"), ("torch", "OutOfMemoryError")),
        *(("redis", "ConnectionError"), ("redis", "TimeoutError"), ("playwright", "Error")),
        *(("psycopg", "OperationalError"), ("psycopg2", "OperationalError")),
    }
)
"""Base classes (top-level package, name) of the errors of clients of servers, and of GPUs.

Compared by name, so that no such package is imported for it."""
MISTAKES = frozenset(
    {
        *(("httpx", "UnsupportedProtocol"), ("httpx", "LocalProtocolError"), ("urllib3", "LocationValueError")),
        *(("aiohttp", "InvalidURL"), ("aiohttp", "NonHttpUrlClientError")),
        *(("requests", name) for name in ("MissingSchema", "InvalidSchema", "InvalidURL", "InvalidHeader")),
    }
)
"""Errors (top-level package, name) of such clients about a URL or a header that cannot be sent: errors of the code."""
BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR")
"""Beginnings of SQLite's names of errors that may pass; its OperationalError includes wrong queries, too."""
LATER = (408, 425, 429)
"""HTTP statuses below 500 that mean: not now."""
CONTENT = (400, 413, 422)
"""HTTP statuses that refuse the content of a request.

The content may be the policy's (too long, filtered), and a policy must not be able to end a run."""
TRACEBACK = "Traceback (most recent call last):\n"
CAUSED = "\nThe above exception was the direct cause of the following exception:\n"
STATUS = re.compile(r" (?:Error code: |(?:Client|Server) error '|HTTP Error )?([45]\d\d)\b")
"""HTTP status at the beginning of the text of an error of openai, httpx, requests, urllib or aiohttp."""
SHOWN_FRAMES = 4
SHOWN_CHARACTERS = 500
_INFRASTRUCTURE = ("agentrl", "InfrastructureError")
_PATHS = {("builtins", one.__name__) for one in PATHS}
_FAULTS = {("asyncio", "TimeoutError"), ("concurrent", "TimeoutError")}  # of Python before 3.11
_FAULTS |= CLIENTS | {(one.__module__.partition(".")[0], one.__name__) for one in FAULTS}
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_fault(error: BaseException) -> bool:
    """Check whether the infrastructure failed: by the error's class, or by the class of an error it was raised `from`.

    An error of `MISTAKES` is never a fault. A group of errors is a fault where all of them are.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_fault, error.exceptions))
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and not any(found is one for one in chain):
        chain.append(found)
        found = found.__cause__
    return _is_fault_chain(
        [(_classes(type(one)), _http_status(one), str(getattr(one, "sqlite_errorname", ""))) for one in chain]
    )


def is_told_fault(raised: JSON) -> bool:
    """Do as `is_fault` for an error of another process, which tells its classes apart from any text.

    For each error of a group, or the one error: itself and those that it was raised from, each as `classes` (pairs of
    package and name), `status` and `sqlite`.
    """
    chains = [[_told(as_object(one)) for one in as_list(chain)] for chain in as_list(raised)]
    return bool(chains) and all(map(_is_fault_chain, chains))


def _told(error: dict[str, JSON]) -> Raised:
    status = error.get("status")
    pairs = [one for one in map(as_list, as_list(error.get("classes"))) if len(one) == 2]
    classes = {(str(package), str(name)) for package, name in pairs}
    return classes, status if isinstance(status, int) else None, str(error.get("sqlite"))


def _is_fault_chain(chain: Sequence[Raised]) -> bool:
    return all(MISTAKES.isdisjoint(classes) for classes, _, _ in chain) and any(
        sqlite.startswith(BUSY) or _is_fault(classes, status) for classes, status, sqlite in chain
    )


def read_traceback(output: str) -> tuple[str, bool] | None:
    """Read the last traceback that a Python program wrote: the line that names the error, and whether it is a fault.

    None without a traceback, or for a group of errors. The errors that it was raised `from` count, as in `is_fault`.
    """
    *before, last = output.split(TRACEBACK)
    if not before:
        return None
    chain = [last]
    while len(before) > 1 and CAUSED in before[-1]:
        chain.append(before.pop())
    raised = [next((line for line in part.splitlines() if line[:1].strip()), "") for part in chain]
    if not raised[0]:  # a group's, which is indented
        return None
    named = [line.partition(":") for line in raised]
    classes = [_classes_named(name) for name, _, _ in named]
    statuses = [STATUS.match(text) for _, _, text in named]
    fails = (_is_fault(known, found and int(found[1])) for known, found in zip(classes, statuses, strict=True))
    return raised[0], all(map(MISTAKES.isdisjoint, classes)) and any(fails)


def _classes(kind: type) -> set[tuple[str, str]]:
    return {(one.__module__.partition(".")[0], one.__name__) for one in kind.__mro__}


def _classes_named(name: str) -> set[tuple[str, str]]:
    """Return the classes of an error by its name in a traceback.

    A class that this process has not loaded is taken for the error of a client where its package has such.
    """
    module, _, leaf = name.rpartition(".")
    kind = vars(sys.modules.get(module or "builtins", re)).get(leaf)  # `vars`, so that a lazy module imports nothing
    if isinstance(kind, type):
        return _classes(kind)
    package = module.partition(".")[0]
    return {(package, leaf), *(one for one in CLIENTS if one[0] == package)}


def _is_fault(classes: set[tuple[str, str]], status: int | None) -> bool:
    """Check whether errors of these classes are faults; `status`: HTTP status that the error holds."""
    if _INFRASTRUCTURE in classes:
        return True
    if classes.isdisjoint(_FAULTS):
        return False
    return status >= 500 or status in (*LATER, *CONTENT) if status is not None else classes.isdisjoint(_PATHS)


def _http_status(error: BaseException) -> int | None:
    """Find the HTTP status that an error holds, under the names of httpx, aiohttp, requests, urllib and openai."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 400 <= value <= 599:
                return value
    return None


@contextmanager
def user_code(what: str, code: Code, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise CodeError in place of errors of `code`, called `what` in messages.

    Faults, UserErrors, the classes of `passing`, and errors that no user code had a part in stay as they are. A
    CancelledError without a request to cancel is a fault (see `agentrl.system.cancellation`).
    """
    with leaked_cancellation_fails(what):
        try:
            yield
        except (Exception, SystemExit) as error:
            if isinstance(error, (UserError, *passing)) or is_fault(error):
                raise
            if is_agentrl_code(code) and not _frames(error, code):
                raise
            raise code_error(what, error, code) from error


async def await_user_code(
    what: str, code: Code, call: Callable[[], Awaitable[T]], passing: tuple[type[Exception], ...] = ()
) -> T:
    """Await `call`, a call of `code`. Raises CodeError as `user_code` does, and for a result that cannot be awaited."""
    with user_code(what, code, passing):
        answer = call()
        if inspect.isawaitable(answer):
            return await answer
    raise contract_error(what, code, "it must be a coroutine function (`async def`)")


def collect_numbers(
    what: str, code: Callable[[], Mapping[str, float]], on_error: Callable[[CodeError], None]
) -> Metrics:
    """Return the metrics that `code` gives; on its error, call `on_error` and return no metrics."""
    try:
        with user_code(what, code):
            return Metrics.merged([code()])
    except CodeError as error:
        on_error(error)
        return Metrics()


def code_error(what: str, error: BaseException, code: Code) -> CodeError:
    """Make the CodeError for an error of `code`: its class and text, and the last places in the user's files."""
    while isinstance(error, BaseExceptionGroup):
        error = next((one for one in error.exceptions if not is_fault(one)), error.exceptions[0])
    text = " ".join(str(error)[:SHOWN_CHARACTERS].split())
    text = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
    frames = _frames(error, code)
    problem = f"{type(error).__name__}: {text}".removesuffix(": ")
    if not frames:
        return contract_error(what, code, problem)
    lines = [
        f"  {file}:{line} in {name}: {linecache.getline(file, line).strip()}"
        for file, line, name in frames[-SHOWN_FRAMES:]
    ]
    return CodeError("\n".join([f"{what} ({_name(code)}): {problem}", *lines]), "{}:{}".format(*frames[-1]))


def contract_error(what: str, code: Code, problem: str) -> CodeError:
    """Make the error for `code` that broke its contract, with the place where it is defined."""
    function = inspect.unwrap(getattr(code, "__func__", code))
    compiled = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    # Without Python source there is no place.
    place = "" if compiled is None else f"{Path(compiled.co_filename).absolute()}:{compiled.co_firstlineno}"
    message = f"{what} ({_name(code)}): {problem}" + (f"\n  {place}" if place else "")
    return CodeError(message, place, of_contract=True)


def is_agentrl_code(code: Code) -> bool:
    """Check whether `code` is part of this package."""
    return _package(code) == "agentrl"


def _frames(error: BaseException, code: Code) -> list[tuple[str, int, str]]:
    """List file, line and function of the frames in the user's files, the innermost last.

    The package of `code` is the user's wherever it is installed. Other packages there, and Python's, are libraries.
    """
    package, found = _package(code), []
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")).partition(".")[0]
        is_library = file.startswith(LIBRARIES) or "/site-packages/" in file or "/dist-packages/" in file
        if module != "agentrl" and not file.startswith("<") and (module == package or not is_library):
            found.append((str(Path(file).absolute()), line, frame.f_code.co_name))
    return found


def _package(code: Code) -> str:
    module = getattr(code, "__module__", None) or type(code).__module__
    return str(module).partition(".")[0]


def _name(code: Code) -> str:
    """Return `package.module.Class.method`, with the class of the object."""
    owner = getattr(code, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        kind = owner if isinstance(owner, type) else type(owner)
        return f"{plain_name(kind.__module__)}.{kind.__qualname__}.{getattr(code, '__name__', '')}"
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{plain_name(named.__module__)}.{named.__qualname__}"
