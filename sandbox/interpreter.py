"""A program in the warm interpreter, from its first line to its exit status; and a session's cells, one after another.

Runs in the program's own confined process. Nothing that it sends is trusted by anyone.
"""

from __future__ import annotations

import ast
import atexit
import base64
import json
import linecache
import os
import signal
import stat
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from typing import Any

from sandbox.limits import MAX_FETCHED


def run_script(path: str, argv: list[str], show_last: bool = False) -> int:
    """Run the file as `python path` would, and return its exit status. `show_last`: where its last statement is an
    expression, print its repr, as a notebook does.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    sys.argv = [path, *argv]
    status = 0
    try:
        with open(path, "rb") as file:
            source = file.read()
        if show_last:
            sys.displayhook(_execute(source, path, main.__dict__))
        else:
            exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as stop:
        status = _exit_status(stop)
    except BaseException as error:
        _print_traceback(error)
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:
        _print_traceback(error)
    atexit._run_exitfuncs()
    return _flush(status)


def _flush(status: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            status = 120  # Python's own
    return status


def _execute(source: str | bytes, name: str, scope: dict[str, Any]) -> Any:
    """Run a program. The value of its last statement, where that is an expression, else None."""
    tree = compile(source, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # ast.parse would be in a traceback
    assert isinstance(tree, ast.Module)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), scope)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), scope)


def _exit_status(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    """Print the traceback as a fresh interpreter would."""
    try:
        traceback.print_exception(type(error), error, _frames(error))
    except BaseException:
        os.write(2, f"{type(error).__name__}\n".encode())


def _frames(error: BaseException) -> types.TracebackType | None:
    """Return the error's traceback without the frames of this file at its start."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


MARK = 16
"""Bytes before each packet of an answer: those that came with the cell."""
PIECE = 32 << 10
"""Bytes of JSON in a packet."""


def packets(message: bytes, mark: bytes = b"") -> Iterator[bytes]:
    """A message for the channel of a session: `mark`, 1 in the last packet, and a piece of it."""
    for start in range(0, len(message), PIECE):
        yield mark + bytes([start + PIECE >= len(message)]) + message[start : start + PIECE]


def run_cells(channel: int) -> int:
    """Execute cells until the channel closes. Both ways: packets of JSON, whose borders the kernel keeps.

    A cell: {mark: hex, code, files: {path: base64}, fetch: [path]}. Its answer: {result, error, files, refused};
    `result` is the repr of the last expression, as in a notebook, `error` {ename, evalue, traceback}. Files are read
    and written with the program's own rights.
    """
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = [""]
    number = 0
    while message := _receive(channel):
        cell = json.loads(message)
        number += 1
        answer: dict[str, Any]
        try:
            refused = _write_files(cell["files"])
            answer = _run_cell(cell["code"], f"<cell {number}>", main.__dict__)
            answer["files"], more = _read_files(cell["fetch"])
            answer["refused"] = refused | more
        except KeyboardInterrupt as error:
            answer = {"result": None, "error": _describe(error), "files": {}, "refused": {}}
        _flush(0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt that is late
        encoded = json.dumps(answer, ensure_ascii=False).encode(errors="replace")  # lone surrogates
        for packet in packets(encoded, bytes.fromhex(cell["mark"])):
            os.write(channel, packet)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return 0


def _write_files(files: dict[str, str]) -> dict[str, str]:
    refused = {}
    for path, content in files.items():
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "wb") as file:
                file.write(base64.b64decode(content))
        except OSError as error:
            refused[path] = str(error.strerror)
    return refused


def _read_files(paths: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    files, refused = {}, {}
    left = MAX_FETCHED
    for path in paths:
        try:
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                state = os.fstat(file.fileno())
                if not stat.S_ISREG(state.st_mode):
                    raise ValueError("not a regular file")
                if state.st_size > left:
                    raise ValueError(f"larger than the {left} bytes that are left of {MAX_FETCHED}")
                content = file.read(state.st_size)
                left -= len(content)
                files[path] = base64.b64encode(content).decode()
        except (OSError, ValueError) as error:
            refused[path] = getattr(error, "strerror", None) or str(error)
    return files, refused


def _receive(channel: int) -> bytes:
    """The next message, or nothing when the channel is closed."""
    data = bytearray()
    while True:
        try:
            packet = os.read(channel, 2 * PIECE)
        except KeyboardInterrupt:
            continue
        if not packet:
            return b""
        data += packet[1:]
        if packet[0]:
            return bytes(data)


def _run_cell(source: str, name: str, scope: dict[str, Any]) -> dict[str, Any]:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    result = None
    try:
        value = _execute(source, name, scope)
        result = None if value is None else repr(value)[:1_000_000]
    except SystemExit as stop:
        return {"result": None, "error": _describe(stop)}
    except BaseException as error:
        return {"result": None, "error": _describe(error)}
    return {"result": result, "error": None}


def _describe(error: BaseException) -> dict[str, Any]:
    try:
        lines = traceback.format_exception(type(error), error, _frames(error))
        text = str(error)
    except BaseException:
        lines, text = [], "<the exception cannot be shown>"
    return {
        "ename": type(error).__name__,
        "evalue": text[:100_000],
        "traceback": [line[:10_000] for line in lines[:200]],
    }
