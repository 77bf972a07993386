"""Programs judged in a real sandbox server: right ones, wrong ones, and ones that try to be paid for nothing."""

from __future__ import annotations

import asyncio
import builtins
import json
import random
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.sections.reward import RewardConfig, SandboxFusionConfig
from agentrl.errors import ConfigError, DataError
from agentrl.remote import RemoteRefused, RemoteUnavailable
from agentrl.reward import NaiveRewardManager, score_all
from agentrl.reward.code import (
    HARNESS,
    AssertTests,
    Case,
    CodeJudge,
    StdioTests,
    Tests,
    extract,
    read_tests,
    same_output,
)
from agentrl.reward.code_harness import relayed
from agentrl.system.deadline import within
from agentrl.trajectory import Status, Trajectory
from agentrl.trajectory.sample import Sample
from tests.naming import naming
from tests.remote.conftest import FaultyServer, hangs, says
from tests.sandbox.servers import running

SECRET = str(random.SystemRandom().randrange(10**15, 10**16))
"""What a right answer would be; programs do not know it."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[str]:
    with running(None, options=("--concurrency", "4")) as server:
        yield server.url


async def judged(url: str, program: str, tests: Tests, **config: Any) -> dict[str, float]:
    judge = CodeJudge(SandboxFusionConfig(url=url, **{"timeout": 5.0, **config}))
    try:
        async with within(30):
            return await judge.judge(textwrap.dedent(program), tests)
    finally:
        await judge.close()


def asserts(*tests: str, entry: str = "f", setup: str = "") -> AssertTests:
    return AssertTests(setup=setup, entry_points=[entry], tests=list(tests))


ATTACKS = {
    "equal to everything": """
        class E(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
        def f(): return E()
        """,
    "an object that answers for itself": "class E:\n    def __eq__(s, o): return True\ndef f(): return E()",
    "exit at once": "import sys; sys.exit(0)",
    "exit in the call": "import os\ndef f(): os._exit(0)",
    "an end of its own": 'print(\'["units", 1]\\n["pass", 0]\\n["end"]\', flush=True)\ndef f(): return 0',
    "no assertion errors": """
        import builtins
        builtins.AssertionError = None
        builtins.bool = lambda x: True
        def f(): return 0
        """,
    "patched judges": """
        import json, os, sys, __main__
        for name in dir(__main__):
            if not name.startswith("_"): setattr(__main__, name, lambda *a, **k: True)
        def f(): return 0
        """,
    "answers before the questions": """
        import os
        for fd in range(3, 64):
            try: os.write(fd, b'{"ready": true}\\n{"value": true}\\n{"raised": []}\\n[]\\n{"value": {"set": [[]]}}\\n')
            except OSError: pass
        def f(): return 0
        """,
    "the tests in a file": """
        import pathlib, re
        def f():
            for path in [*pathlib.Path(".").rglob("*"), *pathlib.Path("/tmp").rglob("*")]:
                found = re.search(rb"== (\\d{16})", path.read_bytes()) if path.is_file() else None
                if found: return int(found[1])
        """,
    "the tests in its own memory": """
        import re
        def f():
            with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
                for line in maps:
                    begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                    try:
                        memory.seek(begin)
                        found = re.search(rb"== (\\d{16})", memory.read(end - begin))
                    except (OSError, ValueError, OverflowError): continue
                    if found: return int(found[1])
        """,
    "the tests in the memory of others": """
        import os, re
        def f():
            for pid in filter(str.isdigit, os.listdir("/proc")):
                if int(pid) == os.getpid(): continue
                try:
                    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
                        for line in maps:
                            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                            try:
                                memory.seek(begin)
                                found = re.search(rb"== (\\d{16})", memory.read(end - begin))
                            except (OSError, ValueError, OverflowError): continue
                            if found: return int(found[1])
                except OSError: continue
        """,
    "the tests in what others have open": """
        import os, re
        def f():
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try: fds = os.listdir(f"/proc/{pid}/fd")
                except OSError: continue
                for fd in fds:
                    try: content = os.pread(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK), 1 << 20, 0)
                    except OSError: continue
                    found = re.search(rb"== (\\d{16})", content)
                    if found: return int(found[1])
        """,
    "a module in the way of the tests": """
        import os, pathlib
        for folder in (".", "/tmp", os.path.expanduser("~")):
            for name in ("colorsys", "sitecustomize"):
                try: pathlib.Path(folder, name + ".py").write_text("def rgb_to_hsv(*a): return 0")
                except OSError: pass
        def f(): return 0
        """,
    "the judge killed": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef f(): return 0",
    "the judge interrupted": "import os, signal\ndef f(): os.kill(os.getppid(), signal.SIGINT); return 0",
    "a heap of answers": "def f():\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
}


@pytest.mark.slice(5, "hostile")
@pytest.mark.parametrize("name", ATTACKS)
async def test_nothing_is_paid_for_an_attack(sandbox: str, name: str) -> None:
    test = f"import colorsys\nassert colorsys.rgb_to_hsv(1, 1, 1) == (0.0, 0.0, 1)\nassert f() == {SECRET}"
    verdict = await judged(sandbox, ATTACKS[name], asserts(test), timeout=3.0)
    assert verdict["score"] == 0.0
    assert verdict["pass_fraction"] in (0.0, 0.5)  # the first assert is no work of the program's


ENDS = ("StopIteration", "StopAsyncIteration", "GeneratorExit", "KeyboardInterrupt", "SystemExit")
CALL_ATTACKS = {
    **{name: program.replace("== (\\d{16})", "\\[(\\d{16})\\]") for name, program in ATTACKS.items()},
    **{f"raises {kind}": f"def f(): raise {kind}" for kind in ENDS},
    "patched JSON": """
        import json
        json.loads = json.dumps = lambda *a, **k: json
        def f(): return 0
        """,
    "a list that holds everything": """
        class L(list):
            def __contains__(self, item): return True
            def __eq__(self, other): return True
        def f(): return L()
        """,
}


@pytest.mark.slice(4, "hostile")
@pytest.mark.parametrize("name", CALL_ATTACKS)
async def test_nothing_is_paid_for_an_attack_on_the_tests_of_a_call(sandbox: str, name: str) -> None:
    program, tests = CALL_ATTACKS[name], read_tests({"fn_name": "f", "inputs": [[]], "outputs": [int(SECRET)]})
    method = f"class Solution:\n{textwrap.indent('f = staticmethod(f)', '    ')}\ndel f"
    programs = [program] if "def f()" not in program else [program, f"{textwrap.dedent(program)}\n{method}"]
    for each in programs:
        assert await judged(sandbox, each, tests, timeout=3.0) == {"score": 0.0, "pass_fraction": 0.0}


async def test_the_attack_on_the_memory_of_others_works_where_nothing_stops_it(sandbox: str) -> None:
    """So that its failure above says something."""
    judge = CodeJudge(SandboxFusionConfig(url=sandbox))
    judge._harness = judge._harness.replace("prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0", "getpid() == 0")
    async with within(30):
        verdict = await judge.judge(
            textwrap.dedent(ATTACKS["the tests in the memory of others"]), asserts(f"assert f() == {SECRET}")
        )
    await judge.close()
    assert verdict["score"] == 1.0


async def test_a_right_program_passes_and_a_wrong_one_gets_its_share(sandbox: str) -> None:
    tests = asserts(
        "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-1) == 0, 'below'\n"
        "    for n in range(9):\n        assert candidate(n) == n + one\n    assert candidate(10) == 11\n\ncheck(f)",
        setup="one = 1\n\ndef f(x):\n    'Add one.'\n",
    )
    assert await judged(sandbox, "def f(x): return x + one", tests) == {"score": 1.0, "pass_fraction": 1.0}
    assert await judged(sandbox, "def f(x): return abs(x) + 1", tests) == {"score": 0.0, "pass_fraction": 0.75}
    assert await judged(sandbox, "def f(x): return {}[x]", tests) == {"score": 0.0, "pass_fraction": 0.0}
    assert await judged(sandbox, "def f(x: return", tests) == {"score": 0.0, "pass_fraction": 0.0}
    assert await judged(sandbox, "", tests) == {"score": 0.0, "pass_fraction": 0.0}


async def test_partial_credit_is_the_share_of_tests_that_pass(sandbox: str) -> None:
    tests = StdioTests(tests=[Case(input=str(n), output=str(n)) for n in range(4)])
    for program, share in (("print(input())", 1.0), ("print(max(int(input()), 1))", 0.75), ("", 0.0)):
        verdict = {"score": share, "pass_fraction": share}
        assert await judged(sandbox, program, tests, partial_credit=True) == verdict
    never = asserts("assert f(1) == 1\nassert f(2) == 1")
    assert (await judged(sandbox, "def f(x): return 1 // (2 - x)", never, partial_credit=True))["score"] == 0.5


@pytest.mark.parametrize("as_text", [False, True])
async def test_inputs_and_outputs_of_published_sets_are_tests(sandbox: str, as_text: bool) -> None:
    def tests(**value: Any) -> Tests:
        return read_tests(json.dumps(value) if as_text else value)

    printed = tests(inputs=["2\n", ["3", "4"]], outputs=["2\n", ["3", "4"]])
    assert await judged(sandbox, "import sys\nprint(sys.stdin.read())", printed) == {"score": 1.0, "pass_fraction": 1.0}
    inputs = [[1, "a"], '2\n"b"', [3, {"c": []}]]
    called = tests(fn_name="two", inputs=inputs, outputs=[[1, "a"], '[2, "b"]', [3, {"c": []}]])
    for right in ("def two(a, b): return a, b", "class Solution:\n    def two(self, a, b): return [a, b]"):
        assert await judged(sandbox, right, called) == {"score": 1.0, "pass_fraction": 1.0}
        wrapped = tests(fn_name="two", inputs=inputs, outputs=[[[1, "a"]], '[[2, "b"]]', [[3, {"c": []}]]])
        assert await judged(sandbox, right, wrapped) == {"score": 1.0, "pass_fraction": 1.0}
    part = "def two(a, b): return a"
    assert await judged(sandbox, part, tests(fn_name="two", inputs=[[1, 2]] * 2, outputs=[[1, 2], [1]])) == {
        "score": 0.0,
        "pass_fraction": 0.0,
    }
    wrong = "def two(a, b): return [a, b] if a < 3 else [[a, b]]"
    assert await judged(sandbox, wrong, called) == {"score": 0.0, "pass_fraction": 2 / 3}


@pytest.mark.parametrize(
    ("truth", "problem"),
    [
        ({"inputs": ["1"], "outputs": []}, "same length"),
        ({"inputs": ["1"]}, "same length"),
        ({"inputs": [], "outputs": []}, "stdio.tests"),
        ({"inputs": [1], "outputs": ["1"]}, "stdio.tests.0.input"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "'x' is no JSON"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f(x) or g"}, "fn_name must be"),
    ],
)
def test_inputs_and_outputs_that_are_no_tests_are_told(truth: dict[str, Any], problem: str) -> None:
    with naming(ValueError, problem):
        read_tests(json.dumps(truth))


@pytest.mark.parametrize("source", ["apps", "codecontests", "codeforces", "taco", "code/mbpp"])
def test_sources_of_programs_need_a_sandbox_and_no_name_of_a_scorer(source: str) -> None:
    with pytest.raises(ConfigError, match=f"'{source}'.*sandbox.server.*reward_model.sandbox_fusion.url="):
        NaiveRewardManager().check(["gsm8k", source])
    NaiveRewardManager(RewardConfig(sandbox_fusion=SandboxFusionConfig(url="http://127.0.0.1:9"))).check([source])


def test_a_url_that_no_sandbox_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sandbox_fusion.url: expected http://HOST:PORT.*'localhost:8080'"):
        NaiveRewardManager(RewardConfig(sandbox_fusion=SandboxFusionConfig(url="localhost:8080")))


async def test_each_test_runs_apart_and_what_a_broken_one_did_not_reach_has_failed(sandbox: str) -> None:
    tests = asserts("assert f(1) == 1", "x = f(2)\nassert x == 2\nassert x", "assert f(3) == 3", "f(1)")
    program = "def f(x):\n    if x == 2: raise ValueError\n    return x"
    assert await judged(sandbox, program, tests) == {"score": 0.0, "pass_fraction": 3 / 5}


async def test_every_kind_of_plain_value_comes_back_as_it_was(sandbox: str) -> None:
    values = (
        "[1, 10**5000, -2.5, True, None, 'a\\n\\ud800\"', (1, (2,)), {1: {2}, (3,): 4}, frozenset([5]), b'\\xff', 1j,"
        " range(1, 9, 3), float('inf')]"
    )
    same = f"v = {values}\nassert f(*v, last=v) == v\nassert [type(x) for x in f(*v, last=v)] == [type(x) for x in v]"
    more = "assert list(g(3)) == [0, 1, 2] and h() == [1.5, 2.0] and f(last=2) == 2"
    raised = "try:\n    f()\nexcept KeyError as error:\n    assert 'last' in str(error)\nelse:\n    assert False"
    program = """
        import numpy as np
        def f(*values, **named): return named["last"]
        def g(n): yield from range(n)
        def h(): return np.array([1.5, 2.0])
        """
    tests = AssertTests(entry_points=["f", "g", "h"], tests=[same, more, raised])
    assert await judged(sandbox, program, tests) == {"score": 1.0, "pass_fraction": 1.0}


STATEMENTS = (
    "assert (y := f([1])) == 1\nassert y == 1",
    "class T:\n    y = 1\n    assert f([1]) == y\n    assert f([y]) == y",
    "import asyncio\nasync def g(): return f([1])\nasync def m():\n    assert await g() == 1\nasyncio.run(m())",
    "try:\n    assert f([]) == 0\nexcept IndexError:\n    assert f([1]) == 1",
    "try:\n    assert f([1]) == 2\nexcept AssertionError:\n    pass",
    "from contextlib import suppress\nwith suppress(IndexError):\n    assert f([]) == 0",
)


@pytest.mark.parametrize("test", STATEMENTS)
async def test_an_assert_means_what_it_means_where_it_stands(sandbox: str, test: str) -> None:
    assert (await judged(sandbox, "def f(x): return x[0]", asserts(test)))["score"] == 1.0
    assert (await judged(sandbox, "def f(x): raise OSError", asserts(test)))["score"] == 0.0


DEFINED = (
    "def test_first():\n    assert f([1]) == 1\n\ndef test_second():\n    assert f([2, 3]) == 2",
    "async def test_it():\n    assert f([1]) == 1",
    "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(f([1]), 1)",
    "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        assert f([1]) == 1\n"
    "unittest.main(exit=False)",
)


@pytest.mark.parametrize("test", DEFINED)
async def test_tests_that_a_text_only_defines_are_run(sandbox: str, test: str) -> None:
    assert (await judged(sandbox, "def f(x): return x[0]", asserts(test)))["score"] == 1.0
    assert (await judged(sandbox, "def f(x): return 0", asserts(test)))["score"] == 0.0


async def test_a_defined_test_that_wants_arguments_judges_nothing_and_fails(sandbox: str) -> None:
    tests = asserts("def test_it(case):\n    assert f([case]) == case")
    assert (await judged(sandbox, "def f(x): return x[0]", tests))["score"] == 0.0


async def test_a_function_that_returns_none_changes_its_arguments_and_no_other_does(sandbox: str) -> None:
    tests = asserts(
        "x = [2, 1]\nf(x)\nassert x == [1, 2]", "x = [[2, 1], []]\nf(x=x)\nassert x == [[], [2, 1]]", "f((2, 1))"
    )
    program = "def f(x):\n    if isinstance(x, list): x.sort()"
    assert (await judged(sandbox, program, tests))["score"] == 1.0
    assert (await judged(sandbox, "def f(x): pass", tests))["pass_fraction"] == 1 / 3
    assert (await judged(sandbox, "def f(x): x[:] = [f]", tests))["pass_fraction"] == 0
    others = asserts("d, s = {1: 2}, {1}\nf(d, s)\nassert (d, s) == ({3: 4}, set())")
    assert (await judged(sandbox, "def f(d, s): d.clear(); d[3] = 4; s.clear()", others))["score"] == 1.0
    reference = asserts("x = [2, 1]\nassert f(x) == sorted(x)")
    assert (await judged(sandbox, "def f(x):\n    x.clear()\n    return x", reference))["score"] == 0.0


SWALLOW = (
    "assert all(f(x) == x for x in map(f, [1, 2]))",
    "assert all(map(lambda x: f(x) == x, [1, 2]))",
    "assert all(a == b for a, b in zip([1, 2], map(f, [1, 2])))",
    "assert not list(filter(lambda x: f(x) != x, [1, 2]))",
    "for found in map(f, [1, 2]):\n    assert found in (1, 2)",
    "assert next(map(f, [1]), 1) == 1",
    "assert list(iter(lambda: f(1), 1)) == []",
    "[*map(f, [1, 2])]",
)


@pytest.mark.slice(2, "hostile")
@pytest.mark.parametrize("kind", [*ENDS, "class Own(StopIteration): pass\n"])
async def test_no_exception_of_a_program_ends_what_the_tests_do_without_a_failure(sandbox: str, kind: str) -> None:
    """Each of these tests passes for a right program, and for none that ends their iteration or their process."""
    raised = "Own" if "class" in kind else kind
    program = f"{kind if raised == 'Own' else ''}\ndef f(x): raise {raised}"
    assert await judged(sandbox, program, asserts(*SWALLOW)) == {"score": 0.0, "pass_fraction": 0.0}
    assert (await judged(sandbox, "def f(x): return x", asserts(*SWALLOW)))["score"] == 1.0


EMPTY = (
    "assert all(map(lambda x: next(f(x)) == x, [1, 2]))",
    "assert not list(filter(lambda x: next(f(x)) != x, [1, 2]))",
    "assert list(iter(lambda: next(f(1)), 1)) == []",
    "for found in map(lambda x: next(f(x)), [1, 2]):\n    assert found in (1, 2)",
    "from itertools import starmap\nassert all(starmap(lambda x, y: next(f(x)) == y, [(1, 1)]))",
    "import itertools\nassert list(itertools.takewhile(lambda x: next(f(x)) != x, [1, 2])) == []",
    "from itertools import filterfalse\nassert not [*filterfalse(lambda x: next(f(x)) == x, [1, 2])]",
    "assert all(next(found) == x for x, found in ((x, f(x)) for x in [1, 2]))",
)


@pytest.mark.parametrize("body", ["return iter(())", "yield from ()", "return zip()"])
async def test_no_empty_iterator_of_a_program_ends_what_the_tests_do(sandbox: str, body: str) -> None:
    verdict = await judged(sandbox, f"def f(x): {body}", asserts(*EMPTY))
    assert verdict == {"score": 0.0, "pass_fraction": 0.0}
    assert (await judged(sandbox, "def f(x): yield x", asserts(*EMPTY)))["score"] == 1.0
    ends = "found = f(1)\nassert next(found) == 1\ntry:\n    next(found)\n    assert False\nexcept StopIteration: pass"
    assert (await judged(sandbox, "def f(x): yield x", asserts(ends, "assert iter([1]) and not any(iter([]))")))[
        "score"
    ] == 1.0


def test_errors_reach_the_tests_as_they_are_and_all_other_exceptions_as_errors() -> None:
    every = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
    for kind in every:
        found = relayed(kind.__name__, "why")
        is_error = issubclass(kind, Exception) and kind.__name__ not in ENDS
        takes_text = not issubclass(kind, UnicodeError | BaseExceptionGroup) or kind is UnicodeError
        assert type(found) is (kind if is_error and takes_text else RuntimeError)
    for other in ("AssertionErrorX", "print", "Timeout", ""):
        assert type(relayed(other, "")) is RuntimeError


async def test_programs_that_read_and_print(sandbox: str) -> None:
    tests = StdioTests(tests=[Case(input=f"{n}\n{n}\n", output=f"{2 * n}\n") for n in range(4)])
    assert (await judged(sandbox, "print(int(input()) + int(input()))", tests))["score"] == 1.0
    assert await judged(sandbox, "print(4)", tests) == {"score": 0.0, "pass_fraction": 0.25}
    late = "x = int(input())\nprint(2 * x)\nassert x != 3"
    assert await judged(sandbox, late, tests) == {"score": 0.0, "pass_fraction": 0.75}


async def test_time_is_a_programs_for_all_of_its_cases_and_what_is_left_has_failed(sandbox: str) -> None:
    cases = StdioTests(tests=[Case(input=str(n), output=str(n)) for n in range(8)])
    program = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    assert await judged(sandbox, program, cases, timeout=1.0) == {"score": 0.0, "pass_fraction": 0.25}
    tests = asserts("assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2")
    loop = "def f(x):\n    while x == 1: pass\n    return x"
    assert await judged(sandbox, loop, tests, timeout=1.0) == {"score": 0.0, "pass_fraction": 1 / 3}


async def test_tests_that_cannot_run_are_an_error_and_no_score(sandbox: str) -> None:
    with naming(DataError, "ModuleNotFoundError"):
        await judged(sandbox, "def f(): return 1", asserts("assert f() == 1", setup="import no_such_module"))
    with naming(DataError, "SyntaxError"):
        await judged(sandbox, "def f(): return 1", asserts("assert f( == 1"))
    judge = CodeJudge(SandboxFusionConfig(url=sandbox))
    for truth, problem in (("4", "object"), ({"kind": "stdio", "tests": []}, "stdio.tests"), ("{", "JSON"), (None, "")):
        with pytest.raises(ValueError, match=f"data_prep.code_tests writes them.*{problem}"):
            await judge.compute_score("code/x", "", truth)


@pytest.mark.parametrize("setup", ["while True: pass", "import os; os._exit(3)"])
async def test_a_run_that_ends_before_its_tests_are_read_is_a_fault_and_no_verdict(sandbox: str, setup: str) -> None:
    """As in a sandbox so slow that the time is over first."""
    with naming(RemoteUnavailable, "before its tests"):
        await judged(sandbox, "def f(): return 1", asserts("assert f() == 1", setup=setup), timeout=0.5)


async def test_a_server_that_refuses_or_is_not_there_gives_no_score(sandbox: str) -> None:
    tests = asserts("assert f() == 1")
    with pytest.raises(RemoteRefused, match="memory_limit_MB"):
        await judged(sandbox, "", tests, memory_limit_mb=100_000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/run_code"
    manager = NaiveRewardManager(RewardConfig(timeout=1.0, sandbox_fusion=SandboxFusionConfig(url=url, timeout=0.5)))
    truth = tests.model_dump_json()
    row = Sample([{"role": "user", "content": "?"}], "code/mbpp", "single_turn", ground_truth=truth)
    trajectory = Trajectory("t", 0, messages=[*row.prompt, {"role": "assistant", "content": "def f(): return 1"}])
    await score_all(manager, [trajectory], row)
    await manager.close()
    assert (trajectory.status, trajectory.score) == (Status.FAILED, None)
    with pytest.raises(ConfigError, match=f"sandbox_fusion.url={url}: .*no connection.*python -m sandbox.server"):
        await manager.start("a run")
    await manager.close()
    assert "RemoteUnavailable: the sandbox of reward_model.sandbox_fusion.url: no connection" in str(trajectory.failure)
    judge = CodeJudge(SandboxFusionConfig(url=url))
    with pytest.raises(RemoteUnavailable):
        async with within(0.5):
            await judge.judge("", tests)
    await judge.close()


async def test_through_the_manager_many_at_once(sandbox: str) -> None:
    config = RewardConfig(sandbox_fusion=SandboxFusionConfig(url=sandbox, max_concurrent=3))
    manager = NaiveRewardManager(config)
    manager.check(["code/humaneval", "code/mbpp", "code/stdio"])
    await manager.start("a run")
    truth = asserts("assert f(2) == 4").model_dump_json()
    row = Sample([{"role": "user", "content": "?"}], "code/humaneval", "single_turn", ground_truth=truth)

    async def one(n: int) -> Trajectory:
        content = f"So:\n```python\ndef f(x):\n    return x + {n}\n```\nThat is it."
        trajectory = Trajectory("t", 0, messages=[*row.prompt, {"role": "assistant", "content": content}])
        await score_all(manager, [trajectory], row)
        return trajectory

    trajectories = await asyncio.gather(*(one(n % 4) for n in range(12)))
    await manager.close()
    assert [(t.score, t.score_extra) for t in trajectories] == [
        (float(n % 4 == 2), {"pass_fraction": float(n % 4 == 2)}) for n in range(12)
    ]


async def test_a_queue_is_nobodys_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is busy for longer than reward_model.timeout costs no trajectory its score; one that says nothing
    does.
    """
    monkeypatch.setattr("agentrl.remote.client._BACK_OFF", lambda state: 0.05)
    result = {"status": "Finished", "return_code": 0, "stdout": "4", "execution_time": 0.1}
    answer = json.dumps({"status": "Success", "message": "", "run_result": result})
    busy = [says(429, Retry_After="0.5"), says(504), says(503)]

    async def late(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.25)
        return await says(200, answer)(request)

    truth = StdioTests(tests=[Case(input="", output="4")] * 2).model_dump_json()
    for handlers, score in (([*busy * 2, late, says(504), late], 1.0), ([says(504), hangs], None)):
        server = FaultyServer(handlers)
        await server.start()
        sandbox = SandboxFusionConfig(url=server.url, timeout=0.2)
        manager = NaiveRewardManager(RewardConfig(timeout=0.4, sandbox_fusion=sandbox))
        trajectory = Trajectory("t", 0, messages=[{"role": "assistant", "content": "print(4)"}])
        begun = time.monotonic()
        await score_all(manager, [trajectory], Sample([], "code/x", "single_turn", ground_truth=truth))
        assert time.monotonic() - begun > 0.3
        await manager.close()
        await server.stop()
        assert trajectory.score == score, trajectory.failure


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\na\n```\nno:\n```python\nb\n\nc\n```\nok ```x```", "b\n\nc\n"),
        ("```py\na\n```\n```\nb\n```", "a\n"),
        ("```\na\n```\n```bash\nb\n```", "a\n"),
        ("```bash\nls\n```\nno program", "```bash\nls\n```\nno program"),
        ("text\n  ```Python3\n  a = '```'\n  ```", "  a = '```'\n"),
        ("```python\ncut off", "cut off\n"),
        ("def f(): pass", "def f(): pass"),
        ("```python\n```", "\n"),
        ("```python\r\nprint('a\u2028b\x0c')\r\n```\r\n", "print('a\u2028b\x0c')\r\n"),
    ],
)
def test_the_program_of_an_answer(answer: str, program: str) -> None:
    assert extract(answer) == program


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3", "1 2 \n3\n\n", True),
        ("1\n2\n3", "1 2\n3", False),
        ("0.3333333", "0.33333333", True),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("nan", "1.0", False),
        ("inf", "1.0", False),
        ("Yes", "yes", False),
        ("", "\n", True),
        ("", "0.0", False),
        ("inf", "1.0e400", False),
        ("1.00e400", "1.0e400", True),
        ("1.0e401", "1.0e400", False),
        ("1e9999999999999999999999", "1.0", False),
        ("0", "0.0000004", False),
        ("0.0000004000000001", "0.0000004", True),
        ("0.00000041", "0.0000004", True),
        ("0.123456", "0.123456789", False),
        ("1e-17", "0.0", True),
        ("-0", "0.000000", True),
        ("0.000001", "0.000000", False),
        ("1_000.5", "1000.5", False),
        ("٣.5", "3.5", False),
        ("0x1.8p1", "3.0", False),
        ("+3.", "3.0", True),
        ("0.54", "0.5", False),
        ("3.141592653589793", "3.14159265358979323846264338327950288", False),
        ("3.141592653589793238462643383279502880", "3.14159265358979323846264338327950288", True),
        ("9007199254740992.0", "9007199254740993.0", False),
        ("0.333333333333", "0.33333333333333331483", True),
        ("1\u20282", "1\n2", False),
        ("1\x0b2", "1 2", False),
        ("1\xa02", "1 2", False),
        ("1\r\n2\r\n", "1\n2", True),
        ("1\r2", "1\n2", False),
        ("\t1\t 2 \n \n", "1 2", True),
    ],
)
def test_outputs_are_compared_by_words(found: str, expected: str, same: bool) -> None:
    assert same_output(found, expected) is same


@given(value=st.floats(allow_nan=False, allow_infinity=False), decimals=st.integers(7, 30))
@settings(deadline=None)
def test_a_double_is_met_by_itself_however_many_decimals_are_expected_and_by_no_other(
    value: float, decimals: int
) -> None:
    expected = f"{value:.{decimals}f}"
    assert same_output(f"{value:.17g}", expected)
    off = Decimal(expected) + max(abs(Decimal(expected)) / 1000, Decimal("2e-6"))
    assert not same_output(f"{off:f}", expected)


LINES = st.lists(st.lists(st.text("ab1.-", min_size=1), min_size=1), min_size=1)


@given(lines=LINES, mark=st.sampled_from("\x0b\x0c\x1c\x85\u2028\xa0\u2003"))
@settings(deadline=None)
def test_only_spaces_tabs_and_newlines_part_words(lines: list[list[str]], mark: str) -> None:
    text = "\n".join(" ".join(line) for line in lines)
    assert same_output(f"\n{text} \n\n", text)
    assert not same_output(text + mark, text)
    assert not same_output(f"1{mark}2", "1 2") and not same_output(f"1{mark}2", "1\n2")


LONG = ["1" * 10**6 + "x", "." * 10**6, "0." + "3" * 10**6, "1" + "e1" * 10**5, "1e" + "9" * 10**6]


@pytest.mark.parametrize("found", LONG, ids=lambda text: text[:4])
def test_outputs_are_compared_in_linear_time(found: str) -> None:
    begun = time.process_time()
    assert not same_output(found, "0.5")
    assert time.process_time() - begun < 0.5


def test_the_harness_needs_nothing_but_python() -> None:
    """SandboxFusion's own server runs it as a file, without our package and our warm interpreter."""
    order = {"nonce": "N", "program": "def f(): return 1", **asserts("assert f() == 1").model_dump()}
    command = [sys.executable, "-I", str(HARNESS)]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line] == ['N["units", 1]', 'N["pass", 0]', 'N["end"]']
