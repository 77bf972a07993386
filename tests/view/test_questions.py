"""Questions: what they find, what they cannot reach, and that nothing makes them wait for ever."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.errors import DataError
from agentrl.trajectory import Message
from agentrl.trajectory.parquet import write_trajectories
from agentrl.view import children as module
from agentrl.view import questions
from agentrl.view.children import BYTES, MOST, Children
from agentrl.view.questions import (
    COLUMNS,
    MOST_CHARACTERS,
    MOST_ROWS,
    OF_THE_GROUP,
    OF_THE_UPDATE,
    READY,
    Answer,
    Question,
    ask,
    prompt_of,
)
from agentrl.view.run import Run, open_run
from agentrl.view.viewer import Viewer
from tests.naming import Names, naming
from tests.view.made import Player, played


@pytest.fixture(scope="module")
def opened(run: Path) -> Run:
    return open_run(str(run))


def found(run: Run, question: Question) -> list[tuple[object, object]]:
    answer = ask(run, run.parts, question)
    assert not answer.problems
    return [(row["step"], row["row"]) for row in answer.rows]


@pytest.mark.parametrize(
    ("question", "rows"),
    [
        (Question(where="malformed > 0", limit=9), [(step, row) for step in (1, 2, 3) for row in (3, 7)]),
        (Question(status="length", reward_to=0.0, limit=3), [(1, 3), (1, 7), (2, 3)]),
        (Question(text="#### 2 É", limit=9), [(step, 6) for step in (1, 2, 3)]),
        (Question(regex=r"^#### \d é$", tool="calculator", error="parse", limit=1), [(1, 3)]),
        (Question(where="tokens > 0", order="-tool_seconds", limit=2), [(1, 3), (1, 7)]),
        (Question(where="num_calls > 0 and list_contains(tools, 'calculator') -- all", limit=1), [(1, 0)]),
        (Question(where="gap_max > 0.4", limit=9), [(2, 1), (3, 1)]),
        (Question(order="-gap_max", limit=1), [(2, 1)]),
        (Question(where="advantage < 0 and weight_max = 1.25 and clipped_share > 0", limit=2), [(2, 3), (2, 7)]),
        (Question(where="version = 2", source="made/up", limit=1), [(3, 0)]),
        (
            Question(
                where="map_extract(metrics, 'generate_seconds')[1] = 0.5 and turns[1].role = 'assistant'", limit=1
            ),
            [(1, 0)],
        ),
    ],
)
def test_what_is_asked_is_found(opened: Run, question: Question, rows: list[tuple[int, int]]) -> None:
    assert found(opened, question) == rows


def test_each_column_and_each_ready_question_can_be_asked(opened: Run) -> None:
    for name in (*COLUMNS, *OF_THE_GROUP, *OF_THE_UPDATE):
        quoted = f'"{name}"'
        assert found(opened, Question(where=f"{quoted} is null or {quoted} is not null", order=f"-{name}"))
    for _, where, order in READY:
        ask(opened, opened.parts, Question(where=where, order=order))


def test_groups_of_equal_reward(tmp_path: Path) -> None:
    group = [played(1, number, k) for number, ks in ((0, (0, 1, 2)), (1, (0, 3)), (2, (0,))) for k in ks]
    (tmp_path / "trajectories").mkdir()
    write_trajectories(tmp_path / "trajectories", group, step=1, split="train", turn_reward_coef=1.0)
    run = open_run(str(tmp_path))
    assert found(run, Question(where="equal_group")) == [(1, 0), (1, 1), (1, 2)]


def test_the_same_prompt_is_found_at_other_steps(opened: Run) -> None:
    prompt = prompt_of(opened, opened.part("train_000001"), 5)
    assert prompt == "system: Be right.\nuser: How much is 1 times 0?"
    assert found(opened, Question(prompt=prompt)) == [(step, row) for step in (1, 2, 3) for row in (4, 5, 6, 7)]


def test_answers_that_were_given_are_of_the_prompt(tmp_path: Path) -> None:
    given: list[Message] = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    players = [Player(f"train/1/0/{k}", k, f"{k} + 1") for k in range(2)]
    for player in players:
        player.says("3").trajectory.messages[1:1] = given
    (tmp_path / "trajectories").mkdir()
    ended = [player.ends(1.0) for player in players]
    write_trajectories(tmp_path / "trajectories", ended, step=1, split="train", turn_reward_coef=1.0)
    run = open_run(str(tmp_path))
    prompt = prompt_of(run, run.part("train_000001"), 1)
    assert prompt == "system: Be right.\nuser: 1 + 1\nassistant: 2\nuser: 1 + 1"
    assert found(run, Question(prompt=prompt)) == [(1, 1)]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("reward >", "want one SQL condition"),
        ("1 = 1; drop table raw", "want one SQL condition"),
        ("1 = 1) union select (1", "want one SQL condition"),
        ("rewards > 1", 'Referenced column "rewards" not found'),
        ("(select count(*) from read_text('/etc/passwd')) > 0", "Permission Error"),
        ("(select count(*) from '/etc/passwd') > 0", "cannot be asked"),
        ("(select count(*) from read_parquet('/tmp/x.parquet')) > 0", "cannot be asked"),
        ("(select count(*) from glob('/*')) > 0", "Permission Error"),
        ("uid in (select uid from opened)", "cannot be asked"),  # no variable of Python's becomes a table
        ("reward", "cannot be asked|want one"),
    ],
)
def test_a_condition_reaches_nothing_but_the_trajectories(opened: Run, where: str, says: str) -> None:
    if where == "reward":  # a number is a condition, too
        assert found(opened, Question(where=where, limit=1))
        return
    with pytest.raises(DataError, match=says):
        ask(opened, opened.parts, Question(where=where))


@pytest.mark.parametrize(
    ("question", "says"),
    [
        (Question(regex="("), "missing"),
        (Question(regex=r"(a)\1"), "cannot be asked"),  # RE2 has no references back
        (Question(order="nothing"), "want one"),
        (Question(order="tokens; drop"), "want one"),
        (Question(limit=10**9), ("want", "number")),
    ],
)
def test_a_question_without_a_meaning_is_refused(opened: Run, question: Question, says: Names) -> None:
    with naming(DataError, says):
        ask(opened, opened.parts, question)


class Watched(Children):
    """Children whose processes a test can look at."""

    def __init__(self) -> None:
        super().__init__("agentrl.view.answers")
        self.started: list[subprocess.Popen[bytes]] = []

    def _start(self) -> subprocess.Popen[bytes]:
        self.started.append(super()._start())
        return self.started[-1]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched()
    monkeypatch.setattr(questions, "CHILDREN", made)
    yield made
    made.close()


def test_a_question_ends_at_its_time_limit(opened: Run, children: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 600.0)
    monkeypatch.setattr(questions, "SECONDS", 0.2)
    with naming(DataError, "more than"):
        ask(opened, opened.parts, Question(where="(select max(x) from range(1000000000000) t(x)) > 1"))
    slow = Question(where="(select count(*) from range(1000000000000) t(x) where x % (row + 2) = 0) > 1")
    answer = None
    while answer is None:
        try:
            answer = ask(opened, opened.parts, slow)
        except DataError:  # a busy machine: not even the check of its meaning came to an end
            monkeypatch.setattr(questions, "SECONDS", 2 * questions.SECONDS)
    assert (answer.searched, answer.rows) == (0, [])
    assert len(children.started) == 1, "it looks at interrupts"


def test_a_function_that_cannot_be_interrupted_is_ended_with_its_process(
    opened: Run, children: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "SECONDS", 0.2)
    with naming(DataError, "more than"):
        ask(opened, opened.parts, Question(where="length(lpad('a', 1500000000, 'b')) > 1"))
    assert children.started[0].returncode == -signal.SIGALRM
    monkeypatch.setattr(questions, "SECONDS", 20.0)
    assert found(opened, Question(where="true", limit=1)) == [(1, 0)], "another process answers"
    assert len(children.started) == 2


@pytest.mark.parametrize(
    "where",
    [
        "list_sort(range(300000000))[1] = 0",
        "length(printf('%2000000000d', 1)) > 1",
        "length(format('{:2000000000d}', 1)) > 1",
        "length(repeat('a', 2000000000)) > 1",
        "row = 0 and length(repeat('a', (row + 2000000000)::BIGINT)) > 1",
        "(select len(list(x)) from range(300000000) t(x)) > 1",
    ],
)
def test_memory_is_bounded_whoever_takes_it(opened: Run, where: str) -> None:
    """DuckDB's own limit leaves out what its functions take."""
    with naming(DataError, "1GB"):
        answer = ask(opened, opened.parts[:1], Question(where=where))
        raise DataError(answer.problems[0])
    assert found(opened, Question(where="true", limit=1)) == [(1, 0)]


def test_the_kernel_holds_the_limit_of_a_child(opened: Run, children: Watched) -> None:
    assert found(opened, Question(where="true", limit=1))
    assert resource.prlimit(children.started[0].pid, resource.RLIMIT_DATA)[0] == BYTES


@pytest.mark.parametrize("name", ["where", "text", "regex", "status", "tool", "error", "source"])
def test_what_is_too_long_is_not_read(opened: Run, children: Watched, name: str) -> None:
    with naming(DataError, f"{name}=", str(MOST_CHARACTERS), "20000"):
        ask(opened, opened.parts, replace(Question(), **cast(dict[str, Any], {name: "(" * 20_000})))
    assert not children.started


def test_others_are_answered_while_a_question_takes_its_time(opened: Run, children: Watched) -> None:
    slow = Question(where="(select max(x) from range(1000000000000) t(x)) > 1")
    with ThreadPoolExecutor(MOST) as threads:
        asked = []
        for number in range(1, MOST):
            asked.append(threads.submit(ask, opened, opened.parts, slow))
            while len(children.started) < number:
                assert not asked[-1].done()
                time.sleep(0.01)
        assert found(opened, Question(where="malformed > 0", limit=1)) == [(1, 3)]
        assert not any(one.done() for one in asked)
        for child in children.started[: MOST - 1]:
            child.kill()
        for one in asked:
            with pytest.raises(DataError, match="needs more than"):  # what the kernel kills a process for, as a rule
                one.result()


def test_a_child_ends_with_its_parent() -> None:
    code = (
        "from agentrl.view.questions import CHILDREN; CHILDREN.ready(); "
        "print(CHILDREN._idle[0].pid, flush=True); input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    ended, _, _ = select.select([child], [], [], 120)
    os.close(child)
    assert ended


def test_texts_that_are_none_are_told(run: Path, tmp_path: Path) -> None:
    table = pq.read_table(run / "trajectories" / "train_000001.parquet")
    bytes_ = pa.array([b"\xff\xfe"] * table.num_rows, pa.binary())
    uids = pa.Array.from_buffers(pa.string(), len(bytes_), bytes_.buffers())
    (tmp_path / "trajectories").mkdir()
    pq.write_table(
        table.set_column(table.column_names.index("uid"), "uid", uids), tmp_path / "trajectories/train_000001.parquet"
    )
    viewer = Viewer([open_run(str(tmp_path))])
    assert "can't decode byte 0xff" in str(viewer.step(0, "train", 1)["problems"])
    for asked in (lambda: viewer.trajectory((0, "train_000001", 0)), lambda: viewer.group(0, "train_000001", 0)):
        with naming(DataError, "train_000001.parquet", "can't", "0xff"):
            asked()


def test_regular_expressions_take_linear_time(tmp_path: Path) -> None:
    one = played(1, 0, 0)
    one.messages[1]["content"] = "a" * 30_000 + "!"
    (tmp_path / "trajectories").mkdir()
    write_trajectories(tmp_path / "trajectories", [one], step=1, split="train", turn_reward_coef=1.0)
    run = open_run(str(tmp_path))
    begun = time.process_time()
    assert ask(run, run.parts, Question(regex="^(a+)+$")).rows == []
    assert time.process_time() - begun < 30, "python's own would not end"


def test_one_that_is_found_early_reads_no_more_files(opened: Run) -> None:
    answer: Answer = ask(opened, opened.parts, Question(where="true", limit=3))
    assert (len(answer.rows), answer.searched, answer.parts, answer.is_cut) == (3, 1, 3, True)


@pytest.mark.parametrize("order", ["", "-tokens"])
def test_rows_that_are_found_first_are_those_of_all_columns(opened: Run, order: str) -> None:
    """A file is first asked which rows they are, by the columns of the conditions alone, then for all of these."""
    conditions = [
        *(f'"{name}" is not null' for name in ("group", "kinds", "seconds")),
        '"TOKENS" > 3 and Reward >= 0',
        "gap_max > 0.1",
    ]
    questions = [Question(where=condition, order=order) for condition in conditions]
    questions += [Question(tool="calculator", error="parse", order=order), Question(text="no json", reward_to=0.5)]
    rows = 0
    for question in questions:
        few, whole = (ask(opened, opened.parts, replace(question, limit=limit)) for limit in (200, MOST_ROWS))
        assert few.problems == [] and few.rows == whole.rows, question
        rows += len(few.rows)
    assert rows
