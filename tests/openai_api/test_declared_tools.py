"""Tools that are no plain functions: each is a function for the policy, and its call goes back as it was declared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from agentrl.openai_api.errors import ApiError
from agentrl.openai_api.history import digests_of
from agentrl.openai_api.messages import Messages
from agentrl.openai_api.request import read_request
from agentrl.openai_api.wire import Reading
from agentrl.system.json_value import JSON
from tests.agent_loop.conftest import call
from tests.chat import templates
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.naming import assert_names, naming
from tests.openai_api.conftest import ADD, scripted
from tests.openai_api.programs import FUNCTION, MessagesProgram, ResponsesProgram
from tests.openai_api.test_record import recorded, said

PLAIN = {"type": "function", **FUNCTION}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [PLAIN, {**PLAIN, "name": "end"}],
}
PATCH = {"type": "custom", "name": "patch", "description": "Change files."}
GROUPED = {"type": "namespace", "name": "mcp__files__", "tools": [PATCH]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": {"type": "object"}}
LATER = {"type": "namespace", "name": "later", "tools": [{**PLAIN, "defer_loading": True}]}
SHELL_OUTPUT = [{"stdout": "5\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
EXEC = {"type": "exec", "env": {}, "command": ["ls"]}
DIFF = {"type": "update_file", "path": "a.py", "diff": "+x"}
RESPONSES: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a namespace's function": (
        AGENTS,
        "agents__add",
        {"a": 1},
        {"type": "function_call", "name": "add", "namespace": "agents", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "output": "5"},
    ),
    "a namespace's text": (
        GROUPED,
        "mcp__files__patch",
        {"input": "+x"},
        {"type": "custom_tool_call", "name": "patch", "namespace": "mcp__files__", "input": "+x"},
        {"type": "custom_tool_call_output", "output": "ok"},
    ),
    "a local shell": (
        {"type": "local_shell"},
        "local_shell",
        {"command": ["ls"]},
        {"type": "local_shell_call", "action": EXEC},
        {"type": "local_shell_call_output", "output": "a.py"},
    ),
    "a shell": (
        {"type": "shell", "environment": {"type": "local"}},
        "shell",
        {"commands": ["ls"], "timeout_ms": 100},
        {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": 100}},
        {"type": "shell_call_output", "output": SHELL_OUTPUT, "max_output_length": None},
    ),
    "a shell whose policy writes null": (
        {"type": "shell", "environment": {"type": "local"}},
        "shell",
        {"commands": ["ls"], "timeout_ms": None},
        {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": None}},
        {"type": "shell_call_output", "output": SHELL_OUTPUT},
    ),
    "a patch": (
        {"type": "apply_patch"},
        "apply_patch",
        DIFF,
        {"type": "apply_patch_call", "operation": DIFF},
        {"type": "apply_patch_call_output", "status": "completed", "output": "ok"},
    ),
    "a search": (
        SEARCH,
        "tool_search",
        {"query": "add"},
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "add"}},
        {"type": "tool_search_output", "execution": "client", "status": "completed", "tools": [LATER]},
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", RESPONSES)
async def test_a_call_goes_back_as_its_tool_was_declared(chat: Chat, name: str, stream: bool) -> None:
    """The client sends the item back with an answer, and the same transcript goes on; a broken call is a function's."""
    tool, function, arguments, item, output = RESPONSES[name]
    texts = [call(function, **arguments), call(function, strange=1) if "input" in arguments else "ok", "ok"]
    async with scripted(chat, texts) as (service, engine), service.session() as open:
        agent = ResponsesProgram(open, tools=[tool], stream=stream)
        agent.say("Hi")
        await agent.ask()
        (made,) = agent.last["output"]
        assert {key: made[key] for key in item} == item and made["call_id"] and made["id"]
        # Programs send back what their own types have: nulls come, and statuses stay.
        agent.history[-1] = {**made, "namespace": made.get("namespace")}
        agent.history.append({**output, "call_id": made["call_id"]})
        calls = await agent.ask()
        if calls:
            assert json.loads(calls[0][2]) == {"strange": 1}, "not what the tool takes: the program sees it as it is"
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)
        assert open.trajectory.metrics.keys().isdisjoint({"openai_bad_requests", "openai_opened_edited"})


@pytest.mark.parametrize(
    "arguments", ['{"commands": [NaN]}', '{"commands": [], "commands": ["ls"]}', r'{"commands": ["\ud800"]}']
)
async def test_arguments_that_are_no_json_go_back_as_text(chat: Chat, arguments: str) -> None:
    """An answer with NaN in it is no JSON for any client; of a member that is given twice, one would be lost.

    A value with half a surrogate pair is read by no client in Rust, and a body with it by no endpoint.
    """
    text = call("shell", commands=1).replace('{"commands": 1}', arguments)
    async with scripted(chat, [text]) as (service, _), service.session() as open, httpx.AsyncClient() as client:
        body = {"input": "Hi", "tools": [{"type": "shell"}]}
        answer = await client.post(f"{open.base_url}/responses", json=body)
        (made,) = json.loads(answer.text, parse_constant=pytest.fail)["output"]
        assert made["type"] == "function_call" and arguments in made["arguments"]


async def test_a_namespaces_functions_are_in_the_prompt(chat: Chat) -> None:
    async with scripted(chat, ["ok"]) as (service, engine), service.session() as open:
        agent = ResponsesProgram(open, tools=[AGENTS, PLAIN])
        agent.say("Hi")
        await agent.ask()
        ((prompt,),) = engine.prompts.values()
        tools = open.session.episode.branches[0].tools or ()
        assert [tool["function"]["name"] for tool in tools] == ["agents__add", "agents__end", "add"]
        assert tools[0]["function"]["description"] == f"Sub-agents.\n\n{FUNCTION['description']}"
        assert "agents__end(" in chat.decode(prompt)


async def test_tools_that_a_search_found_are_declared_behind_the_prompt(chat: Chat) -> None:
    texts = [call("tool_search", query="add"), call("later__add", a=1), "ok"]
    async with scripted(chat, texts) as (service, engine), service.session() as open:
        agent = ResponsesProgram(open, tools=[SEARCH, LATER])
        agent.say("Hi")
        await agent.ask()
        found = {"type": "tool_search_output", "execution": "client", "tools": [LATER]}
        agent.history.append({**found, "call_id": agent.last["output"][0]["call_id"]})
        ((id, name, _),) = await agent.ask()
        assert (name, agent.last["output"][0]["namespace"]) == ("add", "later")
        agent.give([(id, "5")])
        await agent.ask()
        (prompts,) = engine.prompts.values()
        shown = [chat.decode(prompt) for prompt in prompts]
        assert "later__add" not in shown[0]
        assert shown[1].startswith(shown[0]) and "<functions>\n<function>" in shown[1] and '"later__add"' in shown[1]
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)


async def test_tools_that_a_search_found_stay_under_a_previous_response(chat: Chat) -> None:
    """Their namespaces, too, though the client sends neither them nor their search again."""
    texts = [call("tool_search", query="add"), "ok", call("later__add", a=1)]
    async with scripted(chat, texts) as (service, _), service.session() as open, httpx.AsyncClient() as client:

        async def ask(input: Any, before: Any = None) -> Any:
            body = {"tools": [SEARCH], "input": input, "previous_response_id": before and before["id"]}
            answer = await client.post(f"{open.base_url}/responses", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        first = await ask("Hi")
        found = {"type": "tool_search_output", "execution": "client", "tools": [LATER]}
        second = await ask([{**found, "call_id": first["output"][0]["call_id"]}], first)
        (made,) = (await ask("Add.", second))["output"]
        assert (made["name"], made["namespace"], made["arguments"]) == ("add", "later", '{"a": 1}')


async def test_tools_that_are_found_together_are_declared_once_in_a_thread(chat: Chat) -> None:
    sub = {**ADD_LATER, "name": "sub", "description": "Take away."}
    texts = [call("ToolSearch", query="x"), call("ToolSearch", query="x"), "ok"]
    async with scripted(chat, texts) as (service, engine), service.session() as open, httpx.AsyncClient() as client:

        async def ask(thread: Any, content: Any, **more: Any) -> Any:
            body = {"max_tokens": 99, "thread": thread, "messages": [{"role": "user", "content": content}], **more}
            answer = await client.post(f"{open.base_url}/messages", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        said = await ask({"type": "create"}, "Hi", tools=[FIND, ADD_LATER, sub])
        found = [{"type": "tool_reference", "tool_name": name} for name in ("add", "sub")]
        for _ in texts[1:]:
            result = {"type": "tool_result", "tool_use_id": said["content"][0]["id"], "content": found}
            said = await ask({"type": "continue", "previous_message_id": said["id"]}, [result])
        ((*_, prompt),) = engine.prompts.values()
        shown = chat.decode(prompt)
        assert (shown.count("Add two."), shown.count("Take away.")) == (1, 1)


async def test_without_a_search_of_the_clients_deferred_tools_are_in_the_prompt(chat: Chat) -> None:
    server_side = {**SEARCH, "execution": "server"}
    async with scripted(chat, ["ok"]) as (service, _), service.session() as open:
        agent = ResponsesProgram(open, tools=[server_side, LATER])
        agent.say("Hi")
        await agent.ask()
        (tool,) = open.session.episode.branches[0].tools or ()
        assert tool["function"]["name"] == "later__add" and open.trajectory.metrics["openai_dropped_tool_search"] == 1


ADD_LATER = {"name": "add", "description": "Add two.", "input_schema": {"type": "object"}, "defer_loading": True}
FIND = {"name": "ToolSearch", "input_schema": {"type": "object"}}


async def test_a_tool_reference_declares_its_tool_once(chat: Chat) -> None:
    """Claude Code's search: the prompt stays as it is, and the transcript goes on."""
    texts = [call("ToolSearch", query="add"), call("add", a=1), call("ToolSearch", query="add"), "ok"]
    async with scripted(chat, texts) as (service, engine), service.session() as open:
        agent = MessagesProgram(open, tools=[FIND, ADD_LATER])
        agent.say("Hi")
        for _ in texts[:-1]:
            ((id, name, _),) = await agent.ask()
            found: Any = [{"type": "tool_reference", "tool_name": one} for one in ("add", "unknown")]
            content = found if name == "ToolSearch" else "5"
            agent.history.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": content}]}
            )
        await agent.ask()
        ((*_, prompt),) = engine.prompts.values()
        shown = chat.decode(prompt)
        assert shown.count("Add two.") == 1 and shown.index("Add two.") > shown.index("Hi")
        assert shown.count('<function>{"name": "unknown"}</function>') == 2
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)


async def test_an_answer_that_must_call_may_call_a_tool_that_was_found(chat: Chat) -> None:
    async with scripted(chat, [call("add", a=1)]) as (service, _), service.session() as open:
        agent = MessagesProgram(open, tools=[FIND, ADD_LATER], tool_choice={"type": "any"})
        agent.say("Hi")
        ((_, name, _),) = await agent.ask()
        assert name == "add"
        agent.more["tool_choice"] = {"type": "tool", "name": "add"}
        body = {**agent.body(), **agent.more, "messages": agent.history[:1]}
        asked = Messages().read(body, Reading("messages"), {})
        assert asked.promise is not None and asked.promise.functions == frozenset({"add"})


async def test_tools_of_mcp_servers_are_declared_with_long_names_and_schemas_that_are_true(chat: Chat) -> None:
    """Claude Code puts a server's name before a tool's; servers in Go and Rust write `true` for any value."""
    name, properties = "mcp__" + "x" * 123, {"a": True, "b": False, "c": {"type": "string"}}
    tool = {"name": name, "input_schema": {"type": "object", "properties": properties}}
    async with scripted(chat, [call(name, a=1), "ok"]) as (service, engine), service.session() as open:
        agent = MessagesProgram(open, tools=[tool])
        agent.say("Hi")
        ((id, called, given),) = await agent.ask()
        assert (called, given) == (name, {"a": 1})
        agent.give([(id, "5")])
        await agent.ask()
        (declared,) = open.session.episode.branches[0].tools or ()
        shown = declared["function"]["parameters"]["properties"]
        assert shown == {"a": {}, "b": {"not": {}}, "c": {"type": "string"}}
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)


def test_an_answer_may_name_the_longest_tool() -> None:
    name = "x" * 128
    made: JSON = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": name, "arguments": "{}"}}]}
    answered = {"role": "tool", "tool_call_id": "a", "name": name, "content": "5"}
    assert read_request({"messages": [made, answered]}, Reading("chat")).messages[1].name == name


def test_as_many_tools_as_programs_with_many_mcp_servers_have_are_taken() -> None:
    tools: Any = [{"name": f"mcp__server__{number}", "input_schema": {"type": "object"}} for number in range(2048)]
    body: Any = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    assert len(Messages().read(body, Reading("messages"), {}).declared_tools) == 2048
    found: Any = {"tools": [{"name": "one_more", "input_schema": {}, "defer_loading": True}, *tools]}
    with naming(ApiError, "at most 2,048", "found 2,049", "MCP servers"):
        Messages().read({**body, **found}, Reading("messages"), {})


def test_a_parameter_whose_schema_is_no_schema_is_named_by_its_place() -> None:
    tool: Any = {"name": "add", "input_schema": {"type": "object", "properties": {"a": True, "b": 5}}}
    with naming(ApiError, "tools[0].input_schema.properties.b: "):
        Messages().read({"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}, Reading("messages"), {})


async def test_claude_codes_bill_is_no_part_of_the_prompt(chat: Chat) -> None:
    """Some versions change it with each request, and each would open a transcript."""
    async with scripted(chat, ["Hi.", "ok"]) as (service, engine), service.session() as open:
        agent = MessagesProgram(open)
        for number in range(2):
            bill = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={number};"
            agent.more["system"] = [{"type": "text", "text": text} for text in (bill, "You are a program.")]
            agent.say("Hi")
            await agent.ask()
        ((*_, prompt),) = engine.prompts.values()
        assert "billing" not in chat.decode(prompt) and "You are a program." in chat.decode(prompt)
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)


def test_a_default_beyond_all_doubles_is_compared() -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"default": 10**400}}}},
    }
    call: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": 10**400})}}
    talks: list[list[Any]] = [[{"role": "assistant", "content": "", "tool_calls": [call]}]]
    talks.append([{**talks[0][0], "tool_calls": [{**call, "function": {"name": "f", "arguments": "{}"}}]}])
    first, second = (digests_of(talk, [tool]) for talk in talks)
    assert first == second


async def test_a_search_at_the_provider_declares_all_tools(chat: Chat) -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    async with scripted(chat, ["ok"]) as (service, _), service.session() as open:
        agent = MessagesProgram(open, tools=[search, ADD_LATER])
        agent.say("Hi")
        await agent.ask()
        (tool,) = open.session.episode.branches[0].tools or ()
        assert tool["function"]["name"] == "add"


async def test_tools_that_a_client_runs_have_the_schema_of_the_documents(chat: Chat) -> None:
    tools = [{"type": "bash_20250124", "name": "bash"}, {"type": "text_editor_20250728", "name": "editor"}]
    async with scripted(chat, [call("bash", command="ls"), "ok"]) as (service, engine), service.session() as open:
        agent = MessagesProgram(open, tools=[*tools, {"type": "computer_20250124", "name": "computer"}])
        agent.say("Hi")
        ((id, name, given),) = await agent.ask()
        assert (name, given) == ("bash", {"command": "ls"})
        agent.give([(id, "a.py")])
        await agent.ask()
        declared = open.session.episode.branches[0].tools or ()
        assert [tool["function"]["name"] for tool in declared] == ["bash", "editor"]
        assert "restart" in str(declared[0]) and "old_str" in str(declared[1])
        assert open.trajectory.metrics["openai_dropped_computer"] == 2 and recorded(open.trajectory) == said(engine)


EDIT = {
    "name": "edit",
    "input_schema": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "all": {"type": "boolean", "default": False}},
    },
}


@pytest.mark.parametrize(("written", "transcripts"), [(False, 1), (True, 2), (0, 2)])
async def test_a_default_that_a_program_writes_into_a_call_is_no_edit(
    chat: Chat, written: object, transcripts: int
) -> None:
    """Claude Code does so. Another value than the declared one is an edit."""
    async with scripted(chat, [call("edit", text="x"), "ok"]) as (service, engine), service.session() as open:
        agent = MessagesProgram(open, tools=[EDIT])
        agent.say("Hi")
        ((id, _, _),) = await agent.ask()
        agent.history[-1]["content"][-1]["input"]["all"] = written
        agent.give([(id, "done")])
        await agent.ask()
        assert len(open.trajectory.transcripts) == transcripts
        assert transcripts == 2 or recorded(open.trajectory) == said(engine)


CODED = "<tool_call>\n<function=later>\n<parameter=name>\n42\n</parameter>\n</function>\n</tool_call>"
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_arguments_of_a_tool_that_was_found_are_read_by_its_schema(tmp_path: Path, api: str) -> None:
    """Qwen3-Coder writes arguments without quotes: without a schema, 42 is a number."""
    chat = Chat.from_pretrained(save_tokenizer(tmp_path, QWEN, "<|im_end|>", templates.CODER))
    async with scripted(chat, [CODED]) as (service, _), service.session() as open:
        agent: Any
        if api == "messages":
            tool = {"name": "later", "input_schema": NAMED, "defer_loading": True}
            agent = MessagesProgram(open, tools=[FIND, tool])
        else:
            deferred = {"type": "function", "name": "later", "parameters": NAMED, "defer_loading": True}
            agent = ResponsesProgram(open, tools=[SEARCH])
            agent.history = [
                {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "x"}},
                {"type": "tool_search_output", "call_id": "c", "tools": [deferred]},
            ]
        agent.say("Hi")
        ((_, _, arguments),) = await agent.ask()
        assert (arguments if api == "messages" else json.loads(arguments)) == {"name": "42"}


async def test_tools_that_join_and_leave_in_a_system_turn_change_no_prompt(chat: Chat) -> None:
    """Claude Code's changes of tools in the middle of a conversation; kinds that are left out are not told."""
    joins: list[Any] = [
        {
            "type": "tool_addition",
            "tool": {"type": "tool_definition", "definition": {**ADD_LATER, "defer_loading": None}},
        },
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "ToolSearch"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"type": "computer_20250124"}}},
    ]
    later = {"name": "later", "description": "Later.", "input_schema": {"type": "object"}, "defer_loading": True}
    async with scripted(chat, ["ok", call("add", a=1)]) as (service, engine), service.session() as open:
        agent = MessagesProgram(open, tools=[FIND, later])
        agent.say("Hi")
        await agent.ask()
        agent.say("Go on.")
        agent.history.append({"role": "system", "content": [*joins, {"type": "text", "text": "Note."}]})
        ((_, name, _),) = await agent.ask()
        ((first, second),) = engine.prompts.values()
        told = chat.decode(second).removeprefix(chat.decode(first))
        assert name == "add" and "Add two." in told and "Later." in told and "Note." in told
        assert "<removed_functions>\nToolSearch\n</removed_functions>" in told and "computer" not in told
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)
        wrong = {"type": "tool_addition", "tool": {"type": "tool_reference"}}
        for role, block in (("system", wrong), ("user", joins[1])):
            agent.history[-1] = {"role": role, "content": [block]}
            answer = await agent.post({**agent.body(), "tools": [FIND]})
            assert answer.status_code == 400, answer.text


TOOLLESS = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TOOLLESS += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize("is_toolless", [True, False])
async def test_tools_that_the_template_does_not_show_are_counted_and_told_once(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_toolless: bool
) -> None:
    template = tmp_path / "toolless.jinja"
    template.write_text(TOOLLESS)
    chat = Chat.from_pretrained(str(tiny_dir), chat_template=str(template) if is_toolless else None)
    async with scripted(chat, ["one", "two", "three"]) as (service, _), service.session() as open:
        for tools in ({}, {"tools": [ADD]}, {"tools": [ADD, {**ADD, "function": {**FUNCTION, "name": "other"}}]}):
            await open.say([{"role": "user", "content": "Go."}], **tools)
    assert open.trajectory.metrics.get("openai_unseen_tools", 0) == (2 if is_toolless else 0)
    assert caplog.text.count("trajectory/openai_unseen_tools") == is_toolless
    if is_toolless:
        assert_names(caplog.text, "model.chat_template")
