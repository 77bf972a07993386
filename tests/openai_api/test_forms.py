"""Sixty forms of a request for each API: answered, streamed as whole, or refused in the API's own words."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from tests.agent_loop.conftest import call
from tests.openai_api.conftest import ADD, scripted
from tests.openai_api.programs import FUNCTION, TURNS, USER, MessagesProgram, ResponsesProgram, events_of
from tests.openai_api.test_dialects import CALLED, ITEM, OUTPUT, RESULT, USED
from tests.openai_api.test_request import ANSWERED, CLIENTS, SAID, WRONG, without
from tests.openai_api.test_request import CALLED as CHAT_CALLED

SAYS = [*TURNS[:5], "ok"]
"""What the policy says to one form after another."""
CALL = call("add", a=2, b=3)
Form = tuple[dict[str, Any], str | None]
"""A body, and what the policy says to it; None: anything."""
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
SUM = '{"sum": 5}'
NO_SCHEMA = {"type": "numbre"}
ADDRESS = "https://example.org/cat.png"
BROKEN_IMAGE = "data:image/png;base64,aGk="
TOO_LONG = "word " * 5000


def anything(*bodies: dict[str, Any]) -> list[Form]:
    return [(body, None) for body in bodies]


THOUGHTFUL = {"role": "assistant", "content": "ok", "reasoning_content": "So."}
ADD_TWICE: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        for id, arguments in (("call_1", '{"a": 2}'), ("call_2", "broken"))
    ],
}


def allowed(mode: str) -> dict[str, Any]:
    names = [{"type": "function", "function": {"name": "add"}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}


CHAT_FORMS: list[Form] = [
    *((body, SAID.get(name, CALL)) for name, body in CLIENTS.items()),
    *anything(
        {},
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
        {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"x": 1}}]}]},
        {"messages": [{**USER, "name": "me"}]},
        {"messages": [USER, {"role": "assistant", "content": "ok"}, USER]},
        {"messages": [USER, {"role": "assistant", "content": None, "refusal": "no"}, USER]},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER]},
        {"messages": [USER, THOUGHTFUL, USER]},
        {"messages": [USER, CHAT_CALLED, ANSWERED], "tools": [ADD]},
        {"messages": [USER, CHAT_CALLED, {**ANSWERED, "content": [{"type": "text", "text": "5"}]}], "tools": [ADD]},
        {"messages": [USER, ADD_TWICE, {**ANSWERED, "tool_call_id": "call_2"}, ANSWERED], "tools": [ADD]},
        {"messages": [USER, CHAT_CALLED, ANSWERED, USER]},
        {"tools": [ADD], "tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": None, "strict": True}}]},
        {"tools": [], "stop": [], "stop_sequences": None, "n": None},
        {"max_tokens": 7},
        {"max_completion_tokens": 7, "max_tokens": 9},
        {"stop": "five"},
        {"stop": ["I add", "word"]},
        {"stream_options": {"include_usage": True}},
        {"logprobs": True},
        {"return_token_ids": True},
        {"temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0, "seed": 7},
        {"reasoning_effort": "low", "verbosity": "high"},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prediction": {"a": 1}},
        {"presence_penalty": 0, "logit_bias": {}, "best_of": 1, "echo": False, "documents": None},
        {"response_format": {"type": "text"}},
        {"tools": [{"type": "retrieval"}, ADD], "unknown": 1, "messages": [{**USER, "unknown": 1}]},
    ),
    ({"tools": [ADD], "tool_choice": "required"}, CALL),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, CALL),
    ({"tools": [ADD], "parallel_tool_calls": False}, CALL),
    ({"tools": [ADD], "tool_choice": allowed("required")}, CALL),
    ({"tools": [ADD], "tool_choice": allowed("auto")}, "ok"),
    ({"response_format": {"type": "json_object"}}, SUM),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, SUM),
]
CHAT_REFUSED: list[tuple[dict[str, Any], str]] = [
    *((body, param) for body, param, _ in WRONG),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ADDRESS}}]}]},
        "an image is",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{**USER, "content": TOO_LONG}]}, "tokens"),
    ({"messages": None, "input": "Hi"}, "POST v1/responses"),
    ({"system": "Hi", "max_tokens": 5}, "POST v1/messages"),
    ({"messages": [USER, without(CHAT_CALLED, "content"), USER, ANSWERED]}, "messages[3].tool_call_id"),
]

BLOCK = {"type": "text", "text": "a"}
THINKING = {"type": "thinking", "thinking": "So.", "signature": "s"}
TOOL = {"name": "add", "description": "Add.", "input_schema": FUNCTION["parameters"]}
SECOND = {"type": "tool_use", "id": "t2", "name": "add", "input": {}}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


MESSAGES_FORMS: list[Form] = [
    *anything(
        {},
        {"system": "Be brief."},
        {"system": [{**BLOCK, "cache_control": {"type": "ephemeral"}}, BLOCK]},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        {"metadata": {"user_id": "me"}, "service_tier": "auto", "speed": "fast", "inference_geo": "eu"},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"cache_control": {"type": "ephemeral"}},
        {"tools": [], "stop_sequences": [], "mcp_servers": [], "container": None},
        {"messages": [USER, USED, user(RESULT, BLOCK)]},
        {"messages": [USER, USED, user(RESULT), USER]},
        {"messages": [USER, USED, user({**RESULT, "content": [], "is_error": True})]},
        {"messages": [USER, USED, user({**RESULT, "content": "no", "is_error": True})]},
        {"messages": [USER, USED, user({**RESULT, "content": [BLOCK, BLOCK]})]},
        {"messages": [USER, USED, user({**RESULT, "cache_control": {"type": "ephemeral"}})]},
        {"messages": [USER, said(*USED["content"], SECOND), user({**RESULT, "tool_use_id": "t2"}, RESULT)]},
        {"messages": [USER, said(THINKING, BLOCK, {**SECOND, "caller": {"type": "direct"}}), user()]},
        {"messages": [USER, said(THINKING, BLOCK), USER]},
        {"messages": [USER, said({"type": "redacted_thinking", "data": "x"}, BLOCK), USER]},
        {"messages": [USER, said({"type": "server_tool_use", "id": "s"}, BLOCK), USER]},
        {"messages": [USER, {"role": "system", "content": "x"}, said(BLOCK), {"role": "system", "content": [BLOCK]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "mcp_servers": [{"url": "http://x"}]},
        {"tools": [TOOL, {**TOOL, "name": "later", "defer_loading": True, "unknown": 1}], "unknown": {"a": 1}},
        {"tools": [{"type": "bash_20250124", "name": "bash"}, {"type": "text_editor_20250728", "name": "edit"}]},
        {"messages": [USER, said(THINKING, {**BLOCK, "citations": None}), USER]},
        {"messages": [USER, {"role": "assistant", "content": "Hm"}, USER]},
        {"messages": [USER, {"role": "assistant", "content": []}, USER]},
        {"messages": [user(BLOCK, {**BLOCK, "cache_control": {"type": "ephemeral"}})]},
        {"messages": [USER, USER]},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"tools": [{**TOOL, "type": "custom", "strict": True, "cache_control": {}, "eager_input_streaming": True}]},
        {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}},
        {"stop_sequences": ["five", "I add"]},
        {"max_tokens": 7},
        {"model": "claude-x", "max_tokens": None},
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, CALL),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}}, CALL),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, CALL),
    ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, SUM),
    ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, SUM),
]
MESSAGES_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages: "),
    ({"messages": []}, "messages: "),
    ({"messages": "Hi"}, "messages: "),
    ({"messages": [user({"type": "image", "source": {"type": "url", "url": ADDRESS}})]}, "an image is"),
    ({"messages": [user({"type": "image", "source": {"type": "base64", "data": "aGk="}})]}, "no image that can be"),
    ({"messages": [user({"type": "document", "source": {}})]}, "messages[0].content[0]: "),
    ({"messages": [user({"type": "search_result", "content": []})]}, "messages[0].content[0]: "),
    ({"messages": [USER, said({**SECOND, "id": ""})]}, "messages[1].content[0].id: "),
    ({"messages": [USER, said({**SECOND, "input": "x"})]}, "messages[1].content[0].input: "),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text: "),
    ({"messages": [user({"type": "text", "text": 3})]}, "messages[0].content[0].text: "),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: "),
    ({"messages": [user(RESULT)]}, "messages[0].content[0]: the assistant message before"),
    ({"messages": [USER, USED, user(RESULT, RESULT)]}, "messages[2].content[1]: "),
    ({"messages": [user(*USED["content"])]}, "messages[0].content[0]: a user message has no"),
    ({"messages": [user(THINKING)]}, "messages[0].content[0]: a user message has no"),
    ({"messages": [USER, said(RESULT)]}, "messages[1].content[0]: a assistant message"),
    ({"messages": [{**USER, "content": TOO_LONG}]}, "prompt is too long: "),
    ({"system": 3}, "system: "),
    ({"system": [{"type": "image"}]}, "system[0].type: "),
    ({"max_tokens": 0}, "max_tokens: "),
    ({"max_tokens": "9"}, "max_tokens: "),
    ({"max_tokens": True}, "max_tokens: "),
    ({"temperature": -1}, "temperature: "),
    ({"top_p": 2}, "top_p: "),
    ({"top_k": -1}, "top_k: "),
    ({"stream": 1}, "stream: "),
    ({"stop_sequences": "END"}, "stop_sequences: "),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences: "),
    ({"tools": [{"name": "add"}]}, "tools[0].input_schema: "),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: "),
    ({"tools": [TOOL] * 2}, "tools[1].name: 'add' is declared twice"),
    ({"tools": [{**TOOL, "defer_loading": True}, TOOL]}, "tools[1].name: 'add' is declared twice"),
    ({"tools": [{**TOOL, "name": f"f{number}"} for number in range(2049)]}, "tools: "),
    ({"tool_choice": "auto"}, "tool_choice: "),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type: "),
    ({"tool_choice": {"type": "any"}}, "tool_choice='required' needs tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name: "),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: "),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type: "),
    ({"output_config": {"format": {"type": "json_schema", "schema": NO_SCHEMA}}}, "output_config.format.schema: "),
    ({"output_format": {"type": "json_schema", "schema": NO_SCHEMA}}, "output_format.schema: "),
    ({"n": 2}, "n=2 is not supported"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: "),
    ({"messages": [{"role": "system", "content": [RESULT]}]}, "messages[0].content[0]: a system message has no"),
    ({"messages": None, "input": "Hi", "max_tokens": None}, "messages: "),
]

ASSISTANT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
REASONING = {"type": "reasoning", "id": "r", "summary": []}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
DECLARED = {"type": "function", **FUNCTION}
GROUP = {"type": "namespace", "name": "math", "tools": [DECLARED]}
FUNCTIONS = [{**DECLARED, "name": f"f{number}"} for number in range(1025)]


def text_format(**format: Any) -> dict[str, Any]:
    return {"text": {"format": format}}


RESPONSES_FORMS: list[Form] = [
    *anything(
        {},
        {"input": [USER]},
        {"input": [ITEM], "instructions": "Be brief."},
        {"input": [{"role": "developer", "content": "x"}, ITEM]},
        {"input": [{"role": "system", "content": [{"type": "input_text", "text": "x"}]}, ITEM]},
        {"input": [ITEM, ITEM]},
        {"input": [ITEM, ASSISTANT, ITEM]},
        {"input": [ITEM, {**ASSISTANT, "id": "msg_1", "status": "completed", "phase": "final"}, ITEM]},
        {"input": [ITEM, {"role": "assistant", "content": "ok"}, ITEM]},
        {"input": [ITEM, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, ITEM]},
        {"input": [ITEM, CALLED, OUTPUT]},
        {"input": [ITEM, ASSISTANT, CALLED, OUTPUT, ITEM]},
        {"input": [ITEM, CALLED, {**CALLED, "call_id": "c2"}, OUTPUT, {**OUTPUT, "call_id": "c2"}]},
        {"input": [ITEM, CALLED, {**OUTPUT, "output": [{"type": "input_text", "text": "5"}]}]},
        {"input": [ITEM, {**CALLED, "namespace": "n", "arguments": "broken"}, {**OUTPUT, "status": "completed"}]},
        {"input": [ITEM, {**REASONING, "encrypted_content": "aGk="}, CALLED, OUTPUT]},
        {"input": [ITEM, {**REASONING, "content": [{"type": "reasoning_text", "text": "So."}]}, ASSISTANT, ITEM]},
        {"input": [ITEM, {**REASONING, "summary": [{"type": "summary_text", "text": "So."}]}, ASSISTANT, ITEM]},
        {"input": [ITEM, {"type": "web_search_call", "id": "x"}, ASSISTANT, {**ITEM, "name": "me"}], "unknown": 1},
        {"tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}], "max_tool_calls": 3},
        {"tools": [{"type": "namespace", "name": "n", "description": "N.", "tools": [DECLARED, PATCH]}]},
        {"tools": [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}, {"type": "tool_search"}]},
        {"tools": [{"type": "tool_search"}, {**DECLARED, "name": "tool_search"}, {"type": "tool_search"}]},
        {"include": ["file_search_call.results"]},
        {"temperature": 1, "top_p": 0.5, "reasoning": {"effort": "high", "summary": "auto"}},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"truncation": "auto", "background": False, "top_logprobs": 0, "max_tool_calls": None},
        {"metadata": {"a": "b"}, "user": "me", "prompt_cache_key": "k", "service_tier": "auto"},
        {"client_metadata": {"x": "y"}, "safety_identifier": "s", "stream_options": {"include_obfuscation": False}},
        {"tools": [DECLARED], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [DECLARED], "tool_choice": "none"},
        {"tools": [{"type": "function", "name": "f", "parameters": None, "strict": True}]},
        {"tools": [PATCH, DECLARED]},
        {"include": ["reasoning.encrypted_content"], "store": False},
        {"include": [], "store": True},
        {"max_output_tokens": 7},
    ),
    ({"tools": [DECLARED], "tool_choice": "required"}, CALL),
    ({"tools": [DECLARED], "tool_choice": {"type": "function", "name": "add"}}, CALL),
    ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "patch"}}, call("patch", input="x")),
    ({"tools": [DECLARED], "parallel_tool_calls": False}, CALL),
    (text_format(type="json_object"), SUM),
    (text_format(type="json_schema", name="sum", schema=SCHEMA, strict=True, description="A sum."), SUM),
]
RESPONSES_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input: "),
    ({"input": []}, "input: expected at least one item"),
    ({"input": ""}, "input: expected at least one item"),
    ({"input": 3}, "input: "),
    ({"input": [3]}, "input[0]: "),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": ADDRESS}]}]}, "an image is"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": BROKEN_IMAGE}]}]}, "no image that"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]."),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0].type: "),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role: "),
    ({"input": [{"role": "user"}]}, "input[0].content: "),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content: "),
    ({"input": [OUTPUT]}, "input[0]: the assistant message before made no call 'c1'"),
    ({"input": [ITEM, CALLED, OUTPUT, OUTPUT]}, "input[3]: the call 'c1' is answered already"),
    ({"input": [ITEM, CALLED, CALLED, OUTPUT]}, "input[2]: two calls have the id 'c1'"),
    ({"input": [ITEM, {**CALLED, "call_id": ""}]}, "input[1].call_id: "),
    ({"input": [ITEM, {**CALLED, "arguments": {}}]}, "input[1].arguments: "),
    ({"input": [ITEM, {**OUTPUT, "output": 5}]}, "input[1].output: "),
    ({"input": [{"type": "reasoning", "encrypted_content": "?"}, ITEM]}, "input[0].encrypted_content: "),
    ({"input": [{**REASONING, "content": "x"}, ITEM]}, "input[0].content: "),
    ({"input": TOO_LONG}, "The prompt has "),
    ({"instructions": ["x"]}, "instructions: "),
    ({"previous_response_id": "resp_x"}, "previous_response_id: this session has kept no answer"),
    ({"max_output_tokens": 0}, "max_output_tokens: "),
    ({"max_output_tokens": 2.5}, "max_output_tokens: "),
    ({"temperature": "hot"}, "temperature: "),
    ({"top_p": -1}, "top_p: "),
    ({"store": "no"}, "store: "),
    ({"tools": {}}, "tools: "),
    ({"tools": [DECLARED] * 2}, "tools[1].name: 'add' is declared twice"),
    ({"tools": [{**DECLARED, "defer_loading": True}] * 2}, "tools[1].name: 'add' is declared twice"),
    ({"tools": [{"type": "web_search"}, GROUP, GROUP]}, "tools[2].tools[0].name: 'math__add' is declared twice"),
    (
        {"tools": [{"type": "shell"}, {"type": "web_search"}, {"type": "shell"}]},
        "tools[2].type: 'shell' is declared twice",
    ),
    ({"tools": [{**DECLARED, "name": "a b"}]}, "tools[0].name: "),
    ({"tool_choice": "required"}, "tool_choice='required' needs tools"),
    ({"tool_choice": "any"}, "tool_choice: "),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice names 'x'"),
    (text_format(type="grammar"), "text.format.type: "),
    (text_format(type="json_schema", name="a"), "text.format: schema is needed"),
    (text_format(type="json_schema", name="a", schema=NO_SCHEMA), "text.format.schema: "),
    (text_format(type="json_schema", name="a", schema={"$ref": "http://x/y"}), "text.format.schema: "),
    ({"background": True}, "background=True is not supported"),
    ({"conversation": "c"}, "conversation='c' is not supported"),
    ({"prompt": {"id": "p"}}, "prompt="),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id: "),
    ({"input": [ITEM, {"type": "shell_call", "action": {}}]}, "input[1].call_id: "),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]: "),
    ({"input": [{"role": "user", "content": [{"type": "refusal", "text": "x"}]}]}, "input[0].content[0]: "),
    ({"input": [ITEM, {"type": "reasoning", "encrypted_content": "?"}, ITEM]}, "input[1].encrypted_content: "),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [DECLARED, DECLARED]}]}, "tools[1].name: 'n__add'"),
    ({"tools": [{"type": "namespace", "name": f"n{k}", "tools": FUNCTIONS} for k in range(2)]}, "at most 2,048, found"),
    ({"tools": [DECLARED], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ({"input": None, "messages": [USER]}, "POST v1/chat/completions and POST v1/messages know"),
]


@dataclass(frozen=True)
class Api:
    """An API and its forms; `least` is part of each body that does not say otherwise."""

    path: str
    least: dict[str, Any]
    forms: list[Form]
    refused: list[tuple[dict[str, Any], str]]

    def body(self, changes: dict[str, Any]) -> dict[str, Any]:
        """`changes` on the least body; a None there leaves a member out."""
        whole = {**self.least, **changes}
        return {name: value for name, value in whole.items() if value is not None or name not in self.least}

    def whole(self, answer: httpx.Response) -> dict[str, Any]:
        """Join the events of a stream."""
        if self.path == "messages":
            return MessagesProgram.put_together(events_of(answer.content))
        if self.path == "responses":
            return ResponsesProgram.put_together(events_of(answer.content))
        return joined(answer)


CHAT = Api("chat/completions", {"messages": [USER]}, CHAT_FORMS, CHAT_REFUSED)
MESSAGES = Api("messages", {"messages": [USER], "max_tokens": 99}, MESSAGES_FORMS, MESSAGES_REFUSED)
RESPONSES = Api("responses", {"input": "Hi"}, RESPONSES_FORMS, RESPONSES_REFUSED)
APIS = [CHAT, MESSAGES, RESPONSES]
PARTS = 5


def joined(answer: httpx.Response) -> dict[str, Any]:
    """Join the chunks of Chat Completions to what a whole answer is."""
    lines = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    whole, message = chunks[0], dict[str, Any]()
    choice = {**whole["choices"][0], "message": message}
    for delta in (one["choices"][0] for one in chunks if one["choices"]):
        choice["finish_reason"] = delta["finish_reason"]
        for name, value in delta["delta"].items():
            if name != "tool_calls":
                message[name] = value if value is None or name == "role" else message.get(name, "") + value
                continue
            (made,) = value
            calls = message.setdefault("tool_calls", [])
            if made["index"] == len(calls):
                calls.append({name: value for name, value in made.items() if name != "index"})
            else:
                calls[made["index"]]["function"]["arguments"] += made["function"]["arguments"]
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    del choice["delta"]
    usage = {"usage": chunks[-1]["usage"]} if not chunks[-1]["choices"] else {}
    return {**whole, "object": "chat.completion", "choices": [choice], **usage}


def comparable(answer: dict[str, Any]) -> Any:
    """An answer without what is new in each."""
    name = answer["id"].replace("-", "_").partition("_")[2]
    parts = {key: value for key, value in answer.items() if key not in ("id", "created", "created_at")}
    return json.loads(json.dumps(parts).replace(name, "ID"))


def test_there_are_sixty_forms_of_each() -> None:
    assert min(len(api.forms) + len(api.refused) for api in APIS) >= 60
    for api in APIS:
        bodies = [json.dumps(api.body(changes), sort_keys=True) for changes, _ in [*api.forms, *api.refused]]
        assert len(set(bodies)) == len(bodies)


@pytest.mark.slice(3, "matrix")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
async def test_a_form_is_answered_streamed_as_whole_or_refused_in_the_apis_words(
    chat: Chat, api: Api, part: int
) -> None:
    says = ""
    async with (
        scripted(chat, lambda session, turn: says) as (service, engine),
        httpx.AsyncClient(timeout=60) as client,
    ):
        for number, (changes, text) in itertools.islice(enumerate(api.forms), part, None, PARTS):
            says = SAYS[number % len(SAYS)] if text is None else text
            answers: list[Any] = []
            for stream in (False, True):
                async with service.session() as open:
                    body = {**api.body(changes), "stream": stream}
                    answer = await client.post(f"{open.base_url}/{api.path}", json=body)
                    assert answer.status_code == 200, (changes, answer.text)
                    whole = answer.json() if not stream else api.whole(answer)
                    if api is CHAT and "usage" not in whole:
                        answers[0].pop("usage")
                    answers.append(comparable(whole))
                    assert len(open.trajectory.transcripts) == 1
                    assert "openai_bad_requests" not in open.trajectory.metrics
            assert answers[0] == answers[1], changes
        asked = sum(map(len, engine.prompts.values()))
        async with service.session() as open:
            refused = list(itertools.islice(api.refused, part, None, PARTS))
            for changes, words in refused:
                answer = await client.post(f"{open.base_url}/{api.path}", json=api.body(changes))
                assert answer.status_code == 400, (changes, answer.text)
                error = answer.json()["error"]
                assert words in error["message"] and len(error["message"]) < 700, (changes, error)
                assert error["type"] == "invalid_request_error"
                names = {"type", "message"} if api is MESSAGES else {"type", "message", "param", "code"}
                assert error.keys() == names and (answer.json().get("type") == "error") == (api is MESSAGES)
            assert not open.trajectory.transcripts and asked == sum(map(len, engine.prompts.values()))
            counted = [open.trajectory.metrics.get(f"openai_{name}", 0) for name in ("bad_requests", "refused")]
            assert sum(counted) == len(refused) and open.session.fault is None
