"""What of an agent's session is trained on, and by which score: from its program to the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.agents.agent import AgentOptions
from agentrl.config import Config
from agentrl.errors import CodeError, ConfigError
from agentrl.observe.metrics import step_metrics
from agentrl.trajectory import Status, Trajectory
from agentrl.trajectory.collate import from_trajectories
from tests.agent_loop import test_openai_proxy
from tests.agent_loop.conftest import sample
from tests.agent_loop.test_openai_proxy import ASYNC, POST, REPORTING, command, function, run
from tests.naming import naming

__all__ = ["run"]

WORK = """
async def work(between=None):
    messages = list(sample["prompt"])
    messages.append({"role": "assistant", "content": await ask(messages)})
    if between is not None:
        await between("Topic?")
    messages.append({"role": "user", "content": "Sure?"})
    return await ask(messages)
async def title(text="Title?"):
    messages = [{"role": "system", "content": "Name it."}, {"role": "user", "content": text}]
    await client.chat.completions.create(model="small", messages=messages)
"""


def said(session: str, turn: int) -> str:
    """The work's second turn is right; side calls say another number."""
    return "#### 5" if turn else "#### 4"


def in_turn(texts: list[str]) -> Callable[[str, int], str]:
    """The texts one after another, in all transcripts together."""
    rest = iter(texts)
    return lambda session, turn: next(rest)


def agent(tmp_path: Path, body: str, train: str | list[str] = "all", head: str = REPORTING) -> AgentOptions:
    return function(tmp_path, f"{ASYNC}{POST}{WORK}{body}", head).model_copy(update={"train": train})


COLUMNS = ("offsets", "ids", "mask", "rollout_logprobs", "rewards", "version", "group", "trajectory", "policy")


@pytest.mark.parametrize(
    ("train", "body"),
    [
        ("main", "await title()\nawait work(title)"),
        (["policy"], "await title()\nawait work(title)\nawait title('New topic?')"),
    ],
)
async def test_a_side_call_that_is_left_out_leaves_no_trace_in_the_batch(
    run: Any, tmp_path: Path, train: str | list[str], body: str
) -> None:
    """Score, turn reward and lengths are those of an agent that makes none."""
    bodies = {"without": "await work()", "titled": body}
    both: list[list[Trajectory]] = [
        await run(said, agent(tmp_path / name, f"{each}\nreturn {{'reward': 0.5}}", train), n=2)
        for name, each in bodies.items()
    ]
    assert [[t.failure for t in each] for each in both] == [[None] * 2] * 2
    batches = [from_trajectories(each, turn_reward_coef=0.5) for each in both]
    for name in COLUMNS:
        assert torch.equal(*(getattr(batch, name) for batch in batches)), name
    metrics = [step_metrics([t.outline() for t in each], turn_reward_coef=0.5, success_threshold=1.0) for each in both]
    for name in metrics[0]:
        if name.startswith(("prompt/", "response/", "turns/", "reward/", "score/", "success/")):
            assert metrics[0][name] == metrics[1][name], name
    assert metrics[0]["score/mean"] == 1.0, "the scorer reads no title"
    titles = body.count("title(") + 1
    assert [one["trajectory/left_out/side_calls"] for one in metrics] == [0, titles]
    assert metrics[1]["trajectory/openai_transcripts"] == titles + 1
    (first, _) = both[1]
    assert [one.trained_to for one in first.transcripts] == [0, None, *[0] * (titles - 1)]
    assert sum(turn.role == "assistant" for turn in first.turns) == titles + 2, "the record has them"
    assert "Title?" not in [message["content"] for message in first.messages], "scorers are shown none"


async def test_main_with_a_sub_agent(run: Any, tmp_path: Path) -> None:
    """By default all are trained on, and counted by kind all the same."""
    call = '<tool_call>\n{"name": "help", "arguments": {}}\n</tool_call>'
    body = """
tools = [{"type": "function", "function": {"name": "help", "parameters": {"type": "object"}}}]
messages = list(sample["prompt"])
reply = (await client.chat.completions.create(model=model, messages=messages, tools=tools)).choices[0].message
found = await ask([{"role": "user", "content": "Compute 2 + 3, please."}])
await title()
messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": found}]
await ask(messages, tools=tools)
"""
    texts = [call, "It is five, by my count.", "A sum", "#### 5"]
    for train, ends in (("all", [None, None, None]), ("main", [None, None, 0])):
        options = agent(tmp_path / train, body, train)
        (t,) = await run(in_turn(texts), options)
        assert (t.failure, t.score) == (None, 1.0)
        assert [one.trained_to for one in t.transcripts] == ends
        kinds = ("openai_transcripts", "openai_sub_agents", "openai_side_calls", "openai_side_calls/new")
        assert [t.metrics[name] for name in kinds] == [3, 1, 1, 1]
        assert t.metrics.get("left_out/side_calls") == (None if train == "all" else 1)


async def test_names_that_match_nothing_end_the_run(run: Any, tmp_path: Path) -> None:
    """No try is a zero; where all of the first ones are so, the key is in error."""
    failed = await run(said, agent(tmp_path / "some", "await work()", ["gpt-5"]), n=2)
    assert [(t.status, t.score, t.failure_cause) for t in failed] == [(Status.FAILED, None, "AgentError")] * 2
    assert "openai_proxy.train: no call of its session named one of the models gpt-5; they named policy" in str(
        failed[0].failure
    )
    with naming(CodeError, "gpt-5"):
        await run(said, agent(tmp_path / "all", "await work()", ["gpt-5"]), n=8)


async def test_a_function_that_fails_ends_the_run_and_names_its_key(run: Any, tmp_path: Path) -> None:
    for body, says in (("raise KeyError('no')", "KeyError"), ("return 5", "must return those of the transcripts")):
        file = tmp_path / f"{says[:4].strip()}_choose.py"
        file.write_text(f"def choose(transcripts):\n    {body}\n")
        with pytest.raises(CodeError) as told:
            await run(said, agent(tmp_path / says[:4], "await work()", f"{file}:choose"))
        assert says in str(told.value) and "openai_proxy.train=" in str(told.value) and "choose.py:" in str(told.value)


async def test_a_session_that_is_killed_begins_again(run: Any, tmp_path: Path) -> None:
    """The first try dies after its title; nothing of it is in the second one's record."""
    body = f"""
call([{{"role": "system", "content": "Name it."}}, {{"role": "user", "content": "Title?"}}])
first = not os.path.exists({str(tmp_path / "once")!r})
open({str(tmp_path / "once")!r}, "w").close()
if first:
    os.kill(os.getpid(), 9)
call(sample["prompt"])
"""
    (t,) = await run(in_turn(["A sum", "A sum", "#### 5"]), command(tmp_path, body, train="main"))
    assert (t.failure, t.score, t.attempt) == (None, 1.0, 1)
    assert [one.trained_to for one in t.transcripts] == [0, None]
    assert len(from_trajectories([t], turn_reward_coef=1.0)) == 1


SCORES = """
import json
sub = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Help."}])
await work()
codes = [await tell(json.dumps(one)) for one in (
    {"score": 0.25, "response": sub.id},
    {"score": 0.5, "response": sub.id},
    {"score": 0.5, "response": "chatcmpl-0"},
    {"score": 0.5, "depth": 1, "response": sub.id},
    {"score": "1", "response": sub.id},
    {"score": 0.5, "response": 7},
)]
assert codes == WANTED, codes
return {"score": 1.0}
"""


async def test_a_score_of_one_transcript(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_openai_proxy, "SAMPLE", sample("openai_proxy", data_source="agent/mine"))
    options = agent(tmp_path, SCORES.replace("WANTED", "[200, 409, 404, 400, 400, 400]"))
    (t,) = await run(said, options)
    assert (t.failure, t.score) == (None, 1.0)
    assert [one.score for one in t.transcripts] == [0.25, None]
    assert t.outline().score_shifts == [-0.75, 0.0]
    assert t.outline().reward(1.0) == 1.0 == float(from_trajectories([t], turn_reward_coef=1.0).rewards.sum())
    assert t.metrics["openai_feedback_twice"] == 1


async def test_an_estimator_without_such_scores_refuses_them(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.openai_api.agent_loop import OpenAIProxyLoop

    made = OpenAIProxyLoop.__init__

    def with_config(self: OpenAIProxyLoop, options: AgentOptions) -> None:
        made(self, options)
        self.configure(Config.model_validate({"algorithm": {"adv_estimator": "reinforce_plus_plus"}}))

    monkeypatch.setattr(OpenAIProxyLoop, "__init__", with_config)
    monkeypatch.setattr(test_openai_proxy, "SAMPLE", sample("openai_proxy", data_source="agent/mine"))
    (t,) = await run(said, agent(tmp_path, SCORES.replace("WANTED", "[400] * 6")))
    assert (t.failure, t.score, [one.score for one in t.transcripts]) == (None, 1.0, [None, None])


@pytest.mark.parametrize("train", ["main", "auto"])
def test_roles_have_no_main_conversation(tmp_path: Path, train: str) -> None:
    """Nor where a harness chooses it."""
    from agentrl.openai_api.agent_loop import OpenAIProxyLoop

    harness = "codex" if train == "auto" else None
    loop = OpenAIProxyLoop(agent(tmp_path, "pass", train).model_copy(update={"harness": harness}))
    loop.configure(Config.model_validate({"actor_rollout_ref": {"rollout": {"roles": {"white": {}, "black": {}}}}}))
    with naming(ConfigError, "main", "role"):
        loop.check()
