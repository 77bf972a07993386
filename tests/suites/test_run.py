"""`agentrl.evaluate --suite`: a suite of a user's own on a tiny policy, its report, and two reports compared."""

from __future__ import annotations

import ast
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

import agentrl
from agentrl.agent_loop.single_turn import SingleTurnCallsLoop
from agentrl.errors import ConfigError, DataError
from agentrl.evaluate import main
from agentrl.offline.intervals import of_share
from agentrl.suites import gsm8k, reasoning_gym, report
from agentrl.suites.contract import Group, Request, Suite, Tasks
from agentrl.suites.report import Scored
from agentrl.system.json_value import JSON
from agentrl.trajectory.sample import Sample
from tests.naming import naming
from tests.runs import refused

fails = partial(refused, main)

OWN = """
import json

from agentrl.suites.contract import Group, Request, Row, Suite, Tasks

TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])


def tasks(request: Request) -> Tasks:
    called = json.dumps({"category": "irrelevance", "functions": [], "answers": None})
    rows = [Row("sums", str(n), f"What is {n} + 2?", str(n + 2), "openai/gsm8k") for n in range(3)]
    rows.append(Row("calls", "0", "How is the weather?", called, "bfcl/irrelevance", "single_turn_calls", TOOLS))
    return Tasks(rows, "version 1")


KEYS = {"data.max_response_length": 16, "data.max_prompt_length": 300}
SUITE = Suite(tasks, KEYS, groups={"all": Group(("sums", "calls"))})
"""


def test_a_suite_is_run_scored_again_and_compared(
    policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def of(out: str, *more: str) -> list[str]:
        suite = f"{tmp_path}/own.py:SUITE"
        return ["--suite", suite, "--out", str(tmp_path / out), f"model.path={policy_dir}", *more]

    assert main(of("a")) == 0
    printed = capsys.readouterr().out
    made = json.loads((tmp_path / "a/report.json").read_text())
    assert made["version"] == "version 1" and made["settings"]["actor_rollout_ref.rollout.do_sample"] is False
    assert (made["settings"]["data.max_response_length"], made["settings"]["trainer.seed"]) == (16, 1)
    assert {name: one["tasks"] for name, one in made["numbers"].items()} == {"sums": 3, "calls": 1, "all": 4}
    rows = pq.read_table(tmp_path / "a/responses.parquet").to_pylist()
    is_call = "<tool_call>" in rows[3]["responses"][0]
    assert made["numbers"]["calls"]["mean"] == float(not is_call), "of the record's message, not of the text"
    assert any(line.split()[:3] == ["sums", "3", "of"] for line in printed.splitlines())
    before = (tmp_path / "a/responses.parquet").stat().st_mtime_ns
    assert main(of("a")) == 0
    assert (tmp_path / "a/responses.parquet").stat().st_mtime_ns == before, "only the scores are made again"
    fails(of("a", "trainer.seed=2"), capsys, "holds a run with trainer.seed=1, and now it is 2")
    fails(of("b", "data.prompt_key=x"), capsys, "data.prompt_key: a suite sets this key itself")
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("sums"))
    assert line.split()[-4:] == ["+0.0000", "+0.0000", "to", "+0.0000"]


def test_numbers_have_wilsons_interval() -> None:
    assert of_share(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert of_share(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert of_share(1.0, 1)[1] == 1.0
    suite = Suite(
        lambda request: Tasks((), ""),
        groups={"plain": Group(("a", "b")), "rows": Group(("a", "b"), by_rows=True), "lacking": Group(("a", "c"))},
    )
    scored = [*(Scored("a", str(n), float(n < 1)) for n in range(4)), Scored("b", "0", 1.0), Scored("b", "1", None)]
    found = report.numbers_of(suite, scored, {"a": 4, "b": 3, "c": 1})
    assert (found["a"].mean, found["b"].scored, found["b"].tasks) == (0.25, 1, 3)
    assert found["c"] == report.Number(None, None, 0, 1)
    assert (found["plain"].mean, found["rows"].mean) == (0.625, 0.4) and "lacking" not in found


def test_tasks_are_compared_in_pairs(tmp_path: Path) -> None:
    def write(name: str, scores: list[float | None], version: str = "1") -> Path:
        (tmp_path / name).mkdir()
        told: dict[str, JSON] = {"suite": "x", "version": version}
        report.write(tmp_path / name, told, [Scored("a", str(n), score) for n, score in enumerate(scores)])
        return tmp_path / name

    one = write("one", [0.0, 0.0, 1.0, 1.0, None, 1.0])
    other = write("other", [1.0, 1.0, 1.0, 0.0, 1.0])
    (line,) = report.compare(one, other)
    assert line == ["a", "4", "0.5000", "0.7500", "+0.2500", "-0.6883 to +1.1883"]
    with pytest.raises(DataError, match=r"has version 1, .* 2"):
        report.compare(one, write("later", [1.0], version="2"))
    with naming(DataError, "no scored task"):
        report.compare(one, write("empty", [None]))
    with pytest.raises(DataError, match=r"expected report.json and scores.jsonl"):
        report.compare(one, tmp_path)


def test_gsm8k_reads_its_file_and_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(
        '{"question": "2+\u20282?", "answer": "two and two\\n#### 1,004"}\n{"question": "x", "answer": "4"}\n'
    )
    (row,) = gsm8k.tasks(Request(limit=1, source=tmp_path)).rows
    assert (row.ground_truth, row.part, row.id) == ("1004", "test", "0")
    with naming(DataError, "test.jsonl:2", "`question`", "`answer`"):
        gsm8k.tasks(Request(source=path))
    with pytest.raises(DataError, match="fetches nothing: --source FOLDER names"):
        gsm8k.tasks(Request())


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 4 </answer>", "4"),
        ("<answer>3</answer> no: <answer>4</answer>", "4"),
        ("<answer>3</answer> or <answer>4", "3"),
        ("4", None),
        ("</answer> 4 <answer>", None),
    ],
)
def test_the_last_answer_counts(text: str, answer: str | None) -> None:
    assert reasoning_gym.answer_in(text) == answer


@pytest.mark.parametrize(
    ("task", "why"), [("countdown", "Python"), ("word_ladder", "another process"), ("coin_flip", "1e400000000")]
)
def test_tasks_that_cannot_be_judged_are_not_used(task: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(factory=SimpleNamespace(DATASETS=[task]))
    monkeypatch.setattr(reasoning_gym, "package", lambda: package)
    with naming(ConfigError, task, why):
        reasoning_gym.tasks(Request((task,)))
    truth = json.dumps({"task": task, "size": 1, "seed": 1, "index": 0, "question": ""})
    with naming(DataError, task, why):
        reasoning_gym.compute_score("<answer>1</answer>", truth)


def test_the_suite_and_the_environment_leave_the_same_tasks_out() -> None:
    """The adapter runs in another Python, with nothing of ours; here reasoning-gym need not be installed."""
    adapter = Path(agentrl.__file__).parent / "environments/adapters/reasoning_gym.py"
    lines: list[ast.stmt] = [one for one in ast.parse(adapter.read_text()).body if isinstance(one, ast.Assign)]
    found: dict[str, tuple[str, ...]] = {}
    exec(compile(ast.Module(lines, []), str(adapter), "exec"), found)
    assert found["EVALUATED"] == reasoning_gym.EVALUATED
    assert [name for name, why in reasoning_gym.REFUSED.items() if "1e400" in why] == list(found["ENDLESS"])


class Primes(list[dict[str, str]]):
    """A generator whose scorer cannot read every text, as that of prime_factorization."""

    def score_answer(self, answer: str | None, entry: dict[str, str]) -> float:
        return float(answer is not None and int(answer) == int(entry["answer"]))


def test_an_answer_that_the_scorer_cannot_read_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Primes([{"question": "7?", "answer": "7"}])
    monkeypatch.setattr(reasoning_gym, "generator", lambda task, size, seed: made)
    given: dict[str, object] = {"task": "primes", "size": 1, "seed": 1, "index": 0}
    truth = json.dumps({**given, "question": reasoning_gym.digest("7?")})
    texts = ("<answer>7</answer>", "<answer>seven</answer>", "7")
    assert [reasoning_gym.compute_score(text, truth) for text in texts] == [1, 0, 0]
    for other in ({**given, "question": reasoning_gym.digest("11?")}, given):
        with naming(DataError, "ground_truth", "make the rows again"):
            reasoning_gym.compute_score("<answer>7</answer>", json.dumps(other))


def test_a_row_is_shown_its_own_tools_alone() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    row = Sample([{"role": "user", "content": "?"}], "x", "single_turn_calls", extra_info={"tools": json.dumps(tools)})
    assert SingleTurnCallsLoop().first_prompt(row, [{"function": {"name": "of_the_run"}}]) == (row.prompt, tools)


@pytest.mark.parametrize("tools", [None, "{", '{"name": "f"}', "[1]"])
def test_a_row_without_tools_is_refused(tools: str | None) -> None:
    sample = Sample([{"role": "user", "content": "?"}], "x", "single_turn_calls", extra_info={"tools": tools})
    with naming(DataError, "extra_info.tools", "JSON", "OpenAI's"):
        SingleTurnCallsLoop().first_prompt(sample, [])
