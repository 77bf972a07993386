"""Runs of LangSmith, written as calls of an API.

Read are runs of LangChain's chat models, with messages as LangChain serializes them, and of the clients of OpenAI and
Anthropic that LangSmith wraps. All other runs (chains, tools, retrievers) are no calls of a model.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.data.messages import with_wrapped_tools
from agentrl.openai_api.messages import input_of
from agentrl.system.json_value import JSON, as_list, as_object
from data_prep.conversation_formats import BadConversation, chat_call
from data_prep.records import opened

MODEL = "llm"
"""Kind of runs that are calls of a model."""
ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "function"}
"""Roles by the kind of LangChain's messages."""
THOUGHTS = ("thinking", "reasoning")
"""Parts of an answer that are its reasoning; a member of the same name holds the text."""
NOT_SHOWN = {"tool_use", "tool_call", "invalid_tool_call", "input_json_delta", "redacted_thinking", *THOUGHTS}
"""Parts of an answer that are no text: calls stand in a list of their own."""


def run_kind(fields: Mapping[str, JSON]) -> str | None:
    """Return the kind of a run of LangSmith; None for any other record."""
    kind = fields.get("run_type")
    return kind if isinstance(kind, str) and ("inputs" in fields or "outputs" in fields) else None


def call_of(fields: Mapping[str, JSON]) -> dict[str, JSON]:
    """Write a run of a model as a call. Raises BadConversation.

    The run's own `session_id` is left out: it names a project, which holds the runs of all users.
    """
    extra = as_object(opened(fields.get("extra")))
    about = as_object(extra.get("metadata"))
    inputs, outputs = as_object(opened(fields.get("inputs"))), as_object(opened(fields.get("outputs")))
    made = {name: fields[name] for name in ("id", "trace_id", "start_time", "error") if fields.get(name)}
    made |= {"metadata": about, "model": about.get("ls_model_name")}
    if "generations" in outputs or isinstance(_first(inputs.get("messages")), list) or "prompts" in inputs:
        parameters = as_object(extra.get("invocation_params"))
        return made | _of_langchain(inputs, outputs, parameters)
    if about.get("ls_provider") == "anthropic":
        return made | _of_anthropic(inputs, outputs)
    answer = outputs["output"] if outputs.keys() == {"output"} else outputs.get("message") or outputs
    return made | {"request": inputs, "response": answer or None}


def _first(value: JSON) -> JSON:
    return next(iter(as_list(value)), None)


def _of_langchain(
    inputs: Mapping[str, JSON], outputs: Mapping[str, JSON], parameters: Mapping[str, JSON]
) -> dict[str, JSON]:
    if "messages" not in inputs:
        raise BadConversation("a prompt that is plain text", "a run of a model that is no chat model")
    prompts, generations = as_list(inputs["messages"]), as_list(outputs.get("generations"))
    if len(prompts) != 1 or len(generations) > 1:
        raise BadConversation("a run of several prompts", f"{len(prompts)} lists of messages")
    choices: list[JSON] = []
    for one in map(as_object, as_list(_first(generations))):
        said = as_object(one.get("message"))
        choices.append({"message": _message(said), "finish_reason": _end(one, _held(said)[1])})
    messages: list[JSON] = [_message(as_object(one)) for one in as_list(prompts[0])]
    tools = with_wrapped_tools([_tool(as_object(one)) for one in as_list(parameters.get("tools"))])
    return {
        "request": {"messages": messages, "tools": tools or None},
        "response": {"choices": choices} if choices else None,
    }


def _held(message: Mapping[str, JSON]) -> tuple[str, dict[str, JSON]]:
    """Return the kind of a message of LangChain, and its fields: of an object, of `messages_to_dict`, or flat."""
    kwargs, data, kind = as_object(message.get("kwargs")), as_object(message.get("data")), message.get("type")
    if kind == "constructor":
        kind = kwargs.get("type") or next(reversed(as_list(message.get("id"))), None)
    return str(kind).removesuffix("Chunk").removesuffix("Message").lower(), kwargs or data or dict(message)


def _message(message: Mapping[str, JSON]) -> dict[str, JSON]:
    """Write a message as Chat Completions have it. Raises BadConversation."""
    if "role" in message:
        return dict(message)
    kind, held = _held(message)
    role = held.get("role") if kind == "chat" else ROLES.get(kind)
    if not isinstance(role, str):
        raise BadConversation("a message of an unknown kind", f"expected one of {', '.join(ROLES)}, found {kind!r}")
    made: dict[str, JSON] = {"role": role, "content": held.get("content")}
    if role != "assistant":
        key = "name" if role == "user" else "tool_call_id"  # an answer's tool is named by its call
        return made | ({key: held[key]} if held.get(key) else {})
    further = as_object(held.get("additional_kwargs"))
    thought, parts = str(further.get("reasoning_content") or ""), as_list(held.get("content"))
    for part in map(as_object, parts):
        if (name := part.get("type")) in THOUGHTS:
            thought += str(part.get(str(name)) or "")
    if parts:
        made["content"] = [one for one in parts if as_object(one).get("type") not in NOT_SHOWN] or None
    if thought:
        made["reasoning_content"] = thought
    made["tool_calls"] = further.get("tool_calls") or [
        chat_call(call.get("id"), call.get("name"), call.get("args"))
        for name in ("tool_calls", "invalid_tool_calls")
        for call in map(as_object, as_list(held.get(name)))
    ]
    return made


def _end(generation: Mapping[str, JSON], message: Mapping[str, JSON]) -> JSON:
    told = as_object(generation.get("generation_info")) | as_object(message.get("response_metadata"))
    return told.get("finish_reason") or told.get("stop_reason")


def _tool(tool: Mapping[str, JSON]) -> dict[str, JSON]:
    """Write a tool of any provider as OpenAI's function."""
    if "input_schema" not in tool:
        return dict(tool)
    named = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    return {**named, "parameters": tool["input_schema"]}


def _of_anthropic(inputs: Mapping[str, JSON], outputs: Mapping[str, JSON]) -> dict[str, JSON]:
    """Undo what LangSmith's wrapper of the client does to a request of Messages and to its answer."""
    messages = [as_object(one) for one in as_list(inputs.get("messages"))]
    request = {**inputs, "messages": [one for one in messages if one.get("role") != "system"]}
    if system := [one["content"] for one in messages if one.get("role") == "system" and one.get("content")]:
        request["system"] = system[0]
    said, response = outputs.get("content"), dict(outputs)
    if outputs and not isinstance(said, list):
        blocks: list[JSON] = [{"type": "text", "text": said}] if said else []
        for call in (as_object(one) for one in as_list(outputs.get("tool_calls"))):
            function = as_object(call.get("function"))
            given = function.get("arguments")
            given = input_of(given) if isinstance(given, str) else given
            blocks.append({"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": given})
        response |= {"type": "message", "content": blocks, "tool_calls": None}
    return {"request": request, "response": response or None}
