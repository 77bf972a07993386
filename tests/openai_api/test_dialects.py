"""Responses and Messages as recorded programs speak them: one record, streams, what is refused, and in which words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from agentrl.openai_api.responses import ENCRYPTED
from agentrl.tool import ToolSchema
from tests.agent_loop.conftest import call
from tests.openai_api.conftest import ADD, Open, scripted
from tests.openai_api.test_record import QUESTION, recorded, said

TOOL: ToolSchema = ADD  # type: ignore[assignment]
FUNCTION: dict[str, Any] = ADD["function"]  # type: ignore[assignment]
SYSTEM = "Use tools."
THOUGHT = "<think>\nTwo and three.\n</think>\n\n"
BROKEN = '<tool_call>\n{"name": "add", "arguments": [2}\n</tool_call>'


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Read a stream; the name of each event is its type."""
    found = []
    for block in answer.text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            name, data = (line.partition(": ")[2] for line in lines)
            found.append(json.loads(data))
            assert found[-1]["type"] == name
    return found


class Program:
    """A program that keeps its conversation in the form of its API, and sends all of it each time."""

    path: str

    def __init__(self, open: Open, *, stream: bool = False, **more: Any) -> None:
        self.url = f"{open.base_url.removesuffix('/v1')}/{self.path}"
        self.stream, self.more = stream, more
        self.history: list[Any] = []
        self.last: dict[str, Any] = {}

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(self.url, json=body)

    async def ask(self) -> list[tuple[str, str, Any]]:
        """Send the conversation, keep the answer: (id, name, arguments) of its calls."""
        answer = await self.post({**self.body(), "stream": self.stream, **self.more})
        assert answer.status_code == 200, answer.text
        self.last = self.put_together(events_of(answer)) if self.stream else answer.json()
        return self.keep()

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def put_together(self, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Join the events of a stream."""
        raise NotImplementedError

    def keep(self) -> list[tuple[str, str, Any]]:
        raise NotImplementedError

    def say(self, text: str) -> None:
        raise NotImplementedError

    def give(self, results: Sequence[tuple[str, str]]) -> None:
        """Keep the answers to calls: (id, text)."""
        raise NotImplementedError


class MessagesProgram(Program):
    """Content blocks, as Claude Code keeps them."""

    path = "v1/messages"

    def body(self) -> dict[str, Any]:
        tool = {"name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
        system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
        return {"model": "m", "max_tokens": 200, "system": system, "tools": [tool], "messages": self.history}

    def put_together(self, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {}
        written = ""
        for event in events:
            match event["type"]:
                case "message_start":
                    message = event["message"]
                case "content_block_start":
                    assert event["index"] == len(message["content"])
                    message["content"].append(event["content_block"])
                    written = ""
                case "content_block_delta":
                    block, delta = message["content"][event["index"]], event["delta"]
                    if delta["type"] == "input_json_delta":
                        written += delta["partial_json"]
                    else:
                        field = delta["type"].removesuffix("_delta")
                        block[field] += delta[field]
                case "content_block_stop":
                    block = message["content"][event["index"]]
                    if block["type"] == "tool_use":
                        block["input"] = json.loads(written)
                case "message_delta":
                    message |= event["delta"]
                    message["usage"] = event["usage"]
        assert events[-1]["type"] == "message_stop"
        return message

    def keep(self) -> list[tuple[str, str, Any]]:
        self.history.append({"role": "assistant", "content": self.last["content"]})
        return [(b["id"], b["name"], b["input"]) for b in self.last["content"] if b["type"] == "tool_use"]

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def give(self, results: Sequence[tuple[str, str]]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": text}]}
            for id, text in results
        ]
        self.history.append({"role": "user", "content": blocks})


class ResponsesProgram(Program):
    """Items, as Codex keeps them: nothing is stored at the endpoint."""

    path = "v1/responses"

    def body(self) -> dict[str, Any]:
        tool = {"type": "function", "strict": False, **FUNCTION}
        asked = {"store": False, "include": [ENCRYPTED], "parallel_tool_calls": True, "reasoning": {"effort": "low"}}
        return {"model": "m", "instructions": SYSTEM, "tools": [tool], "input": self.history, **asked}

    def put_together(self, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        items: list[dict[str, Any]] = []
        for event in events:
            kind = event["type"]
            if kind == "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            elif kind == "response.content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            elif kind == "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            elif kind == "response.custom_tool_call_input.delta":
                items[event["output_index"]]["input"] += event["delta"]
            elif kind == "response.output_item.done":
                for known_at_the_end in {"status", "encrypted_content"} & event["item"].keys():
                    items[event["output_index"]][known_at_the_end] = event["item"][known_at_the_end]
                assert items[event["output_index"]] == event["item"]
        whole: dict[str, Any] = events[-1]["response"]
        assert whole["output"] == items and events[-1]["type"] == f"response.{whole['status']}"
        return whole

    def keep(self) -> list[tuple[str, str, Any]]:
        kept = [dict(item) for item in self.last["output"]]
        for item in kept:
            if item["type"] == "reasoning":
                del item["content"]  # Codex sends back what is encrypted.
        self.history += kept
        return [(i["call_id"], i["name"], i["arguments"]) for i in kept if i["type"] == "function_call"]

    def say(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        self.history.append({"type": "message", "role": "user", "content": content})

    def give(self, results: Sequence[tuple[str, str]]) -> None:
        self.history += [{"type": "function_call_output", "call_id": id, "output": text} for id, text in results]


PROGRAMS = pytest.mark.parametrize("program", [MessagesProgram, ResponsesProgram])
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
TURNS = [
    THOUGHT + "I add.\n" + call("add", a=2, b=3),
    call("add", a=1.0, b=10**17 + 1) + "\n" + call("add", a=2, b=2),
    BROKEN,
    call("add", a=-0.0, b=1e300),
    "five é \U0001f600 " + "word " * 60,
] * 4
"""What the policy says: reasoning, text beside calls, parallel calls, numbers, a broken call, plain text."""


@PROGRAMS
@STREAMS
async def test_twenty_turns_are_one_transcript_of_exact_ids(chat: Chat, program: type[Program], stream: bool) -> None:
    limits = {"max_model_len": 8192, "max_response_tokens": 8000, "max_assistant_turns": 30}
    async with scripted(chat, [*TURNS, "#### 5"], **limits) as (service, engine):  # noqa: SIM117 (more than a line)
        async with service.session() as open:
            agent = program(open, stream=stream)
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


@PROGRAMS
@pytest.mark.parametrize("text", [*TURNS[:5], "", THOUGHT + "So."])
async def test_a_stream_says_what_a_whole_answer_says(chat: Chat, program: type[Program], text: str) -> None:
    answers: list[Any] = []
    for stream in (False, True):
        async with scripted(chat, [text]) as (service, _), service.session() as open:
            agent = program(open, stream=stream)
            agent.say("Hi")
            await agent.ask()
            known = {"id", "created_at", "content", "output", "usage"}
            answers.append({name: value for name, value in agent.last.items() if name not in known})
            spoken = json.dumps(agent.last.get("content", agent.last.get("output")))
            answers.append(spoken.replace(agent.last["id"].partition("_")[2], "ID"))
            answers.append(agent.last["usage"])
    assert answers[:3] == answers[3:]


@PROGRAMS
async def test_a_sub_agent_and_a_shortened_history_have_transcripts_of_their_own(
    chat: Chat, program: type[Program]
) -> None:
    texts = [f"said {number}" for number in range(6)]
    async with scripted(chat, texts) as (service, engine):  # noqa: SIM117
        async with service.session() as open:
            main, sub = program(open), program(open)
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


@PROGRAMS
async def test_a_program_that_drops_its_reasoning_continues_in_a_transcript_without_it(
    chat: Chat, program: type[Program]
) -> None:
    """The policy sees what a server would show it that renders what it is sent; the next call continues there."""
    async with scripted(chat, [THOUGHT + "I add.", "#### 5", "Yes."]) as (service, engine), service.session() as open:
        agent = program(open)
        agent.say("Hi")
        await agent.ask()
        turn = agent.history[-1]
        if "content" in turn and isinstance(turn["content"], list):
            kept = [block for block in turn["content"] if block["type"] != "thinking"]
            agent.history[-1] = {**turn, "content": kept}
        agent.history = [item for item in agent.history if item.get("type") != "reasoning"]
        agent.say("And?")
        await agent.ask()
        agent.say("Sure?")
        await agent.ask()
        assert [len(turns) for turns in engine.said.values()] == [1, 2]
        assert recorded(open.trajectory) == said(engine)
        assert "Two and three." not in chat.decode(open.trajectory.transcripts[1].ids)
        assert open.trajectory.metrics["openai_reasoning_left_out"] == 1


async def test_an_answer_is_continued_by_its_id(chat: Chat) -> None:
    async with scripted(chat, [TURNS[0], "ok", "no"]) as (service, engine), service.session() as open:
        agent = ResponsesProgram(open, store=True)
        agent.say("Hi")
        ((id, _, _),) = await agent.ask()
        first = agent.last["id"]
        agent.history = [{"type": "function_call_output", "call_id": id, "output": "5"}]
        agent.more["previous_response_id"] = first
        await agent.ask()
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)
        assert agent.last["previous_response_id"] == first
        agent.more["store"] = False
        agent.say("More.")
        await agent.ask()
        for unknown in (agent.last["id"], "resp_x"):
            answer = await agent.post({"input": "x", "previous_response_id": unknown})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")


async def test_items_are_sent_by_reference(chat: Chat) -> None:
    """As Vercel's AI SDK sends what is stored: the transcript goes on."""
    async with scripted(chat, [THOUGHT + TURNS[1], "ok"]) as (service, engine), service.session() as open:
        agent = ResponsesProgram(open, store=True)
        agent.say("Hi")
        assert await agent.ask()
        agent.history = [
            {"type": "item_reference", "id": item["id"]} if item.get("id") else item for item in agent.history
        ]
        assert {item.get("type") for item in agent.history[1:]} == {"item_reference"}
        agent.give([(one["call_id"], "5") for one in agent.last["output"] if one["type"] == "function_call"])
        await agent.ask()
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)
        answer = await agent.post({"input": [ITEM, {"type": "item_reference", "id": "msg_x"}]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[1].id")


async def test_a_tool_that_takes_text_is_called_with_text(chat: Chat) -> None:
    patch = {"type": "custom", "name": "patch", "description": "Change files.", "format": {"type": "text"}}
    texts = [call("patch", input="*** Begin\n+é"), call("patch", path="x"), "done"]
    async with scripted(chat, texts) as (service, engine), service.session() as open:
        agent = ResponsesProgram(open, tools=[patch])
        agent.say("Hi")
        await agent.ask()
        (item,) = agent.last["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin\n+é")
        agent.history.append({"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"})
        ((id, _, arguments),) = await agent.ask()
        assert json.loads(arguments) == {"path": "x"}, "not what such a tool takes: the program sees it as it is"
        agent.give([(id, "expected text")])
        await agent.ask()
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)


async def test_tokens_are_counted_without_a_record(chat: Chat) -> None:
    async with scripted(chat, ["ok"]) as (service, engine), service.session() as open:
        agent = MessagesProgram(open)
        agent.say("Hi")
        body = agent.body()
        del body["max_tokens"]
        async with httpx.AsyncClient() as client:
            counted = await client.post(f"{agent.url}/count_tokens", json=body)
            assert not open.trajectory.transcripts and open.session.turns == 0
        await agent.ask()
        ((prompt,),) = engine.prompts.values()
        usage = agent.last["usage"]
        assert counted.json() == {"input_tokens": len(prompt)}
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("text", "more", "reasons"),
    [
        ("ok", {}, ("end_turn", None)),
        ("a b END c", {"stop_sequences": ["END"]}, ("stop_sequence", "END")),
        ("word " * 50, {"max_tokens": 4}, ("max_tokens", None)),
        (TURNS[0], {}, ("tool_use", None)),
        (TURNS[0], {"tool_choice": {"type": "none"}}, ("end_turn", None)),
        (TURNS[0], {"tool_choice": {"type": "tool", "name": "add"}}, ("tool_use", None)),
    ],
)
async def test_why_a_message_ended(chat: Chat, text: str, more: dict[str, Any], reasons: tuple[str, Any]) -> None:
    async with scripted(chat, [text]) as (service, _), service.session() as open:
        agent = MessagesProgram(open, **more)
        agent.say("Hi")
        await agent.ask()
        assert (agent.last["stop_reason"], agent.last["stop_sequence"]) == reasons


USER = {"role": "user", "content": "Hi"}
USED: dict[str, Any] = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}],
}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "5"}
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
CALLED = {
    "type": "function_call",
    "call_id": "c1",
    "name": "add",
    "arguments": '{"a": 1}',
    "id": "fc_1",
    "status": None,
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "5"}


async def test_errors_are_in_the_form_of_the_route(chat: Chat) -> None:
    async with scripted(chat, ["ok"]) as (service, _), httpx.AsyncClient() as client:
        for path, kind in (("v1/messages", "not_found_error"), ("v1/responses", "invalid_request_error")):
            answer = await client.post(f"{service.endpoint.url}/wrong-token/{path}", json={"messages": [USER]})
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, kind)
            assert "session" in answer.json()["error"]["message"]
        async with service.session() as open:
            answer = await client.post(f"{open.base_url}/messages/batches", json={})
            assert answer.status_code == 404 and answer.json()["type"] == "error"
            assert "POST v1/messages, POST v1/messages/count_tokens" in answer.json()["error"]["message"]
            answer = await client.post(f"{open.base_url}/v1/messages", json={"messages": [USER], "max_tokens": 9})
            assert answer.json()["content"] == [{"type": "text", "text": "ok"}], "a base URL that ends with v1"


ODD: list[Any] = [None, 3, -1.5, "x", "", [], {}, True, [3], {"type": "x"}, [[]], 10**30, "\ud800"]
"""Values put in place of every member of a request."""
FOUND = [{"type": "tool_reference", "tool_name": "later"}, {"type": "text", "text": "5"}]
FULL_MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "tools": [
        {"name": "add", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"default": 1}}}},
        {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True},
        {"type": "bash_20250124", "name": "bash"},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "stop_sequences": ["END"],
    "stream": False,
    "thinking": {"type": "adaptive"},
    "temperature": 1.0,
    "top_k": 5,
    "metadata": {"user_id": "u"},
    "messages": [
        USER,
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, *USED["content"]]},
        {"role": "user", "content": [RESULT | {"content": FOUND}, {"type": "text", "text": "b"}]},
    ],
}
FULL_RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "a",
    "max_output_tokens": 9,
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        {"type": "tool_search", "execution": "client"},
        {"type": "shell"},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
    "parallel_tool_calls": True,
    "store": False,
    "stream": False,
    "include": [ENCRYPTED],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "input": [
        ITEM,
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        CALLED,
        OUTPUT,
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
        {"type": "tool_search_call", "call_id": "c3", "arguments": {"query": "x"}},
        {"type": "shell_call", "call_id": "c4", "action": {"commands": ["ls"]}},
        {"type": "tool_search_output", "call_id": "c3", "tools": [{"type": "function", "name": "g"}]},
        {"type": "shell_call_output", "call_id": "c4", "output": [{"stdout": "x"}]},
    ],
}


def changed(value: Any) -> Iterator[Any]:
    """Copies of a JSON value, each with one member replaced by an odd one, or left out."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        for other in [*ODD, *changed(member)]:
            copy = value.copy()
            copy[name] = other
            yield copy
        copy = value.copy()
        del copy[name]
        yield copy


@pytest.mark.slice(1, "hostile")
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize(
    ("program", "body"),
    [(MessagesProgram, FULL_MESSAGES), (ResponsesProgram, FULL_RESPONSES)],
    ids=["messages", "responses"],
)
async def test_no_odd_request_is_an_error_of_the_endpoint(
    chat: Chat, program: type[Program], body: dict[str, Any], part: int
) -> None:
    """Each is answered, or refused with the path of a member that exists or is missing."""
    seen = {200: 0, 400: 0}
    limits = {"max_assistant_turns": 10**6}
    async with scripted(chat, lambda session, turn: "ok", **limits) as (service, _), httpx.AsyncClient() as client:
        for other in itertools.islice(changed(body), part, None, 8):
            async with service.session() as open:
                url = f"{open.base_url.removesuffix('/v1')}/{program.path}"
                answer = await client.post(url, content=json.dumps(other), headers={"content-type": "application/json"})
                assert answer.status_code in seen, (other, answer.text)
                seen[answer.status_code] += 1
                if answer.status_code == 400:
                    assert answer.json()["error"]["message"] and ".:" not in answer.text, (other, answer.text)
    assert min(seen.values()) > 10


async def test_tokens_are_counted_of_the_prompt_that_a_call_gets(chat: Chat) -> None:
    """A transcript keeps reasoning that a template leaves out of its history."""
    async with scripted(chat, [THOUGHT + "Yes.", "No."]) as (service, _), service.session() as open:
        talk: list[Any] = [{"role": "user", "content": "Hi"}]
        async with httpx.AsyncClient(timeout=60) as client:

            async def ask(path: str) -> Any:
                answer = await client.post(f"{open.base_url}/{path}", json={"messages": talk, "max_tokens": 99})
                assert answer.status_code == 200, answer.text
                return answer.json()

            for _ in range(2):
                counted = (await ask("messages/count_tokens"))["input_tokens"]
                said = await ask("messages")
                usage = said["usage"]
                assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
                talk += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "Sure?"}]
        assert len(open.trajectory.transcripts) == 1
