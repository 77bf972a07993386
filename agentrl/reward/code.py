"""Programs, judged by tests that run in a sandbox server (`POST /run_code`, as SandboxFusion serves it).

The program is hostile: its author, the policy, is rewarded for passing. So expected outputs never leave this process
(stdio), or stay in a process apart from the program's (asserts: see `agentrl.reward.code_harness`).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from agentrl.config.sections.reward import SandboxFusionConfig
from agentrl.errors import ConfigError, DataError
from agentrl.remote import (
    FaultKind,
    RemoteClient,
    RemoteOptions,
    RemoteRefused,
    RemoteUnavailable,
    checked_url,
    how_to_start,
)
from agentrl.system.deadline import paused_deadlines, within
from agentrl.system.json_value import JSON

HARNESS = Path(__file__).with_name("code_harness.py")
QUEUE_SECONDS = 15.0
"""Seconds in the server's queue after which a request is made again."""
AROUND_SECONDS = 5.0
"""Seconds of the server's own, before and after the program's time."""
MOST_QUEUED = 600.0
"""Seconds after which a server that only says that it is busy is taken for broken."""
START_SECONDS = 10.0
"""Seconds within which a server has to answer when a run begins."""
TOLERANCE = Decimal("1e-6")
"""Tolerance with which decimal numbers in outputs are compared; see `same_output`."""
CALLED = """\
import bisect, collections, functools, heapq, itertools, math, re, string
from typing import Any, Dict, List, Optional, Set, Tuple, Union
"""
"""Prelude of programs that are called: published solutions take it for granted. It brings no names of functions, as
the requested function could be among them."""
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_BLANKS = re.compile(r"[ \t]+")


class AssertTests(pydantic.BaseModel):
    """Statements with asserts that call functions of the program."""

    kind: Literal["asserts"] = "asserts"
    setup: str = ""
    """Runs before the program and, apart from it, before the tests: what both need."""
    entry_points: list[str] = pydantic.Field(min_length=1)
    """The functions of the program that the tests call. Arguments and results must be plain data."""
    tests: list[str] = pydantic.Field(min_length=1)
    """Python statements; each text runs apart from the others."""


class Case(pydantic.BaseModel):
    """Input of a program, and the output expected of it."""

    input: str
    output: str


class StdioTests(pydantic.BaseModel):
    """Runs of the program."""

    kind: Literal["stdio"] = "stdio"
    tests: list[Case] = pydantic.Field(min_length=1)


Tests = AssertTests | StdioTests
_TESTS: pydantic.TypeAdapter[Tests] = pydantic.TypeAdapter(Annotated[Tests, pydantic.Field(discriminator="kind")])


class NoVerdict(RemoteUnavailable):
    """A run ended before its tests were read: the sandbox is too slow for that, or their set-up never ends."""


class CodeJudge:
    """Runs programs against tests. One object serves all trajectories."""

    def __init__(self, sandbox: SandboxFusionConfig, key: str = "reward_model.sandbox_fusion.url") -> None:
        """`key` names the URL in messages. Raises ConfigError when there is no URL of a server."""
        try:
            parts = checked_url(sandbox.url or "")
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
        self._url = parts.geturl().rstrip("/").removesuffix("/run_code") + "/run_code"
        self._config, self._key = sandbox, key
        self._harness = HARNESS.read_text(encoding="utf-8")
        options = RemoteOptions(attempt_timeout=QUEUE_SECONDS + sandbox.timeout + AROUND_SECONDS)
        self._client = RemoteClient(f"the sandbox of {key}", options)

    async def start(self, run: str) -> None:
        """Ask the server whether it is there, on behalf of `run`. Raises ConfigError."""
        self._client.run = run
        try:
            async with within(START_SECONDS):
                await self._client.request("GET", self._url.removesuffix("run_code") + "v1/ping", safe=True)
        except (RemoteUnavailable, RemoteRefused) as error:
            start = how_to_start("python -m sandbox.server", self._url)
            raise ConfigError(f"{self._key}={self._config.url}: {error}; {start}") from error

    async def close(self) -> None:
        await self._client.close()

    async def compute_score(
        self, data_source: str, solution_str: str, ground_truth: object, extra_info: object = None
    ) -> dict[str, float]:
        """Score 1.0 when all tests pass, else 0.0, or with `partial_credit` the share that does; `pass_fraction`: of
        cases or asserts.

        Raises ValueError for a ground truth that holds no tests, DataError for tests that cannot run, RemoteUnavailable
        and RemoteRefused when the server gives no verdict.
        """
        return await self.judge(extract(solution_str), read_tests(ground_truth))

    async def judge(self, program: str, tests: Tests) -> dict[str, float]:
        """The same for a program that has been taken out of its answer."""
        outcomes = await self.outcomes(program, tests)
        share = sum(outcomes) / len(outcomes)
        return {"score": share if self._config.partial_credit else float(share == 1.0), "pass_fraction": share}

    async def outcomes(self, program: str, tests: Tests) -> list[bool]:
        """Judge each case, or each assert as written (a test without any is one)."""
        program = program.encode(errors="replace").decode()  # lone surrogates, which no request may hold
        if isinstance(tests, StdioTests):
            return await self._cases(program, tests)
        return await self._asserts(program, tests)

    async def _cases(self, program: str, tests: StdioTests) -> list[bool]:
        """One run a case, one after another, within the program's time; cases left when it is over have failed."""
        outcomes, left = [False] * len(tests.tests), self._config.timeout
        for number, case in enumerate(tests.tests):
            run = await self.run(program, case.input, left)
            finished = run["status"] == "Finished" and run["return_code"] == 0 and "stdout" not in run.get("cut", ())
            outcomes[number] = finished and same_output(run["stdout"] or "", case.output)
            left -= run["execution_time"] or 0.0
            if run["status"] == "TimeLimitExceeded" or left <= 0:
                break
        return outcomes

    async def _asserts(self, program: str, tests: AssertTests) -> list[bool]:
        nonce = secrets.token_hex(16)
        order = {"nonce": nonce, "program": program, **tests.model_dump(exclude={"kind"})}
        run = await self.run(self._harness, json.dumps(order), self._config.timeout)
        events = [json.loads(line) for line in _after(nonce, run["stdout"] or "")]
        units = next((event[1] for event in events if event[0] == "units"), 0)
        if not units:
            problem = next((event[1] for event in events if event[0] == "error"), None)
            if problem is not None:
                raise DataError(f"the tests cannot run: {problem}")
            how = f"{run['status']}, status {run['return_code']}: {(run['stderr'] or '')[-300:]}"
            raise NoVerdict(FaultKind.ANSWER, f"{self._url}: the run ended before its tests were read ({how})")
        number = {what: {event[1] for event in events if event[0] == what} for what in ("pass", "fail")}
        outcomes = [unit in number["pass"] - number["fail"] for unit in range(units)]
        if ["end"] not in events:
            outcomes[-1] = False
        return outcomes

    async def run(self, code: str, stdin: str, seconds: float) -> dict[str, Any]:
        """The `run_result` of a Python program, with all keys.

        No deadline around it counts a run that comes to its end, or the server's queue before it. The server ends
        programs that run out of time, and a queued program waits for other programs. Raises RemoteUnavailable when the
        server does not answer within the deadline, RemoteRefused.
        """
        asked = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "run_timeout": seconds,
            "memory_limit_MB": self._config.memory_limit_mb,
        }
        body, runs = json.dumps(asked).encode(), seconds + AROUND_SECONDS
        with paused_deadlines():
            answer = await self._client.request("POST", self._url, body=body, safe=True, runs=runs, queued=MOST_QUEUED)
        try:
            said = json.loads(answer.body)
            run = said["run_result"]
            if said["status"] != "SandboxError" and run["status"] in ("Finished", "TimeLimitExceeded"):
                return {"return_code": None, "stdout": None, "stderr": None, "execution_time": None, **run}
            problem = f"{said['status']}: {said['message']}"
        except (ValueError, LookupError, TypeError) as error:
            problem = f"answered {answer.body[:80]!r} ({type(error).__name__}: {error})"
        raise RemoteUnavailable(FaultKind.ANSWER, f"{self._url}: {problem}")


def read_tests(ground_truth: object) -> Tests:
    """Read the tests of a row, which may be JSON text.

    Their form is written by `data_prep.code_tests`, or is {"inputs", "outputs"} as in APPS, TACO and PRIME's
    collection, with "fn_name" where a function is called. Raises ValueError when the row holds no tests.
    """
    try:
        value = _json(ground_truth) if isinstance(ground_truth, str) else ground_truth
        return _TESTS.validate_python(_pairs(value) if isinstance(value, dict) and "inputs" in value else value)
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, fault['loc'])) or 'ground_truth'}: {fault['msg']}"
    except ValueError as error:
        problem = str(error)
    raise ValueError(
        f"ground_truth holds no tests as data_prep.code_tests writes them, nor inputs and outputs: {problem}"
    )


def _json(text: str) -> JSON:
    try:
        value: JSON = json.loads(text)
        return value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text!r:.80} is no JSON ({error})") from error


def _pairs(value: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError."""
    inputs, outputs, name = value["inputs"], value.get("outputs"), value.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs must be lists of the same length")
    if not name:
        pairs = zip(inputs, outputs, strict=True)
        return {
            "kind": "stdio",
            "tests": [{"input": _lines_of(one), "output": _lines_of(other)} for one, other in pairs],
        }
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"fn_name must be the name of a function, found {name!r:.80}")
    results = [_json(output) if isinstance(output, str) else output for output in outputs]
    # Some sets wrap each result in a list of one item. Unwrap all or nothing: a part of a right list is no answer.
    wrapped = all(isinstance(result, list) and len(result) == 1 for result in results)
    tests = [
        _call(name, given, [result, *result] if wrapped and isinstance(result, list) else [result])
        for given, result in zip(inputs, results, strict=True)
    ]
    return {"kind": "asserts", "setup": CALLED, "entry_points": [name], "tests": tests}


def _lines_of(value: object) -> object:
    """A text; some sets have a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else value


def _call(name: str, arguments: object, accepted: list[object]) -> str:
    """A test of one call. Arguments are a list, or lines of JSON; one of the `accepted` results is right."""
    given = [_json(line) for line in arguments.split("\n")] if isinstance(arguments, str) else arguments
    if not isinstance(given, list):
        raise ValueError(f"expected a list of arguments of {name}, found {given!r:.80}")
    return (
        f"import json\nfound = {name}(*json.loads({json.dumps(given)!r}))\n"
        f"assert json.loads(json.dumps(found)) in json.loads({json.dumps(accepted)!r})"
    )


def extract(text: str) -> str:
    """The program of an answer: the last fenced block marked as Python, else the last unmarked one, else all of it.

    A block whose end is missing goes to the end of the answer.
    """
    blocks: dict[str, list[str]] = {}
    inside: list[str] | None = None
    for line in text.removesuffix("\n").split("\n"):  # `splitlines` ends lines within texts of programs, too
        mark = line.strip()
        if inside is not None and mark == "```":
            inside = None
        elif inside is not None:
            inside.append(line)
        elif mark.startswith("```"):
            label = mark[3:].strip().lower()
            inside = blocks["python" if label in ("python", "python3", "py") else label] = []
    found = blocks.get("python", blocks.get(""))
    return text if found is None else "\n".join(found) + "\n"


def same_output(found: str, expected: str) -> bool:
    r"""Compare the printed output of a program with the expected output, word by word.

    Lines end with \n or \r\n, words with spaces or tabs. Spaces at the ends of lines, and empty lines at both ends of
    the text, do not count. An expected word with a decimal point is a number: it is met by any plain decimal
    number (sign, digits, point, exponent) close to it. Close is a distance of at most TOLERANCE times its value. Close
    is also at most TOLERANCE where so few decimals are expected, and half of the last decimal where there are more: 0
    is not 0.0000004. Where no double has the digits (1.0e400, forty digits of pi), only the value itself meets the
    word. All other words are met by themselves.
    """
    lines, wanted = _lines(found), _lines(expected)
    return len(lines) == len(wanted) and all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(lines, wanted, strict=True)
    )


def _lines(text: str) -> list[list[str]]:
    return [_BLANKS.split(line.strip(" \t\r")) for line in text.strip(" \t\r\n").split("\n")]


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if "." not in expected or not _NUMBER.fullmatch(expected) or not _NUMBER.fullmatch(found):
        return False
    with localcontext(Context(prec=len(found) + len(expected), Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])):
        value = Decimal(expected)
        return abs(Decimal(found) - value) <= _tolerance(value)


def _tolerance(value: Decimal) -> Decimal:
    last_place = Decimal((0, (1,), int(value.as_tuple().exponent)))
    if Decimal(float(value)).quantize(last_place) != value:
        return Decimal(0)
    return max(TOLERANCE * abs(value), min(TOLERANCE, last_place / 2))


def _after(nonce: str, output: str) -> Iterator[str]:
    """Return what follows the nonce on the lines that begin with it."""
    for line in output.splitlines():
        if line.startswith(nonce):
            yield line[len(nonce) :]
