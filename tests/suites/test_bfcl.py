"""BFCL: tools and scores are the authors' own, whose runner runs in an interpreter of its own."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, DataError
from agentrl.suites import bfcl
from agentrl.suites.contract import Request, Row
from agentrl.trajectory import Trajectory
from tests.naming import naming
from tests.tiers import takes_all

Calls = list[tuple[str, str]] | str
AUTHORS = Path(__file__).with_name("authors_checker.py")
TASKS = 25
"""Tasks of each category that answers are made of."""


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the wheel, which is fetched where all tests run."""
    if not takes_all(request.config):
        pytest.skip("the wheel of bfcl-eval is fetched where all tests run: make test-all")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        given = os.environ.get("AGENTRL_BFCL_WHEEL")
        yield bfcl.WHEEL.fetched(None if given is None else Path(given), "--source")


def authors(wheel: Path, folder: Path, given: str, *more: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, str(AUTHORS), str(wheel), *more],
        input=given,
        env={**os.environ, "BFCL_PROJECT_ROOT": str(folder), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def first(value: Any) -> Any:
    """The first value that a parameter may have, with a dictionary's or list's own."""
    if isinstance(value, dict):
        return {key: first(next(one for one in its if one != "")) for key, its in value.items() if its != [""]}
    if isinstance(value, list):
        return [first(one) for one in value]
    return value


def right(answers: list[dict[str, Any]], language: str) -> list[tuple[str, dict[str, Any]]]:
    """Calls with a value that each parameter may have; in Java and JavaScript as texts."""
    calls = []
    for answer in answers:
        ((name, parameters),) = answer.items()
        values = {key: first(next(iter(its))) for key, its in parameters.items() if its and its[0] != ""}
        if language != "Python":
            values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        calls.append((name.replace(".", "_"), values))
    return calls


def recorded(row: Row) -> Iterator[Calls]:
    """Answers to a task: right ones, and wrong ones of each kind that the checker tells apart."""
    truth = json.loads(row.ground_truth)
    name = truth["functions"][0]["name"].replace(".", "_") if truth["functions"] else "guess"
    yield "There is no function for this."
    yield [(name, "{}")]
    yield [(name, '{"a": 1')]
    if truth["answers"] is None:
        return
    calls = right(truth["answers"], bfcl.HINTS.get(row.part, "Python"))

    def written(these: list[tuple[str, dict[str, Any]]]) -> Calls:
        return [(one, json.dumps(values)) for one, values in these]

    yield written(calls)
    yield written(calls[::-1])
    yield written([*calls, calls[0]])
    yield written([(f"{one}2", values) for one, values in calls])
    for change in ("drop", "more", "null", "other", "number", "case"):
        changed = copy.deepcopy(calls)
        values = changed[0][1]
        if change == "more":
            values["surprise"] = 1
        elif values:
            key = next(iter(values))
            if change == "drop":
                del values[key]
            else:
                text = f" {values[key]}.".upper() if isinstance(values[key], str) else values[key]
                values[key] = {"null": None, "other": [{"x": values[key]}], "number": 3.5, "case": text}[change]
        yield written(changed)


def trajectory(calls: Calls) -> Trajectory:
    message: dict[str, Any] = {"role": "assistant", "content": calls if isinstance(calls, str) else ""}
    if not isinstance(calls, str):
        message["tool_calls"] = []
        for number, (name, text) in enumerate(calls):
            try:
                arguments = json.loads(text)
            except ValueError:
                arguments = text  # as a message has a call that cannot be read
            function = {"name": name, "arguments": arguments}
            message["tool_calls"].append({"id": str(number), "type": "function", "function": function})
    messages: Any = [{"role": "user", "content": "?"}, message]
    return Trajectory(uid="a/0", group=0, data_source="bfcl", agent_name="single_turn_calls", messages=messages)


def test_recorded_answers_have_the_authors_scores(wheel: Path, tmp_path: Path) -> None:
    ours, lines = [], []
    for part in bfcl.PARTS:
        for number, row in enumerate(bfcl.tasks(Request((part,), TASKS)).rows):
            for calls in recorded(row):
                ours.append((part, bfcl.compute_score(trajectory(calls), row.ground_truth)))
                lines.append(json.dumps({"category": part, "number": number, "calls": calls}))
    theirs = authors(wheel, tmp_path, "\n".join(lines))
    assert len(theirs) == len(ours) > 2000
    differing = [line for line, (_, score), valid in zip(lines, ours, theirs, strict=True) if bool(score) != valid]
    assert not differing, f"{len(differing)}: {differing[:3]}"
    passed, all_of = Counter(part for part, score in ours if score == 1), Counter(part for part, _ in ours)
    assert all(
        TASKS // 3 < passed[part] < all_of[part] - TASKS // 3 for part in bfcl.PARTS if all_of[part] > 10 * TASKS
    )
    assert min(passed[part] for part in bfcl.PARTS) > 0


def test_tools_and_prompts_are_the_authors(wheel: Path, tmp_path: Path) -> None:
    theirs = authors(wheel, tmp_path, " ".join(bfcl.PARTS), "tools")
    tasks = bfcl.tasks(Request())
    assert tasks.version == "bfcl-eval==2026.3.23" and len(tasks.rows) == len(theirs) > 3400
    for row, (part, name, question, tools) in zip(tasks.rows, theirs, strict=True):
        assert (row.part, row.id, row.question) == (part, name, question)
        assert row.tools is not None and json.loads(row.tools) == tools


def test_what_cannot_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    bfcl.checker.cache_clear()
    with naming(DataError, "bfcl-eval==", "agentrl.evaluate", "--suite"):
        bfcl.compute_score(
            trajectory([("f", "{}")]), json.dumps({"category": "multiple", "functions": [], "answers": []})
        )
    (tmp_path / "other.whl").write_bytes(b"PK")
    with naming(
        DataError,
        "other.whl",
        "bfcl-eval==2026.3.23",
        "SHA-256",
        "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
    ):
        bfcl.tasks(Request(source=tmp_path / "other.whl"))
    with naming(DataError, "none.whl"):
        bfcl.tasks(Request(source=tmp_path / "none.whl"))
    assert not bfcl.WHEEL.folder.exists()


CHECKER = """
import re

def ast_checker(functions, calls, answers, language, category, model):
    (values,) = calls[0].values()
    return {"valid": re.fullmatch(r"(a|a)*", values["x"].strip()) is not None}
"""


def test_a_text_that_keeps_the_checker_busy_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    monkeypatch.setattr(bfcl, "SECONDS", 1)
    monkeypatch.setattr(bfcl, "checker", lambda: None)  # in this process nothing is judged
    constants, checks = bfcl.WHEEL.folder / "bfcl_eval/constants", bfcl.WHEEL.folder / "bfcl_eval/eval_checker/ast_eval"
    for folder in (constants, checks):
        folder.mkdir(parents=True)
    (constants / "enums.py").write_text("Language = str")
    (checks / "ast_checker.py").write_text(CHECKER)

    def score(text: str) -> float:
        truth = json.dumps({"category": "simple_java", "functions": [], "answers": []})
        return bfcl.compute_score(trajectory([("f", json.dumps({"x": text}))]), truth)

    assert [score(text + " " * 300) for text in ("aaa", "a" * 40 + "b")] == [1.0, 0.0]


def test_without_answers_to_compare_a_call_alone_counts() -> None:
    call, text, broken = trajectory([("f", "{}")]), trajectory("No."), trajectory([("f", "{")])
    for category, scores in (("live_relevance", [1, 0, 0]), ("irrelevance", [0, 1, 1])):
        truth = json.dumps({"category": category, "functions": [], "answers": None})
        assert [bfcl.compute_score(one, truth) for one in (call, text, broken)] == scores


def test_an_unknown_part_is_refused(wheel: Path) -> None:
    with naming(ConfigError, "'simple_pythom'", "'simple_python'", "unknown"):
        bfcl.tasks(Request(("simple_pythom",)))
