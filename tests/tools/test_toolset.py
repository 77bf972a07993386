"""What one call comes to: typed errors, deadlines, queues, truncation."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from agentrl.errors import ConfigError, DataError
from agentrl.observe.error_summary import TOOL_FAILED
from agentrl.tool import ErrorKind, FunctionTool, Tool, ToolError, ToolFailed, ToolResponse, tool
from agentrl.tool.session import ToolInfrastructureError
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import ToolAnswer
from tests.naming import naming
from tests.virtual_time import virtual_time
from tools.calculator import CalculatorTool

Bind = Callable[[ToolSet], ToolSet]


async def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


async def multiply(a: int) -> int:
    """Multiply."""
    return a


async def call(toolset: ToolSet, name: str, arguments: Any, **kwargs: Any) -> ToolAnswer:
    session = await toolset.open("i", {})
    try:
        return await session.call(name, arguments, **kwargs)
    finally:
        await session.close()


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "text"),
    [
        ("ad", {"a": 1}, "unknown_tool", "no tool 'ad'; did you mean 'add'?; available: add, multiply"),
        ("x" * 5000, {}, "unknown_tool", f"no tool '{'x' * 64}'; available: add, multiply"),
        ("add", {}, "arguments", "argument 'a' is missing"),
        ("add", {"a": "1"}, "arguments", 'a: "1" is not of type "integer"'),
        ("add", {"a": 1, "bb": 2}, "arguments", "unknown argument 'bb'; did you mean 'b'?; arguments: a, b"),
        ("add", {"b": "x", "c": 1}, "arguments", None),
        ("add", {"a": "y" * 100_000}, "arguments", None),
        ("add", {"a": float("nan")}, "arguments", None),
        ("add", {"a": "\ud800"}, "arguments", None),
        ("add", [1, 2], "arguments", '[1,2] is not of type "object"'),
        ("add", None, "parse", "the call has no arguments"),
    ],
)
async def test_faulty_calls_are_told_what_is_wrong(
    bound: Bind, name: str, arguments: Any, kind: str, text: str | None
) -> None:
    result = await call(bound(ToolSet.from_tools([add, multiply])), name, arguments)
    assert result.error == kind
    assert result.text.startswith(f"Error ({kind}): ")
    assert text is None or result.text == f"Error ({kind}): {text}"
    assert len(result.text) < 400


async def test_a_parse_error_comes_before_everything_else(bound: Bind) -> None:
    result = await call(bound(ToolSet.from_tools([add])), "nope", {"a": 1}, parse_error="not JSON:\n line 3")
    assert (result.error, result.text) == (ErrorKind.PARSE, "Error (parse): not JSON: line 3")


@virtual_time
async def test_the_deadline_counts_from_the_start_of_the_call_not_from_the_queue(
    bound: Bind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", asyncio.get_running_loop().time)

    @tool(max_concurrent=1, timeout=1.0)
    async def slow() -> str:
        """Take 0.4 s."""
        await asyncio.sleep(0.4)
        return "done"

    tools = bound(ToolSet.from_tools([slow]))
    session = await tools.open("i", {})
    results = await asyncio.gather(*(session.call("slow", {}) for _ in range(3)))
    assert [result.text for result in results] == ["done"] * 3
    assert [result.seconds for result in results] == pytest.approx([0.4] * 3)
    metrics = tools.take_metrics()
    assert metrics["tool/slow/queue_seconds_mean"] == pytest.approx(0.4)
    assert metrics["tool/slow/queue_seconds_p99"] == pytest.approx(0.8, abs=0.02)
    assert tools.take_metrics() == {}


@virtual_time
async def test_a_hanging_call_is_a_timeout_and_frees_its_place(bound: Bind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", asyncio.get_running_loop().time)

    @tool(max_concurrent=1, timeout=0.1)
    async def sometimes(hang: bool) -> str:
        """Hang, or not."""
        await asyncio.sleep(60 if hang else 0)
        return "done"

    session = await bound(ToolSet.from_tools([sometimes])).open("i", {})
    first, second = await asyncio.gather(*(session.call("sometimes", {"hang": hang}) for hang in (True, False)))
    assert (first.error, first.text) == (ErrorKind.TIMEOUT, "Error (timeout): sometimes gave no answer within 0.1 s")
    assert first.seconds == pytest.approx(0.1)
    assert (second.error, second.text) == (None, "done")


class Lines(Tool):
    """Streams an answer as a class does."""

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> AsyncGenerator[str | ToolResponse, None]:
        async for piece in lines(**arguments):
            yield piece
        yield ToolResponse("end", reward=0.5, metrics={"lines": 2})


async def lines(then: str) -> AsyncGenerator[Any, None]:
    """Say two lines, and then something else."""
    yield "one\n"
    await asyncio.sleep(0.05)
    yield "two\n"
    if then == "hang":
        await asyncio.sleep(60)
    elif then == "raise":
        raise RuntimeError("no more")
    elif then == "refuse":
        raise ToolError("enough")
    elif then == "number":
        yield 3


SAID = "; before that it said:\none\ntwo\n"


@pytest.mark.parametrize("kind", ["function", "class"])
@pytest.mark.parametrize(
    ("then", "error", "text"),
    [
        ("end", None, "one\ntwo\n"),
        ("hang", ErrorKind.TIMEOUT, "Error (timeout): lines gave no whole answer within 0.2 s" + SAID),
        ("raise", ErrorKind.EXECUTION, "Error (execution): RuntimeError: no more" + SAID),
        ("refuse", ErrorKind.REFUSED, "Error (execution): enough" + SAID),
        ("number", ErrorKind.EXECUTION, "yield texts, and perhaps a ToolResponse as the last; found int 3" + SAID),
    ],
)
@virtual_time
async def test_pieces_of_an_answer_outlast_its_end(
    bound: Bind, kind: str, then: str, error: ErrorKind | None, text: str
) -> None:
    function = FunctionTool(lines, {"timeout": 0.2})
    made = function if kind == "function" else Lines({"timeout": 0.2}, function.schema)
    session = await bound(ToolSet.from_tools([made])).open("i", {})
    answer = await session.call("lines", {"then": then})
    ended = kind == "class" and then == "end"
    assert answer.error == error
    assert answer.text.endswith(text + "end" * ended)
    assert (answer.reward, answer.metrics) == ((0.5, {"lines": 2.0}) if ended else (None, {}))


async def test_a_run_that_ends_closes_the_generator(bound: Bind) -> None:
    begun, closed = asyncio.Event(), asyncio.Event()

    async def endless() -> AsyncGenerator[str, None]:
        """Never end."""
        try:
            while True:
                begun.set()
                yield "."
                await asyncio.sleep(0)
        finally:
            closed.set()

    session = await bound(ToolSet.from_tools([FunctionTool(endless)])).open("i", {})
    call = asyncio.create_task(session.call("endless", {}))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert closed.is_set()


async def test_a_hanging_sync_function_blocks_nothing(bound: Bind) -> None:
    over = threading.Event()

    @tool(timeout=0.1)
    def hang() -> str:
        """Block the thread."""
        over.wait()
        return "done"

    @tool(timeout=3600.0)
    def answer() -> str:
        """Block nothing."""
        return "done"

    session = await bound(ToolSet.from_tools([hang, answer])).open("i", {})
    results = await asyncio.gather(session.call("hang", {}), session.call("answer", {}))
    over.set()
    assert [result.error for result in results] == [ErrorKind.TIMEOUT, None]


async def test_a_tools_own_timeout_error_is_no_timeout_of_the_call(bound: Bind) -> None:
    async def fetch() -> str:
        """Fetch."""
        raise TimeoutError("the server is slow")

    result = await call(bound(ToolSet.from_tools([fetch])), "fetch", {})
    assert (result.error, result.text) == (ErrorKind.EXECUTION, "Error (execution): TimeoutError: the server is slow")


async def test_what_a_tool_says_of_the_call_is_no_failure_of_the_tool(bound: Bind) -> None:
    """The model reads one word for both; the record tells them apart."""

    async def lookup(name: str) -> str:
        """Look up.

        Args:
            name: Which.
        """
        raise {"odd": ToolError, "down": ToolFailed, "bug": RuntimeError}[name](name)

    tools = bound(ToolSet.from_tools([lookup, CalculatorTool()]))
    results = [await call(tools, "lookup", {"name": name}) for name in ("odd", "down", "bug")]
    results.append(await call(tools, "calculator", {"expression": "the age of Ann"}))
    assert [result.error in TOOL_FAILED for result in results] == [False, True, True, False]
    assert [result.error for result in results[:2]] == [ErrorKind.REFUSED, ErrorKind.EXECUTION]
    assert [result.text for result in results[:2]] == ["Error (execution): odd", "Error (execution): down"]


async def test_exceptions_are_one_short_line(bound: Bind) -> None:
    async def fail() -> str:
        """Fail."""
        raise ValueError("first\n  second " + "z" * 1_000_000)

    result = await call(bound(ToolSet.from_tools([fail])), "fail", {})
    assert result.error is ErrorKind.EXECUTION
    assert result.text.startswith("Error (execution): ValueError: first second zz")
    assert result.text.endswith("zz ...")
    assert len(result.text) < 600
    result = await call(bound(ToolSet.from_tools([fail], max_response_tokens=80)), "fail", {})
    assert result.text.startswith("Error (execution): ")
    assert result.truncated

    async def leave() -> str:
        """Fail."""
        raise SystemExit(3)

    result = await call(bound(ToolSet.from_tools([leave])), "leave", {})
    assert result.text == "Error (execution): SystemExit: 3"


@pytest.mark.parametrize("hang", [False, True])
async def test_on_error_fail_raises(bound: Bind, hang: bool) -> None:
    @tool(on_error="fail", timeout=0.05)
    async def server() -> str:
        """Fail."""
        if hang:
            await asyncio.sleep(60)
        raise ConnectionError("refused")

    with pytest.raises(ToolInfrastructureError, match="tool server: " + (".*within 0.05 s" if hang else ".*refused")):
        await call(bound(ToolSet.from_tools([server])), "server", {})


async def test_on_error_fail_still_tells_the_model_its_own_faults(bound: Bind) -> None:
    @tool(on_error="fail")
    async def picky(a: int) -> str:
        """Refuse."""
        raise ToolError("not that one")

    toolset = bound(ToolSet.from_tools([picky]))
    assert (await call(toolset, "picky", {"a": 1})).text == "Error (execution): not that one"
    assert (await call(toolset, "picky", {})).error is ErrorKind.ARGUMENTS


async def test_cancelling_propagates_and_frees_the_place(bound: Bind) -> None:
    @tool(max_concurrent=1)
    async def hang(forever: bool) -> str:
        """Hang."""
        await asyncio.sleep(60 if forever else 0)
        return "done"

    session = await bound(ToolSet.from_tools([hang])).open("i", {})
    running = asyncio.create_task(session.call("hang", {"forever": True}))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await session.call("hang", {"forever": False})).text == "done"


class Odd(Tool):
    """Answers with whatever it is configured to."""

    default_schema = {"type": "function", "function": {"name": "odd"}}

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        answer: ToolResponse = self.config["answer"]
        return answer


@pytest.mark.parametrize(
    "answer",
    ["text", None, ToolResponse(3), ToolResponse("x", reward=float("nan"))],  # type: ignore[arg-type]
)
async def test_an_answer_against_the_contract_is_an_error_that_the_model_and_the_user_are_told(
    bound: Bind, answer: Any
) -> None:
    tools, told = bound(ToolSet.from_tools([Odd({"answer": answer})])), list[str]()
    tools.warn = told.append
    result = await call(tools, "odd", {})
    assert result.error is ErrorKind.EXECUTION and "ToolResponse" in result.text
    assert len(told) == 1 and "tool odd (tests.tools.test_toolset.Odd.execute): " in told[0]


async def test_answers_are_cut_in_tokens_by_the_tools_own_limit(bound: Bind, tokenizer: Tokenizer) -> None:
    @tool(max_response_tokens=40)
    async def short() -> str:
        """Speak."""
        return "é1 " * 500

    async def default() -> str:
        """Speak."""
        return "é1 " * 500

    toolset = bound(ToolSet.from_tools([short, default], max_response_tokens=90, truncate_side="right"))
    for name, limit in (("short", 40), ("default", 90)):
        result = await call(toolset, name, {})
        assert result.truncated
        assert limit - 5 <= len(tokenizer.encode(result.text).ids) <= limit
        assert result.text.startswith("é1 é1")
        assert result.text.endswith("tokens cut ...]\n")


async def test_lone_surrogates_never_reach_the_tokenizer(bound: Bind) -> None:
    async def broken() -> str:
        """Speak."""
        return "name \ud800 é"

    assert (await call(bound(ToolSet.from_tools([broken])), "broken", {})).text == "name ? é"


async def test_reward_and_metrics_of_a_response(bound: Bind) -> None:
    async def pay() -> ToolResponse:
        """Pay."""
        return ToolResponse("ok", reward=0.5, metrics={"coins": 2.0})

    result = await call(bound(ToolSet.from_tools([pay])), "pay", {})
    assert (result.reward, result.metrics) == (0.5, {"coins": 2.0})


async def test_a_tool_set_serves_one_event_loop_after_another(bound: Bind) -> None:
    @tool(max_concurrent=1)
    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(0.01)
        return "ok"

    toolset = bound(ToolSet.from_tools([wait]))

    async def several() -> list[ToolAnswer]:
        session = await toolset.open("i", {})
        return await asyncio.gather(*(session.call("wait", {}) for _ in range(3)))

    for _ in range(2):
        results = await asyncio.to_thread(asyncio.run, several())
        assert [result.text for result in results] == ["ok"] * 3


async def test_tools_kwargs_of_an_unknown_tool(bound: Bind) -> None:
    with naming(DataError, "'adds'", "'add'"):
        await bound(ToolSet.from_tools([add])).open("i", {"adds": {}})


async def test_without_a_tokenizer_nothing_is_answered_uncut() -> None:
    with pytest.raises(RuntimeError, match="bind"):
        await call(ToolSet.from_tools([add]), "add", {"a": 1})


def test_duplicate_names() -> None:
    with naming(ConfigError, "'add'", "two"):
        ToolSet.from_tools([add, tool(name="add")(multiply)])


def test_names_and_schemas_in_order() -> None:
    toolset = ToolSet.from_tools([multiply, add])
    assert toolset.names == ["multiply", "add"]
    assert [schema["function"]["name"] for schema in toolset.schemas] == ["multiply", "add"]


async def test_a_trajectorys_use_is_cheap(bound: Bind) -> None:
    """The whole runtime has 1 ms a trajectory: twice as many calls of Python functions as are measured."""
    toolset = bound(ToolSet.from_tools([add]))

    async def calls_of(work: Callable[[], Any]) -> int:
        await work()
        calls = Counter[str]()
        sys.setprofile(lambda frame, event, argument: calls.update([event]))
        try:
            await work()
        finally:
            sys.setprofile(None)
        return calls["call"] + calls["c_call"]

    async def idle() -> None:
        await (await toolset.open("i", {})).close()

    session = await toolset.open("i", {})
    assert await calls_of(idle) < 12
    assert await calls_of(lambda: session.call("add", {"a": 1})) < 222
