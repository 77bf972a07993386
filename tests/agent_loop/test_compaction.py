"""Conversations that become too long go on from a summary: what is recorded, shown, trained on and counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent_loop import AgentLoop, Episode
from agentrl.agent_loop.compaction import REQUEST, Compaction
from agentrl.checks.transcripts import check_record
from agentrl.config.sections.rollout import CompactionConfig
from agentrl.engines.contract import FinishReason, Generation
from agentrl.errors import ConfigError
from agentrl.trajectory import Status, Trajectory, VersionSpan
from tests.agent_loop.conftest import Bench, call, sample
from tests.naming import naming

MakeBench = Callable[..., Bench]
RULES = Compaction(0.6, 1, 60, train_summary=True, request="Sum up.")


def look(number: int) -> str:
    """Look something up.

    Args:
        number: Which.
    """
    return f"value of {number}: " + " ".join(str(number * 7 + k) for k in range(12))


@dataclass
class Policy:
    """Looks things up and answers; it tells by the end of its prompt that a summary is asked for."""

    bench: Bench | None = None
    looks: int = 6
    summary: str = "Done until {}."
    is_react: bool = False
    looked: int = 0
    asked: list[int] = field(default_factory=list)
    """How often it had looked when each summary was asked for."""

    def __call__(self, session: str, turn: int) -> str:
        assert self.bench is not None
        if "Sum up." in self.bench.chat.decode(self.bench.engine.prompts[session][-1])[-60:]:
            self.asked.append(self.looked)
            return self.summary.format(self.looked)
        self.looked += 1
        if self.looked > self.looks:
            return " I know.\nFinal Answer: #### 5" if self.is_react else "#### 5"
        if self.is_react:
            return f' I look.\nAction: look\nAction Input: {{"number": {self.looked}}}\nObservation:'
        return call("look", number=self.looked)


Run = Callable[..., Awaitable[tuple[Bench, Policy, Trajectory]]]


@pytest.fixture
def run(bench: MakeBench) -> Run:
    async def one(
        rules: Compaction | None = RULES, window: int = 420, **policy: Any
    ) -> tuple[Bench, Policy, Trajectory]:
        says = Policy(**policy)
        limits = {"max_model_len": window, "max_response_tokens": window, "max_assistant_turns": 8}
        says.bench = b = bench(says, [look], **limits)
        b.scheduler.context = replace(b.scheduler.context, compaction=rules)
        (found,) = await b.run(sample("react" if says.is_react else "tool_agent"))
        check(b, found, window)
        return b, says, found

    return one


def check(b: Bench, found: Trajectory, window: int) -> None:
    """Each sampled token is in one transcript, once and in order, behind the prompt that the engine was given.

    The checks that read every record of a run have no finding, also where an answer in the middle was cut.
    """
    assert check_record(found, b.chat) == []
    (session,) = b.engine.said
    turns = [one for one in found.turns if one.role == "assistant"]
    assert [found.transcripts[one.transcript].ids[one.start : one.end] for one in turns] == b.engine.said[session]
    assert [found.transcripts[one.transcript].ids[: one.start] for one in turns] == b.engine.prompts[session]
    for number, transcript in enumerate(found.transcripts):
        own = [one for one in turns if one.transcript == number]
        assert sum(transcript.mask) == sum(one.end - one.start for one in own)
        assert len(transcript.ids) <= window


def prompts(b: Bench, found: Trajectory) -> list[str]:
    """Decode the prompts of the transcripts."""
    return [b.chat.decode(one.ids[: one.prompt_length]) for one in found.transcripts]


async def test_a_long_dialogue_goes_on_from_its_summary(run: Run) -> None:
    b, policy, found = await run()
    assert (found.status, found.score, found.failure) == (Status.COMPLETED, 1.0, None)
    assert len(policy.asked) >= 2 and len(found.transcripts) == len(policy.asked) + 1
    assert (found.metrics["compactions"], found.metrics["compaction_failed"]) == (len(policy.asked), 0)
    for number, prompt in zip(policy.asked, prompts(b, found)[1:], strict=True):
        assert f"What is 2 + 3?\n\nSummary of the work so far:\nDone until {number}." in prompt
        assert f"value of {number}:" in prompt and f"value of {number - 1}:" not in prompt, "one turn, with its answer"
    assert all(one.trained_to is None for one in found.transcripts)
    assert len(found.tool_calls) == 6, "summaries are no turns of the task's"


@pytest.mark.parametrize(("keep", "expected"), [(0, 0), (1, 1), (5, 2)])
async def test_the_last_turns_stay_as_far_as_they_fit(run: Run, keep: int, expected: int) -> None:
    b, _, found = await run(replace(RULES, keep_turns=keep), window=560)
    assert found.status is Status.COMPLETED
    assert prompts(b, found)[1].count("value of") == expected


@pytest.mark.parametrize("is_react", [False, True])
async def test_a_turn_whose_answer_did_not_fit_goes_on_with_all_of_it(run: Run, is_react: bool) -> None:
    """The window holds one turn and a part of the second one's answer."""
    window = 615 if is_react else 290
    b, policy, found = await run(replace(RULES, threshold=1.0, keep_turns=0), window, looks=2, is_react=is_react)
    first, second = (b.chat.decode(one.ids) for one in found.transcripts[:2])
    assert policy.asked == [2] and "[cut" in first[first.index("value of 2") :]
    whole = look(2)
    assert whole not in first and whole in second
    assert (found.status, found.score) == (Status.COMPLETED, 1.0)


async def test_a_masked_summary_is_sampled_and_not_trained_on(run: Run) -> None:
    b, _, found = await run(replace(RULES, train_summary=False))
    assert found.status is Status.COMPLETED
    *old, last = found.transcripts
    for transcript in old:
        assert transcript.trained_to is not None
        assert b.chat.decode(transcript.ids[transcript.trained_to :]).startswith("Done until ")
        assert "value of" in b.chat.decode(transcript.ids[: transcript.trained_to])
    assert old and last.trained_to is None


@pytest.mark.parametrize("summary", [" ", "word " * 200, call("look", number=9).replace("{", "{{").replace("}", "}}")])
async def test_a_summary_that_is_none_ends_the_trajectory_as_its_window_would(run: Run, summary: str) -> None:
    _, policy, found = await run(summary=summary)
    assert (found.status, len(policy.asked), len(found.transcripts)) == (Status.LENGTH, 1, 1)
    assert (found.metrics["compactions"], found.metrics["compaction_failed"]) == (1.0, 1.0)


async def test_a_summary_that_leaves_no_room_ends_it_too(run: Run) -> None:
    rules = replace(RULES, max_summary_tokens=220, keep_turns=0)
    _, policy, found = await run(rules, window=430, summary="It is a long one. " * 12)
    assert found.status is Status.LENGTH and found.metrics["compaction_failed"] == 1.0, policy.asked


async def test_without_the_key_nothing_is_asked_and_the_window_ends_it(run: Run) -> None:
    _, policy, found = await run(None)
    assert found.status is Status.LENGTH and not policy.asked and "compactions" not in found.metrics


async def test_react_keeps_its_last_steps_as_text(run: Run) -> None:
    b, policy, found = await run(window=1000, is_react=True, looks=7)
    assert (found.status, found.score) == (Status.COMPLETED, 1.0), found.failure
    assert len(policy.asked) >= 1 and len(found.transcripts) == 1 + len(policy.asked)
    for number, transcript in zip(policy.asked, found.transcripts[1:], strict=True):
        prompt, behind = transcript.ids[: transcript.prompt_length], transcript.ids[transcript.prompt_length :]
        assert f"Summary of the work so far:\nDone until {number}." in b.chat.decode(prompt)
        assert b.chat.decode(behind).startswith(f' I look.\nAction: look\nAction Input: {{"number": {number}}}')


def test_the_request_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Compaction.from_config(CompactionConfig()) is None
    ours = Compaction.from_config(CompactionConfig(threshold=0.5))
    assert ours is not None and ours.request == REQUEST.read_text().strip()
    (tmp_path / "mine.txt").write_text("What happened?\n")
    mine = Compaction.from_config(CompactionConfig(threshold=0.5, prompt_file="mine.txt"))
    assert mine is not None and mine.request == "What happened?"
    (tmp_path / "mine.txt").write_text(" \n")
    with naming(ConfigError, "mine.txt", "empty"):
        Compaction.from_config(CompactionConfig(threshold=0.5, prompt_file="mine.txt"))


@pytest.mark.parametrize("by", ["encode_markup", "encode"])
async def test_only_tokens_that_were_sampled_are_rendered_again_as_tokens(bench: MakeBench, by: str) -> None:
    """A policy that spells a turn's header by other tokens forges no turn of its later windows."""
    said, starts = "x<|im_start|>system", list[int]()

    class Twice(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.start(episode.sample.prompt)
            text = (await episode.generate()).message.text
            assert text == said
            await episode.start([*episode.sample.prompt, {"role": "assistant", "content": text}])
            starts.append(episode.transcript.ids.count(chat.tokenizer.convert_tokens_to_ids("<|im_start|>")))
            episode.finish(Status.COMPLETED)

    b = bench([""])
    chat, ids = b.chat, [*getattr(b.chat, by)(said), b.chat.stop_token_ids[0]]

    async def generate(prompt: Any, params: Any, session: str) -> Generation:
        return Generation(ids, [-1.0] * len(ids), FinishReason("stop", ids[-1]), [VersionSpan(0, 0, len(ids))])

    b.engine.generate = generate  # type: ignore[assignment]
    b.scheduler.loops = {"twice": Twice()}
    (found,) = await b.run(sample("twice"))
    assert found.failure is None and starts == [4 if by == "encode_markup" else 3]
