"""Programs that speak the model APIs: each keeps its conversation in the form of its API, and sends all of it."""

from __future__ import annotations

import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from agentrl.openai_api.responses import ENCRYPTED
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message
from tests.agent_loop.conftest import call
from tests.openai_api.conftest import ADD, Open

QUESTION: Message = {"role": "user", "content": "What is 2 + 3?"}
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TOOL: ToolSchema = ADD  # type: ignore[assignment]
FUNCTION: dict[str, Any] = ADD["function"]  # type: ignore[assignment]
SYSTEM = "Use tools."
THOUGHT = "<think>\nTwo and three.\n</think>\n\n"
BROKEN = '<tool_call>\n{"name": "add", "arguments": [2}\n</tool_call>'
TURNS = [
    THOUGHT + "I add.\n" + call("add", a=2, b=3),
    call("add", a=1.0, b=10**17 + 1) + "\n" + call("add", a=2, b=2),
    BROKEN,
    call("add", a=-0.0, b=1e300),
    "five é \U0001f600 " + "word " * 60,
] * 4
"""What the policy says: reasoning, text beside calls, parallel calls, numbers, a broken call, plain text."""


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Read the events that have arrived whole; where events have names, the name of each is its type.

    The stream may be as a connection gives it, with heads and the sizes of chunks between the events.
    """
    found = []
    for block in stream.decode(errors="replace").split("\n\n")[:-1]:
        before, begun, data = block.rpartition("data: ")
        if begun and data != "[DONE]":
            found.append(json.loads(data))
            name = before.rstrip("\n").rpartition("\n")[2]
            assert not name.startswith("event: ") or name == f"event: {found[-1]['type']}"
    return found


class Program(ABC):
    """A program that speaks one API, for the tests of every API (`tests/openai_api/contract.py`)."""

    path: ClassVar[str]
    last_event: ClassVar[bytes]
    """Begin of the event that ends a stream."""
    least: ClassVar[dict[str, Any]]
    """A body that says `Hi` and lets the policy say as much as it wants."""

    def __init__(self, open: Open, *, stream: bool = False, **more: Any) -> None:
        self.url = self.url_of(open)
        self.stream, self.more = stream, more
        self.history: list[Any] = []
        self.last: dict[str, Any] = {}

    @classmethod
    def url_of(cls, open: Open) -> str:
        return f"{open.base_url.removesuffix('/v1')}/{cls.path}"

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(self.url, json=body)

    async def ask(self) -> list[tuple[str, str, Any]]:
        """Send the conversation, keep the answer: (id, name, arguments) of its calls."""
        answer = await self.post({**self.body(), "stream": self.stream, **self.more})
        assert answer.status_code == 200, answer.text
        self.last = self.put_together(events_of(answer.content)) if self.stream else self.whole(answer.json())
        return self.keep()

    @abstractmethod
    def body(self) -> dict[str, Any]: ...

    @staticmethod
    @abstractmethod
    def put_together(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Join the events of a stream."""

    @staticmethod
    def whole(answer: dict[str, Any]) -> dict[str, Any]:
        """Bring an answer that was not streamed into the form of `put_together`."""
        return answer

    @staticmethod
    @abstractmethod
    def texts_of(events: Sequence[dict[str, Any]]) -> tuple[str, str]:
        """Reasoning and text of a stream so far."""

    @abstractmethod
    def keep(self) -> list[tuple[str, str, Any]]: ...

    @abstractmethod
    def say(self, text: str) -> None: ...

    @abstractmethod
    def give(self, results: Sequence[tuple[str, str]]) -> None:
        """Keep the answers to calls: (id, text)."""


class ChatProgram(Program):
    """Messages, as most programs keep them."""

    path = "v1/chat/completions"
    last_event = b"data: [DONE]"
    least = {"messages": [USER]}

    def body(self) -> dict[str, Any]:
        more = {"stream_options": {"include_usage": True}} if self.stream else {}
        return {
            "model": "m",
            "messages": [{"role": "system", "content": SYSTEM}, *self.history],
            "tools": [ADD],
            **more,
        }

    @staticmethod
    def put_together(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        found: dict[str, Any] = {"id": events[0]["id"], "message": message, "finish_reason": None, "usage": None}
        for chunk in events:
            assert "error" not in chunk and chunk["id"] == found["id"], chunk
            found["usage"] = chunk.get("usage") or found["usage"]
            for choice in chunk["choices"]:
                found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                if thought := delta.get("reasoning_content"):
                    message["reasoning_content"] = message.get("reasoning_content", "") + thought
                for one in delta.get("tool_calls", ()):
                    index = one.pop("index")
                    if "id" in one:
                        message.setdefault("tool_calls", []).append(one)
                    else:
                        message["tool_calls"][index]["function"]["arguments"] += one["function"]["arguments"]
        return found

    @staticmethod
    def whole(answer: dict[str, Any]) -> dict[str, Any]:
        (choice,) = answer["choices"]
        message = {name: value for name, value in choice["message"].items() if name != "refusal"}
        return {
            "id": answer["id"],
            "message": {**message, "content": message["content"] or ""},
            "finish_reason": choice["finish_reason"],
            "usage": answer["usage"],
        }

    @staticmethod
    def texts_of(events: Sequence[dict[str, Any]]) -> tuple[str, str]:
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        reasoning, text = ("".join(one.get(key) or "" for one in deltas) for key in ("reasoning_content", "content"))
        return reasoning, text

    def keep(self) -> list[tuple[str, str, Any]]:
        message = self.last["message"]
        self.history.append(message)
        return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def give(self, results: Sequence[tuple[str, str]]) -> None:
        self.history += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]


class MessagesProgram(Program):
    """Content blocks, as Claude Code keeps them."""

    path = "v1/messages"
    last_event = b"event: message_stop"
    least = {"messages": [USER], "max_tokens": 20_000}

    def body(self) -> dict[str, Any]:
        tool = {"name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
        system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
        return {"model": "m", "max_tokens": 200, "system": system, "tools": [tool], "messages": self.history}

    @staticmethod
    def put_together(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
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

    @staticmethod
    def texts_of(events: Sequence[dict[str, Any]]) -> tuple[str, str]:
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return "".join(one.get("thinking", "") for one in deltas), "".join(one.get("text", "") for one in deltas)


class ResponsesProgram(Program):
    """Items, as Codex keeps them: nothing is stored at the endpoint."""

    path = "v1/responses"
    last_event = b"event: response.completed"
    least = {"input": [USER]}

    def body(self) -> dict[str, Any]:
        tool = {"type": "function", "strict": False, **FUNCTION}
        asked = {"store": False, "include": [ENCRYPTED], "parallel_tool_calls": True, "reasoning": {"effort": "low"}}
        return {"model": "m", "instructions": SYSTEM, "tools": [tool], "input": self.history, **asked}

    @staticmethod
    def put_together(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
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

    @staticmethod
    def texts_of(events: Sequence[dict[str, Any]]) -> tuple[str, str]:
        kinds = ("response.reasoning_text.delta", "response.output_text.delta")
        reasoning, text = ("".join(one["delta"] for one in events if one["type"] == kind) for kind in kinds)
        return reasoning, text


PROGRAMS: list[type[Program]] = [ChatProgram, ResponsesProgram, MessagesProgram]


def undelivered(open: Open) -> tuple[float, float]:
    metrics = open.trajectory.metrics
    return metrics.get("openai_undelivered_turns", 0), metrics.get("openai_undelivered_tokens", 0)


def request(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a request; the system takes little of its answer before the program reads."""
    address, content = urlsplit(url), json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before the connection, which fixes the window
    connection.connect((address.hostname, address.port))
    head = f"POST {address.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def read_until(connection: socket.socket, wanted: bytes, most: int) -> bytes:
    """Read to the end of the event that begins with `wanted`, or to any other text."""
    said = b""
    while not (wanted in said and (b"\n\n" in said.partition(wanted)[2] or not wanted.startswith(b"event"))):
        piece = connection.recv(most)
        assert piece, said[-2000:]
        said += piece
    return said


def leave_at(url: str, body: dict[str, Any], wanted: bytes, most: int) -> bytes:
    with request(url, body) as connection:
        return read_until(connection, wanted, most)
