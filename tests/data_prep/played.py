"""Sessions that real SDKs play against a server on loopback, with a log of what went over the wire."""

from __future__ import annotations

import json
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = [
    "rain",
    "sun",
    "wind",
    "Köln",
    "Oslo",
    "🌧",
    "red",
    "blue",
    "\n-",
    "item\t«ok»",
    "{x}",
    "\\d",
    '"quoted"',
    "100%",
    "null",
    "07",
    "e-2",
]
TOOLS = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["city"],
        },
    },
    {"name": "note", "description": "Keep a text.", "parameters": {"type": "object", "properties": {"text": {}}}},
]


@dataclass
class Said:
    """One answer of the model."""

    text: str
    calls: list[tuple[str, str, dict[str, Any]]]
    """(id, name, arguments)."""


@dataclass
class Server:
    """A server that answers with the next of its answers."""

    url: str = ""
    answers: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps(server.answers.pop(0)).encode()
            status = 429 if b'"error": {' in body[:20] else 200
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{listening.server_port}"
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


class Client(ABC):
    """A program with an SDK. It keeps its history as the SDK's users do."""

    def __init__(self, server: Server, log: list[dict[str, Any]], system: str, tools: list[dict[str, Any]]) -> None:
        self.server, self.log, self.system, self.tools = server, log, system, tools
        self.history: list[Any] = []

    def _note(self, response: Any) -> None:
        """Log what a request and its answer were on the wire."""
        response.read()
        self.log.append({"request": json.loads(response.request.content), "response": response.json()})

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    @abstractmethod
    def answer(self, said: Said, id: str) -> None:
        """Have the server answer so."""

    @abstractmethod
    def result(self, id: str, text: str) -> None:
        """Answer a call."""


class Chat(Client):
    """openai, Chat Completions."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        import httpx
        import openai

        http = httpx.Client(event_hooks={"response": [self._note]}, trust_env=False)
        self.client = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="unused", http_client=http)

    def answer(self, said: Said, id: str) -> None:
        calls = [
            {"id": one, "type": "function", "function": {"name": name, "arguments": json.dumps(held)}}
            for one, name, held in said.calls
        ]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said.text or None,
            "refusal": None,
            "annotations": [],
        }
        message |= {"tool_calls": calls} if calls else {}
        end = "tool_calls" if calls else "stop"
        self.server.answers.append(
            {
                "id": f"chatcmpl-{id}",
                "object": "chat.completion",
                "created": 1_800_000_000,
                "model": "model-2",
                "choices": [{"index": 0, "message": message, "finish_reason": end, "logprobs": None}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )
        tools = [{"type": "function", "function": one} for one in self.tools]
        messages = [{"role": "system", "content": self.system}, *self.history]
        given = {"tools": tools} if tools else {}
        reply = self.client.chat.completions.create(model="model", messages=messages, temperature=0.5, **given)  # type: ignore[call-overload]
        self.history.append(reply.choices[0].message)

    def result(self, id: str, text: str) -> None:
        self.history.append({"role": "tool", "tool_call_id": id, "content": text})


class Messages(Client):
    """anthropic, Messages."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        import anthropic
        import httpx2

        http = httpx2.Client(event_hooks={"response": [self._note]}, trust_env=False)
        self.client = anthropic.Anthropic(base_url=self.server.url, api_key="unused", http_client=http)

    def answer(self, said: Said, id: str) -> None:
        content: list[dict[str, Any]] = [{"type": "text", "text": said.text}] if said.text else []
        content += [{"type": "tool_use", "id": one, "name": name, "input": held} for one, name, held in said.calls]
        self.server.answers.append(
            {
                "id": f"msg_{id}",
                "type": "message",
                "role": "assistant",
                "model": "model-2",
                "content": content,
                "stop_reason": "tool_use" if said.calls else "end_turn",
                "stop_sequence": None,
                "usage": {"input_tokens": 1, "output_tokens": 1},
            }
        )
        tools = [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in self.tools
        ]
        given: dict[str, Any] = {"tools": tools} if tools else {}
        reply = self.client.messages.create(
            model="model", max_tokens=99, system=self.system, messages=self.history, **given
        )
        self.history.append({"role": "assistant", "content": reply.content})

    def result(self, id: str, text: str) -> None:
        block = {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": text}]}
        if isinstance(self.history[-1]["content"], list) and self.history[-1]["role"] == "user":
            self.history[-1]["content"].append(block)
        else:
            self.history.append({"role": "user", "content": [block]})


class Responses(Client):
    """openai, Responses, with the whole history in each request."""

    kept = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        import httpx
        import openai

        http = httpx.Client(event_hooks={"response": [self._note]}, trust_env=False)
        self.client = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="unused", http_client=http)
        self.before: str | None = None
        self.sent = 0

    def answer(self, said: Said, id: str) -> None:
        reasoning = {"type": "reasoning", "id": f"rs_{id}", "summary": [], "encrypted_content": "gAAAA-sealed_=="}
        items: list[dict[str, Any]] = [reasoning]
        if said.text:
            part = {"type": "output_text", "text": said.text, "annotations": []}
            items.append(
                {"type": "message", "id": f"msg_{id}", "role": "assistant", "status": "completed", "content": [part]}
            )
        items += [
            {"type": "function_call", "id": f"fc_{n}{id}", "call_id": one, "name": name, "arguments": json.dumps(held)}
            for n, (one, name, held) in enumerate(said.calls)
        ]
        self.server.answers.append(
            {
                "id": f"resp_{id}",
                "object": "response",
                "created_at": 1_800_000_000,
                "status": "completed",
                "model": "model-2",
                "output": items,
                "parallel_tool_calls": True,
                "tool_choice": "auto",
                "tools": [],
            }
        )
        tools = [{"type": "function", "strict": False, **one} for one in self.tools]
        given: dict[str, Any] = {"previous_response_id": self.before} if self.kept and self.before else {}
        new = self.history[self.sent :] if self.kept else self.history
        reply = self.client.responses.create(model="model", instructions=self.system, input=new, tools=tools, **given)  # type: ignore[arg-type]
        self.before = reply.id
        self.history += reply.output
        self.sent = len(self.history)

    def result(self, id: str, text: str) -> None:
        self.history.append({"type": "function_call_output", "call_id": id, "output": text})


class KeptResponses(Responses):
    """The same by `previous_response_id`."""

    kept = True


class Spans(Client):
    """opentelemetry-sdk, with the attributes of the conventions for generative AI."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        provider, self.finished = TracerProvider(), InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self.finished))
        self.tracer = provider.get_tracer("played")

    def answer(self, said: Said, id: str) -> None:
        parts: list[dict[str, Any]] = [{"type": "text", "content": said.text}] if said.text else []
        parts += [{"type": "tool_call", "id": one, "name": name, "arguments": held} for one, name, held in said.calls]
        end = "tool_call" if said.calls else "stop"
        answer = {"role": "assistant", "parts": parts, "finish_reason": end}
        with self.tracer.start_as_current_span("chat model") as span:
            span.set_attributes(
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.request.model": "model",
                    "gen_ai.response.model": "model-2",
                    "gen_ai.response.id": id,
                    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": self.system}]),
                    "gen_ai.input.messages": json.dumps(self.history),
                    "gen_ai.output.messages": json.dumps([answer]),
                    "gen_ai.tool.definitions": json.dumps([{"type": "function", **one} for one in self.tools]),
                }
            )
        (finished,) = self.finished.get_finished_spans()
        self.finished.clear()
        self.log.append(json.loads(finished.to_json()) if len(self.log) % 2 else otlp(finished))
        self.history.append(answer)

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "parts": [{"type": "text", "content": text}]})

    def result(self, id: str, text: str) -> None:
        part = {"type": "tool_call_response", "id": id, "response": text}
        self.history.append({"role": "tool", "parts": [part]})


def otlp(span: Any) -> dict[str, Any]:
    """A span as the collector's file exporter writes it."""
    from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    made: dict[str, Any] = MessageToDict(encode_spans([span]))
    (one,) = made["resourceSpans"][0]["scopeSpans"][0]["spans"]
    one["traceId"], one["spanId"] = f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"
    return made


CLIENTS: dict[str, Callable[..., Client]] = {
    "chat": Chat,
    "messages": Messages,
    "responses": Responses,
    "kept": KeptResponses,
    "spans": Spans,
}


@dataclass
class Player:
    """Draws a session, plays it, and knows which rows it makes."""

    random: random.Random
    server: Server
    log: list[dict[str, Any]]
    kind: str
    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0

    def words(self, low: int, high: int) -> str:
        return " ".join(self.random.choice(WORDS) for _ in range(self.random.randint(low, high))).strip() or "so"

    def play(self, *, branches: bool = True) -> None:
        """Play a session: turns with and without tools; then an answer asked for again, or a question edited."""
        system, tools = f"Be brief. {self.words(1, 3)}", TOOLS if self.random.random() < 0.7 else []
        client = CLIENTS[self.kind](self.server, self.log, system, tools)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        places = []
        for _ in range(self.random.randint(1, 3)):
            text = f"{self.name}: {self.words(1, 6)}"
            client.ask(text)
            messages.append({"role": "user", "content": text})
            places.append((list(client.history), list(messages), getattr(client, "before", None)))
            self._turn(client, messages)
        self._row(messages, tools)
        if branches and self.random.random() < 0.4:
            history, before, previous = self.random.choice(places)
            if self.random.random() < 0.5:
                # A question is edited; the first one must stay, as nothing else joins a session without ids.
                if len(before) == 2:
                    return
                before = [*before[:-1], {"role": "user", "content": f"{self.name} edited: {self.words(1, 4)}"}]
                client.history = history[:-1]
                client.ask(before[-1]["content"])
            else:
                client.history = list(history)
            if isinstance(client, Responses):
                client.before, client.sent = previous, len(client.history) - 1
            again = [{**one, "weight": 0} if one["role"] == "assistant" else one for one in before]
            self._turn(client, again)
            self._row(again, tools)

    def _turn(self, client: Client, messages: list[dict[str, Any]]) -> None:
        for number in range(self.random.randint(0, 2) if client.tools else 0):
            calls = []
            for _ in range(self.random.randint(1, 2)):
                # No two calls are alike: the same answer to the same prompt is one turn.
                name, arguments = (
                    "weather",
                    {"city": f"{self.words(1, 2)} {self._id()}", "days": self.random.randint(1, 9)},
                )
                if self.random.random() < 0.4:
                    held = self.random.choice([self.words(1, 3), 1.5, None, [1, {"a": "ü"}]])
                    name, arguments = "note", {"text": {"of": self._id(), "held": held}}
                calls.append((f"call_{self._id()}", name, arguments))
            said = Said(self.words(1, 3) if number and self.kind != "spans" else "", calls)
            client.answer(said, self._id())
            messages.append(
                {
                    "role": "assistant",
                    "content": said.text,
                    "tool_calls": [{"name": name, "arguments": held} for _, name, held in calls],
                }
            )
            for id, _, _ in calls:
                result = self.words(0, 4)
                client.result(id, result)
                messages.append({"role": "tool", "content": result})
        said = Said(f"{self.words(1, 8)} {self._id()}", [])
        client.answer(said, self._id())
        messages.append({"role": "assistant", "content": said.text})

    def _id(self) -> str:
        self.count += 1
        return f"{self.name.replace(' ', '')}x{self.count:04d}"

    def _row(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
        self.rows.append({"messages": [dict(one) for one in messages], "tools": tools})


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the file as a player has it."""
    messages = []
    for one in row["messages"]:
        made = {"role": one["role"], "content": one["content"]}
        if one["tool_calls"]:
            functions = [call["function"] for call in one["tool_calls"]]
            made["tool_calls"] = [{"name": f["name"], "arguments": json.loads(f["arguments"])} for f in functions]
        if one["weight"] is not None:
            made["weight"] = one["weight"]
        messages.append(made)
    tools = json.loads(row["tools"]) if row["tools"] else []
    return {"messages": messages, "tools": [tool["function"] for tool in tools]}
