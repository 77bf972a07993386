"""The text of a row that its privileged teacher is shown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent_loop import AgentLoop, Episode
from agentrl.agent_loop.teacher_context import filled, load_teacher_context, with_teacher_context
from agentrl.config import load_config
from agentrl.system import threads
from agentrl.trajectory import Message, Status, Trajectory
from agentrl.trajectory.collate import from_trajectories
from agentrl.trajectory.sample import Sample
from agentrl.verl.agent_loop import AgentLoopBase, AgentLoopOutput
from tests.agent_loop.conftest import Bench, call, sample

MakeBench = Callable[..., Bench]


def row(**fields: Any) -> Sample:
    return sample(**{"ground_truth": "51", "extra_info": {"hint": "use tools", "steps": [1, 2], "none": ""}, **fields})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("It is {ground_truth}.", "It is 51."),
        ("{hint}: {steps}", "use tools: [1, 2]"),
        (r"\boxed{{ground_truth}} and {1}, {}", r"\boxed{51} and {1}, {}"),
        ("It is {answer}.", None),
        ("{none}", None),
        ("Think twice.", "Think twice."),
    ],
)
def test_values_of_the_row(template: str, text: str | None) -> None:
    assert filled(template, row()) == text


def test_text_goes_to_the_end_of_the_last_user_message() -> None:
    system, question, answer, told = (
        Message(role=role, content=text)
        for role, text in (("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "q\n\nhint"))
    )
    assert with_teacher_context([system, question], "hint") == [system, told]
    assert with_teacher_context([question, question, answer], "hint") == [question, told, answer]
    assert with_teacher_context([system], "hint") == [system, {"role": "user", "content": "hint"}]
    assert question["content"] == "q", "the policy's own message is not changed"


def test_each_data_source_has_its_teachers_text() -> None:
    assert load_teacher_context(load_config(["distillation.teacher.path=t"])) is None
    sources = "{a/*: {path: policy, privileged: '{hint}'}, b: {path: t}}"
    told = load_teacher_context(load_config([f"distillation.by_source={sources}"]))
    assert told is not None
    found = [told(row(data_source=name)) for name in ("a/1", "b", "c")]
    assert found == ["use tools", None, None]


def test_every_transcript_has_a_prompt_for_the_teacher(bench: MakeBench) -> None:
    """Each its own, tools and all, when the history is written anew; nothing else of the record changes."""

    class Twice(AgentLoop):
        async def run(self, episode: Episode) -> None:
            tools = episode.context.tools.schemas
            await episode.start(episode.sample.prompt, tools)
            reply = await episode.generate()
            _, answers = await episode.answer_calls(reply.message.calls)
            await episode.observe(answers)
            await episode.generate()
            await episode.start([{"role": "user", "content": "Once more."}])
            await episode.generate()
            episode.finish(Status.COMPLETED)

    def run(privileged: bool, **fields: Any) -> tuple[Bench, Trajectory]:
        made = bench([call("none"), "It is 51.", "Still 51."])
        made.scheduler.loops = {**made.scheduler.loops, "twice": Twice()}
        if privileged:
            context = replace(made.scheduler.context, teacher_context=lambda one: filled("It is {ground_truth}.", one))
            made.scheduler.context = context
        return made, asyncio.run(made.run(row(agent_name="twice", **fields)))[0]

    used, told = run(True)
    _, plain = run(False)
    _, untold = run(True, ground_truth=None)
    first, second = told.transcripts
    chat, prompt = used.chat, row().prompt
    tools = used.scheduler.context.tools.schemas
    assert first.teacher_prompt == chat.render(with_teacher_context(prompt, "It is 51."), tools)
    assert second.teacher_prompt == chat.render([{"role": "user", "content": "Once more.\n\nIt is 51."}])
    assert [one.ids for one in told.transcripts] == [one.ids for one in plain.transcripts]
    assert told.messages == plain.messages
    assert not any(one.teacher_prompt for one in [*plain.transcripts, *untold.transcripts])
    batch = from_trajectories([told, untold], turn_reward_coef=1.0, privileged=True)
    assert batch.teacher_prompts is not None
    assert [ids.tolist() for ids in batch.teacher_prompts.ids] == [first.teacher_prompt, second.teacher_prompt, [], []]
    assert batch.teacher_prompts.replaced.tolist() == [one.prompt_length for one in [*told.transcripts] * 2]
    read = batch.as_taught()
    assert read.ids[: read.offsets[1]].tolist() == [*first.teacher_prompt, *first.ids[first.prompt_length :]]


class Plain(AgentLoop):
    async def run(self, episode: Episode) -> None:
        await episode.start(episode.sample.prompt)
        await episode.generate()
        episode.finish(Status.COMPLETED)


class OfVerl(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        said = await self.server_manager.generate("one", prompt_ids=prompt, sampling_params=sampling_params)
        mask = [1] * len(said.token_ids)
        return AgentLoopOutput(prompt_ids=prompt, response_ids=said.token_ids, response_mask=mask)


@pytest.mark.parametrize("loop", [Plain(), OfVerl.adapted_class()()], ids=["ours", "verl's"])
@pytest.mark.parametrize("long", [True, False])
def test_a_long_prompt_for_the_teacher_is_rendered_in_a_thread(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, loop: AgentLoop, long: bool
) -> None:
    """Long by what it says of the privileged text alone."""
    told = "It is 51. " * 10
    monkeypatch.setattr(threads, "LONG_TEXT", len(told) if long else 10**6)
    loop.configure(load_config([]))
    made, seen = bench(["51"]), list[bool]()
    made.scheduler.loops = {**made.scheduler.loops, "one": loop}
    made.scheduler.context = replace(made.scheduler.context, teacher_context=lambda _: told)
    render, loops_thread = made.chat.render, threading.get_ident()

    def noting(messages: list[Message], *tools: Any, **more: Any) -> list[int]:
        if told in str(messages):
            seen.append(threading.get_ident() != loops_thread)
        return render(messages, *tools, **more)

    monkeypatch.setattr(made.chat, "render", noting)
    (trajectory,) = asyncio.run(made.run(row(agent_name="one")))
    assert seen == [long]
    assert trajectory.transcripts[0].teacher_prompt == render(with_teacher_context(row().prompt, told))
