"""The loop of environments: scripted turns against real sidecars, their faults, and how they start and end."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.environments.interpreter import _install, find_python
from agentrl.environments.loop import EnvironmentLoop
from agentrl.environments.serve import KEY, MOST_LOG, MOST_TEXT, Refused, Session, chain_of, leaves
from agentrl.environments.sidecar import ADAPTERS, EnvironmentOptions, Play, Sidecar
from agentrl.errors import CodeError, ConfigError, InfrastructureError
from agentrl.remote.faults import RemoteRefused
from agentrl.system.call_journal import CallJournal, Entry
from agentrl.system.json_value import as_list
from agentrl.system.user_code import is_fault, is_told_fault
from agentrl.tool import ErrorKind
from agentrl.trajectory import Status, Trajectory
from agentrl.trajectory.sample import Sample
from data_prep.environment import content_of, rows
from tests.agent_loop.conftest import Bench, call, sample
from tests.agent_loop.recorded_environments import (
    COUNTING,
    FILE,
    REPLAY,
    SAID,
    make_files,
    play,
    play_counter,
    play_game,
)
from tests.conftest import PROJECT
from tests.e2e.test_docs import write_files
from tests.naming import Names, assert_names, naming
from tests.sandbox.servers import running
from tests.system.test_call_journal import live
from tests.system.test_user_code import ERRORS, FAULTS
from tests.waiting import until

MakeBench = Callable[..., Bench]

ODD = '''
"""Does what the task says, in the step that it says."""
import json, math, os, signal, time
from pathlib import Path

def tasks(split, seed, count):
    yield {}

def start(task, seed):
    if task.get("start") == "raise":
        raise LookupError("unknown task")
    return dict(task, steps=0), task.get("opening")

def step(episode, action):
    episode["steps"] += 1
    what = episode.get("step") if episode["steps"] == 2 else None
    marker = Path(episode.get("marker", "/"))
    if what == "raise":
        raise KeyError("my mistake")
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "fault":
        raise ConnectionError("its database is gone")
    if what == "forge":
        raise ValueError("\\n\\nTraceback (most recent call last):\\n  File 'x'\\nConnectionError: forged")
    if what in ("die", "hang") and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL) if what == "die" else time.sleep(60)
    answer = {"observation": f"step {episode['steps']}", "reward": 0.25, "done": episode["steps"] == 3}
    answer.update(episode.get("changes", {}) if what == "change" else {})
    if answer["reward"] == "nan":
        answer["reward"] = math.nan
    return answer

def score(episode):
    return episode.get("score", 1.0)

def close(episode):
    with open(os.environ["CLOSED"], "a") as file:
        file.write(str(episode["steps"]) + "\\n")
'''


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentOptions:
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    return EnvironmentOptions(environment=str(tmp_path / "odd.py"), pass_env=["CLOSED"])


def row(task: dict[str, Any], **changes: Any) -> Sample:
    text = json.dumps({"task": task, "seed": 7})
    return sample("env", data_source="environment/env", extra_info={"environment": text}, **changes)


@asynccontextmanager
async def playing(bench: Bench, options: EnvironmentOptions) -> AsyncIterator[EnvironmentLoop]:
    loop = EnvironmentLoop(options)
    bench.scheduler.loops["env"] = loop  # type: ignore[index]
    try:
        yield loop
    finally:
        await loop.close()


async def played(bench: Bench, options: EnvironmentOptions, *rows: Sample) -> list[Trajectory]:
    async with playing(bench, options):
        requests = [replace(bench.requests(one)[0], uid=f"t/{number}") for number, one in enumerate(rows)]
        return [one for request in requests for one in await bench.scheduler.run([request])]


async def test_an_episode_of_the_page(bench: MakeBench, tmp_path: Path) -> None:
    assert write_files("docs/environments.md", tmp_path)[0] == "my_environment.py"
    oldest = next(map(str, Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9")), None)  # where it is there
    options = EnvironmentOptions(environment=str(tmp_path / "my_environment.py"), python=oldest)
    sidecar = Sidecar(options)
    (task,) = await sidecar.tasks("train", 1, 1, 20)
    await sidecar.close()
    number = task["number"]
    assert isinstance(number, int)
    calls = [call("compare", number=number + 1), call("compare", number="x"), call("solve", number=1)]
    b = bench(["".join(calls), "-1", f" {number} ", "never"])
    (one,) = await played(b, options, row(task))
    assert one.status is Status.COMPLETED
    assert [(turn.role, turn.reward) for turn in one.turns] == [
        *[("assistant", None), ("tool", None), ("assistant", 0.0), ("user", None), ("assistant", 1.0)]
    ]
    assert [(record.name, record.error) for record in one.tool_calls] == [
        *[("compare", None), ("compare", ErrorKind.ARGUMENTS), ("solve", ErrorKind.UNKNOWN_TOOL)]
    ]
    assert one.tool_calls[0].response == "not too small"
    assert [message["content"] for message in one.messages if message["role"] == "user"] == [
        *["What is 2 + 3?", "No. Again!"]
    ]
    assert '"name": "compare"' in b.chat.decode(one.transcripts[0].ids)
    assert one.score == 1.0
    assert one.score_extra["guesses"] == 2.0
    assert one.score_extra["counted_turn_reward"] == 1.0


async def test_an_environment_of_the_page_that_asks_for_turns_itself(bench: MakeBench, tmp_path: Path) -> None:
    write_files("docs/environments.md", tmp_path)
    options = EnvironmentOptions(environment=str(tmp_path / "my_play.py"))
    sidecar = Sidecar(options)
    task, other = await sidecar.tasks("train", 1, 2, 20)
    await sidecar.close()
    assert task["prompt"] == [{"role": "user", "content": "Say 0."}] and other["prompt"] != task["prompt"]
    (made,) = rows("play", [task], "train", 1)
    said = [call("shout", text="0"), "1", "0"]
    b = bench(said)
    (one,) = await played(b, options, row(task, prompt=made["prompt"]))
    assert (one.status, one.score, one.score_extra["turns"]) == (Status.COMPLETED, 1.0, 3.0)
    assert [turn.role for turn in one.turns] == ["assistant", "tool", "assistant", "user", "assistant"]
    assert one.tool_calls[0].response == "0!"
    (cut,) = await played(bench(["1"] * 2, max_assistant_turns=2), options, row(task, prompt=made["prompt"]))
    assert (cut.status, cut.score, cut.score_extra["turns"]) == (Status.TURN_LIMIT, 0.0, 2.0)


ASKING = """
def tasks(split, seed, count, what):
    for number in range(count):
        own = {"prompt": f"{what} {number}", "tools": [TOOL]} if what.startswith("own") else {}
        yield {"what": what, "number": number, **own}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

async def play(task, seed, ask):
    said = [{"role": "user", "content": f"{task['what']} {task['number']}"}]
    if task["what"] == "nothing":
        return 0.0
    if task["what"] == "own but more":
        said.insert(0, {"role": "system", "content": "Be brief."})
    turn = await ask(said, [{**TOOL, "strict": True}] if task["what"] == "own but tools" else [])
    after = {
        "system": [{"role": "system", "content": "Hurry."}],
        "assistant": [{"role": "assistant", "content": "I see."}],
        "no call": [{"role": "tool", "tool_call_id": "1", "content": "x"}],
        "parts": [{"role": "user", "content": [{"type": "text", "text": "Hm."}]}],
        "tools": [],
    }
    if task["what"] in after:
        said += [{"role": "assistant", "content": turn["text"]}, *after[task["what"]]]
        await ask(said + [{"role": "user", "content": "Go on."}], [TOOL] if task["what"] == "tools" else [])
    if task["what"] == "uncaught":
        await ask([*said, {"role": "assistant", "content": turn["text"]}, said[0]])
    if task["what"] == "another":
        await ask(said)
    return {"score": 1.0}
"""


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("another", "messages that do not continue .* rewards that compare several answers need: not supported"),
        ("nothing", "play ended before it asked for a turn"),
        ("uncaught", "EOFError: the episode is over"),
        *((what, "expected texts of the role `tool`.*found {'role'") for what in ("system", "assistant", "no call")),
        ("parts", "expected texts of the role `tool`.*'Hm.'"),
        ("tools", "other tools than before the turn"),
        ("own but more", "expected the task's prompt as the first request, found .*'Be brief.'"),
        ("own but tools", "give the task the same `tools`"),
        ("own", None),
        ("fine", None),
    ],
)
async def test_what_asks_in_a_way_that_cannot_be_trained_is_refused_where_rows_are_made(
    tmp_path: Path, what: str, problem: str | None
) -> None:
    (tmp_path / "asking.py").write_text(ASKING)
    sidecar = Sidecar(EnvironmentOptions(environment=str(tmp_path / "asking.py"), task_options={"what": what}))
    try:
        if problem is None:
            (task,) = await sidecar.tasks("train", 1, 1, 20)
            changed = Play(sidecar, await sidecar.ready(), 20.0, "place")
            with naming(CodeError, "request"):
                await changed.start({name: one for name, one in task.items() if name != "prompt"} | {"number": 5}, 1)
        else:
            with pytest.raises(CodeError, match=problem):
                await sidecar.tasks("train", 1, 1, 20)
    finally:
        await sidecar.close()


STARTS = """
import subprocess, sys
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
Path(__file__).with_suffix(".pid").write_text(str(child.pid))
def tasks(split, seed, count): ...
def start(task, seed): ...
def step(episode, action): ...
def score(episode): ...
"""


@pytest.mark.parametrize("how", ["closed", "killed", "starter killed"])
async def test_processes_that_an_environment_started_end_with_it(tmp_path: Path, how: str) -> None:
    """Also those that lead a session of their own, as tool servers of verifiers do."""
    (tmp_path / "starts.py").write_text(STARTS)

    def child() -> int:
        return int((tmp_path / "starts.pid").read_text())

    def gone(process: int) -> bool:
        return not Path(f"/proc/{process}/cmdline").exists() or _is_zombie(process)

    if how == "starter killed":
        program = (
            "import sys; from agentrl.environments.sidecar import *\n"
            "Sidecar(EnvironmentOptions(environment=sys.argv[1])).start(); print(flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "starts.py")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as starter:
            assert starter.stdout is not None
            starter.stdout.readline()
            assert not gone(child())
            starter.kill()
        await until(lambda: gone(child()))
        return
    sidecar = Sidecar(EnvironmentOptions(environment=str(tmp_path / "starts.py")))
    address = await sidecar.ready()
    first = child()
    assert not gone(first) and address.process is not None
    if how == "killed":
        address.process.kill()
        address.process.wait()
        await sidecar.ready()
        assert child() != first and not gone(child())
    else:
        await sidecar.close()
    await until(lambda: gone(first))
    last = child()
    await sidecar.close()
    await until(lambda: gone(last))


async def test_what_the_environment_says_reaches_the_policy_and_the_score(
    bench: MakeBench, odd: EnvironmentOptions, tmp_path: Path
) -> None:
    b = bench(["a", "b", "c"], max_assistant_turns=3)
    first, second = await played(
        b, odd, row({"opening": "Begin."}), row({"step": "change", "changes": {"done": True, "metrics": {"left": 3}}})
    )
    assert [m["content"] for m in first.messages] == ["What is 2 + 3?\n\nBegin.", "a", "step 1", "b", "step 2", "c"]
    assert [turn.reward for turn in first.turns if turn.role == "assistant"] == [0.25] * 3
    assert (first.score, first.score_extra["counted_turn_reward"]) == (1.0, 0.75)
    assert (len(second.messages), second.score_extra["left"]) == (4, 3.0)
    assert (tmp_path / "closed").read_text().split() == ["3", "2"]


async def test_limits_end_an_episode_and_its_score_counts(bench: MakeBench, odd: EnvironmentOptions) -> None:
    long = row({"step": "change", "changes": {"observation": "word " * 2000}, "score": 0.5})
    b = bench(["a", "b", "c"], max_assistant_turns=2, tool_response_tokens=20)
    first, _ = await played(b, odd, row({}), long)
    assert (first.status, first.score) == (Status.TURN_LIMIT, 1.0)
    b = bench(["a", "b", "c"], tool_response_tokens=20)
    (cut,) = await played(b, odd, long)
    assert cut.status is Status.COMPLETED
    assert len(b.chat.encode(str(cut.messages[4]["content"]))) <= 20


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ({"step": "raise"}, ("step: KeyError", "'my mistake'")),
        ({"step": "change", "changes": {"reward": "nan"}}, ("step 2", "t7", "test.parquet", "row 0")),
        ({"step": "change", "changes": {"reward": "nan"}}, ("reward", "found nan")),
        ({"step": "change", "changes": {"observation": 3}}, ("None", "found 3")),
        ({"step": "change", "changes": {"observation": None}}, "observation"),
        ({"step": "change", "changes": {"done": 1}}, "found 1"),
        ({"step": "change", "changes": {"answers": ["x"]}}, ("0 texts", "found ['x']")),
        ({"score": "nan"}, "found 'nan'"),
        ({"score": {"steps": 3}}, "dict"),
    ],
)
async def test_the_policys_text_ends_no_run(
    bench: MakeBench,
    odd: EnvironmentOptions,
    task: dict[str, Any],
    problem: Names,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error of the environment after a turn costs its trajectory, and says where."""
    b = bench(["a"] * 4)
    first, second, good = await played(b, odd, row({"id": "t7", **task}), row({"id": "t7", **task}), row({}))
    assert b.scheduler.on_code_error == "error"
    assert [(one.status, one.failure_cause) for one in (first, second)] == [(Status.FAILED, "CodeError")] * 2
    assert (first.score, first.metrics["retries"], good.score) == (None, 0.0, 1.0)
    (told,) = (one.getMessage() for one in caplog.records if "left out, and counted" in one.getMessage())
    assert_names(told, problem)
    assert "test.parquet, row 0" in told
    if "raise" in task.values():
        assert 'odd.py", line ' in told


async def test_an_error_before_the_first_turn_is_none_of_the_policys_text(
    bench: MakeBench, odd: EnvironmentOptions
) -> None:
    with pytest.raises(CodeError, match="start: LookupError: unknown task") as error:
        await played(bench(["a"]), odd, row({"start": "raise"}))
    assert "test.parquet" in str(error.value) and 'odd.py", line ' in str(error.value)


async def test_no_reward_is_no_score(bench: MakeBench, odd: EnvironmentOptions) -> None:
    (one,) = await played(bench(["a"] * 3), odd, row({"score": None}))
    assert (one.status, one.failure_cause, one.score, one.metrics["retries"]) == (Status.FAILED, "NoScore", None, 0.0)
    assert len(one.turns) == 5


async def test_an_opening_is_cut_as_steps_are(bench: MakeBench, odd: EnvironmentOptions) -> None:
    b = bench(["a", "b", "c"], tool_response_tokens=20)
    (one,) = await played(b, odd, row({"opening": "word " * 400_000}))
    opening = str(one.messages[0]["content"]).removeprefix("What is 2 + 3?\n\n")
    assert 10 < len(b.chat.encode(opening)) <= 20
    (none,) = await played(bench(["a"], max_response_tokens=0), odd, row({}))
    assert (none.status, none.failure_cause, none.score) == (Status.FAILED, "NoScore", None)


SESSIONS = """
import json
from pathlib import Path

FULL = {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "all 1 sessions are in use"}}

class connect:
    def __init__(self, url, **options):
        self.answers = json.loads(Path("answers.json").read_text())
        left = int(Path("full").read_text())
        Path("full").write_text(str(max(0, left - 1)))
        if left:
            self.answers = [FULL]

    def send(self, text):
        if self.answers == [FULL]:
            raise OSError("the server hung up")

    def recv(self):
        answer = self.answers.pop(0)
        if "type" in answer:
            return json.dumps(answer)
        return json.dumps({"type": "observation", "data": {"observation": {"said": "Go on."}, **answer}})

    def close(self): ...
"""
"""Stand-in for websockets, whose package is not among the trainer's: sessions of an OpenEnv server."""


@pytest.mark.parametrize(
    ("answers", "full", "score"),
    [
        ([{"reward": None}, {"reward": 0.5}, {"reward": None, "done": True}], 0, 0.5),
        ([{"reward": None}, {"reward": 0.0, "done": True}], 0, 0.0),
        ([{"reward": None}, {"reward": None}, {"reward": None, "done": True}], 0, None),
        ([{"reward": None, "done": True}, {"reward": 9.0}], 0, None),
        ([{"reward": None}, {"reward": 1.0, "done": True}], 3, 1.0),
    ],
    ids=["some", "zero", "none", "over at reset", "full"],
)
async def test_a_server_of_openenv(
    bench: MakeBench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[dict[str, Any]],
    full: int,
    score: float | None,
) -> None:
    """NaN is null on the wire: no reward. A server that is full has a place later."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "websockets" / "sync").mkdir(parents=True)
    (tmp_path / "websockets" / "sync" / "client.py").write_text(SESSIONS)
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    (tmp_path / "full").write_text(str(full))
    options = EnvironmentOptions(environment="openenv", task_options={"server": "http://unused", "shown": "said"})
    task = {"reset": {"seed": 1}, "mcp": False, "field": "message"}
    (one,) = await played(bench(["a"] * 3), options, row(task))
    assert (one.score, one.metrics["retries"]) == (score, 0.0)
    assert one.failure_cause == ("NoScore" if score is None else None)
    assert sum(turn.role == "assistant" for turn in one.turns) == max(1, len(answers) - 1)


TELLS = """
import os
def tasks(split, seed, count): return []
def start(task, seed): return task, f"It is {os.environ['MY_TOKEN']}."
def step(episode, action):
    if episode.get("raise"):
        raise KeyError(os.environ["MY_TOKEN"])
    return {"observation": f"Still {os.environ['MY_TOKEN']}, in {os.environ['MY_LEVEL']}", "done": episode.get("done")
        or action["text"] == "b", "metrics": {os.environ["MY_TOKEN"]: 1}}
def score(episode): return float(os.environ["MY_TOKEN"] == "hunter2-hunter2")
"""


async def test_what_an_environment_was_passed_is_hidden_in_what_it_says(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")
    monkeypatch.setenv("MY_LEVEL", "3")
    (tmp_path / "tells.py").write_text(TELLS)
    options = EnvironmentOptions(environment=str(tmp_path / "tells.py"), pass_env=["MY_TOKEN", "MY_LEVEL"])
    one, failed = await played(bench(["a", "b"]), options, row({}), row({"raise": True}))
    assert one.score == 1.0
    assert [str(m["content"]) for m in one.messages][::2] == [
        "What is 2 + 3?\n\nIt is [secret].",
        "Still [secret], in 3",
    ]
    for text in (str(asdict(one)), str(asdict(failed)), caplog.text):
        assert "[secret]" in text and "hunter2" not in text


ORDERED = """
def tasks(split, seed, count): return [{"id": "1", "prompt": " ".join({"a", "b", "c", "d", "e", "f"})}]
def start(task, seed): return task, None
def step(episode, action): return {"done": True}
def score(episode): return 1.0
"""


async def test_every_process_of_an_environment_lists_sets_of_texts_in_one_order(tmp_path: Path) -> None:
    (tmp_path / "ordered.py").write_text(ORDERED)
    listed = []
    for _ in range(2):
        sidecar = Sidecar(EnvironmentOptions(environment=str(tmp_path / "ordered.py")))
        try:
            listed += await sidecar.tasks("train", 1, 1, 60)
        finally:
            await sidecar.close()
    assert listed[0] == listed[1]


BACKEND = """
import json, os, zipfile

def build_wheel(directory, settings=None, metadata=None):
    with open(os.path.join(os.environ["HOME"], "seen.json"), "w") as file:
        json.dump(dict(os.environ), file)
    print("the index is", os.environ["PIP_EXTRA_INDEX_URL"])
    raise SystemExit("no wheel today")
"""


def test_code_of_packages_sees_no_secret_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "pyproject.toml").write_text(project + '[project]\nname = "spy"\nversion = "1"\n')
    (tmp_path / "package" / "backend.py").write_text(BACKEND)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://me:pass-word@127.0.0.1:9/simple")
    pip = [sys.executable, "-m", "pip", "install", "--target", str(tmp_path / "to"), str(tmp_path / "package")]
    with pytest.raises(ConfigError, match="no wheel today") as error:
        _install("spy", [*pip, "--no-index"], "packages")
    assert "me:[secret]@" in str(error.value) and "pass-word" not in str(error.value)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert "PIP_EXTRA_INDEX_URL" in seen and "WANDB_API_KEY" not in seen


@pytest.mark.parametrize("what", ["die", "hang"])
async def test_a_dead_or_silent_sidecar_costs_a_try_and_no_reward(
    bench: MakeBench, odd: EnvironmentOptions, tmp_path: Path, what: str
) -> None:
    b = bench(["a", "b", "c"], call_timeout=3.0 if what == "hang" else 30.0)
    bad, good = row({"step": what, "marker": str(tmp_path / "marker"), "score": 0.5}), row({})
    async with playing(b, odd):
        requests = [replace(b.requests(bad)[0], uid="t/bad"), *b.requests(good, 4)]
        trajectories = await b.scheduler.run(requests)
    assert [one.score for one in trajectories] == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert [one.status for one in trajectories] == [Status.COMPLETED] * 5
    assert trajectories[0].metrics["retries"] >= 1.0
    assert [len(one.turns) for one in trajectories] == [5] * 5


ENDING = """
import asyncio, sys

def tasks(split, seed, count): yield {}

async def play(task, seed, ask):
    try:
        turn = await ask([{"role": "user", "content": "Hi."}])
    except EOFError:
        return 0.0
    if turn["text"] == "apart":
        await asyncio.create_task(end())
    return 1.0 if turn["text"] == "fine" else await end()

async def end():
    sys.exit(3)
"""


async def test_what_ends_a_thread_is_an_error_of_its_episode_alone(
    bench: MakeBench, odd: EnvironmentOptions, tmp_path: Path
) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    asking = EnvironmentOptions(environment=str(tmp_path / "ending.py"))
    for options, task, said, problem in (
        (odd, {"step": "interrupt"}, "", "step: KeyboardInterrupt"),
        (asking, {}, "apart", "step: SystemExit: 3"),
        (asking, {}, "exit", "step: SystemExit: 3"),
    ):
        sidecar = Sidecar(options)
        try:
            address = await sidecar.ready()
            bad, good = (Play(sidecar, address, 20.0, "place") for _ in range(2))
            await bad.start(task, 1)
            await good.start({}, 1)
            with naming(CodeError, problem):
                for _ in range(2):
                    await bad.step(said, [])
            await good.step("fine", [])
            assert await good.score() == {"score": 1.0}
        finally:
            await sidecar.close()


def test_a_request_that_a_close_overtook_is_refused() -> None:
    session = Session(lambda work: str(work()).encode())
    assert session.ask(0, lambda: 5) == b"5"
    session.end(None)
    assert session.ask(0, lambda: 6) == b"5"
    with naming(Refused, "it was closed"):
        session.ask(1, lambda: 6)


async def test_a_fault_of_its_services_is_none_of_its_code(bench: MakeBench, odd: EnvironmentOptions) -> None:
    (one,) = await played(bench(["a"] * 9), odd, row({"step": "fault"}))
    assert (one.status, one.score, one.metrics["retries"]) == (Status.FAILED, None, 2.0)
    assert "ConnectionError: its database is gone" in str(one.failure)


async def test_a_text_in_an_error_makes_no_fault_of_it(bench: MakeBench, odd: EnvironmentOptions) -> None:
    (one,) = await played(bench(["a"] * 9), odd, row({"step": "forge"}))
    assert (one.status, one.score, one.metrics.get("retries", 0.0)) == (Status.FAILED, None, 0.0)
    assert "CodeError" in str(one.failure)


def test_an_error_named_by_its_classes_says_the_same_as_itself() -> None:
    for error in (*FAULTS, *ERRORS):
        told = json.loads(json.dumps(list(map(chain_of, leaves(error)))))
        assert is_told_fault(told) is is_fault(error), error
    assert not is_told_fault(None) and not is_told_fault([[]]) and not is_told_fault([[{"classes": [1, ["a"]]}]])


LONG = """
def tasks(split, seed, count): yield {}
def start(task, seed): return {}, "a" + "x" * (20 << 20) + "b"
def step(episode, action):
    return {"observation": "c" + "\\0" * (20 << 20) + "d", "answers": ["\\u00e9" * (9 << 20)] * 2}
def score(episode): ...
"""


async def test_a_text_of_any_length_is_cut_and_no_fault(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(LONG)
    sidecar = Sidecar(EnvironmentOptions(environment=str(tmp_path / "long.py")))
    try:
        episode = Play(sidecar, await sidecar.ready(), 60.0, "place")
        opening = await episode.start({}, 1) or ""
        found = await episode.step("", [{"id": str(at), "name": "f", "arguments": {}} for at in range(2)])
        assert [(one[0], one[-1], len(one)) for one in (opening, str(found["observation"]))] == [
            *[("a", "b", MOST_TEXT), ("c", "d", MOST_TEXT)]
        ]
        assert [len(str(one)) for one in as_list(found["answers"])] == [MOST_TEXT] * 2
    finally:
        await sidecar.close()


async def test_no_further_number_of_a_score_stands_for_it(bench: MakeBench, odd: EnvironmentOptions) -> None:
    given = {"score": 1.0, "interaction_score": 0.25, "interaction_turn_score": 9.0}
    (one,) = await played(bench(["a"] * 3), odd, row({"score": given}))
    assert (one.score, one.score_extra["counted_turn_reward"]) == (1.0, 0.75)


LOUD = """
import os, sys
def tasks(split, seed, count):
    print("x" * (5 << 20), "last words", sep="\\n", flush=True)
    yield {}
def start(task, seed):
    return {}, None
def step(episode, action): os._exit(3)
def score(episode): ...
"""


async def test_the_log_of_a_sidecar_is_bounded_and_keeps_its_end(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    sidecar = Sidecar(EnvironmentOptions(environment=str(tmp_path / "loud.py")))
    try:
        await sidecar.tasks("train", 1, 1, 60)
        episode = Play(sidecar, await sidecar.ready(), 60.0, "place")
        await episode.start({}, 1)
        await until(lambda: os.fstat(sidecar._log.fileno()).st_size <= MOST_LOG)
        with naming(InfrastructureError, ("status 3", "last words")):
            await episode.step("", [])
    finally:
        await sidecar.close()


async def life(
    make: MakeBench, options: EnvironmentOptions, task: dict[str, Any], recorded: list[Entry]
) -> tuple[Trajectory, list[Entry], list[str]]:
    """The trajectory of a process that finds the entries: itself, all entries, and why it restarted."""
    entries, notes = list(recorded), list[str]()
    b = make(["a", "b", "c"])
    journal = CallJournal("t/0", entries.append, live(recorded), {}, notes.append)
    b.engine.said["t/0.0"] = [[]] * sum(one.who.startswith("engine") for one in live(recorded))
    async with playing(b, options):
        (one,) = await b.scheduler.run([replace(b.requests(row(task))[0], journal=journal)])
    return one, entries, notes


async def test_after_a_kill_of_the_trainer_the_episode_is_played_again(
    bench: MakeBench, odd: EnvironmentOptions, tmp_path: Path
) -> None:
    whole, entries, _ = await life(bench, odd, {"opening": "Begin."}, [])
    assert sum(one.who.startswith("engine") for one in entries) == 3
    for killed in (1, 2, 3):
        found, _, notes = await life(bench, odd, {"opening": "Begin."}, entries[:killed])
        assert (notes, found.transcripts, found.messages, found.score) == (
            *([], whole.transcripts, whole.messages, whole.score),
        )
    assert (tmp_path / "closed").read_text().split() == ["3"] * 4
    # An environment that answers otherwise than before: its second observation is another's.
    _, _, notes = await life(bench, odd, {"opening": "Start."}, entries[:2])
    assert len(notes) == 1


async def test_repeated_requests_are_harmless_and_wrong_ones_refused(odd: EnvironmentOptions, tmp_path: Path) -> None:
    sidecar = Sidecar(odd)
    try:
        address = await sidecar.ready()
        asked: dict[str, Any] = {"session": "s", "task": {}, "seed": 1}
        assert [await sidecar.ask(address, "start", asked) for _ in range(2)] == [{"observation": None}] * 2
        action = {"text": "a", "calls": []}
        for number in (1, 1, 1, 2, 3):
            step: dict[str, Any] = {"session": "s", "number": number, "action": action}
            assert (await sidecar.ask(address, "step", step))["observation"] == f"step {number}"
        with naming(CodeError, "step 4", "step 3"):
            await sidecar.ask(address, "step", {**step, "number": 4})
        with naming(RemoteRefused, "found 9"):
            await sidecar.ask(address, "score", {"session": "s", "number": 9})
        for _ in range(2):
            await sidecar.ask(address, "close", {"session": "s"})
        with naming(RemoteRefused, "no such session"):
            await sidecar.ask(address, "score", {"session": "s", "number": 5})
        assert (tmp_path / "closed").read_text() == "3\n"
    finally:
        await sidecar.close()


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise OSError('no model at /x')", "status 1"),
        ("raise OSError('no model at /x')", ("OSError", "/x")),
        (
            "def tasks(): ...",
            ("start, step, score", "tasks", "play"),
        ),
    ],
)
def test_an_environment_that_does_not_start_gives_its_last_lines(tmp_path: Path, code: str, problem: Names) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError) as error:
        EnvironmentLoop(EnvironmentOptions(environment=str(tmp_path / "mine.py"))).check()
    assert_names(error.value, problem)


def test_an_adapter_whose_package_is_missing_says_so() -> None:
    """An adapter is called like its package, and is not taken for it."""
    with naming(ConfigError, "'textarena'", "Install", "`packages`"):
        EnvironmentLoop(EnvironmentOptions(environment="textarena")).check()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"environment": "nowhere.py"}, "expected a Python file, or one of .*reasoning_gym.*; found nowhere.py"),
        ({"environment": "textarena", "python": "3.99"}, r"Python 3.99 is not on this machine \(found: .*3\.\d+"),
        ({"environment": "textarena", "python": "/bin/false"}, "a Python that runs, or a version .* found /bin/false"),
        ({"url": "http://127.0.0.1:9"}, "no sidecar answers at http://127.0.0.1:9"),
        ({"url": "http://127.0.0.1:9", "key_env": "NO_SUCH"}, "the environment variable NO_SUCH is not set"),
        ({"environment": "textarena", "pass_env": ["HOME", "NO_SUCH"]}, "pass_env: NO_SUCH not set"),
    ],
)
def test_what_cannot_be_started(
    options: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(ConfigError, match=problem):
        EnvironmentLoop(EnvironmentOptions.model_validate(options)).check()


def test_an_interpreter_counts_once_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shims, real = tmp_path / "shims", tmp_path / "pyenv" / "versions" / "3.10" / "bin"
    for folder, body in ((shims, "exit 127"), (real, "echo 3.10.99")):
        folder.mkdir(parents=True)
        (folder / "python3.10").write_text(f"#!/bin/sh\n{body}\n")
        (folder / "python3.10").chmod(0o755)
    monkeypatch.setenv("PATH", f"{shims}:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert find_python("3.10", "python") == str(real / "python3.10")
    assert find_python(None, "python") == sys.executable


async def test_a_sidecar_that_runs_is_attached_to_and_left_running(
    bench: MakeBench, odd: EnvironmentOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv(KEY, "secret")
    serve = [sys.executable, "agentrl/environments/serve.py", str(tmp_path / "odd.py")]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
            attached = EnvironmentOptions(url=url, key_env="MY_KEY")
            (one,) = await played(bench(["a"] * 3), attached, row({}))
            assert one.score == 1.0
            (two,) = await played(bench(["a"] * 3), attached, row({}))
            assert two.score == 1.0
            with naming(ConfigError, "key", "missing"):
                await asyncio.to_thread(EnvironmentLoop(EnvironmentOptions(url=url)).check)
        finally:
            process.kill()


async def test_a_sidecar_ends_with_its_killed_starter(odd: EnvironmentOptions) -> None:
    program = (
        "import sys; from agentrl.environments.sidecar import *\n"
        "address = Sidecar(EnvironmentOptions(environment=sys.argv[1])).start()\n"
        "print(address.process.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(odd.environment)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        sidecar = int(starter.stdout.readline())
        os.kill(sidecar, 0)
        starter.send_signal(signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{sidecar}/cmdline").exists() or _is_zombie(sidecar))


def _is_zombie(process: int) -> bool:
    return " Z " in Path(f"/proc/{process}/stat").read_text()


class ResourcesServer(BaseHTTPRequestHandler):
    """Resources server as NeMo Gym 0.4.0 has it: a session by cookie, a tool by path, and a verifier."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cookie = self.headers.get("Cookie", "")
        answer: dict[str, Any] = {}
        status = 200
        if self.path == "/seed_session":
            assert asked["verifier_metadata"] == {"expected_city": "Paris"}
        elif cookie != "session=s1":
            status, answer = 500, {"detail": "no session"}
        elif self.path == "/get_weather":
            status, answer = (200, {"weather": "sunny"}) if asked["city"] == "Paris" else (422, {"detail": "no city"})
        elif self.path == "/verify":
            kinds = [one["type"] for one in asked["response"]["output"]]
            assert kinds == [*["function_call", "function_call_output"] * 2, "message"]
            assert asked["response"]["output"][1]["output"] == '{"weather": "sunny"}'
            said = asked["response"]["output"][-1]["content"][0]["text"]
            answer = {**asked, "reward": float(said == "sunny"), "tool_call_seen": True}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Set-Cookie", "session=s1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("family", SAID)
async def test_what_real_packages_answered_is_played(bench: MakeBench, tmp_path: Path, family: str) -> None:
    recorded = json.loads(FILE.read_text())[family]
    (tmp_path / "replay.py").write_text(REPLAY)
    (made,) = rows(family, [recorded["task"]], "train", 1)
    b = bench(SAID[family], max_assistant_turns=len(SAID[family]))
    again = row({name: recorded[name] for name in ("opening", "steps", "score")}, prompt=made["prompt"])
    (one,) = await played(b, EnvironmentOptions(environment=str(tmp_path / "replay.py")), again)
    steps = recorded["steps"]
    assert one.status is (Status.COMPLETED if steps[-1]["done"] else Status.TURN_LIMIT)
    assert one.score == recorded["score"]["score"]
    shown = [step["observation"] for step in steps[: len(SAID[family]) - 1]]
    assert [turn.text for turn in one.turns if turn.role == "user"] == shown
    assert [turn.reward for turn in one.turns if turn.role == "assistant"] == [step["reward"] for step in steps]


async def test_what_tools_of_nemo_gym_answered_is_played(bench: MakeBench, tmp_path: Path) -> None:
    recorded = json.loads(FILE.read_text())["counter"]
    (tmp_path / "replay.py").write_text(REPLAY)
    task, said = recorded["task"], ["".join(call(name, **given) for name, given in calls) for calls in COUNTING]
    b = bench([*said[:-1], "24"], max_assistant_turns=len(said))
    again = {"tools": task["tools"], **{name: recorded[name] for name in ("opening", "steps", "score")}}
    options = EnvironmentOptions(environment=str(tmp_path / "replay.py"))
    (one,) = await played(b, options, row(again, prompt=task["prompt"]))
    assert (one.status, one.score) == (Status.COMPLETED, 1.0)
    answered = [answer for step in recorded["steps"] for answer in step["answers"]]
    assert [(record.response, record.error) for record in one.tool_calls] == [(answer, None) for answer in answered]
    assert answered[-1] == '{"count":24}'


def skip_without_python_3_12() -> None:
    """Skip a test of NeMo Gym's package, with the interpreters that are there as the reason."""
    try:
        find_python("3.12", "NeMo Gym")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", [*SAID, "game", "counter"])
async def test_real_packages_answer_as_recorded(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == "counter":
        skip_without_python_3_12()
    monkeypatch.chdir(tmp_path)
    others = {"game": play_game, "counter": play_counter}
    assert await (others[family]() if family in others else play(family)) == json.loads(FILE.read_text())[family]


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1800)
async def test_what_a_policy_writes_neither_ends_a_run_of_reasoning_gym_nor_is_run_as_code(bench: MakeBench) -> None:
    """A scorer that cannot read an answer raises; others evaluate it."""
    (given,) = yaml.safe_load(
        (PROJECT / "agentrl/environments/configs/environments" / "reasoning_gym.yaml").read_text()
    )
    given["options"]["task_options"] = {"datasets": ["prime_factorization"]}
    options = EnvironmentOptions.model_validate(given["options"])
    sidecar = Sidecar(options)
    try:
        (task,) = await sidecar.tasks("train", 1, 1, 600)
        for name, problem in {"countdown": "as code", "leg_countin": "did you mean leg_counting"}.items():
            sidecar.options = options.model_copy(update={"task_options": {"datasets": [name]}})
            with pytest.raises(CodeError, match=problem):
                await sidecar.tasks("train", 1, 1, 600)
    finally:
        await sidecar.close()
    (one,) = await played(bench(["<answer>yes</answer>"]), options, row(task))
    assert (one.status, one.score, one.score_extra["unreadable"]) == (Status.COMPLETED, 0.0, 1.0)


GROUP_RUBRIC = """
import verifiers as vf
from datasets import Dataset

def longest(completions):
    most = max(len(one[-1]["content"]) for one in completions)
    return [float(len(one[-1]["content"]) == most) for one in completions]

def load_environment():
    data = Dataset.from_list([{"question": "1 + 1?", "answer": "2"}])
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[longest]))
"""


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("family", "environment", "problem"),
    [
        ("verifiers", "grouped", ("grouped:", "(longest)")),
        ("verifiers_v1", {"id": "best-of-n", "taskset": {"id": "my_taskset"}}, "second conversation"),
        ("verifiers_v1", {"taskset": {"id": "my_tasks"}}, "'my_tasks'"),
    ],
)
async def test_rewards_that_see_a_group_are_refused_where_rows_are_made(
    family: str, environment: object, problem: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (given,) = yaml.safe_load((PROJECT / "agentrl/environments/configs/environments" / f"{family}.yaml").read_text())
    options = EnvironmentOptions.model_validate({**given["options"], "task_options": {"environment": environment}})
    make_files(family, options)
    (tmp_path / "grouped.py").write_text(GROUP_RUBRIC)
    sidecar = Sidecar(options)
    try:
        with naming(CodeError, problem):
            await sidecar.tasks("train", 1, 1, 600)
    finally:
        await sidecar.close()


async def test_a_resources_server_of_nemo_gym(bench: MakeBench, tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "name": "get_weather", "parameters": parameters, "strict": True}
    asked = {"input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Paris?"}]}
    line = {"responses_create_params": {**asked, "tools": [tool]}, "verifier_metadata": {"expected_city": "Paris"}}
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(line)}\n" * 11)
    with ThreadingHTTPServer(("127.0.0.1", 0), ResourcesServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        given: dict[str, Any] = {"url": url, "file": str(tmp_path / "tasks.jsonl")}
        options = EnvironmentOptions(environment="nemo_gym", task_options=given)
        sidecar = Sidecar(options)
        listed = [await sidecar.tasks(split, 1, 20, 20) for split in ("train", "validation")]
        await sidecar.close()
        assert [len(tasks) for tasks in listed] == [9, 2]
        assert listed[0][0]["prompt"] == [
            *[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Paris?"}]
        ]
        script = [call("get_weather", city="Paris"), call("get_weather", city="Rome"), "sunny"]
        (one,) = await played(bench(script), options, row(listed[0][0]))
        server.shutdown()
    assert [record.response for record in one.tool_calls] == ['{"weather": "sunny"}', '{"detail": "no city"}']
    assert (one.status, one.score, one.score_extra["tool_call_seen"]) == (Status.COMPLETED, 1.0, 1.0)


@pytest.mark.parametrize("name", ["verify", "seed_session", "..", "a/b", "a?b", ""])
async def test_a_tool_of_a_row_is_no_other_route_of_a_server_of_nemo_gym(tmp_path: Path, name: str) -> None:
    given: dict[str, Any] = {"url": "http://127.0.0.1:9", "file": str(tmp_path / "tasks.jsonl")}
    configured = runpy.run_path(str(ADAPTERS / "nemo_gym.py"))["configured"]
    task = {"tools": [{"type": "function", "function": {"name": name}}]}
    with naming(ValueError, (repr(name), "tool")):
        configured(task, **given)
    task["tools"][0]["function"] = {"name": "get_weather"}
    assert configured(task, **given) == {"url": given["url"]}


INSTRUCTION = "Write hello into /app/out.txt.\n"
TESTS = """#!/bin/bash
# /tests/expected is beside /app/out.txt
cmp /app/out.txt /tests/expected && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


def harbor_task(folder: Path, dockerfile: str = "FROM ubuntu:24.04\n\n# No more.\n\nWORKDIR /app") -> Path:
    """A task folder as `harbor init` of 0.26.0 makes it, with an instruction and tests."""
    for name, content in {
        "task.toml": 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 20.0\n[environment]\n',
        "instruction.md": INSTRUCTION,
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": TESTS,
        "tests/expected": "hello\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


async def test_a_task_folder_of_harbor_in_the_sandbox(bench: MakeBench, tmp_path: Path) -> None:
    for number in range(11):
        harbor_task(tmp_path / f"t{number:02}")
    forged = (
        "mkdir -p ../tests ../logs/verifier; echo 1 | tee ../logs/verifier/reward.txt; echo exit > ../tests/test.sh"
    )
    with running(None) as server:
        given: dict[str, Any] = {"folder": str(tmp_path), "sandbox": server.url, "command_timeout": 2}
        options = EnvironmentOptions(environment="harbor", task_options=given)
        sidecar = Sidecar(options)
        listed = [await sidecar.tasks(split, 1, 20, 20) for split in ("train", "validation")]
        await sidecar.close()
        assert [len(tasks) for tasks in listed] == [9, 2]
        (task, *_) = listed[0]
        assert task["prompt"] == "Write hello into /home/sandbox/app/out.txt.\n"
        assert len({content_of(one) for tasks in listed for one in tasks}) == 11  # with the same instruction
        scripts = [
            [call("bash", command="echo hello > out.txt; pwd; false"), call("bash", command="sleep 9"), "Done."],
            [call("bash", command=forged), "Done."],
        ]
        played_ones = [(await played(bench(script), options, row(task)))[0] for script in scripts]
    assert [(one.status, one.score) for one in played_ones] == [(Status.COMPLETED, 1.0), (Status.COMPLETED, 0.0)]
    assert [record.response for record in played_ones[0].tool_calls] == [
        *["/home/sandbox/app\n\n[exit status 1]", "limits reached: wall_time"]
    ]


async def test_files_of_harbor_that_are_large_or_lost_are_told_in_the_score(tmp_path: Path) -> None:
    harbor_task(tmp_path / "t0")
    kill = "echo hello > out.txt; setsid bash -c 'sleep 0.5; kill -9 '$PPID >/dev/null 2>&1 &"
    with running(None) as server:
        given: dict[str, Any] = {"folder": str(tmp_path), "sandbox": server.url}
        sidecar = Sidecar(EnvironmentOptions(environment="harbor", task_options=given))
        try:
            address, (task,) = await sidecar.ready(), await sidecar.tasks("validation", 1, 1, 20)
            found = []
            for command, seconds in (
                ("echo hello > out.txt; for i in 1 2 3; do head -c 30000000 /dev/zero > $i; done", 0.0),
                ("echo hello > out.txt; for i in 1 2 3; do head -c 30000000 /dev/urandom > $i; done", 0.0),
                (kill, 2.0),
            ):
                play = Play(sidecar, address, 60.0, "place")
                await play.start(task, 1)
                await play.step("", [{"id": "1", "name": "bash", "arguments": {"command": command}}])
                await asyncio.sleep(seconds)
                found.append(await play.score())
                await play.close()
        finally:
            await sidecar.close()
    assert found[0] == {"score": 1.0, "state_lost": 0.0, "state_cut": 0.0}
    assert found[1]["state_cut"] == 1.0
    assert found[2] == {"score": 0.0, "state_lost": 1.0, "state_cut": 0.0}


@pytest.mark.parametrize(
    ("dockerfile", "link", "words"),
    [("FROM python:3.12\nRUN pip install numpy", None, ("t0:", "RUN")), ("FROM ubuntu", "tests/host", "host: a link")],
)
async def test_a_task_folder_that_needs_an_image_or_leads_out_is_refused(
    tmp_path: Path, dockerfile: str, link: str | None, words: Names
) -> None:
    harbor_task(tmp_path / "t0", dockerfile)
    if link is not None:
        (tmp_path / "t0" / link).symlink_to("/etc/passwd")
    options = EnvironmentOptions(
        environment="harbor", task_options={"folder": str(tmp_path), "sandbox": "http://unused"}
    )
    sidecar = Sidecar(options)
    try:
        with naming(CodeError, words):
            await sidecar.tasks("validation", 1, 1, 20)
    finally:
        await sidecar.close()
