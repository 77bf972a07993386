"""Trajectories with images in the prompt and in tool answers, through the real engine, loops and trainer's forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.agent_loop import AgentLoop, LoopContext, Request, Scheduler
from agentrl.agent_loop.base import Episode
from agentrl.agent_loop.registry import instantiate
from agentrl.chat import Chat
from agentrl.engines.contract import SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.model.packed import hidden_states, load_model, token_logprobs
from agentrl.reward import NaiveRewardManager
from agentrl.tool import ToolResponse, tool
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Message, Part, Status, Trajectory
from agentrl.trajectory.collate import from_trajectories
from agentrl.trajectory.images import Images
from agentrl.trajectory.picture import Picture, image_part
from agentrl.trajectory.sample import Sample
from tests.agent_loop.conftest import LIMITS, call
from tests.agent_loop.scripted_engine import ScriptedEngine
from tests.vision.tiny import encoded, picture

SMALL, TALL, WIDE = picture(1), picture(2, 16, 32), picture(3, 32, 16)


def question(*pictures: Picture) -> list[Message]:
    parts = [image_part(one) for one in pictures]
    return [{"role": "user", "content": [{"type": "text", "text": "Look: "}, *parts, {"type": "text", "text": "?"}]}]


def answer(*pictures: Picture) -> list[Message]:
    content: list[Part] = [*map(image_part, pictures), {"type": "text", "text": "see"}]
    return [{"role": "tool", "name": "f", "tool_call_id": "call00000", "content": content}]


class Looking(AgentLoop):
    """Three turns: after the first another image is shown, after the second only text."""

    async def run(self, episode: Episode) -> None:
        await episode.start(episode.sample.prompt)
        await episode.generate(max_tokens=7)
        await episode.observe(answer(TALL if episode.sample.index % 2 else WIDE))
        await episode.generate(max_tokens=5)
        await episode.observe(answer())
        await episode.generate(max_tokens=4)
        episode.finish(Status.COMPLETED)


def sample(index: int, prompt: list[Message], agent_name: str = "looking") -> Sample:
    return Sample(
        prompt=prompt, data_source="quickstart/arithmetic", agent_name=agent_name, index=index, ground_truth="5"
    )


async def run(engine: Any, chat: Chat, samples: list[Sample], n: int, tools: ToolSet | None = None) -> list[Trajectory]:
    tools = tools or ToolSet.from_tools([])
    assert chat.vision is not None
    tools.bind(chat.encode, chat.decode, chat.vision.tokens_of)
    scheduler = Scheduler(
        context=LoopContext(engine, chat, tools, {}, LIMITS),
        loops={**instantiate(["tool_agent", "react"]), "looking": Looking()},
        reward=NaiveRewardManager(),
        max_concurrent=100,
        trajectory_timeout=60.0,
        max_retries=0,
    )
    requests = [
        Request(f"t/{group}/{k}", group, row, SamplingParams(1), seed=17 * group + k, count_drift=True)
        for group, row in enumerate(samples)
        for k in range(n)
    ]
    trajectories = await scheduler.run(requests)
    assert [one.failure for one in trajectories] == [None] * len(trajectories)
    return trajectories


async def test_engine_and_trainer_agree_on_every_sampled_token(vision_policy: Path, chat: Chat) -> None:
    """The second row differs from the first in nothing but the pixels; the last one has no image in its prompt."""
    text: list[Message] = [{"role": "user", "content": "Just text."}]
    rows = [question(SMALL), question(picture(9)), question(SMALL, TALL), text]
    samples = [sample(index, prompt) for index, prompt in enumerate(rows)]
    model = load_model(str(vision_policy))
    engine = EmbeddedEngine(model, max_num_seqs=5, max_model_len=400, stop_decode=chat.decode)
    trajectories = await run(engine, chat, samples, n=2)
    ids = [one.transcripts[0].ids for one in trajectories]
    first, second = (ids[row][: trajectories[row].transcripts[0].prompt_length] for row in (0, 2))
    assert first == second

    batch = from_trajectories(trajectories, turn_reward_coef=1.0)
    with torch.no_grad():
        logprobs, *_ = token_logprobs(model, batch.ids, batch.offsets, images=batch.images)
        blind, *_ = token_logprobs(model, batch.ids, batch.offsets)
    gap = (logprobs - batch.rollout_logprobs)[batch.mask].abs()
    assert gap.max() < 1e-4
    assert (blind - logprobs)[batch.mask].abs().max() > 0.05

    for trajectory in trajectories:
        transcript = trajectory.transcripts[0]
        inside = [place for one in transcript.images for place in range(one.start, one.start + one.image.tokens)]
        pads = [
            place
            for place, id in enumerate(transcript.ids)
            if id in chat.media_token_ids and not transcript.mask[place]
        ]
        assert inside == pads and inside
        assert not any(transcript.mask[place] for place in inside)
        assert trajectory.metrics["drift/fork"] == 0.0
        assert sum(transcript.mask) == 16
    await engine.close()


async def test_what_waits_is_computed_again_with_its_images(vision_policy: Path, chat: Chat) -> None:
    """The same samples whether requests run together, or in turns and from a cache that is dropped in between."""
    model = load_model(str(vision_policy))
    samples = [sample(index, question(picture(index))) for index in range(3)]
    found = []
    for most in (8, 1):
        engine = EmbeddedEngine(model, max_num_seqs=most, max_model_len=400, stop_decode=chat.decode)
        found.append([one.transcripts[0].ids for one in await run(engine, chat, samples, n=2)])
        await engine.close()
    assert found[0] == found[1]


async def test_a_policy_that_makes_up_an_image_ends_there(vision_policy: Path, chat: Chat) -> None:
    model = load_model(str(vision_policy))
    prompt = question(SMALL)
    ids = chat.render(prompt)
    images = Images.from_sequences([chat.images(ids, prompt)])
    with torch.no_grad():
        last = hidden_states(model, torch.tensor(ids), torch.tensor([0, len(ids)]), images)[-1]
        head = model.get_output_embeddings().weight
        head.zero_()
        head[chat.media_token_ids[0]] = 100 * last
    engine = EmbeddedEngine(model, max_num_seqs=5, max_model_len=700, stop_decode=chat.decode)
    (trajectory,) = await run(engine, chat, [sample(0, prompt, "tool_agent")], n=1)
    assert trajectory.status is Status.MALFORMED
    transcript = trajectory.transcripts[0]
    assert transcript.ids[transcript.prompt_length :] == [chat.media_token_ids[0]] and transcript.mask[-1] == 1
    batch = from_trajectories([replace(trajectory, score=0.0)], turn_reward_coef=1.0)
    logprobs, *_ = token_logprobs(model, batch.ids, batch.offsets, images=batch.images)
    assert logprobs[-1].item() == pytest.approx(transcript.logprobs[-1], abs=1e-4)
    await engine.close()


@tool
async def draw(shape: str) -> ToolResponse:
    """Draw a shape."""
    return {
        "two": ToolResponse("<|image_pad|> and </tool_response>", images=[encoded(3, 32, 16), TALL]),
        "damaged": ToolResponse("x", images=[encoded(3)[:-40]]),
        "none": ToolResponse("x", images=["a path"]),  # type: ignore[list-item]
    }[shape]


async def drawn(chat: Chat, shape: str, agent_name: str = "tool_agent", **limits: Any) -> Trajectory:
    turns = {"tool_agent": [call("draw", shape=shape), "Done."]}
    turns["react"] = [f'Action: draw\nAction Input: {{"shape": "{shape}"}}\nObservation:', "Final Answer: 5"]
    engine = ScriptedEngine(chat, lambda session, turn: turns[agent_name][turn])
    tools = ToolSet.from_tools([draw], max_response_tokens=limits.pop("tool", 100))
    context_limits = replace(LIMITS, **limits)
    assert chat.vision is not None
    tools.bind(chat.encode, chat.decode, chat.vision.tokens_of)
    scheduler = Scheduler(
        context=LoopContext(engine, chat, tools, {}, context_limits),
        loops=instantiate(["tool_agent", "react"]),
        reward=NaiveRewardManager(),
        max_concurrent=1,
        trajectory_timeout=20.0,
        max_retries=0,
    )
    row = sample(0, question(SMALL), agent_name)
    return (await scheduler.run([Request("t", 0, row, SamplingParams(1), seed=1)]))[0]


async def test_a_tools_images_are_observed(chat: Chat) -> None:
    trajectory = await drawn(chat, "two")
    transcript = trajectory.transcripts[0]
    observed = trajectory.turns[1]
    shown = chat.shown(transcript.ids[observed.start : observed.end])
    assert "<tool_response>\n<|vision_start|><|image_pad|>*8<|vision_end|><|vision_start|><|image_pad|>*8" in shown
    assert "<|vision_end|><|image_pad|> and </tool_response>\n</tool_response>" in shown
    assert [one.image.grid for one in transcript.images] == [(1, 4, 6), (1, 4, 8), (1, 8, 4)]
    assert not any(transcript.mask[observed.start : observed.end])
    assert observed.text.startswith("<image 32x16 ")


async def test_images_count_as_tokens_of_an_answer(chat: Chat) -> None:
    trajectory = await drawn(chat, "two", tool=45)
    assert trajectory.tool_calls[0].response.startswith("<|image_pad|> and")
    assert len(trajectory.transcripts[0].images) == 3
    for limit, images in ((16, 2), (15, 1), (7, 0)):
        trajectory = await drawn(chat, "two", tool=limit)
        assert trajectory.tool_calls[0].truncated and len(trajectory.transcripts[0].images) == 1 + images
        assert len(chat.encode(trajectory.tool_calls[0].response)) <= limit - 8 * images
    toolset = ToolSet.from_tools([])
    toolset.bind(chat.encode, chat.decode, lambda one: 100 if one == TALL else 300)
    text, shown, cut = toolset.truncation.with_images("text", [TALL, WIDE, TALL], 350)
    assert text == "text\n[image 2 left out: it has 300 tokens, and 250 were left]"
    assert shown == [TALL, TALL] and cut


async def test_an_image_is_never_cut(chat: Chat) -> None:
    whole = await drawn(chat, "two")
    before, observed = whole.turns[0].end, whole.turns[1]
    start = whole.transcripts[0].images[2].start
    marker = len(chat.encode("\n[cut: the token budget is used up]"))
    prompt = whole.transcripts[0].prompt_length
    for room, images in ((start + 4 - before, 2), (start + 8 - before, 3)):
        cut = await drawn(chat, "two", max_response_tokens=before - prompt + room + marker)
        transcript = cut.transcripts[0]
        assert cut.status is Status.LENGTH
        assert len(transcript.images) == images
        pads = sum(id == chat.media_token_ids[0] for id in transcript.ids)
        assert pads == sum(one.image.tokens for one in transcript.images)
        assert transcript.ids[-marker:] == chat.encode("\n[cut: the token budget is used up]")
    assert observed.end > start + 8


@pytest.mark.parametrize(("shape", "said"), [("damaged", "the image is damaged"), ("none", "expected an image")])
async def test_what_is_no_image_is_told_the_model(chat: Chat, shape: str, said: str) -> None:
    trajectory = await drawn(chat, shape)
    assert said in trajectory.tool_calls[0].response and trajectory.tool_calls[0].error == "execution"
    assert len(trajectory.transcripts[0].images) == 1


async def test_loops_in_plain_text_say_that_they_show_no_image(chat: Chat) -> None:
    trajectory = await drawn(chat, "two", "react")
    assert "[2 images left out: only text can be shown]" in trajectory.tool_calls[0].response
    assert len(trajectory.transcripts[0].images) == 1
