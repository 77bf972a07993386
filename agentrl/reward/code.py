"""Programs, judged by tests that run in a sandbox server (`POST /run_code`, as SandboxFusion serves it).

The program is hostile: it is written by what is rewarded for passing. So expected outputs never leave this process
(stdio), or stay in a process of their own beside the program's (asserts: see `agentrl.reward.code_harness`).
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from agentrl.config.sections.reward import SandboxFusionConfig
from agentrl.errors import ConfigError, DataError
from agentrl.remote import FaultKind, RemoteClient, RemoteOptions, RemoteRefused, RemoteUnavailable, checked_url
from agentrl.system.deadline import paused_deadlines, within

HARNESS = Path(__file__).with_name("code_harness.py")
QUEUE_SECONDS = 15.0
"""Seconds in the server's queue after which a request is made again."""
AROUND_SECONDS = 5.0
"""Seconds of the server's own, before and after the program's time."""
MOST_QUEUED = 600.0
"""Seconds after which a server that only says that it is busy is taken for broken."""
START_SECONDS = 10.0
"""Seconds within which a server has to answer when a run begins."""
TOLERANCE = 1e-6
"""Relative and absolute, of decimal numbers in outputs."""


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
            raise ConfigError(f"{self._key}={self._config.url}: {error}; start `python -m sandbox.server`") from error

    async def close(self) -> None:
        await self._client.close()

    async def compute_score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> dict[str, float]:
        """Score 1.0 when all tests pass, else 0.0; `pass_fraction`: of cases or asserts.

        Raises ValueError for a ground truth that holds no tests, DataError for tests that cannot run, RemoteUnavailable
        and RemoteRefused when the server gives no verdict.
        """
        return await self.judge(extract(solution_str), read_tests(ground_truth))

    async def judge(self, program: str, tests: Tests) -> dict[str, float]:
        """The same for a program that has been taken out of its answer."""
        outcomes = await self.outcomes(program, tests)
        return {"score": float(all(outcomes)), "pass_fraction": sum(outcomes) / len(outcomes)}

    async def outcomes(self, program: str, tests: Tests) -> list[bool]:
        """Judge each case, or each assert as written (a test without any is one)."""
        program = program.encode(errors="replace").decode()  # lone surrogates, which no request may hold
        if isinstance(tests, StdioTests):
            return await self._cases(program, tests)
        return await self._asserts(program, tests)

    async def _cases(self, program: str, tests: StdioTests) -> list[bool]:
        """One run a case, one after another, within the program's time; what is left when it is over has failed."""
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

        No deadline around it counts a run that comes to its end, or the server's queue before it: the program's time is
        the server's to end, and who waits there waits for the programs of others. Raises RemoteUnavailable when the
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


def read_tests(ground_truth: Any) -> Tests:
    """Raises ValueError when it holds none; `data_prep.code_tests` writes them."""
    try:
        if isinstance(ground_truth, str):
            return _TESTS.validate_json(ground_truth)
        return _TESTS.validate_python(ground_truth)
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"])) or "ground_truth"
        raise ValueError(
            f"ground_truth holds no tests as data_prep.code_tests writes them: {where}: {fault['msg']}"
        ) from error


def extract(text: str) -> str:
    """The program of an answer: the last fenced block marked as Python, else the last unmarked one, else all of it.

    A block whose end is missing goes to the end of the answer.
    """
    blocks: dict[str, list[str]] = {}
    inside: list[str] | None = None
    for line in text.splitlines():
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
    """Equal line by line, spaces and empty lines at the ends apart; decimal numbers within `TOLERANCE`."""
    lines, wanted = _lines(found), _lines(expected)
    return len(lines) == len(wanted) and all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(lines, wanted, strict=True)
    )


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    try:
        return "." in expected and math.isclose(float(found), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False


def _after(nonce: str, output: str) -> Iterator[str]:
    """Return what follows the nonce on the lines that begin with it."""
    for line in output.splitlines():
        if line.startswith(nonce):
            yield line[len(nonce) :]
