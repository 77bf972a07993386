"""GSM8K (arXiv:2110.14168) as rows: `python -m data_prep.gsm8k --source DIR --out DIR`.

DIR holds train.jsonl and test.jsonl with {"question", "answer"}, whose answers end with `#### N`. Each becomes a
parquet file of rows for `tool_agent` with the calculator, for `single_turn`, or both. `--sft` adds sft.parquet: the
worked solutions of the training problems as conversations, whose annotations `<<48/2=24>>` are calls of the calculator.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.errors import DataError, UserError
from agentrl.system.visible import complain
from agentrl.tool import ToolError
from agentrl.trajectory import FunctionCall, Message, ToolCall
from data_prep.files import Row, write_splits
from data_prep.options import positive, span
from tools.calculator import CalculatorTool, calculate

Agent = Literal["tool_agent", "single_turn"]

SPLITS = ("train", "test")
CALCULATOR_PROMPT = "Solve the problem step by step. Compute with the calculator tool."
ANNOTATION = re.compile(r"<<([^<>=]+)=[^<>]*>>")
ANSWER_PROMPT = "Let's think step by step and output the final answer after `####`."


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of the data set."""

    question: str
    answer: str
    """Worked solution, with its calculator annotations `<<48/2=24>>` and the last line `#### N`."""
    result: str
    """The number N without thousands separators."""

    @property
    def steps(self) -> int:
        """Number of computations in the worked solution."""
        return len(ANNOTATION.findall(self.answer))


def main(arguments: list[str] | None = None) -> int:
    """Write the files and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.gsm8k", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="directory with train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="directory to write train.parquet and test.parquet to")
    parser.add_argument("--agent", choices=("tool_agent", "single_turn", "both"), default="tool_agent")
    parser.add_argument(
        "--interaction", action="store_true", help="tool_agent rows are answered by the gsm8k interaction"
    )
    parser.add_argument(
        "--steps", type=positive, help="leave out problems whose worked solution computes more than N times"
    )
    parser.add_argument(
        "--problems", type=span, default=slice(None), metavar="A:B", help="only these training problems, e.g. 0:2000"
    )
    parser.add_argument("--sft", action="store_true", help="write sft.parquet, too: solutions that call the calculator")
    given = parser.parse_args(arguments)
    if given.interaction and given.agent == "single_turn":
        parser.error("--interaction needs turns to answer: single_turn has one; use --agent tool_agent or both")
    agents: tuple[Agent, ...] = ("tool_agent", "single_turn") if given.agent == "both" else (given.agent,)
    files: dict[Path, list[Row]] = {}
    remarks: list[str] = []
    try:
        for split in SPLITS:
            lines = list(enumerate(read(given.source / f"{split}.jsonl")))
            problems = {
                index: problem
                for index, problem in (lines[given.problems] if split == "train" else lines)
                if given.steps is None or problem.steps <= given.steps
            }
            path = given.out / f"{split}.parquet"
            files[path] = [
                row(problem, agent, split, index, interaction=given.interaction)
                for index, problem in problems.items()
                for agent in agents
            ]
            remarks.append(f"{path}: {len(files[path])} rows of {len(problems)} problems")
            if given.sft and split == "train":
                path = given.out / "sft.parquet"
                tools = json.dumps([CalculatorTool.default_schema])
                files[path] = [{"messages": conversation(problem), "tools": tools} for problem in problems.values()]
                remarks.append(f"{path}: {len(problems)} conversations")
        write_splits(files)
    except UserError as error:
        return complain(error)
    print(*remarks, sep="\n", flush=True)
    return 0


def read(path: Path) -> Iterator[Problem]:
    """Read the problems of one file. Raises DataError naming the file and line that cannot be used."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield problem(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); --source must hold {path.name}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error})") from error


def problem(line: str, where: str) -> Problem:
    """Parse one line. Raises DataError."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: expected a JSON object, found {line[:80]!r} ({error})") from error
    for key in ("question", "answer"):
        if not isinstance(record, dict) or not isinstance(record.get(key), str):
            raise DataError(f"{where}: expected an object with the text `{key}`, found {line[:80]!r}")
    _, marker, result = record["answer"].rpartition("####")
    result = result.strip().replace(",", "")
    if not marker or not result:
        raise DataError(f"{where}: expected an answer that ends with `#### N`, found {record['answer'][-80:]!r}")
    return Problem(record["question"], record["answer"], result)


def row(problem: Problem, agent: Agent, split: str, index: int, *, interaction: bool) -> Row:
    """Make one row, with the fields that verl's own preparation of GSM8K has."""
    tools = agent == "tool_agent"
    made: dict[str, object] = {
        "data_source": "openai/gsm8k",
        "prompt": prompt(problem, agent),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.result},
        "agent_name": agent,
        "extra_info": {"split": split, "index": index, "question": problem.question, "answer": problem.answer},
    }
    if tools:
        made["tools_kwargs"] = {"calculator": {"create_kwargs": {"ground_truth": problem.result}}}
        if interaction:
            made["interaction_kwargs"] = {
                "name": "gsm8k",
                "query": problem.question,
                "ground_truth": problem.result,
            }
    return made


def prompt(problem: Problem, agent: Agent) -> list[Message]:
    """Make the prompt of an agent."""
    question: Message = {"role": "user", "content": f"{problem.question} {ANSWER_PROMPT}"}
    return [{"role": "system", "content": CALCULATOR_PROMPT}, question] if agent == "tool_agent" else [question]


def conversation(problem: Problem) -> list[Message]:
    """Cut the worked solution at its annotations: each is a call, answered by the calculator itself."""
    *steps, ending = re.split(ANNOTATION, problem.answer)
    messages = prompt(problem, "tool_agent")
    for text, expression in zip(steps[::2], steps[1::2], strict=True):
        function: FunctionCall = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
        call: ToolCall = {"type": "function", "function": function}
        messages.append({"role": "assistant", "content": text.strip(), "tool_calls": [call]})
        messages.append({"role": "tool", "content": computed(expression)})
    return [*messages, {"role": "assistant", "content": ending.strip()}]


def computed(expression: str) -> str:
    """Compute an annotation. Raises DataError."""
    try:
        return calculate(expression)
    except ToolError as error:
        raise DataError(f"--sft: the annotation <<{expression}=...>> cannot be computed: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
