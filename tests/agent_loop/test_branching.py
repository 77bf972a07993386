"""Interactions that rewrite the history or open the dialogue, through the real loop; and a training step with one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.agent_loop import AgentLoop, Episode, LoopContext, Request
from agentrl.agent_loop.dialogue import Dialogue
from agentrl.agent_loop.registry import register
from agentrl.chat import Chat
from agentrl.engines.contract import SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.errors import CodeError
from agentrl.interaction import Interaction, InteractionResponse
from agentrl.observe.invariants import check_trajectory
from agentrl.reward.manager import policy_text
from agentrl.tool import ToolResponse
from agentrl.tool.toolset import ToolSet
from agentrl.train import main
from agentrl.trajectory import Message, Status, Trajectory
from agentrl.trajectory.collate import from_trajectories, token_rewards
from agentrl.trajectory.parquet import read_trajectories
from tests.agent_loop.conftest import LIMITS, Bench, call, sample
from tests.agent_loop.short_turns import ending_its_turns
from tests.e2e.test_train import lines
from tests.naming import naming

MakeBench = Callable[..., Bench]
ROW = sample(interaction_kwargs={"name": "it"})


class Compacting(Interaction):
    """After every turn the dialogue shrinks to a note of how long it was. The third turn ends it."""

    def __init__(self, config: dict[str, Any] | None = None, name: str = "it") -> None:
        super().__init__(config or {}, name)
        self.seen: list[list[Message]] = []

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None: ...

    def note(self, messages: list[Message]) -> list[Message]:
        return [{"role": "user", "content": f"Before: {len(messages)} messages."}]

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        self.seen.append(messages)
        over = len(self.seen) >= 3
        return InteractionResponse(
            over,
            "",
            float(len(self.seen)),
            {"looks": np.int64(len(self.seen)), "odd": math.nan, "why": "text"},
            self.note(messages),
        )


class Rewinding(Compacting):
    """Begins anew with the same prompt, after every turn."""

    def note(self, messages: list[Message]) -> list[Message]:
        return messages[:1]


class Overlong(Compacting):
    def note(self, messages: list[Message]) -> list[Message]:
        return [{"role": "user", "content": "word " * 2000}]


class Unanswerable(Compacting):
    def note(self, messages: list[Message]) -> list[Message]:
        return messages


class Opening(Compacting):
    """Speaks first."""

    async def open_dialogue(self, instance_id: str, messages: list[Message]) -> str | None:
        return f"First words to {len(messages)}."


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def test_each_rewritten_history_is_a_transcript_of_its_own(bench: MakeBench) -> None:
    it = Compacting()
    b = bench(["one", call("add", a=2, b=3), "two", "#### 5"], [add], interactions={"it": it})
    (t,) = await b.scheduler.run([Request("t/0", 0, ROW, SamplingParams(1), seed=0, count_drift=True)])
    assert t.status is Status.COMPLETED
    assert check_trajectory(t, b.chat.vocab_size) == []
    assert len(t.transcripts) == 3
    assert [turn.transcript for turn in t.turns] == [0, 1, 1, 1, 2]
    said = [turn for turn in t.turns if turn.role == "assistant"]
    for turn, ids, prompt in zip(said, b.engine.said["t/0.0"], b.engine.prompts["t/0.0"], strict=True):
        transcript = t.transcripts[turn.transcript]
        assert transcript.ids[turn.start : turn.end] == ids
        assert transcript.ids[: turn.start] == prompt
    texts = [b.chat.decode(transcript.ids) for transcript in t.transcripts]
    assert "Before: 2 messages." in texts[1] and "one" not in texts[1]
    assert "Before: 4 messages." in texts[2]
    assert all("Add two numbers" in text for text in texts), "the tools are offered in every transcript"
    assert [len(messages) for messages in it.seen] == [2, 4, 2], "the interaction is asked about what the policy sees"
    assert t.metrics["drift/clean"] == 1.0
    assert b.engine.released == ["t/0.0"]
    assert policy_text(t, ROW).split("\n")[0] == "one"
    assert policy_text(t, ROW).split("\n")[-1] == "#### 5"
    assert t.score == 1.0
    assert t.score_extra == {"looks": 3.0}


async def test_rewards_stay_on_their_turns_and_the_score_is_on_the_last_token(bench: MakeBench) -> None:
    b = bench(["one", "two", "#### 5"], interactions={"it": Compacting()})
    (t,) = await b.run(ROW)
    rewards = token_rewards(t, 0.5)
    last = [max(i for i, mask in enumerate(transcript.mask) if mask) for transcript in t.transcripts]
    assert [row[at] for row, at in zip(rewards, last, strict=True)] == [0.5, 1.0, 1.5 + 1.0]
    assert sum(map(sum, rewards)) == 4.0
    batch = from_trajectories([t], turn_reward_coef=0.5)
    assert batch.trajectory.tolist() == [0, 0, 0]
    assert int(batch.mask.sum()) == sum(len(ids) for ids in b.engine.said["t/0.0"])


async def test_drift_is_counted_in_the_transcripts_that_were_left(bench: MakeBench) -> None:
    """A malformed call, which no template can write, in the first of two transcripts."""
    it = Compacting()
    it.seen = [[]]
    b = bench(['<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>', "x", "y"], [add])
    b.scheduler.context.interactions["it"] = it
    (t,) = await b.scheduler.run([Request("t/0", 0, ROW, SamplingParams(1), seed=0, count_drift=True)])
    assert len(t.transcripts) == 2
    assert (t.metrics["drift/clean"], t.metrics["drift/fork"]) == (0.5, 0.5)


async def test_every_transcript_has_a_token_budget_of_its_own(bench: MakeBench, chat: Chat) -> None:
    budget = len(chat.encode("word " * 12)) + 3
    b = bench(["word " * 12, "word " * 12, "#### 5"], interactions={"it": Compacting()}, max_response_tokens=budget)
    (t,) = await b.run(ROW)
    assert t.status is Status.COMPLETED
    assert max(transcript.response_length for transcript in t.transcripts) <= budget
    assert sum(transcript.response_length for transcript in t.transcripts) > budget


async def test_a_history_without_room_for_an_answer_ends_in_length_and_the_rest_is_trained(bench: MakeBench) -> None:
    b = bench(["#### 5"], interactions={"it": Overlong()})
    (t,) = await b.run(ROW)
    assert t.status is Status.LENGTH
    assert t.score == 1.0
    assert t.transcripts[1].sampled_length == 0
    assert from_trajectories([t], turn_reward_coef=1.0).offsets.tolist() == [0, len(t.transcripts[0])]
    assert check_trajectory(t, b.chat.vocab_size) == []


async def test_a_history_that_nobody_could_answer_is_the_interactions_fault(bench: MakeBench) -> None:
    b = bench(["one"], interactions={"it": Unanswerable()})
    with naming(CodeError, "interaction it", "rewritten"):
        await b.run(ROW)


async def test_limits_of_turns_hold_over_all_transcripts(bench: MakeBench) -> None:
    b = bench(["one", "two", "three"], interactions={"it": Compacting()}, max_assistant_turns=2)
    (t,) = await b.run(ROW)
    assert t.status is Status.TURN_LIMIT
    assert len(t.transcripts) == 2


async def test_the_interactions_first_words_open_the_dialogue(bench: MakeBench) -> None:
    b = bench(["#### 5", "x", "y"], interactions={"it": Opening()})
    system: list[Message] = [{"role": "system", "content": "Be brief."}]
    cases: list[tuple[list[Message], list[Message]]] = [
        (ROW.prompt, [{"role": "user", "content": "What is 2 + 3?\n\nFirst words to 1."}]),
        (system, [*system, {"role": "user", "content": "First words to 1."}]),
    ]
    for prompt, expected in cases:
        row = sample(interaction_kwargs={"name": "it"}, prompt=prompt)
        (t,) = await b.run(row)
        assert t.messages[: len(expected)] == expected
        transcript = t.transcripts[0]
        assert transcript.ids[: transcript.prompt_length] == b.chat.render(expected)
    assert ROW.prompt == [{"role": "user", "content": "What is 2 + 3?"}], "the row is as it was"


async def test_the_same_prompt_again_is_answered_anew(chat: Chat, tiny_dir: Path) -> None:
    """On the embedded engine, whose cache knows the session: other samples, and their true log-probs."""
    model, reference = (AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32) for _ in range(2))
    engine = EmbeddedEngine(model, max_num_seqs=4, max_model_len=1500, stop_decode=chat.decode)
    trajectory = Trajectory("t/0", 0)
    context = LoopContext(engine, chat, ToolSet.from_tools([]), {}, LIMITS)
    episode = Episode(context, ROW, trajectory, SamplingParams(1), seed=3, session="t/0.0")
    try:
        for _ in range(3):
            await episode.start(ROW.prompt)
            await episode.generate(max_tokens=12)
    finally:
        await engine.close()
    assert len({tuple(transcript.ids[: transcript.prompt_length]) for transcript in trajectory.transcripts}) == 1
    assert len({tuple(transcript.ids) for transcript in trajectory.transcripts}) == 3
    for transcript in trajectory.transcripts:
        with torch.no_grad():
            expected = reference(torch.tensor([transcript.ids])).logits[0].log_softmax(-1)
        for i in range(transcript.prompt_length, len(transcript)):
            assert transcript.logprobs[i] == pytest.approx(float(expected[i - 1, transcript.ids[i]]), abs=1e-4)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_training_step_over_rewritten_histories(
    small_run: Callable[..., list[str]], tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    (tmp_path / "compacting_of_a_user.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "it.yaml").write_text("interaction:\n  - {name: it, class_name: compacting_of_a_user.Compacting}\n")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {n} + 2?"}],
            "data_source": "x",
            "agent_name": "tool_agent",
            "interaction_kwargs": {"name": "it"},
        }
        for n in range(4)
    ]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    more = [
        f"algorithm={algorithm}",
        f"data.train_files={tmp_path}/rows.parquet",
        f"data.val_files={tmp_path}/rows.parquet",
        f"{multi_turn}.tool_config_path=null",
        f"{multi_turn}.interaction_config_path={tmp_path}/it.yaml",
        f"actor_rollout_ref.model.path={ending_its_turns(tiny_dir, tmp_path / 'policy')}",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
    ]
    base = [override for override in small_run() if "filter_groups" not in override]
    assert main([*base, *more]) == 0
    (step,) = lines(tmp_path / "run")
    assert step["left_out/failed"] == 0
    assert step["rollout/logprob_gap_max_abs"] < 1e-4
    assert step["actor/grad_norm"] > 0
    written = read_trajectories(next((tmp_path / "run" / "trajectories").glob("train_*[0-9].parquet")))
    assert [problem for t in written for problem in check_trajectory(t, 600)] == []
    assert max(len(t.transcripts) for t in written) == 4
    assert sum(len(t.transcripts) > 1 for t in written) > 4


USERS = '''
from agentrl.interaction import Interaction, InteractionResponse


class Compacting(Interaction):
    """Three times the dialogue shrinks to one message."""

    async def start_interaction(self, instance_id, **kwargs):
        self.turns = {**getattr(self, "turns", {}), instance_id: 0}

    async def generate_response(self, instance_id, messages):
        self.turns[instance_id] += 1
        over = self.turns[instance_id] > 3
        history = [{"role": "user", "content": f"Note {self.turns[instance_id]}."}]
        return InteractionResponse(over, "Go on.", 0.1, history=history)
'''


class TwoAtOnce(AgentLoop):
    """Two branches at the same time."""

    async def run(self, episode: Episode) -> None:
        async def one(branch: Episode) -> None:
            await branch.start(episode.sample.prompt, episode.context.tools.schemas)
            reply = await branch.generate()
            _, messages = await branch.answer_calls(reply.message.calls)
            await branch.observe(messages)
            await branch.generate()
            await Dialogue(branch, episode.context.interactions["it"]).respond()

        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(one(episode.branch()))
        episode.finish(Status.COMPLETED)


async def test_calls_and_rewards_belong_to_the_turn_whatever_other_branches_do_meanwhile(bench: MakeBench) -> None:
    judged = [asyncio.Event(), asyncio.Event()]

    async def ask(who: int) -> ToolResponse:
        if who == 0:
            await judged[1].wait()
        return ToolResponse(str(who), reward=float(who))

    class Slow(Compacting):
        async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
            who = int(instance_id[-1])
            judged[who].set()
            await judged[1 - who].wait()
            return InteractionResponse(True, "", 10.0 * (who + 1))

    register("two_at_once")(TwoAtOnce)
    b = bench(
        lambda session, turn: call("ask", who=int(session[-1])) if turn == 0 else f"done {session[-1]}",
        [ask],
        interactions={"it": Slow()},
    )
    (t,) = await b.run(sample("two_at_once"))
    assert t.failure is None
    said = [turn for turn in t.turns if turn.role == "assistant"]
    assert len(said) == 4
    for turn in said:
        who = turn.transcript
        if turn.calls:
            assert [record.response for record in turn.calls] == [str(who)]
            assert turn.reward == who
        else:
            assert turn.text == f"done {who}" and turn.reward == 10.0 * (who + 1)
