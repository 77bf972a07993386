"""Feedback by unit tests, from a real sandbox server, through the real loop."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentrl.errors import ConfigError, DataError
from agentrl.interaction import Interaction, ask
from agentrl.observe.invariants import check_trajectory
from agentrl.reward import code
from agentrl.reward.code import AssertTests, Case, StdioTests
from agentrl.trajectory import Status
from interactions.environment import EnvironmentInteraction
from interactions.gsm8k import Gsm8kInteraction
from interactions.simulated_user import SimulatedUser
from interactions.unit_tests import AGAIN, RIGHT, UnitTestInteraction, units
from tests.agent_loop.conftest import Bench, sample
from tests.naming import assert_names, naming
from tests.sandbox.servers import running

MakeBench = Callable[..., Bench]
SECRET = str(random.SystemRandom().randrange(10**15, 10**16))
ADD = AssertTests(
    entry_points=["add"], tests=["assert add(1, 2) == 3\nassert add(0, 0) == 0", "assert add('a', 'b') == 'ab'"]
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[str]:
    with running(None, options=("--concurrency", "4")) as server:
        yield server.url


async def feedback(url: str, program: str, tests: AssertTests | StdioTests, **config: Any) -> Any:
    """The answer to one program."""
    judge = UnitTestInteraction({"url": url, "timeout": 5.0, **config}, "tests")
    await judge.start_interaction("a", tests=tests.model_dump_json())
    try:
        return await judge.generate_response("a", [{"role": "assistant", "content": f"So:\n```python\n{program}\n```"}])
    finally:
        await judge.finalize_interaction("a")
        await judge.close()


async def test_a_program_is_mended_until_its_tests_pass(bench: MakeBench, sandbox: str) -> None:
    judge = UnitTestInteraction({"url": sandbox}, "tests")
    await judge.start("run")
    script = [f"```python\ndef add(a, b):\n    return {body}\n```" for body in ("a - b", "int(a) + int(b)", "a + b")]
    b = bench(script, interactions={"tests": judge}, call_timeout=30.0, max_response_tokens=2000, max_model_len=4000)
    kwargs = {"name": "tests", "tests": json.loads(ADD.model_dump_json())}
    (t,) = await b.run(sample(data_source="interaction/code", interaction_kwargs=kwargs))
    await judge.close()
    assert t.status is Status.COMPLETED
    assert check_trajectory(t, b.chat.vocab_size) == []
    said = [turn.text for turn in t.turns if turn.role == "user"]
    assert said == [
        f"2 of 3 tests failed. Test 1: `add(1, 2)` gave -1.\n{AGAIN}",
        "1 of 3 tests failed. Test 3: `add('a', 'b')` raised ValueError: invalid literal for int() with base 10: 'a' "
        f"(line 2 of your program).\n{AGAIN}",
    ]
    assert t.turn_rewards == [0.0, 0.0, 0.0], "the score pays"
    assert t.score == t.score_extra["interaction_score"] == t.score_extra["pass_fraction"] == 1.0
    assert not judge._tests


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("def add(a, b):\n    return a - b", "`add(1, 2)` gave -1."),
        (
            "def add(a, b:\n    return 3",
            "`add(1, 2)` raised SyntaxError: '(' was never closed (line 1 of your program).",
        ),
        ("def plus(a, b):\n    return 3", "`add(1, 2)` raised NameError: name 'add' is not defined."),
        ("import sys\nsys.exit(3)", "`add(1, 2)` ended with status 3."),
        ("import os\ndef add(a, b):\n    os._exit(0)", "your program ended before it was called."),
        ("def add(a, b):\n    return 'x' * 1000", "[cut]."),
        ("from __future__ import annotations\ndef add(a: A, b: B):\n    return 9", "`add(1, 2)` gave 9."),
        ("def add(a, b):\n    return [0] * (1 << 45)", "`add(1, 2)` reached its limit of memory."),
    ],
)
async def test_what_is_said_of_a_failed_assert(sandbox: str, program: str, says: str) -> None:
    answer = await feedback(sandbox, program, ADD)
    assert (answer.should_end, answer.score) == (False, 0.0)
    assert says in answer.text
    assert "== 3" not in answer.text
    assert answer.text.endswith(AGAIN)


async def test_a_test_may_be_revealed(sandbox: str) -> None:
    answer = await feedback(sandbox, "def add(a, b):\n    return a - b", ADD, reveal=True)
    assert "Test 1: `add(1, 2)` gave -1. The test:\nassert add(1, 2) == 3\n" in answer.text


async def test_a_program_without_an_end_is_told_so(sandbox: str) -> None:
    answer = await feedback(sandbox, "def add(a, b):\n    while a: pass\n    return a + b", ADD, timeout=1.0)
    assert "Test 1: `add(1, 2)` did not come to an end in time." in answer.text
    loop = await feedback(sandbox, "while True: pass", StdioTests(tests=[Case(input="1", output="2")]), timeout=1.0)
    assert "on the input\n1\nyour program did not come to an end in time" in loop.text


HUNT = """
import gc, os, sys
def f(x=None):
    found = [open(f"/proc/self/{name}").read() for name in ("environ", "cmdline")]
    for value in gc.get_objects():
        found += [v for v in value.values() if type(v) is str] if type(value) is dict else []
    frame = sys._getframe()
    while frame:
        found.append(repr(frame.f_globals) + repr(frame.f_locals))
        frame = frame.f_back
    text = "".join(found)
    return [text[i - 20 : i + 40] for i in range(len(text)) if text.startswith(SECRET[:9], i)] or len(text)
print(f())
"""


async def test_what_is_not_revealed_cannot_be_found_by_the_program(sandbox: str) -> None:
    hunt = HUNT.replace("SECRET[:9]", f'"{SECRET[:4]}" + "{SECRET[4:9]}"')
    asserts = AssertTests(entry_points=["f"], tests=[f"assert f(1) == {SECRET}"])
    cases = StdioTests(tests=[Case(input="7", output=SECRET)])
    for tests, shown in ((asserts, "`f(1)` gave "), (cases, "your program printed")):
        answer = await feedback(sandbox, hunt, tests)
        assert shown in answer.text
        assert SECRET not in answer.text
        assert SECRET in (await feedback(sandbox, hunt, tests, reveal=True)).text


async def test_cases_of_input_and_output(sandbox: str) -> None:
    tests = StdioTests(tests=[Case(input="1 2", output="3"), Case(input="4 5", output="9")])
    right = await feedback(sandbox, "a, b = map(int, input().split())\nprint(a + b)", tests)
    assert (right.should_end, right.score, right.text) == (True, 0.0, RIGHT)
    wrong = await feedback(sandbox, "a, b = map(int, input().split())\nprint(b + 1)", tests, reveal=True)
    assert wrong.text == (
        f"1 of 2 tests failed. Test 2: on the input\n4 5\nyour program printed\n6\n\nand not\n9\n{AGAIN}"
    )
    assert wrong.extra == {"pass_fraction": 0.5}
    fault = await feedback(sandbox, "raise ValueError('no')", tests)
    assert_names(fault.text, "ValueError")


def test_the_call_that_is_looked_at_needs_nothing_of_the_test() -> None:
    tests = AssertTests(
        entry_points=["f"],
        tests=[
            "def check(candidate):\n    for x in range(3):\n        assert candidate(x) == x\n"
            "    assert abs(candidate(-1) - 2.5) < 1e-6\ncheck(f)",
            "assert 5 == f(sorted([3, 1]), key=len)",
            "f(1)",
            "a = 1\nassert f(a) == f(2)",
        ],
    )
    assert [unit.call for unit in units(tests)] == [None, "f(-1)", "f(sorted([3, 1]), key=len)", None, "f(2)"]


async def test_no_server_is_said_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "START_SECONDS", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    judge = UnitTestInteraction({"url": url}, "tests")
    with pytest.raises(ConfigError, match=r"interaction tests: config\.url=http://127\.0\.0\.1:\d+: .* no connection"):
        await judge.start("run")
    await judge.close()


def test_a_row_and_the_url_are_checked() -> None:
    judge = UnitTestInteraction({"url": "http://127.0.0.1:1"}, "tests")
    judge.check_row({"tests": ADD.model_dump_json()})
    judge.check_row({"tests": ADD.model_dump()})
    for tests in ("[]", "{}", '{"kind": "asserts"}', {"kind": "stdio", "tests": []}):
        with naming(DataError, "interaction_kwargs"):
            judge.check_row({"tests": tests})
    with pytest.raises(ConfigError, match=r"interaction tests: config\.url: expected http://HOST:PORT"):
        UnitTestInteraction({"url": "localhost:8080"}, "tests")


@pytest.mark.parametrize(
    ("setup", "failure"),
    [
        (
            "import no_such_module",
            "DataError: interaction_kwargs of tests: tests: the tests cannot run: Module",
        ),
        ("while True: pass", "NoVerdict: "),
    ],
)
async def test_what_a_row_or_a_slow_sandbox_is_to_blame_for_ends_no_run(
    bench: MakeBench, sandbox: str, setup: str, failure: str
) -> None:
    judge = UnitTestInteraction({"url": sandbox, "timeout": 0.5}, "tests")
    b = bench(lambda session, turn: "```python\npass\n```", interactions={"tests": judge})
    b.scheduler.max_retries = 1
    row = ADD.model_copy(update={"setup": setup}).model_dump()
    (t,) = await b.run(sample(interaction_kwargs={"name": "tests", "tests": row}))
    await judge.close()
    assert t.status is Status.FAILED and str(t.failure).startswith(failure)
    assert t.metrics["retries"] == failure.startswith("NoVerdict"), "only what may pass is tried again"


def test_rows_whose_tests_are_no_python_are_refused_before_the_run() -> None:
    row = ADD.model_copy(update={"tests": ["assert add( == 3"]}).model_dump()
    with pytest.raises(DataError, match=r"interaction_kwargs of tests: tests: .*line 1"):
        UnitTestInteraction({"url": "http://127.0.0.1:9"}, "tests").check_row({"tests": row})


async def test_no_shipped_interaction_takes_a_row_for_an_error_of_its_code() -> None:
    shipped: list[Interaction] = [
        UnitTestInteraction({"url": "http://127.0.0.1:9"}, "x"),
        Gsm8kInteraction({}, "x"),
        EnvironmentInteraction({"factory": "builtins.object"}, "x"),
        SimulatedUser({"base_url": "http://127.0.0.1:9/v1", "model": "m"}, "x"),
    ]
    for interaction in shipped:
        for row in ({}, {"seed": "x", "options": 1}, {"tests": "{", "goal": "", "ground_truth": None}):
            if row or not isinstance(interaction, EnvironmentInteraction):
                with pytest.raises(DataError, match="interaction_kwargs of x"):
                    await ask(interaction, interaction.start_interaction, "a", **row)
