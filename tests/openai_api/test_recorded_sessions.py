"""Whole sessions in the shape of Claude Code's and Codex's: masks by an independent computation, no id made again.

Each has twenty turns of its main agent with thinking and parallel calls, two sub-agents at once, a side request without
tools, a compaction by the client, and a client that leaves out earlier reasoning.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from agentrl.trajectory import Message
from tests.agent_loop.conftest import call
from tests.agent_loop.scripted_engine import ScriptedEngine
from tests.openai_api.conftest import Open, scripted
from tests.openai_api.programs import BROKEN, THOUGHT, MessagesProgram, ResponsesProgram

MARK = {"cache_control": {"type": "ephemeral"}}
REMINDER = "<system-reminder>\nNotes of the project: none.\n</system-reminder>"
TASK = "Make the tests pass."
SUMMARISE = "Your task is to write a summary of the conversation so far."
TOOLS: dict[str, dict[str, Any]] = {
    "shell": {"command": {"type": "array", "items": {"type": "string"}}, "timeout": {"type": "number"}},
    "read": {"path": {"type": "string"}, "limit": {"type": "integer"}},
    "edit": {"input": {"type": "string"}},
    "task": {"description": {"type": "string"}, "prompt": {"type": "string"}},
}


def schema(name: str) -> dict[str, Any]:
    required = [next(iter(TOOLS[name]))]
    return {"type": "object", "properties": TOOLS[name], "required": required, "additionalProperties": False}


class ClaudeCode(MessagesProgram):
    """Requests as Claude Code's: marks of the cache that move on, reminders, metadata, thinking, a stream."""

    def __init__(self, open: Open, system: str = "You are a CLI tool.", tools: tuple[str, ...] = tuple(TOOLS)) -> None:
        super().__init__(open, stream=True)
        self.system, self.tools = system, tools

    def body(self) -> dict[str, Any]:
        messages = copy.deepcopy(self.history)
        messages[-1]["content"][-1] |= MARK
        tools: list[dict[str, Any]] = [
            {"name": name, "description": f"Use {name}.", "input_schema": schema(name)} for name in self.tools
        ]
        if tools:
            tools[-1] |= MARK
        return {
            "model": "claude-x",
            "max_tokens": 4000,
            "temperature": 1,
            "system": [{"type": "text", "text": self.system, **MARK}],
            "tools": tools,
            "messages": messages,
            "metadata": {"user_id": "user_1_session_2"},
            "thinking": {"type": "enabled", "budget_tokens": 3000},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }

    def begin(self, text: str) -> None:
        blocks = [{"type": "text", "text": REMINDER}, {"type": "text", "text": text}]
        self.history = [{"role": "user", "content": blocks}]

    def without_reasoning(self) -> None:
        for turn in self.history:
            turn["content"] = [block for block in turn["content"] if block["type"] != "thinking"]

    def first(self, text: str) -> list[Message]:
        shown = f"{REMINDER}\n\n{text}"
        return [{"role": "system", "content": self.system}, {"role": "user", "content": shown}]

    async def count(self) -> int:
        body = {name: value for name, value in self.body().items() if name not in ("max_tokens", "temperature")}
        async with httpx.AsyncClient(timeout=600) as client:
            answer = await client.post(f"{self.url}/count_tokens", json=body)
            assert answer.status_code == 200, answer.text
            return int(answer.json()["input_tokens"])


class Codex(ResponsesProgram):
    """Requests as Codex': nothing stored, encrypted reasoning, a tool that takes text, a stream."""

    def __init__(self, open: Open, system: str = "You are Codex.", tools: tuple[str, ...] = tuple(TOOLS)) -> None:
        super().__init__(open, stream=True)
        self.system, self.tools = system, tools

    def body(self) -> dict[str, Any]:
        tools = [
            {"type": "custom", "name": name, "description": f"Use {name}.", "format": {"type": "text"}}
            if name == "edit"
            else {
                "type": "function",
                "name": name,
                "description": f"Use {name}.",
                "strict": False,
                "parameters": schema(name),
            }
            for name in self.tools
        ]
        return {
            **super().body(),
            "instructions": self.system,
            "tools": tools,
            "input": copy.deepcopy(self.history),
            "tool_choice": "auto",
            "prompt_cache_key": "session-1",
            "text": {"verbosity": "medium"},
            "client_metadata": {"originator": "codex"},
        }

    @staticmethod
    def put_together(events: Any) -> dict[str, Any]:
        (last,) = [event for event in events if event["type"] in ("response.completed", "response.incomplete")]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert last["response"]["output"] == done, "Codex keeps the items that are done"
        whole: dict[str, Any] = last["response"]
        return whole

    def keep(self) -> list[tuple[str, str, Any]]:
        calls = super().keep()
        return calls + [(i["call_id"], i["name"], i["input"]) for i in self.last["output"] if "input" in i]

    def give(self, results: Any) -> None:
        custom = {item["call_id"] for item in self.history if item.get("type") == "custom_tool_call"}
        for id, text in results:
            kind = "custom_tool_call_output" if id in custom else "function_call_output"
            self.history.append({"type": kind, "call_id": id, "output": text})

    def begin(self, text: str) -> None:
        self.history = []
        developer = {"type": "input_text", "text": REMINDER}
        self.history.append({"type": "message", "role": "developer", "content": [developer]})
        self.say(text)

    def without_reasoning(self) -> None:
        self.history = [item for item in self.history if item["type"] != "reasoning"]

    def first(self, text: str) -> list[Message]:
        said = [("system", self.system), ("developer", REMINDER), ("user", text)]
        return [{"role": role, "content": words} for role, words in said]


MAIN = [
    THOUGHT + "I look.\n" + call("read", path="a.py", limit=1.0),
    call("read", path="b.py") + "\n" + call("shell", command=["ls", "-la"], timeout=1e3),
    THOUGHT + call("task", description="x", prompt="Find x.") + "\n" + call("task", description="y", prompt="Find y."),
    BROKEN,
    call("edit", input="*** Begin Patch\n+é \U0001f600\n*** End Patch"),
    "Half of it is done.",
    THOUGHT + call("shell", command=["pytest"]),
    call("unknown", a=1),
    THOUGHT + "Once more.\n" + call("shell", command=["pytest", "-x"]) + "\n" + call("read", path="c.py"),
    "Now it passes.",
]
"""What the policy says in ten turns of the main agent; twice in a session."""
SUB = [THOUGHT + call("read", path="x.py"), "Found it."]


class CharacterByCharacter:
    """Tokenizer that writes text as no template would: ids that were sampled differ from ids of the same text."""

    def __init__(self, chat: Chat) -> None:
        self.encode_whole = chat.tokenizer.encode

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        pieces = [piece for part in re.split(r"(<[^<>]*>)", text) for piece in ([part] if part[:1] == "<" else part)]
        return [id for piece in pieces for id in self.encode_whole(piece, add_special_tokens=False)]


async def turns(agent: Any, number: int, sub_agent: Any = None) -> None:
    """Take turns of an agent; every call is answered, a task by a sub-agent."""
    for _ in range(number):
        calls = await agent.ask()
        tasks = [given for given in calls if given[1] == "task"]
        if tasks:
            await asyncio.gather(*[sub_agent() for _ in tasks])
        if calls:
            agent.give([(id, f"result of {name}") for id, name, _ in calls])
        else:
            agent.say("Go on.")


def independent(engine: ScriptedEngine) -> Iterator[tuple[list[int], list[int]]]:
    """(ids, mask) of each transcript from what the engine was asked and what it sampled, and from nothing else."""
    for session, prompts in engine.prompts.items():
        sampled, ids, mask = engine.said[session], list[int](), list[int]()
        for prompt, answer in zip(prompts, sampled, strict=True):
            assert prompt[: len(ids)] == ids, "a prompt continues the ids before it, those sampled as they were sampled"
            mask += [0] * (len(prompt) - len(ids)) + [1] * len(answer)
            ids = prompt + answer
        yield ids, mask


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("program", [ClaudeCode, Codex])
async def test_a_whole_session_is_recorded_exactly(chat: Chat, program: Any) -> None:
    main = itertools.cycle(MAIN)

    def says(session: str, turn: int) -> str:
        asked = chat.decode(engine.prompts[session][-1])
        if "Write a title." in asked:
            return "A title"
        if "You look things up." in asked:
            return SUB[turn]
        return THOUGHT + "We did half of it." if SUMMARISE in asked else next(main)

    limits = {"max_model_len": 1 << 16, "max_response_tokens": 1 << 15, "max_assistant_turns": 60}
    async with scripted(chat, says, **limits) as (service, engine), service.session() as open:
        engine.chat = SimpleNamespace(tokenizer=CharacterByCharacter(chat), stop_token_ids=chat.stop_token_ids)

        found = itertools.count()

        async def sub_agent() -> None:
            sub = program(open, "You look things up.", ("read", "shell"))
            sub.begin(f"Find {next(found)}.")
            await turns(sub, 2)

        side, agent = program(open, "Write a title.", ()), program(open)
        side.begin(TASK)
        await side.ask()
        agent.begin(TASK)
        counted = await agent.count() if isinstance(agent, ClaudeCode) else None
        await turns(agent, 10, sub_agent)
        agent.say(SUMMARISE)
        assert await agent.ask() == []
        agent.begin("A summary: we did half of it.")
        await turns(agent, 7, sub_agent)
        assert "openai_reasoning_left_out" not in open.trajectory.metrics
        agent.without_reasoning()
        await turns(agent, 3, sub_agent)

        transcripts = open.trajectory.transcripts
        assert [(one.ids, one.mask) for one in transcripts] == list(independent(engine))
        assert [len(said) for said in engine.said.values()] == [1, 11, 2, 2, 7, 2, 2, 3]
        prompts = list(engine.prompts.values())
        assert prompts[1][0] == chat.render(agent.first(TASK), open.session.episode.branches[1].tools)
        assert counted in (None, len(prompts[1][0]))
        assert open.trajectory.metrics["openai_reasoning_left_out"] == 1
        assert chat.decode(prompts[4][-1]).count("Two and three.") == 2, "what the policy thought stays"
        assert "Two and three." not in chat.decode(prompts[7][0]), "what the client left out is not shown"
        sampled = [id for said in engine.said.values() for turn in said for id in turn]
        assert len(chat.tokenizer.encode(chat.decode(sampled), add_special_tokens=False)) < 0.7 * len(sampled)
