"""Code problems with tests as rows: `python -m data_prep.code_tests --source FILE --out DIR`.

FILE holds JSON lines in the fields of HumanEval, of MBPP, or {"question", "input_output": {"inputs", "outputs"}},
with "fn_name" beside them where a function is called. The rows are judged by `agentrl.reward.code`, for which training
needs a sandbox (reward_model.sandbox_fusion.url).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

import pyarrow as pa

from agentrl.config.sections.reward import SandboxFusionConfig
from agentrl.errors import DataError, UserError
from agentrl.remote import RemoteRefused, RemoteUnavailable
from agentrl.reward.code import CodeJudge, NoVerdict
from agentrl.system.deadline import within
from agentrl.system.json_value import JSON
from agentrl.system.visible import complain, visible
from data_prep.code_problems import LeftOut, Problem, problem
from data_prep.files import write_rows
from data_prep.options import positive
from data_prep.records import read_records

Agent = Literal["tool_agent", "single_turn"]

TOOL_PROMPT = "Solve the task in Python. Try your program with the code_interpreter tool before you answer."
ANSWER_PROMPT = "Answer with the whole program in one ```python block."
CHECKED_AT_ONCE = 8
WAIT_SECONDS = 60.0
"""Seconds that a program may wait for a place in the sandbox, beyond its own time."""
MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "agent_name": pa.string(),
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64(), "name": pa.string()}),
    }
)


class Selection:
    """Problems of a file, without those that are left out, which are printed and counted."""

    def __init__(self, source: Path, max_cases: int | None) -> None:
        self.source, self.max_cases = source, max_cases
        self.left_out = 0

    def problems(self) -> Iterator[Problem]:
        """Read the problems. Raises DataError."""
        for record in read_records(self.source):
            try:
                yield problem(record, self.max_cases)
            except LeftOut as reason:
                self.leave_out(record.where, str(reason))

    def passing(self, problems: Iterable[Problem], sandbox: SandboxFusionConfig) -> Iterator[Problem]:
        """Keep the problems whose own solution passes their tests, and those without one.

        Raises DataError without a sandbox.
        """
        remaining, judge = iter(problems), CodeJudge(sandbox, "--check")
        with asyncio.Runner() as runner:
            try:
                while some := list(islice(remaining, CHECKED_AT_ONCE)):
                    for one, reason in zip(some, runner.run(checked(judge, some, sandbox)), strict=True):
                        if reason is None:
                            yield one
                        else:
                            self.leave_out(f"{one.where} ({one.name})", reason)
            finally:
                runner.run(judge.close())

    def leave_out(self, where: str, reason: str) -> None:
        """Count and print a problem that is left out."""
        self.left_out += 1
        print(visible(f"left out: {where}: {reason}"), flush=True)


async def checked(judge: CodeJudge, problems: list[Problem], sandbox: SandboxFusionConfig) -> list[str | None]:
    """Run each problem's own solution; return why the problem may not stay, or None."""

    async def check(one: Problem) -> str | None:
        if one.solution is None:
            return None
        try:
            async with within(sandbox.timeout + WAIT_SECONDS):
                verdict = await judge.judge(one.solution, one.tests)
        except (ValueError, DataError, NoVerdict) as error:
            return str(error)
        except (RemoteUnavailable, RemoteRefused) as error:
            raise DataError(f"--check {sandbox.url}: {error}; start one with `python -m sandbox.server`") from error
        passed = verdict["pass_fraction"]
        return None if verdict["score"] == 1.0 else f"its own solution passes {passed:.0%} of its tests"

    return list(await asyncio.gather(*(check(one) for one in problems)))


def main(arguments: list[str] | None = None) -> int:
    """Write the rows and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.code_tests", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="JSON lines, may be gzipped")
    parser.add_argument("--out", type=Path, required=True, help="directory to write train.parquet or test.parquet to")
    parser.add_argument("--agent", choices=("tool_agent", "single_turn"), default="tool_agent")
    parser.add_argument("--split", choices=("train", "test"), default="train", help="which of the two the file is")
    parser.add_argument("--max-cases", type=positive, help="of a problem's inputs and outputs, spread over all")
    parser.add_argument(
        "--check", metavar="URL", help="a sandbox server: leave out problems whose own solution fails their tests"
    )
    parser.add_argument("--timeout", type=positive, default=10, help="seconds that --check gives a solution")
    given = parser.parse_args(arguments)
    selection = Selection(given.source, given.max_cases)
    try:
        problems = selection.problems()
        if given.check is not None:
            problems = selection.passing(problems, SandboxFusionConfig(url=given.check, timeout=given.timeout))
        path = given.out / f"{given.split}.parquet"
        rows = (row(one, given.agent, given.split, index) for index, one in enumerate(problems))
        count = write_rows(path, rows, SCHEMA)
        print(f"{path}: {count} problems, {selection.left_out} left out", flush=True)
    except UserError as error:
        return complain(error)
    return 0


def row(one: Problem, agent: Agent, split: str, index: int) -> dict[str, JSON]:
    """Make the row of a problem."""
    question = {"role": "user", "content": f"{one.task}\n\n{ANSWER_PROMPT}"}
    tests = json.dumps(one.tests.model_dump(), ensure_ascii=False, separators=(",", ":"))
    return {
        "data_source": one.source,
        "prompt": [{"role": "system", "content": TOOL_PROMPT}, question] if agent == "tool_agent" else [question],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": tests},
        "agent_name": agent,
        "extra_info": {"split": split, "index": index, "name": one.name},
    }


if __name__ == "__main__":
    sys.exit(main())
