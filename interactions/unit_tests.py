"""Feedback on programs by their tests: a sandbox server runs them, and the policy is told which failed, and how."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pydantic

from agentrl.config.sections.reward import SandboxFusionConfig
from agentrl.errors import DataError
from agentrl.interaction import Interaction, InteractionResponse
from agentrl.reward.code import AssertTests, Case, CodeJudge, Tests, extract, read_tests
from agentrl.system.graphemes import beginning
from agentrl.trajectory import Message

MOST = 400
"""Characters of a quoted text."""
LOOK_SECONDS = 5.0
"""Seconds for which a failed test is run again, to see what the program gives."""
RIGHT = "All tests passed."
AGAIN = "Mend the program and give all of it again, in one ```python block."
MARK = "agentrl-returned:"
LOOK = f"""
import json, sys, types
order = json.loads(sys.stdin.read())
module = types.ModuleType("solution")
sys.modules["solution"] = module
for source in (order["setup"], order["program"]):
    exec(compile(source, "<program>", "exec", dont_inherit=True), module.__dict__)
print("\\n{MARK}" + repr(eval(compile(order["call"], "<test>", "eval"), module.__dict__)))
"""
"""Program that runs in the sandbox.

It is told a call and not what that should give, for the program may find whatever is here."""


class UnitTestOptions(pydantic.BaseModel):
    """Config of the interaction."""

    model_config = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=True)

    url: str
    """Server that speaks SandboxFusion's API, e.g. http://127.0.0.1:8080 for `python -m sandbox.server`."""
    timeout: float = pydantic.Field(10.0, gt=0)
    """Running time of a program over all of its tests, in seconds."""
    memory_limit_mb: int = pydantic.Field(1024, gt=0)
    """MiB that a program may use, its tests included."""
    reveal: bool = False
    """Tell what the failed test expects. Else the policy is told what was called or read, and what its program gave."""


class UnitTestRow(pydantic.BaseModel):
    """A row's `interaction_kwargs`, beside `name`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    tests: str | dict[str, Any]
    """Tests as in `ground_truth` of data sources `code/*`: `agentrl.reward.code.AssertTests` or `StdioTests`, or its
    JSON."""


class UnitTestInteraction(Interaction):
    """Interaction that runs the last Python block of each answer against the row's tests until all pass.

    Turns have no score: programs are judged by the row's scorer, and a right one is paid once. Score of the dialogue: 1
    when all tests pass, else 0. The number `pass_fraction` is the last one.

    Row: `interaction_kwargs: {name: ..., tests: ...}`.
    """

    on_resume = "calls"
    config_model = UnitTestOptions
    row_model = UnitTestRow
    options: UnitTestOptions

    def __init__(self, config: dict[str, Any], name: str) -> None:
        """Set up the sandbox's client. Raises ConfigError for a URL that is none."""
        super().__init__(config, name)
        options = self.options
        sandbox = SandboxFusionConfig(url=options.url, timeout=options.timeout, memory_limit_mb=options.memory_limit_mb)
        self._judge = CodeJudge(sandbox, f"interaction {name}: config.url")
        self._tests: dict[str, Tests] = {}
        self._score: dict[str, float] = {}

    def check_row(self, kwargs: dict[str, Any]) -> None:
        super().check_row(kwargs)
        try:
            tests = read_tests(kwargs["tests"])
            if isinstance(tests, AssertTests):
                list(units(tests))
        except (ValueError, SyntaxError) as error:
            raise DataError(f"interaction_kwargs of {self.name}: tests: {error}") from error

    async def start(self, run: str) -> None:
        await self._judge.start(run)

    async def close(self) -> None:
        await self._judge.close()

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Keep the row's tests. Raises DataError for a row without tests."""
        self.check_row(kwargs)
        self._tests[instance_id] = read_tests(UnitTestRow.model_validate(kwargs).tests)
        self._score[instance_id] = 0.0

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        """Run the tests and tell the first failure. Raises DataError for tests that cannot run, RemoteUnavailable and
        RemoteRefused."""
        tests, answer = self._tests[instance_id], str(messages[-1].get("content") or "")
        program = extract(answer).encode(errors="replace").decode()
        try:
            outcomes = await self._judge.outcomes(program, tests)
        except DataError as error:
            raise DataError(f"interaction_kwargs of {self.name}: tests: {error}") from error
        self._score[instance_id] = float(all(outcomes))
        extra = {"pass_fraction": sum(outcomes) / len(outcomes)}
        if all(outcomes):
            return InteractionResponse(should_end=True, text=RIGHT, extra=extra)
        number = outcomes.index(False)
        if isinstance(tests, AssertTests):
            said = await self._failed_assert(program, tests, number)
        else:
            said = await self._failed_case(program, tests.tests[number])
        count = f"{outcomes.count(False)} of {len(outcomes)} tests failed. Test {number + 1}: "
        return InteractionResponse(should_end=False, text=f"{count}{said}\n{AGAIN}", extra=extra)

    async def calculate_score(self, instance_id: str) -> float:
        return self._score[instance_id]

    async def finalize_interaction(self, instance_id: str) -> None:
        del self._tests[instance_id], self._score[instance_id]

    async def _failed_assert(self, program: str, tests: AssertTests, number: int) -> str:
        unit = list(units(tests))[number]
        order = {"setup": tests.setup, "program": program, "call": unit.call or "None"}
        run = await self._judge.run(LOOK, json.dumps(order), min(LOOK_SECONDS, self.options.timeout))
        what = f"`{_cut(unit.call)}`" if unit.call else "it"
        if (fault := _fault(run)) is not None:
            said = f"{what} {fault}."
        elif unit.call is None:
            said = "it failed."
        else:
            _, returned, value = (run["stdout"] or "").rpartition(MARK)
            said = f"{what} gave {_cut(value.strip())}." if returned else "your program ended before it was called."
        return f"{said} The test:\n{_cut(unit.source)}" if self.options.reveal else said

    async def _failed_case(self, program: str, case: Case) -> str:
        run = await self._judge.run(program, case.input, min(LOOK_SECONDS, self.options.timeout))
        said = f"on the input\n{_cut(case.input)}\nyour program {_fault(run) or 'printed'}"
        if run["return_code"] == 0:
            said += f"\n{_cut(run['stdout'] or 'nothing')}"
        return f"{said}\nand not\n{_cut(case.output)}" if self.options.reveal else said


@dataclass(frozen=True, slots=True)
class Unit:
    """One assert as written, or a test without any."""

    source: str
    call: str | None
    """First call of the program in it that needs nothing but literals and built-in names."""


def units(tests: AssertTests) -> Iterator[Unit]:
    """Iterate over the asserts of all tests, in the order in which the judge counts them."""
    for source in tests.tests:
        found = _Asserts()
        found.visit(ast.parse(source))
        for node in found.asserts:
            yield Unit(ast.unparse(node), _call(node, tests.entry_points))
        if not found.asserts:
            yield Unit(source, None)


class _Asserts(ast.NodeVisitor):
    def __init__(self) -> None:
        self.asserts: list[ast.Assert] = []

    def visit_Assert(self, node: ast.Assert) -> None:
        self.asserts.append(node)


def _call(node: ast.Assert, entry_points: list[str]) -> str | None:
    """Find the call to show. `candidate` stands for the one entry point, as in HumanEval's tests."""
    names = {name: name for name in entry_points} | {"candidate": entry_points[0]}
    for call in ast.walk(node.test):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names:
            used = {name.id for name in ast.walk(call) if isinstance(name, ast.Name)} - {call.func.id}
            if all(hasattr(builtins, name) for name in used):
                call.func.id = names[call.func.id]
                return ast.unparse(call)
    return None


def _fault(run: dict[str, Any]) -> str | None:
    """Describe how a run failed; None when it came to its end."""
    if run["status"] == "TimeLimitExceeded":
        return "did not come to an end in time"
    if run["return_code"] == 0:
        return None
    if run.get("limits"):
        return f"reached its limit of {', '.join(run['limits'])}"
    lines = (run["stderr"] or "").strip().splitlines()
    if not lines:
        return f"ended with status {run['return_code']}"
    at = re.findall(r'File "<program>", line (\d+)', "\n".join(lines))
    return f"raised {_cut(lines[-1])}" + (f" (line {at[-1]} of your program)" if at else "")


def _cut(text: str) -> str:
    return text if len(text) <= MOST else f"{beginning(text, MOST)} [cut]"
