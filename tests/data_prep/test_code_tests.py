"""Code problems as rows that the judge can read, their own solutions run against their tests in a real sandbox."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrl.config.sections.reward import SandboxFusionConfig
from agentrl.data.dataset import FileDataset
from agentrl.reward.code import CodeJudge, StdioTests, read_tests
from data_prep.code_tests import main
from tests.naming import Names, assert_names
from tests.sandbox.servers import running

HUMANEVAL: dict[str, Any] = {
    "task_id": "HumanEval/900",
    "prompt": "import math\n\n\ndef line(xs: list, x: float):\n    return xs[0] + xs[1] * x\n\n\n"
    'def zero(xs: list):\n    """Where the line is zero."""\n',
    "entry_point": "zero",
    "canonical_solution": "    return -xs[0] / xs[1]\n",
    "test": "def check(candidate):\n    for n in range(1, 5):\n"
    "        assert math.fabs(line([n, 3], candidate([n, 3]))) < 1e-9\n",
}
MBPP: dict[str, Any] = {
    "task_id": 901,
    "text": "Write a function to share two tuples.",
    "code": "import math\ndef helper(a): return set(a)\ndef shared(a, b): return tuple(helper(a) & helper(b))",
    "test_list": ["assert set(shared((3, 4), (4, 5))) == {4}", "assert math.gcd(4, 6) and shared((1,), (2,)) == ()"],
    "test_setup_code": "import math",
    "challenge_test_list": [],
}
SANITISED = {**MBPP, "task_id": 902, "prompt": MBPP["text"], "text": None, "test_imports": ["import math", "import re"]}
STDIO = {
    "question": "Add two numbers.",
    "input_output": json.dumps({"inputs": [f"{n} 1\n" for n in range(9)], "outputs": [f"{n + 1}\n" for n in range(9)]}),
    "solutions": json.dumps(["print(sum(map(int, input().split())))", "no"]),
}
LINES = {"prompt": "Say a, then b.", "input_output": {"inputs": [""], "outputs": [["a", "b"]]}}
WRONG = {**HUMANEVAL, "task_id": "HumanEval/903", "canonical_solution": "    return xs[0] / xs[1]\n"}
OBJECTS = {
    **MBPP,
    "task_id": 904,
    "code": "class Pair: pass\ndef two(p): return 2",
    "test_list": ["assert two(Pair()) == 2"],
}
CALLED = {
    "question": "Add.",
    "starter_code": "class Solution:\n    def add(self, xs: List[int]) -> int:\n",
    "input_output": json.dumps({"fn_name": "add", "inputs": [[[1, 2]], [[3]]], "outputs": [[3], [3]]}),
    "solutions": json.dumps(["class Solution:\n    def add(self, xs: List[int]) -> int:\n        return sum(xs)\n"]),
}
LINED = {"question": "Join.", "input_output": {"fn_name": "join", "inputs": ['"a"\n"b"'], "outputs": ['"ab"']}}
NAMELESS = {"question": "Add.", "input_output": {"fn_name": "a+b", "inputs": [[1, 2]], "outputs": [3]}}
WITHOUT = {"question": "Hidden.", "input_output": ""}


def rows(tmp_path: Path, *records: Any, options: tuple[str, ...] = (), split: str = "train") -> list[dict[str, Any]]:
    source = tmp_path / "problems.jsonl.gz"
    source.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    assert main(["--source", str(source), "--out", str(tmp_path / "out"), *options]) == 0
    table: list[dict[str, Any]] = pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()
    return table


def truth(row: dict[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(row["reward_model"]["ground_truth"])
    return value


def test_rows_of_each_kind(tmp_path: Path) -> None:
    human, mbpp, sanitised, stdio, lines = rows(tmp_path, HUMANEVAL, MBPP, SANITISED, STDIO, LINES)
    assert [row["data_source"] for row in (human, mbpp, stdio)] == ["code/humaneval", "code/mbpp", "code/stdio"]
    assert [message["role"] for message in human["prompt"]] == ["system", "user"]
    assert HUMANEVAL["prompt"].strip() in human["prompt"][1]["content"]
    assert human["extra_info"] == {"split": "train", "index": 0, "name": "HumanEval/900"}
    assert truth(human)["entry_points"] == ["zero"] and truth(human)["tests"][0].endswith("\ncheck(zero)\n")
    assert truth(mbpp) == {
        "kind": "asserts",
        "setup": "import math",
        "entry_points": ["shared"],
        "tests": MBPP["test_list"],
    }
    assert MBPP["test_list"][0] in mbpp["prompt"][1]["content"]
    assert MBPP["test_list"][1] not in mbpp["prompt"][1]["content"]
    assert truth(sanitised)["setup"] == "import math\nimport re" and sanitised["extra_info"]["name"] == "MBPP/902"
    assert truth(stdio)["tests"][8] == {"input": "8 1\n", "output": "9\n"}
    assert truth(lines)["tests"] == [{"input": "", "output": "a\nb"}]
    sample = FileDataset(str(tmp_path / "out" / "train.parquet"))[3]
    assert isinstance(read_tests(sample.ground_truth), StdioTests)


def test_rows_whose_tests_call_a_function(tmp_path: Path) -> None:
    called, lined = rows(tmp_path, CALLED, LINED, options=("--max-cases", "1"))
    assert called["data_source"] == "code/calls"
    told = called["prompt"][1]["content"]
    assert "class Solution:" in told and "`add` is called" in told and "standard input" not in told
    assert "Write a function `join`" in lined["prompt"][1]["content"]
    assert truth(called)["entry_points"] == ["add"] and len(truth(called)["tests"]) == 1
    assert '*json.loads(\'["a", "b"]\')' in truth(lined)["tests"][0]


def test_options(tmp_path: Path) -> None:
    options = ("--agent", "single_turn", "--split", "test", "--max-cases", "3")
    (row,) = rows(tmp_path, STDIO, options=options, split="test")
    assert (row["agent_name"], row["extra_info"]["split"]) == ("single_turn", "test")
    assert [message["role"] for message in row["prompt"]] == ["user"]
    assert [case["output"] for case in truth(row)["tests"]] == ["1\n", "4\n", "7\n"]


def test_what_no_test_can_run_for_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = {**MBPP, "test_list": ["assert other(1) == 1"]}
    assert len(rows(tmp_path, NAMELESS, WITHOUT, foreign, {**MBPP, "code": "def f("}, MBPP)) == 1
    told = capsys.readouterr().out.splitlines()
    for number, reason in ((1, "fn_name"), (2, "no tests"), (3, "no function of its code"), (4, "can be parsed")):
        assert told[number - 1].startswith(f"left out: {tmp_path}/problems.jsonl.gz:{number}: ")
        assert reason in told[number - 1]
    assert told[-1].endswith("train.parquet: 1 problems, 4 left out")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[str]:
    with running(None) as server:
        yield server.url


def test_the_check_leaves_out_what_its_own_solution_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sandbox: str
) -> None:
    broken = {**MBPP, "task_id": 905, "test_setup_code": "import no_such_module"}
    records = (HUMANEVAL, MBPP, SANITISED, STDIO, LINES, WRONG, OBJECTS, broken, CALLED)
    kept = rows(tmp_path, *records, options=("--check", sandbox))
    assert [row["extra_info"]["index"] for row in kept] == [0, 1, 2, 3, 4, 5]
    told = capsys.readouterr().out
    assert_names(told, "(HumanEval/903)", "0%")
    assert_names(told, "(MBPP/904)", "0%")
    assert_names(told, "(MBPP/905)", "ModuleNotFoundError")
    assert "6 problems, 3 left out" in told

    async def judged() -> list[float]:
        judge = CodeJudge(SandboxFusionConfig(url=sandbox))
        answers = {
            0: "def zero(xs):\n    return -xs[0] / xs[1]",
            3: STDIO["solutions"],
            4: "print('a\\nb')",
            5: "def add(xs): return 3",
        }
        verdicts = [
            await judge.compute_score(
                kept[n]["data_source"], f"```python\n{answer}\n```", kept[n]["reward_model"]["ground_truth"]
            )
            for n, answer in answers.items()
        ]
        await judge.close()
        return [verdict["score"] for verdict in verdicts]

    assert asyncio.run(judged()) == [1.0, 0.0, 1.0, 1.0]


def test_a_check_without_a_server_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "p.jsonl").write_text(json.dumps(MBPP))
    arguments = ["--source", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "out"), "--timeout", "1"]
    assert main([*arguments, "--check", url]) == 2
    assert f"--check {url}: " in (error := capsys.readouterr().err) and "python -m sandbox.server" in error
    assert not list((tmp_path / "out").glob("*"))
    assert main([*arguments, "--check", "localhost"]) == 2
    assert "--check: expected http://HOST:PORT, found 'localhost'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"question": "?"}, ("HumanEval", "entry_point", "MBPP")),
        ({**HUMANEVAL, "test": 3}, ("`test`", "found 3")),
        ({**HUMANEVAL, "prompt": None}, "`prompt`"),
        ({**MBPP, "test_list": "assert"}, "`test_list`"),
        ({**MBPP, "test_setup_code": ["x"]}, "`test_setup_code`"),
        ({**STDIO, "input_output": "{"}, ("`input_output`", "JSON")),
        ({**STDIO, "input_output": "[1]"}, "`input_output`"),
        ({**STDIO, "input_output": {"inputs": ["1"], "outputs": ["1", "2"]}}, ("inputs", "outputs")),
        ({**STDIO, "input_output": {"inputs": [1], "outputs": ["1"]}}, ("`input_output`", "found 1")),
    ],
)
def test_a_bad_record_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any], expected: Names
) -> None:
    (tmp_path / "p.jsonl").write_text(f"{json.dumps(MBPP)}\n{json.dumps(record)}\n")
    assert main(["--source", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert_names(message, f"{tmp_path}/p.jsonl:2", expected)
    assert not list((tmp_path / "out").glob("*"))
