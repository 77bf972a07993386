"""Runs in the sandbox: a program that nobody trusts, and the tests that judge it, in two processes.

Invariant: the program's process never holds the tests, the expected values or the nonce, and the tests' process never
runs a line of the program and never meets an object of it. Arguments and results cross two pipes as plain data
(`encode`, `decode`). So a program cannot write a verdict, patch its judge, end the process that counts, or return
an object that equals everything. Its process is a new interpreter, not a fork: a fork inherits the memory of the
process that started this one, which may have held the data on stdin. The tests' process is not dumpable:
another process of the same user may not read or write its memory or its descriptors.

Started by `agentrl.reward.code`, which sends one JSON object on stdin: {nonce, setup, program, entry_points, tests}.
Answers on stdout: the nonce and a JSON array a line, `["units", n]` (asserts, as written), `["pass", i]` and
`["fail", i]` (the first time that each happens), `["end"]`; or `["error", text]` when the tests themselves are broken.
Written for any CPython from 3.8 on, with its standard library alone.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import itertools
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

PR_SET_DUMPABLE = 4
ROLE = "program"
"""Argument of the untrusted process."""
ENDS = (StopIteration, StopAsyncIteration)
"""Exceptions that are no errors: with GeneratorExit, KeyboardInterrupt and SystemExit, which are no `Exception`."""
MOST_ITEMS = 1_000_000
"""Most items that are read of an iterator that the program returns."""


def encode(value: Any) -> Any:
    """Plain data as JSON: lists, texts, numbers, truth values and None as they are, the rest as {kind: content}.

    Raises TypeError for all other values.
    """
    for kind, written in WRITTEN:
        if isinstance(value, kind):
            return written(value)
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return encode(value.tolist())
    raise TypeError(f"a {type(value).__name__} cannot be passed between program and tests")


def encode_all(items: Iterable[Any]) -> list[Any]:
    return [encode(item) for item in items]


WRITTEN: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    ((type(None), bool), lambda value: value),
    (int, int),
    (float, float),
    (str, str.__str__),
    (list, encode_all),
    (dict, lambda value: {"dict": [[encode(key), encode(item)] for key, item in value.items()]}),
    (tuple, lambda value: {"tuple": encode_all(value)}),
    (set, lambda value: {"set": encode_all(value)}),
    (frozenset, lambda value: {"frozenset": encode_all(value)}),
    (complex, lambda value: {"complex": [value.real, value.imag]}),
    ((bytes, bytearray), lambda value: {"bytes": list(value)}),
    (range, lambda value: {"range": [value.start, value.stop, value.step]}),
    (Iterator, lambda value: {"iterator": encode_all(islice(value, MOST_ITEMS))}),
)
"""How values are written, by type; the first type that fits is taken."""


def decode(value: Any) -> Any:
    """The other way. Raises ValueError or TypeError for what `encode` does not make."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind not in MAKERS:
        raise ValueError("not a kind of value")
    return MAKERS[kind](decode(content))


MAKERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "complex": lambda parts: complex(*parts),
    "bytes": bytes,
    "range": lambda parts: range(*parts),
    "iterator": iter,
}


def send(pipe: IO[bytes], message: Any) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def run_program() -> None:
    """The untrusted process: it has no more than two pipes, and what it is sent."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    order = json.loads(requests.readline())
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    for source in (order["setup"], order["program"]):
        exec(compile(source, "<program>", "exec", dont_inherit=True), module.__dict__)
    send(answers, {"ready": True})
    while line := requests.readline():
        request = json.loads(line)
        try:
            arguments, keywords = decode(request["arguments"]), decode(request["keywords"])
            value = function_of(module, request["name"])(*arguments, **keywords)
            answer = {"value": encode(value)}
            if value is None:
                answer["left"] = [left_of(one) for one in (*arguments, *keywords.values())]
        except BaseException as error:
            answer = {"raised": [type(error).__name__, str(error)[:500]]}
        send(answers, answer)


def left_of(argument: Any) -> Any:
    """Encode an argument as a call left it; None for what is no plain data any more."""
    try:
        return encode(argument)
    except (TypeError, RecursionError):
        return None


def refill(argument: Any, left: Any) -> None:
    """Change a test's list, dict or set as the program changed its copy."""
    if isinstance(argument, list) and isinstance(left, list):
        argument[:] = left
    for kind in (dict, set):
        if isinstance(argument, kind) and isinstance(left, kind):
            argument.clear()
            argument.update(left)


def function_of(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """Find a function of the program; some data sets want it as a method of a class `Solution`."""
    methods = not hasattr(module, name) and hasattr(module, "Solution")
    function: Callable[..., Any] = getattr(module.Solution() if methods else module, name)
    return function


class Program:
    """The tests' end of the pipes."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", __file__, ROLE]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def load(self, setup: str, program: str) -> bool:
        """Run it; whether it ran to its end."""
        try:
            send(self.requests, {"setup": setup, "program": program})
            return json.loads(self.answers.readline()) == {"ready": True}
        except (OSError, ValueError, RecursionError):
            return False

    def function(self, name: str) -> Callable[..., Any]:
        """Call the program's function `name`. Raises what `relayed` makes of what it raised.

        The arguments of a call that returns None become what it left of them, as a function that sorts its list does.
        A function that returns a value cannot change the data of tests, which may be what its value is compared with.
        """

        def call(*arguments: Any, **keywords: Any) -> Any:
            request = {"name": name, "arguments": encode(arguments), "keywords": encode(keywords)}
            send(self.requests, request)
            answer = json.loads(self.answers.readline())
            if "value" in answer:
                value = decode(answer["value"])
                if value is None:
                    given = [*arguments, *keywords.values()]
                    for at, left in enumerate(answer["left"]):
                        refill(given[at], decode(left))
                return value
            raise relayed(*answer["raised"])

        call.__name__ = name
        return call


def relayed(kind: str, text: str) -> Exception:
    """Make the exception that tests meet for the one of a program: the same, if it is built in and an error.

    All others become RuntimeError: exceptions that signal to Python the end of an iteration, a generator or the
    process. In the tests they would end their own `map`, `zip` or `all` early, with nothing left to fail.
    """
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, ENDS):
        try:
            return known(text)
        except TypeError:  # UnicodeDecodeError and alike want more than a text
            pass
    return RuntimeError(f"{kind}: {text}")


def whole(consumer: Callable[..., Any]) -> Callable[..., Any]:
    """Make `map` and alike, of a function and what it is applied to, whose function ends no iteration by an exception.

    A program may return an iterator that is empty: `next` of it, in a function of the tests', raises StopIteration.
    """

    def consume(first: Any, *others: Any, **keywords: Any) -> Any:
        def function(*arguments: Any) -> Any:
            try:
                return first(*arguments)
            except ENDS as error:
                raise RuntimeError(repr(error)) from error

        return consumer(function if callable(first) and others else first, *others, **keywords)

    return consume


class Counted(ast.NodeTransformer):
    """`assert x` becomes a `__check__(number, x)` that catches errors of x: asserts after a failed one count, too.

    They stay statements, so that names are bound where the test binds them. Where the test itself may catch what an
    assert raises (in a `with`, and in a `try` with handlers), it stays an assert.
    """

    def __init__(self, first: int, tree: ast.AST) -> None:
        self.next = first
        catching = [
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.With, ast.AsyncWith)) or getattr(node, "handlers", None)
        ]
        self.caught = {inner for node in catching for part in node.body for inner in ast.walk(part)}  # type: ignore[attr-defined]

    def visit_Assert(self, node: ast.Assert) -> ast.AST | list[ast.AST]:
        number, self.next = self.next, self.next + 1
        if node in self.caught:
            return [node, checked(number, ast.Constant(True), node)]
        handler = ast.ExceptHandler(
            ast.Name("Exception", ast.Load()), None, [checked(number, ast.Constant(False), node)]
        )
        return ast.copy_location(ast.Try([checked(number, node.test, node)], [handler], [], []), node)


def checked(number: int, value: ast.expr, place: ast.AST) -> ast.stmt:
    """Write the call that counts an assert."""
    call = ast.Call(ast.Name("__check__", ast.Load()), [ast.Constant(number), value], [])
    return ast.copy_location(ast.Expr(call), place)


def run_defined(values: list[Any]) -> None:
    """Run the functions `test*` and unittest's cases that a text defines, as pytest does. Raises what they raise."""
    unittest = sys.modules.get("unittest")  # of the text, if it defines cases; its import takes time
    for value in values:
        if unittest is not None and isinstance(value, type) and issubclass(value, unittest.TestCase):
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result := unittest.TestResult())
            if not result.wasSuccessful():
                raise AssertionError(value.__name__)
        elif isinstance(value, types.FunctionType) and value.__name__.startswith("test"):
            made = value()
            if isinstance(made, types.CoroutineType):
                import asyncio

                asyncio.run(made)


def judge(order: dict[str, Any], program: Program, report: Callable[..., None]) -> None:
    """Run the tests, reporting each assert the first time that it passes and the first time that it fails.

    A test without asserts is one unit. When a test ends early, what it did not reach has failed.
    """
    tests, first = [], 0
    setup: dict[str, Any] = {"__name__": "tests", **{one.__name__: whole(one) for one in (filter, iter, map)}}
    for one in (itertools.dropwhile, itertools.filterfalse, itertools.starmap, itertools.takewhile):
        setattr(itertools, one.__name__, whole(one))
    exec(compile(order["setup"], "<setup>", "exec", dont_inherit=True), setup)
    for source in order["tests"]:
        written = ast.parse(source)
        counted = Counted(first, written)
        tree = ast.fix_missing_locations(counted.visit(written))
        units = range(first, max(first + 1, counted.next))
        tests.append((compile(tree, "<tests>", "exec", dont_inherit=True), units))
        first = units.stop
    report("units", first)
    if not program.load(order["setup"], order["program"]):
        return
    seen: set[tuple[str, int]] = set()

    def mark(what: str, number: int) -> None:
        if (what, number) not in seen:
            seen.add((what, number))
            report(what, number)

    def check(number: int, holds: Any) -> None:
        mark("pass" if holds else "fail", number)

    functions = {name: program.function(name) for name in order["entry_points"]}
    for code, units in tests:
        try:
            given = {**setup, **functions, "__check__": check}
            exec(code, defined := dict(given))
            if not any((what, number) in seen for what in ("pass", "fail") for number in units):
                run_defined([value for name, value in defined.items() if value is not given.get(name)])
        except Exception:
            for number in units:
                if ("pass", number) not in seen or number == units[-1]:
                    mark("fail", number)
            continue
        for number in units:  # what did not run did not need to: the branch of another case
            if ("fail", number) not in seen:
                mark("pass", number)
    report("end")


def main() -> None:
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        sys.exit("the tests cannot be kept apart from the program: prctl failed")
    # Modules that the tests import later must not be files that the program wrote.
    written = (Path(__file__).resolve().parent, Path.cwd())
    sys.path[:] = [path for path in sys.path if path and Path(path).resolve() not in written]
    order = json.loads(sys.stdin.buffer.read())
    program = Program()
    verdicts = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)

    def report(*event: Any) -> None:
        os.write(verdicts, f"\n{order['nonce']}{json.dumps(event)}\n".encode())

    try:
        judge(order, program, report)
    except Exception as error:
        report("error", f"{type(error).__name__}: {error}")
    finally:
        program.process.kill()


if __name__ == "__main__":
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    if sys.argv[1:] == [ROLE]:
        run_program()
    else:
        main()
