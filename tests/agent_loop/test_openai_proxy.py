"""Agents written against OpenAI's client, run by the loop: what they earn, how they fail, and what outlives them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentrl.agents.agent import AgentOptions
from agentrl.algorithms.advantages import compute_advantages
from agentrl.config import Config
from agentrl.config.sections.algorithm import AlgorithmConfig
from agentrl.engines.contract import EngineError
from agentrl.errors import CodeError, ConfigError
from agentrl.observe.metrics import step_metrics
from agentrl.openai_api.agent_loop import OpenAIProxyLoop
from agentrl.rollouts.context import load_context
from agentrl.trajectory import Status, Trajectory
from agentrl.trajectory.collate import from_trajectories
from tests.agent_loop.conftest import Bench, sample
from tests.agent_loop.scripted_engine import Script
from tests.naming import Names, assert_names, naming
from tests.waiting import until

SAMPLE = sample("openai_proxy", extra_info={"level": 3})

CLIENT = """
import json, os, subprocess, sys, time
import openai

def call(messages, **more):
    return client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, **more)

sample = json.load(sys.stdin)
client = openai.OpenAI(max_retries=0)
"""
"""The beginning of a command; it reads OPENAI_BASE_URL and OPENAI_API_KEY by itself."""


@pytest.fixture
async def run(bench: Callable[..., Bench]) -> AsyncIterator[Callable[..., Any]]:
    """Run a row with an agent: a function of a file, or a command."""
    loops: list[OpenAIProxyLoop] = []

    async def go(script: Script | list[str], options: AgentOptions, n: int = 1, **keys: Any) -> list[Trajectory]:
        made = bench(script, **keys)
        loop = OpenAIProxyLoop(options)
        loops.append(loop)
        made.scheduler.loops = {"openai_proxy": loop}
        go.bench, go.loop = made, loop  # type: ignore[attr-defined]
        go.again = partial(made.run, SAMPLE)  # type: ignore[attr-defined]
        return await made.run(SAMPLE, n)

    yield go
    for loop in loops:
        await loop.close()


def function(
    tmp_path: Path, body: str, head: str = "async def agent(sample, base_url, api_key, model):"
) -> AgentOptions:
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "my_agent.py"
    lines = "\n    ".join(body.strip().splitlines())
    file.write_text(f"import asyncio, openai, time\n\n{head}\n    {lines}\n")
    return AgentOptions(target=f"{file}:agent")


def command(tmp_path: Path, body: str, **more: Any) -> AgentOptions:
    file = tmp_path / "command.py"
    file.write_text(CLIENT + body)
    return AgentOptions(command=[sys.executable, str(file)], **more)


ASYNC = """
client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
async def ask(messages, **more):
    return (await client.chat.completions.create(model=model, messages=messages, **more)).choices[0].message.content
"""
SYNC = "def agent(sample, base_url, api_key, model):"
SYNC_CALL = """
client = openai.OpenAI(base_url=base_url, api_key=api_key)
client.chat.completions.create(model=model, messages=sample["prompt"])
"""


async def test_an_async_function_is_trained_on(run: Any, tmp_path: Path) -> None:
    options = function(
        tmp_path,
        ASYNC
        + """
assert set(sample) == {"prompt", "extra_info", "data_source", "ability", "index", "origin"}, sample
assert sample["extra_info"] == {"level": 3}
messages = sample["prompt"]
messages.append({"role": "assistant", "content": await ask(messages)})
messages.append({"role": "user", "content": "Sure?"})
assert await ask(messages) == "#### 5"
return {"reward": 0.5, "depth": 2}
""",
    )
    first, second = await run(["hm", "#### 5"], options, n=2)
    for t in (first, second):
        assert (t.status, t.score, t.failure) == (Status.COMPLETED, 1.0, None)
        assert t.turn_rewards == [0.5] and t.turns[-1].reward == 0.5
        assert t.score_extra["depth"] == 2.0
        assert len(t.transcripts) == 1
        assert t.metrics["openai_calls"] == 2
        assert t.metrics["retries"] == 0
    assert len(SAMPLE.prompt) == 1, "what an agent does to its sample stays its own"
    assert sorted(run.bench.engine.released) == ["t/0.0", "t/0.0.0", "t/1.0", "t/1.0.0"]


async def test_a_synchronous_function_runs_in_a_thread(run: Any, tmp_path: Path) -> None:
    trajectories = await run(["#### 5"], function(tmp_path, SYNC_CALL, SYNC), n=8)
    assert [t.score for t in trajectories] == [1.0] * 8


async def test_a_command(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "s3cret")
    monkeypatch.setenv("MY_FLAG", "on")
    body = """
assert "MY_SECRET" not in os.environ and os.environ["MY_FLAG"] == "on"
call(sample["prompt"])
print("thinking ...")
print(json.dumps({"reward": 1, "steps": 1}))
"""
    (t,) = await run(["#### 5"], command(tmp_path, body, pass_env=["MY_FLAG"]))
    assert (t.score, t.turn_rewards, t.score_extra["steps"]) == (1.0, [1.0], 1.0), t.failure


@pytest.mark.parametrize("kind", ["function", "command"])
async def test_an_agent_behind_a_proxy_reaches_its_endpoint_and_is_told_of_the_proxy_elsewhere(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "http://me:secret@127.0.0.1:9" if "http" in name else "a.site")
    elsewhere = "openai.OpenAI(base_url='http://shop.invalid/v1', api_key='k', max_retries=0).models.list()"
    if kind == "function":
        load_context(Config())
        options = function(tmp_path, SYNC_CALL + elsewhere, SYNC)
    else:
        options = command(tmp_path, f"call(sample['prompt'])\n{elsewhere}", pass_env=["http_proxy", "no_proxy"])
    (t,) = await run(["#### 5"], options, max_retries=0)
    assert t.num_sampled > 0, "the endpoint was reached"
    assert t.failure is not None and t.failure.startswith("AgentFailed: ") and "Connection error." in t.failure
    assert t.failure.endswith(" (the environment names a proxy: http_proxy=http://127.0.0.1:9)")


async def test_many_transcripts_are_one_trajectory_of_its_group(run: Any, tmp_path: Path) -> None:
    body = (
        ASYNC
        + """
main = sample["prompt"]
main.append({"role": "assistant", "content": await ask(main)})
helpers = await asyncio.gather(*[ask([{"role": "user", "content": f"part {i}"}]) for i in range(2)])
main.append({"role": "user", "content": " ".join(helpers)})
await ask(main)
return {"reward": 1.0}
"""
    )

    def script(session: str, turn: int) -> str:
        return "#### 5" if session.startswith("t/0.") and session.endswith(".0") else "#### 4"

    first, second = await run(script, function(tmp_path, body), n=2)
    assert [len(t.transcripts) for t in (first, second)] == [3, 3]
    assert (first.score, second.score) == (1.0, 0.0), "the last answer is the main conversation's, not the helpers'"
    batch = from_trajectories([first, second], turn_reward_coef=0.5)
    assert batch.trajectory.tolist() == [0, 0, 0, 1, 1, 1]
    placed = []
    for row in range(3):
        start, end = batch.offsets[row : row + 2].tolist()
        placed += [(row, place - start) for place in range(start, end) if batch.rewards[place]]
    turn, last = first.turns[-1], first.transcripts[2]
    assert turn.transcript == 0 and turn.reward == 1.0, "the main conversation ended last"
    assert placed == [(0, turn.end - 1), (2, len(last) - 1)], "turn reward on its turn, the score behind everything"
    assert batch.rewards.sum().item() == 1.0 + 2 * 0.5
    batch = batch.with_fields(old_logprobs=batch.rollout_logprobs)
    result = compute_advantages(batch, AlgorithmConfig(norm_adv_by_std_in_grpo=False), n=2).advantages
    assert result is not None
    values = [
        set(
            result[batch.offsets[r] : batch.offsets[r + 1]][
                batch.mask[batch.offsets[r] : batch.offsets[r + 1]]
            ].tolist()
        )
        for r in range(6)
    ]
    assert values == [{0.5}] * 3 + [{-0.5}] * 3, "the mean is over trajectories, not over transcripts"
    metrics = step_metrics([first.outline(), second.outline()], turn_reward_coef=1.0, success_threshold=1.0)
    assert (metrics["turns/mean"], metrics["trajectory/openai_calls"]) == (4.0, 4.0)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("raise KeyError('nothing here')", ("KeyError", "'nothing here'")),
        ("pass", "none at all"),
        ("await ask([])", "BadRequestError"),
        ("await ask(sample['prompt'], n=2)", "n=2"),
        ("await ask(sample['prompt'])\nreturn 3", "int"),
        ("await ask(sample['prompt'])\nreturn {'reward': float('nan')}", "reward=nan"),
        (
            "try:\n    await ask(sample['prompt'], n=2)\nexcept openai.BadRequestError:\n    pass",
            "n=2",
        ),
    ],
)
async def test_an_agents_error_is_told_with_its_place_and_no_zero(
    run: Any, tmp_path: Path, body: str, cause: Names
) -> None:
    with pytest.raises(CodeError) as told:
        await run(["#### 4"], function(tmp_path, ASYNC + body))
    assert str(told.value).startswith(f"agent {tmp_path}/my_agent.py:agent (my_agent.agent): ")
    assert_names(told.value, cause, f"{tmp_path}/my_agent.py")
    assert "test.parquet, row 0" in str(told.value)


async def test_what_an_agent_asks_may_fail_it_and_is_tried_again(run: Any, tmp_path: Path) -> None:
    body = "await ask(sample['prompt'])\nraise ConnectionError('the shop is closed')"
    (t,) = await run(lambda session, turn: "#### 4", function(tmp_path, ASYNC + body))
    assert (t.status, t.score, t.metrics["retries"]) == (Status.FAILED, None, 2)
    assert t.failure is not None and "ConnectionError: the shop is closed" in t.failure


POST = """
import httpx
async def tell(numbers, seconds=0.0):
    await asyncio.sleep(seconds)
    async with httpx.AsyncClient() as client:
        return (await client.post(report_url + "/feedback", content=numbers)).status_code
"""
REPORTING = "async def agent(sample, base_url, api_key, model, report_url):"


@pytest.mark.parametrize(
    ("ending", "score", "twice", "differ"),
    [
        ("return {'score': 0.25, 'depth': 2}", 0.25, 0, 0),
        ('assert await tell(\'{"score": 0.5, "depth": 2}\') == 200', 0.5, 0, 0),
        ("assert [await tell('{\"score\": 0.5}'), await tell('{\"score\": 1}')] == [200, 409]", 0.5, 1, 0),
        ("await tell('{\"score\": 1, \"depth\": 2}')\nreturn {'score': 0.25, 'depth': 2}", 0.25, 0, 1),
        ("await tell('{\"score\": 0.5}')\nreturn {'score': 0.5}", 0.5, 0, 0),
        ("assert [await tell(x) for x in ('{\"score\": NaN}', '[1]', '{\"score\": \"1\"}')] == [400] * 3", None, 0, 0),
        ("agent.later = asyncio.create_task(tell('{\"score\": 0.5}', 0.3))", 0.5, 0, 0),
        ("pass", None, 0, 0),
    ],
    ids=["returned", "posted", "twice", "two words", "one word twice", "nonsense", "late", "never"],
)
async def test_an_agent_reports_its_score(
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ending: str,
    score: float | None,
    twice: int,
    differ: int,
) -> None:
    """Whoever reports none fails, and has no zero. Of two words the agent's stands, with an alarm."""
    monkeypatch.setattr(sys.modules[__name__], "SAMPLE", sample("openai_proxy", data_source="agent/mine"))
    options = function(tmp_path, f"{ASYNC}{POST}await ask(sample['prompt'])\n{ending}", head=REPORTING)
    wait = 5.0 if score is not None else 0.1
    run_with = options.model_copy(update={"feedback_timeout": wait})
    (t,) = await run(lambda session, turn: "#### 4", run_with)
    assert t.score == score
    assert t.metrics.get("openai_feedback_twice", 0) == twice
    assert t.metrics.get("openai_scores_differ", 0) == differ
    assert ("score: 0.25 and 1)" in caplog.text) == bool(differ), caplog.text
    if score is None:
        assert t.status is Status.FAILED and "no score was reported" in (t.failure or "")
    else:
        assert t.status is Status.COMPLETED and t.score_extra["reported_score"] == score


async def test_an_agent_that_ends_by_its_used_up_budget_without_a_score_learns_why(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out: a zero could be better than the score of a wrong answer."""
    monkeypatch.setattr(sys.modules[__name__], "SAMPLE", sample("openai_proxy", data_source="agent/mine"))
    twice = f"{ASYNC}await ask(sample['prompt'])\nawait ask(sample['prompt'])\nreturn {{'score': 1.0}}"
    (t,) = await run(["#### 4"], function(tmp_path, twice, head=REPORTING), max_assistant_turns=1)
    assert (t.status, t.score, t.failure_cause) == (Status.FAILED, None, "scorer")
    assert "used up (status turn_limit)" in (t.failure or "")


LEAVES = """
stream = await client.chat.completions.create(model=model, messages=sample["prompt"], stream=True)
async for chunk in stream:
    if chunk.choices[0].delta.content or chunk.choices[0].delta.tool_calls:
        break
await stream.close()
"""


async def test_a_turn_that_its_agent_left_early_is_not_trained_on(run: Any, tmp_path: Path) -> None:
    """Where nothing else was sampled, nothing of the try is. A call is sent when it is whole."""
    long = "<tool_call>" + "word " * 5000
    limits: dict[str, Any] = {"max_model_len": 40_000, "max_response_tokens": 30_000}
    options = function(tmp_path / "all", ASYNC + LEAVES)
    (t,) = await run([long], options, **limits)
    assert (t.failure_cause, t.score, t.num_sampled) == ("AgentError", None, 0)
    assert "left every answer of the policy before it was delivered" in (t.failure or "")
    options = function(tmp_path / "one", f"{ASYNC}await ask(sample['prompt'])\n{LEAVES}")
    texts = iter(["#### 5", long])
    (t,) = await run(lambda session, turn: next(texts), options, **limits)
    assert (t.failure, t.score, t.metrics["openai_undelivered_turns"]) == (None, 1.0, 1)
    assert 0 < t.num_sampled < 10 < 5000 < t.metrics["openai_undelivered_tokens"]


async def test_feedback_for_a_session_that_ended_is_refused(run: Any, tmp_path: Path) -> None:
    options = function(tmp_path, f"{ASYNC}await ask(sample['prompt'])\nagent.url = report_url", head=REPORTING)
    (t,) = await run(["#### 4"], options)
    url = sys.modules[run.loop._agent._function.__module__].agent.url
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/feedback", json={"score": 1.0})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    assert t.score == 0 and "reported_score" not in t.score_extra


SHELL = """
report = sample.pop("report_url")
assert set(sample) == {"prompt", "extra_info", "data_source", "ability", "index", "origin"}
assert report.split("/")[3] not in str(dict(os.environ))
call(sample["prompt"])
# A tool of the policy: a shell, which sees the environment of its agent.
posted = "urllib.request.urlopen(os.environ['OPENAI_BASE_URL'] + '/%s', b'{\\"score\\": 1}')"
for path in ("feedback", "result"):
    shell = [sys.executable, "-c", "import os, urllib.request; " + posted % path]
    ended = subprocess.run(shell, capture_output=True, text=True)
    assert "HTTP Error 403" in ended.stderr, ended.stderr
print(json.dumps({"score": 0.0}))
"""


async def test_the_policys_own_tools_cannot_score_it(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They know the address of the policy's calls, which takes no score."""
    monkeypatch.setattr(sys.modules[__name__], "SAMPLE", sample("openai_proxy", data_source="agent/mine"))
    (t,) = await run(["#### 4"], command(tmp_path, SHELL))
    assert (t.failure, t.score, t.metrics["openai_scores_refused"]) == (None, 0.0, 2)
    assert_names(caplog.text, "address")


OLD_API = "client.completions.create(model='m', prompt='hi')"
INSTEAD = "POST v1/completions does not exist; this endpoint answers POST v1/chat/completions, POST v1/responses, "


async def test_a_client_of_another_api_is_told_what_there_is(run: Any, tmp_path: Path) -> None:
    """In a function it ends the run at once, also where the agent catches it and asks nothing else."""
    for body in (f"await {OLD_API}", f"try:\n    await {OLD_API}\nexcept openai.APIError:\n    pass"):
        with pytest.raises(CodeError) as told:
            await run(["#### 4"], function(tmp_path / str(len(body)), ASYNC + body))
        assert INSTEAD in str(told.value)


CAUGHT = f"try:\n    {OLD_API}\nexcept openai.APIError as error:\n    sys.exit('it says: ' + str(error))"
BROKEN = [
    (OLD_API, INSTEAD),
    (CAUGHT, INSTEAD),
    ("call(sample['prompt']); print(json.dumps({'reward': 'much'}))", "it returned reward='much'"),
]
"""Commands in error: by what the endpoint refused, with a traceback and without, and by what they print, which the
policy may have written."""


@pytest.mark.parametrize(("body", "reason"), BROKEN)
async def test_an_error_of_a_command_leaves_its_try_out(run: Any, tmp_path: Path, body: str, reason: str) -> None:
    (t,) = await run(["#### 4"], command(tmp_path, body))
    assert (t.status, t.score, t.metrics["retries"]) == (Status.FAILED, None, 0)
    assert t.failure is not None and t.failure.startswith("AgentError: agent command ") and reason in t.failure


def plain(tmp_path: Path, body: str) -> AgentOptions:
    """A command that asks nothing, and writes an x at each start."""
    (tmp_path / "plain.py").write_text(f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\n{body}")
    return AgentOptions(command=[sys.executable, "-S", str(tmp_path / "plain.py")])


async def test_a_run_ends_where_the_first_eight_tries_of_a_command_fail_alike(run: Any, tmp_path: Path) -> None:
    options = plain(tmp_path, "raise ValueError('bad luck')")
    failed = await run([], options, n=7)
    assert [(t.status, t.score, t.metrics["retries"]) for t in failed] == [(Status.FAILED, None, 0)] * 7
    assert all(t.failure.startswith("AgentError: ") and "ValueError: bad luck" in t.failure for t in failed)
    with naming(CodeError, "8 tries", "ValueError") as told:
        await run.again(2)
    assert "plain.py" in str(told.value) and "on_code_error=count" in str(told.value)
    assert [t.status for t in await run.again(9)] == [Status.FAILED] * 9, "the policy may have provoked later ones"


@pytest.mark.parametrize("body", ["raise ValueError(open(__file__ + 's').read())", "import sys; sys.exit(3)"])
async def test_a_run_goes_on_where_they_fail_otherwise(run: Any, tmp_path: Path, body: str) -> None:
    """By a text of their own each, or by what nobody can attribute, which is tried again."""
    (tmp_path / "plain.pys").write_text("")
    options = plain(tmp_path, f"open(__file__ + 's', 'a').write('x')\n{body}")
    failed = await run([], options, n=16, max_concurrent=1)
    assert [t.status for t in failed] == [Status.FAILED] * 16
    assert [t.metrics["retries"] for t in failed] == [2 if "exit" in body else 0] * 16


async def test_a_command_whose_server_fails_it_is_started_again(run: Any, tmp_path: Path) -> None:
    gone = "try:\n    raise ConnectionRefusedError('shop')\nexcept OSError as error:\n    raise ValueError from error"
    (t,) = await run([], plain(tmp_path, gone))
    assert (t.status, t.metrics["retries"]) == (Status.FAILED, 2)
    assert t.failure is not None and t.failure.startswith("AgentFailed: ")
    assert (tmp_path / "starts").read_text() == "xxx"


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("sys.exit(3)", "ended with status 3: it wrote nothing"),
        ("raise ValueError('bad luck')", "ValueError: bad luck"),
        ("os.kill(os.getpid(), 9)", "signal SIGKILL"),
        ("sys.stderr.write('x' * 10**6); sys.stderr.write('the end'); sys.exit(1)", "the end"),
    ],
)
async def test_a_failed_command_says_why(run: Any, tmp_path: Path, body: str, cause: str) -> None:
    (t,) = await run(["#### 4"], command(tmp_path, body), max_retries=0)
    assert t.status is Status.FAILED and t.failure is not None
    assert cause in t.failure and len(t.failure) < 20_000


async def test_a_budget_that_ends_an_agent_is_no_fault(run: Any, tmp_path: Path) -> None:
    endless = (
        ASYNC
        + """
messages = sample["prompt"]
while True:
    messages.append({"role": "assistant", "content": await ask(messages)})
    messages.append({"role": "user", "content": "more"})
"""
    )
    (t,) = await run(lambda session, turn: "#### 5", function(tmp_path, endless), max_assistant_turns=3)
    assert (t.status, t.score, t.metrics["retries"]) == (Status.TURN_LIMIT, 1.0, 0)
    assert sum(turn.role == "assistant" for turn in t.turns) == 3
    (t,) = await run(lambda session, turn: "#### 5", function(tmp_path, endless), max_response_tokens=40)
    assert (t.status, t.score, t.metrics["retries"]) == (Status.LENGTH, 1.0, 0)
    assert t.transcripts[0].response_length <= 40


@pytest.mark.parametrize("then", ["", "except openai.BadRequestError:\n    pass"], ids=["raises", "goes on"])
async def test_a_policy_that_makes_no_required_call_is_trained_on_and_no_fault_of_the_agent(
    run: Any, tmp_path: Path, then: str
) -> None:
    tools = [{"type": "function", "function": {"name": "submit", "parameters": {"type": "object", "properties": {}}}}]
    ask = f"await ask(sample['prompt'], tools={tools}, tool_choice='required')"
    body = ASYNC + (f"try:\n    {ask}\n{then}" if then else ask)
    (t,) = await run(lambda session, turn: "#### 5", function(tmp_path, body))
    assert (t.status, t.failure, t.metrics["retries"]) == (Status.MALFORMED, None, 0)
    assert t.score is not None and len(t.transcripts) == t.metrics["openai_asked_again"] + 1 == 4


async def test_an_engine_fault_ends_the_agent_at_once_and_is_tried_again(run: Any, tmp_path: Path) -> None:
    def script(session: str, turn: int) -> str | Exception:
        return EngineError("lost") if session.startswith("t/0.0") else "#### 5"

    stubborn = (
        ASYNC
        + """
while True:
    try:
        return None if await ask(sample["prompt"]) else None
    except openai.APIError:
        await asyncio.Event().wait()
"""
    )
    (t,) = await run(script, function(tmp_path, stubborn))
    assert (t.status, t.score, t.metrics["retries"]) == (Status.COMPLETED, 1.0, 1)


async def test_at_the_deadline_a_function_loses_its_session(run: Any, tmp_path: Path) -> None:
    body = (
        SYNC_CALL
        + f"""
time.sleep(1.0)
try:
    client.chat.completions.create(model=model, messages=sample["prompt"])
except openai.NotFoundError:
    open({str(tmp_path / "refused")!r}, "w").close()
"""
    )
    (t,) = await run(["#### 5"], function(tmp_path, body, SYNC), trajectory_timeout=0.7)
    assert (t.status, t.score) == (Status.TIMEOUT, None)
    assert t.failure is not None and "the agent" in t.failure
    await until((tmp_path / "refused").exists)  # the thread that was given up cannot call


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


GRANDCHILDREN = """
call(sample["prompt"])
sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
children = [subprocess.Popen(sleeper).pid, subprocess.Popen(sleeper, start_new_session=True).pid]
with open(sys.argv[0] + ".pids", "w") as file:
    json.dump([os.getpid(), *children], file)
"""


@pytest.mark.parametrize("ending", ["time.sleep(3600)", "pass"], ids=["deadline", "normal end"])
async def test_a_command_leaves_no_process_behind(run: Any, tmp_path: Path, ending: str) -> None:
    """Nor waits for the command's children, which sleep for an hour."""
    options, seconds = command(tmp_path, GRANDCHILDREN + ending), 4.0
    file = tmp_path / "command.py.pids"
    while not file.exists() or not file.read_text().endswith("]"):  # on a busy machine the command starts slowly
        seconds *= 2
        (t,) = await run(["#### 5"], options, trajectory_timeout=3600.0 if ending == "pass" else seconds)
        assert t.status is (Status.COMPLETED if ending == "pass" else Status.TIMEOUT), t.failure
    pids = json.loads(file.read_text())
    assert len(pids) == 3
    await until(lambda: not any(map(alive, pids)))


async def test_a_cancelled_run_kills_its_commands(run: Any, tmp_path: Path) -> None:
    task = asyncio.create_task(run(["#### 5"], command(tmp_path, GRANDCHILDREN + "time.sleep(3600)")))
    file = tmp_path / "command.py.pids"
    while not file.exists() or not file.read_text().endswith("]"):
        await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait({task})
    await until(lambda: not any(map(alive, json.loads(file.read_text()))))


async def test_many_agents_at_once_leave_no_thread_socket_or_task(run: Any, tmp_path: Path) -> None:
    body = (
        ASYNC
        + """
async with client:
    await asyncio.gather(*[ask([{"role": "user", "content": f"{i}"}]) for i in range(3)])
"""
    )
    options = function(tmp_path, body)
    await run(lambda session, turn: "#### 5", options, n=5)
    open_files, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())  # noqa: PTH208
    trajectories = await run(lambda session, turn: "#### 5", options, n=40)
    assert {(t.score, len(t.transcripts)) for t in trajectories} == {(1.0, 3)}
    await until(lambda: len(os.listdir("/proc/self/fd")) <= open_files + 6)  # noqa: PTH208 - one more server
    await until(lambda: len(asyncio.all_tasks()) <= tasks + 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (AgentOptions(), "set one of"),
        (AgentOptions(target="a.b:c", command=["x"]), "set one of"),
        (AgentOptions(target="nonsense"), "expected package.module:object"),
        (AgentOptions(target="no.such_module:f"), "no"),
        (AgentOptions(target="/no/such/file.py:f"), "no such file"),
        (AgentOptions(target="json:dumps"), "must take the parameters sample"),
        (AgentOptions(target="json:dumbs"), r"openai_proxy\.target: json has no 'dumbs'; did you mean 'dumps'"),
        (AgentOptions(command=[]), "empty"),
        (AgentOptions(command=["x"], pass_env=["HOME", "NO_SUCH"]), r"openai_proxy\.pass_env: NO_SUCH not set"),
    ],
)
def test_options_that_cannot_work_are_refused(options: AgentOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenAIProxyLoop(options).check()


async def test_a_command_that_is_not_there(run: Any, tmp_path: Path) -> None:
    (t,) = await run(["x"], AgentOptions(command=["/no/such/agent"]))
    assert t.failure is not None and "/no/such/agent" in t.failure
    assert t.metrics["retries"] == 0


def test_the_official_client_is_the_one_that_is_tested() -> None:
    assert openai.__version__.startswith("2.")
