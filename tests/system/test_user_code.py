"""Whose fault an exception is, and what is told of one that is the user's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import inspect
import json
import sqlite3
import subprocess
import sys
import traceback
import urllib.error
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import httpx
import openai
import pytest
import requests
import urllib3

from agentrl.agents.task import AgentFailed
from agentrl.engines.contract import EngineError, RequestError
from agentrl.errors import CodeError, ConfigError, DataError, InfrastructureError
from agentrl.remote import FaultKind, RemoteUnavailable
from agentrl.remote.faults import RemoteRefused
from agentrl.system.numbers import finite
from agentrl.system.threads import AbandonedThreads
from agentrl.system.user_code import await_user_code, contract_error, is_fault, read_traceback, user_code
from agentrl.tool.session import ToolInfrastructureError
from tests.naming import assert_names, naming

REQUEST = httpx.Request("POST", "http://127.0.0.1:9/")
DEAD = httpx.ConnectError("refused")


def answered(status: int) -> list[Exception]:
    """What each client raises for an answer of that status."""
    response = httpx.Response(status, request=REQUEST)
    known = SimpleNamespace(real_url=REQUEST.url)
    return [
        httpx.HTTPStatusError("no", request=REQUEST, response=response),
        openai.APIStatusError("no", response=response, body=None),
        aiohttp.ClientResponseError(known, (), status=status),  # type: ignore[arg-type]
        urllib.error.HTTPError("http://x", status, "no", Message(), None),
    ]


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


FAULTS = [
    *(
        EngineError("x"),
        ToolInfrastructureError("x"),
        AgentFailed("x"),
        AbandonedThreads("x"),
        InfrastructureError("x"),
    ),
    *(RemoteUnavailable(FaultKind.CONNECT, "x"), RemoteRefused(400, "too long")),
    *(TimeoutError(), TimeoutError(), ConnectionResetError(), BrokenPipeError(), OSError(113, "no route")),
    *(
        RecursionError(),
        MemoryError(),
        BrokenProcessPool(),
        http.client.IncompleteRead(b""),
        subprocess.TimeoutExpired("x", 1),
    ),
    *(asyncio.IncompleteReadError(b"", 1), urllib.error.URLError("x")),
    *(DEAD, httpx.ReadTimeout("x"), httpx.PoolTimeout("x"), aiohttp.ServerDisconnectedError(), aiohttp.ClientError()),
    *(openai.APIConnectionError(request=REQUEST), openai.APITimeoutError(REQUEST)),
    *(one for status in (400, 408, 413, 422, 429, 500, 503) for one in answered(status)),
    *(caused(RuntimeError("no answer"), DEAD), caused(ValueError(), caused(KeyError(), TimeoutError()))),
    ExceptionGroup("both", [DEAD, ExceptionGroup("inner", [TimeoutError()])]),
]
ERRORS = [
    *(TypeError("x"), AttributeError(), NameError(), KeyError("x"), IndexError(), ValueError(), ZeroDivisionError()),
    *(ImportError(), SyntaxError(), AssertionError(), RuntimeError("x"), NotImplementedError(), SystemExit(1)),
    *(json.JSONDecodeError("x", "y", 0), UnicodeDecodeError("utf-8", b"", 0, 1, "x")),
    *(FileNotFoundError("x"), PermissionError(), IsADirectoryError(), StopIteration(), Exception("x")),
    *(one for status in (401, 403, 404, 405) for one in answered(status)),
    ExceptionGroup("one of both", [DEAD, TypeError("x")]),
    caused(RuntimeError("no answer"), httpx.UnsupportedProtocol("x")),
    *(
        requests.exceptions.InvalidHeader("x"),
        httpx.LocalProtocolError("x"),
        urllib3.exceptions.LocationParseError("x"),
    ),
]


@pytest.mark.parametrize("error", FAULTS, ids=repr)
def test_the_list_of_faults(error: BaseException) -> None:
    assert is_fault(error)
    with pytest.raises(type(error)), user_code("loop", test_the_list_of_faults):
        raise error


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_anything_else_is_an_error_of_the_code(error: BaseException) -> None:
    assert not is_fault(error)
    with pytest.raises(CodeError) as told, user_code("loop x", test_the_list_of_faults):
        raise error
    assert told.value.__cause__ is error
    assert str(told.value).startswith("loop x (tests.system.test_user_code.test_the_list_of_faults): ")


def has_status(error: BaseException) -> bool:
    return any(hasattr(getattr(error, "response", error), name) for name in ("status_code", "status", "code"))


@pytest.mark.parametrize("error", [one for one in (*FAULTS, *ERRORS) if not has_status(one)], ids=repr)
def test_a_traceback_says_the_same_as_the_error_itself(error: BaseException) -> None:
    for one in (error, error.__cause__, getattr(error.__cause__, "__cause__", None)):  # As real ones, with frames.
        with contextlib.suppress(BaseException):
            raise one or error
    written = "".join(traceback.format_exception(error))
    first = "Traceback (most recent call last):\n  File 'x', line 1, in x\nKeyError: 'logged before'\n\n"
    found = read_traceback(f"{first}{written}")
    if isinstance(error, BaseExceptionGroup):
        assert found is None
        return
    assert found is not None
    assert found[0].rpartition(".")[2].startswith(type(error).__name__)
    assert found[1] is is_fault(error)


STATUSES = [
    ("httpx.HTTPStatusError: Client error '{} No' for url 'http://x'", httpx.HTTPStatusError),
    ("openai.NotFoundError: Error code: {} - {{'error': 'port 443'}}", openai.NotFoundError),
    ("requests.exceptions.HTTPError: {} Client Error: No for url: http://x", requests.HTTPError),
    ("urllib.error.HTTPError: HTTP Error {}: No", urllib.error.HTTPError),
    ("aiohttp.client_exceptions.ClientResponseError: {}, message='No', url='x'", aiohttp.ClientResponseError),
    ("anthropic.APIStatusError: Error code: {} - no", None),
]


@pytest.mark.parametrize(("line", "kind"), STATUSES)
def test_a_status_in_a_traceback(line: str, kind: type | None) -> None:
    for status, fails in ((404, False), (401, False), (400, True), (429, True), (503, True)):
        raised = line.format(status)
        assert read_traceback(f"Traceback (most recent call last):\n  a\n{raised}\n") == (raised, fails)


def test_tracebacks_of_libraries_that_are_not_loaded_here_and_texts_without_one() -> None:
    head = "Traceback (most recent call last):\n  File 'x'\n    y\n"
    caused = "\nThe above exception was the direct cause of the following exception:\n\n"
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert "psycopg2" not in sys.modules
    assert read_traceback(f"{head}psycopg2.errors.AdminShutdown: gone\n") == (
        "psycopg2.errors.AdminShutdown: gone",
        True,
    )
    assert read_traceback(f"{head}mine.Broken: x\n") == ("mine.Broken: x", False)
    assert read_traceback(f"{head}Broken\n") == ("Broken", False)
    assert read_traceback(f"{head}TimeoutError\n{caused}{head}mine.Broken: x\n") == ("mine.Broken: x", True)
    assert read_traceback(f"{head}TimeoutError\n{during}{head}mine.Broken: x\n") == ("mine.Broken: x", False)
    assert read_traceback(f"{head}a\0b\n") == ("a\0b", False)
    for text in ("", "ValueError: x", "Error: 404\n    at x.js:1"):
        assert read_traceback(text) is None


def test_what_failed_while_a_fault_was_handled_is_no_fault() -> None:
    try:
        try:
            raise DEAD
        except httpx.ConnectError:
            raise TypeError("in the handler")  # noqa: B904 - as such errors are raised
    except TypeError as error:
        assert not is_fault(error)


def test_a_cause_that_is_the_error_itself() -> None:
    error = KeyError("x")
    error.__cause__ = error
    assert not is_fault(error)


async def test_a_url_that_no_client_can_ask_is_an_error_of_the_code() -> None:
    async def by_aiohttp(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            await session.get(url)

    async def by_openai(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            await client.models.list()

    for url in ("127.0.0.1:9/v1", "ftp://127.0.0.1:9/"):
        for ask in (httpx.get, requests.get, by_aiohttp, by_openai):
            with pytest.raises(Exception) as met:  # of whatever class the client has for it
                done = ask(url)
                if inspect.isawaitable(done):
                    await done
            assert not is_fault(met.value), (url, ask, met.value)


def test_a_database_that_is_locked_is_a_fault_and_a_wrong_query_is_not(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x", timeout=0)) as one, closing(sqlite3.connect(tmp_path / "x")) as other:
        other.execute("create table rows (x)")
        other.execute("begin exclusive")
        with pytest.raises(sqlite3.OperationalError) as locked:
            one.execute("select * from rows")
        other.rollback()
        with pytest.raises(sqlite3.OperationalError) as wrong_query:
            one.execute("select * from nothing")
    assert is_fault(locked.value) and not is_fault(wrong_query.value)


def test_a_text_nested_too_deeply_to_be_read_fails_its_trajectory_alone() -> None:
    with pytest.raises(RecursionError), user_code("scorer", test_the_list_of_faults):
        json.loads("[" * 100_000)


@pytest.mark.parametrize("module", ["redis.exceptions", "psycopg", "psycopg2", "playwright._impl._errors"])
def test_clients_that_are_not_installed_here_are_known_by_name(module: str) -> None:
    name = {"redis": "ConnectionError", "playwright": "Error"}.get(module.partition(".")[0], "OperationalError")
    base = type(name, (Exception,), {"__module__": module})
    assert is_fault(base("gone")) and is_fault(type("Derived", (base,), {"__module__": module})("gone"))
    assert not is_fault(type(name, (Exception,), {"__module__": f"not_{module}"})("gone"))


@pytest.mark.parametrize("error", [DataError("row 7"), ConfigError("key"), CodeError("told")])
def test_what_is_told_already_stays_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as found, user_code("loop", test_the_list_of_faults):
        raise error
    assert found.value is error
    with pytest.raises(RequestError), user_code("loop", test_the_list_of_faults, passing=(RequestError,)):
        raise RequestError("too long")


def inner() -> None:
    json.loads("{")  # the line to look at


def outer() -> None:
    inner()  # its caller


def line_of(text: str) -> int:
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()  # type: ignore[arg-type]
    return next(number for number, line in enumerate(lines, 1) if line.endswith(text))


def test_the_innermost_line_of_the_users_is_told_with_its_callers() -> None:
    with pytest.raises(CodeError) as told, user_code("agent loop x", outer):
        outer()
    first, *_, caller, last = str(told.value).splitlines()
    assert_names(first, "(tests.system.test_user_code.outer)", "JSONDecodeError", "Expecting")
    assert caller == f"  {__file__}:{line_of('# its caller')} in outer: inner()  # its caller"
    assert_names(last, f"{__file__}:{line_of('the line to look at')}", 'json.loads("{")')
    assert told.value.place == f"{__file__}:{line_of('the line to look at')}"
    assert told.value.summary == f"{first} ({told.value.place})"


def test_of_a_group_the_error_is_told_and_not_the_fault() -> None:
    with pytest.raises(CodeError, match=r": TypeError: inside"), user_code("x", outer):
        raise ExceptionGroup("many", [DEAD, ExceptionGroup("more", [TimeoutError(), TypeError("inside")])])


def test_text_of_an_error_is_one_line_without_control_characters() -> None:
    with pytest.raises(CodeError) as told, user_code("x", outer):
        raise ValueError("\x1b[2Jgone\n\u202e" + "long " * 1000)
    first = str(told.value).splitlines()[0]
    assert first.isprintable() and "gone" in first and len(first) < 700


class Callable_:
    async def method(self) -> int:  # in which this is defined
        return 1

    def plain(self) -> int:
        return 1


async def test_a_method_that_is_not_async_is_told() -> None:
    assert await await_user_code("tool x", Callable_().method, Callable_().method) == 1
    plain: Callable[..., object] = Callable_().plain
    named = "tool x (tests.system.test_user_code.Callable_.plain)"
    with naming(CodeError, named):
        await await_user_code("tool x", plain, plain)  # type: ignore[arg-type]


async def test_a_call_that_does_not_fit_the_method_is_told_with_the_place_of_its_definition() -> None:
    method = Callable_().method
    with naming(CodeError, "2 were given") as told:
        await await_user_code("tool x", method, functools.partial(method, 7))  # type: ignore[call-arg]
    assert told.value.place == f"{__file__}:{line_of('in which this is defined')}"


@pytest.mark.parametrize("code", [functools.partial(outer), len, Callable_, Callable_(), SimpleNamespace()])
def test_anything_that_can_be_called_has_a_name(code: Callable[..., object]) -> None:
    assert str(contract_error("tool x", code, "gave nothing")).startswith("tool x (")


def test_finite_numbers() -> None:
    import numpy
    import torch

    good = [1, True, 0.5, numpy.float32(0.5), numpy.bool_(True), torch.tensor(0.5)]
    assert all(finite(one) is not None for one in good)
    bad = ["1", b"1", None, float("nan"), float("inf"), torch.zeros(2), [1], 1j, 10**400]
    assert [one for one in bad if finite(one) is not None] == []
