"""What every model API keeps to: exact ids, streams that say what whole answers say, answers that a client left.

A module of tests subclasses `ApiContract`, and names the program that speaks the API.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from agentrl.chat import Chat
from tests.agent_loop.conftest import call
from tests.openai_api.conftest import Open, embedded, scripted
from tests.openai_api.programs import (
    QUESTION,
    SYSTEM,
    THOUGHT,
    TOOL,
    TURNS,
    Program,
    events_of,
    leave_at,
    undelivered,
)
from tests.openai_api.test_record import recorded, said
from tests.waiting import until

LONG = "word " * 5000
LIMITS = {"max_model_len": 40_000, "max_response_tokens": 30_000}
TURN = "<think>\nHm, two and three.\n</think>\n\nThe sum of two and three is five."
CALL = "\n" + call("add", a=2, b=3)
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class ApiContract:
    """Tests of one API over a scripted policy."""

    program: ClassVar[type[Program]]

    # Conversations

    @STREAMS
    async def test_twenty_turns_are_one_transcript_of_exact_ids(self, chat: Chat, stream: bool) -> None:
        limits = {"max_model_len": 8192, "max_response_tokens": 8000, "max_assistant_turns": 30}
        async with scripted(chat, [*TURNS, "#### 5"], **limits) as (service, engine), service.session() as open:
            agent = self.program(open, stream=stream)
            agent.say(str(QUESTION["content"]))
            for _ in TURNS:
                calls = await agent.ask()
                # A program whose numbers are doubles, as JavaScript's.
                agent.history = json.loads(json.dumps(agent.history), parse_int=float, parse_float=float)
                if calls:
                    agent.give([(id, "5") for id, _, _ in calls])
                else:
                    agent.say("Go on.")
            assert await agent.ask() == []
            (transcript,) = open.trajectory.transcripts
            assert recorded(open.trajectory) == said(engine)
            (turns,) = engine.said.values()
            (prompts,) = engine.prompts.values()
            for prompt, ids in zip(prompts, turns, strict=True):
                assert transcript.ids[: len(prompt) + len(ids)] == prompt + ids
            assert prompts[0] == chat.render([{"role": "system", "content": SYSTEM}, QUESTION], [TOOL])
            records = [record for turn in open.trajectory.turns for record in turn.calls]
            assert len(records) == 20 and all(record.response == "5" for record in records)

    async def test_a_call_with_half_a_pair_is_read_when_it_is_sent_back(self, chat: Chat) -> None:
        """A program whose next request is refused fails its trajectory, which the policy could choose."""
        async with scripted(chat, [call("add", a="\ud800"), "ok"]) as (service, _), service.session() as open:
            agent = self.program(open)
            agent.say("Add.")
            ((id, _, _),) = await agent.ask()
            agent.give([(id, "5")])
            await agent.ask()
            assert len(open.trajectory.transcripts) == 1 and "openai_bad_requests" not in open.trajectory.metrics

    async def test_a_sub_agent_and_a_shortened_history_have_transcripts_of_their_own(self, chat: Chat) -> None:
        texts = [f"said {number}" for number in range(6)]
        async with scripted(chat, texts) as (service, engine), service.session() as open:
            main, sub = self.program(open), self.program(open)
            main.say("Solve it.")
            sub.say("Look it up.")
            for agent in (main, sub, main, sub):
                await agent.ask()
                agent.say("More.")
            main.history = main.history[:1]
            main.say("A summary of what was said.")
            await main.ask()
            main.say("And?")
            await main.ask()
            assert [len(turns) for turns in engine.said.values()] == [2, 2, 2]
            assert recorded(open.trajectory) == said(engine)
            await open.session.episode.count_drift()
            assert open.trajectory.metrics["drift/clean"] == 1.0

    # Streams

    @pytest.mark.parametrize("text", [*TURNS[:5], "", THOUGHT + "So."])
    async def test_a_stream_says_what_a_whole_answer_says(self, chat: Chat, text: str) -> None:
        """But for the answer's own id, of which others are made."""
        answers = []
        for stream in (False, True):
            async with scripted(chat, [text]) as (service, _), service.session() as open:
                agent = self.program(open, stream=stream)
                agent.say("Hi")
                await agent.ask()
                own = agent.last["id"].replace("-", "_").partition("_")[2]
                kept = {name: value for name, value in agent.last.items() if name != "created_at"}
                answers.append(json.dumps(kept).replace(own, "ID"))
        assert answers[0] == answers[1]

    async def test_the_first_words_arrive_before_the_turn_has_ended(self, chat: Chat) -> None:
        """The engine waits until the client has them."""
        async with scripted(chat, lambda session, turn: TURN + CALL) as (service, engine), service.session() as open:
            engine.held_behind = "The sum of two"
            body = {**self.program.least, "stream": True}
            seen = b""
            client = httpx.AsyncClient(timeout=30)
            async with client, client.stream("POST", self.program.url_of(open), json=body) as answer:
                pieces = answer.aiter_bytes()
                while "The sum of" not in self.texts_of(seen)[1]:
                    seen += await anext(pieces)
                assert engine.running == 1 and not open.trajectory.turns
                engine.go_on.set()
                async for piece in pieces:
                    seen += piece
            assert self.texts_of(seen) == ("Hm, two and three.", "The sum of two and three is five.")
            assert [len(turn.calls) for turn in open.trajectory.turns] == [1]
            assert undelivered(open) == (0, 0)

    def texts_of(self, stream: bytes) -> tuple[str, str]:
        """Reasoning and text of a stream so far."""
        return self.program.texts_of(events_of(stream))

    @pytest.mark.parametrize("turn", [TURN + CALL, TURN, "Plain text.", CALL.strip(), "<think>\nNot ended", ""])
    async def test_a_live_stream_says_what_a_whole_one_says(self, chat: Chat, turn: str) -> None:
        """Event by event, where pieces of text are joined, and but for ids and cached tokens."""
        found = []
        for live in (True, False):
            async with scripted(chat, lambda session, number: turn) as (service, engine), service.session() as open:
                if live:
                    engine.held_behind = next((one for one in ("The sum", "Plain", "Not") if one in turn), "")
                    asyncio.get_running_loop().call_later(0.1, engine.go_on.set)
                else:
                    engine.generate = without_listener(engine.generate)
                body = {**self.program.least, "stream": True}
                async with httpx.AsyncClient(timeout=30) as client:
                    answer = await client.post(self.program.url_of(open), json=body)
                found.append((self.texts_of(answer.content), shape(answer.content)))
        assert found[0] == found[1]

    async def test_every_token_of_a_real_policy_is_streamed_and_recorded_once(self, chat: Chat, tiny_dir: Path) -> None:
        async with (
            embedded(chat, tiny_dir) as service,
            service.session() as open,
            httpx.AsyncClient(timeout=60) as client,
        ):
            answer = await client.post(self.program.url_of(open), json={**self.program.least, "stream": True})
            reasoning, text = self.texts_of(answer.content)
            (turn,) = open.trajectory.turns
            assert text.strip() == turn.text.strip() or reasoning
            assert undelivered(open) == (0, 0)

    # Answers that a client left

    @pytest.mark.parametrize("stream", [True, False])
    async def test_an_answer_that_its_client_left_is_not_trained_on(self, chat: Chat, stream: bool) -> None:
        async with scripted(chat, ["Hello.", LONG], **LIMITS) as (service, engine):
            async with service.session() as open:
                hello = (await open.say([QUESTION])).choices[0].message
                before = open.trajectory.num_sampled
                body = {**self.program.least, "stream": stream}
                await asyncio.to_thread(leave_at, self.program.url_of(open), body, b"word", 500)
                await until(lambda: len(engine.prompts) == 2 and not open.session._tasks)
                assert hello.content == "Hello."
            turns, tokens = undelivered(open)
            more = open.trajectory.num_sampled - before  # What was taken stays: of a stream, pieces that arrived.
            assert tokens >= 5000 > 10 * more * (not stream)
            assert tokens + more == sum(map(len, engine.said["s1.1"][-1:]))
            assert (turns, len(open.trajectory.turns)) == ((1, 1) if not more else (0, 2))
            contents = [message["content"] for message in open.trajectory.messages]
            assert contents[:3] == [QUESTION["content"], "Hello.", "Hi"]
            assert "".join(map(str, contents[3:])) == LONG[: len("".join(map(str, contents[3:])))]

    async def test_a_client_that_leaves_at_the_last_event_has_taken_the_answer(self, chat: Chat) -> None:
        """Codex does so: it waits neither for another event nor for the end of the body."""
        body = {**self.program.least, "stream": True}
        async with scripted(chat, lambda session, turn: LONG, **LIMITS) as (service, _):
            for _ in range(3):
                async with service.session() as open:
                    url, last = self.program.url_of(open), self.program.last_event
                    seen = await asyncio.to_thread(leave_at, url, body, last, 65536)
                    assert seen.endswith(b"\r\n0\r\n\r\n")
                assert undelivered(open) == (0, 0) and open.trajectory.num_sampled > 5000

    async def test_of_an_answer_that_its_client_left_the_delivered_tokens_stay(self, chat: Chat) -> None:
        async with scripted(chat, lambda session, turn: TURN) as (service, engine):
            async with service.session() as open:
                engine.held_behind = "The sum of two"
                reasoning, text = await left(open, self.program, "of")
                assert engine.aborted, "sampling stops at once"
            ((ids,),) = engine.said.values()
            (transcript,) = open.trajectory.transcripts
            kept = transcript.ids[transcript.prompt_length :]
            assert kept == ids[: len(kept)] and len(transcript.logprobs) == len(transcript.ids)
            assert chat.decode(kept) == "<think>\nHm, two and three.\n</think>\n\nThe sum of two"
            assert (reasoning, text) == ("Hm, two and three.", "The sum of two")
            (turn,) = open.trajectory.turns
            assert (turn.text, turn.finish_reason, turn.end) == (text, "abort", len(transcript))
            assert [message["content"] for message in open.trajectory.messages] == ["Hi", text]
            assert open.trajectory.num_sampled == len(kept)
            assert [span.end for span in transcript.versions] == [len(transcript)]


class ReasoningContract(ApiContract):
    """Tests of an API whose clients send the policy's reasoning back."""

    def forgetting(self, history: list[Any]) -> list[Any]:
        """Leave out of a conversation what the policy thought."""
        raise NotImplementedError

    async def test_a_program_that_drops_its_reasoning_continues_in_a_transcript_without_it(self, chat: Chat) -> None:
        """The policy sees what a server would show it that renders what it is sent; the next call continues there."""
        texts = [THOUGHT + "I add.", "#### 5", "Yes."]
        async with scripted(chat, texts) as (service, engine), service.session() as open:
            agent = self.program(open)
            agent.say("Hi")
            await agent.ask()
            agent.history = self.forgetting(agent.history)
            agent.say("And?")
            await agent.ask()
            agent.say("Sure?")
            await agent.ask()
            assert [len(turns) for turns in engine.said.values()] == [1, 2]
            assert recorded(open.trajectory) == said(engine)
            assert "Two and three." not in chat.decode(open.trajectory.transcripts[1].ids)
            assert open.trajectory.metrics["openai_reasoning_left_out"] == 1


async def left(open: Open, program: type[Program], wanted: str) -> tuple[str, str]:
    """Read a stream up to a text, and leave; return the reasoning and the text that were read."""
    body = {**program.least, "stream": True}
    seen = await asyncio.to_thread(leave_at, program.url_of(open), body, wanted.encode(), 65536)
    await until(lambda: not open.session._tasks)
    return program.texts_of(events_of(seen))


def without_listener(generate: Any) -> Any:
    async def asked(ids: Any, params: Any, session: str, images: Any = ()) -> Any:
        return await generate(ids, params, session, images)

    return asked


def shape(stream: bytes) -> list[str]:
    """The events of a stream without their texts and ids, one for each run of pieces."""
    found: list[str] = []
    for event in events_of(stream):
        event.pop("sequence_number", None)
        text = json.dumps(hidden(event))
        if not (found and found[-1] == text and "delta" in text):
            found.append(text)
    return found


def hidden(value: Any) -> Any:
    if isinstance(value, dict):
        dropped = ("id", "item_id", "created", "created_at", "signature")
        members = {key: hidden(member) for key, member in value.items() if key not in dropped}
        for key in ("delta", "content", "reasoning_content", "thinking", "text", "partial_json"):
            if members.get(key) and isinstance(members[key], str) and value.get("type") != "message":
                members[key] = "..." if "done" not in str(value.get("type")) else members[key]
        return members
    return [hidden(one) for one in value] if isinstance(value, list) else value
