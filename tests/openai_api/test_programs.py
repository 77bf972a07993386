"""Whole sessions of published coding programs, by the requests that they sent (`recorded_programs`).

No request is refused, each prompt is what a server renders from the same request, and a conversation is one transcript.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from agentrl.openai_api.endpoint import DIALECTS
from agentrl.openai_api.selection import main_of
from agentrl.openai_api.system_turns import placed_turns
from agentrl.openai_api.wire import Reading
from agentrl.trajectory import Message
from tests.openai_api.conftest import scripted
from tests.openai_api.recorded_programs import ROOM, SAYS, requests_of
from tests.openai_api.test_record import recorded, said

DROPPED = {
    "claude_code": {"context_management", "effort", "thinking"},
    "codex": {"reasoning", "web_search"},
    "codex_compacts": {"reasoning", "web_search"},
    "mini_swe_agent": set[str](),
    "opencode": set[str](),
    "pi": {"reasoning"},
}
TRANSCRIPTS = {"claude_code": 2, "codex": 2, "codex_compacts": 3, "mini_swe_agent": 1, "opencode": 2, "pi": 1}
"""The main agent's, and a sub-agent's, a summary's or a title's."""
MAIN = {"codex_compacts": {0, 1, 2}, "opencode": {1}}
"""The main agent's transcripts, where it is not the first one alone. Codex's sub-agent makes the last request, and
nobody takes its answer any more."""
FILLED_IN = {"replace_all": False}
"""Arguments that a program wrote into its calls, and the policy did not."""


def rendered(chat: Chat, request: dict[str, Any]) -> list[int]:
    """The prompt that a server renders from a request alone, by the model's own chat template."""
    reading = Reading(DIALECTS[request["path"]].api)
    asked = DIALECTS[request["path"]].read(request["body"], reading, {})
    messages, _ = placed_turns([message.to_message() for message in asked.messages], chat)
    # The model's template has no branch for developers.
    roles = {"developer": "system"}
    conversation = [{**own(message), "role": roles.get(message["role"], message["role"])} for message in messages]
    tools: Any = asked.declared_tools or None
    text = chat.tokenizer.apply_chat_template(conversation, tools=tools, add_generation_prompt=True, tokenize=False)
    return list(chat.tokenizer.encode(text, add_special_tokens=False))


def own(message: Message) -> Message:
    """A message with the policy's own arguments."""
    for call in message.get("tool_calls", ()):
        arguments = json.loads(str(call["function"]["arguments"]))
        call["function"]["arguments"] = {
            k: v for k, v in arguments.items() if FILLED_IN.get(k, v) != v or k not in FILLED_IN
        }
    return message


@pytest.mark.parametrize("name", SAYS)
async def test_no_request_is_refused_and_each_prompt_is_a_servers(chat: Chat, name: str) -> None:
    says = [text.replace("{work}", "/work") for text in SAYS[name]]
    requests = requests_of(name)
    async with scripted(chat, says, **ROOM) as (service, engine), service.session() as open:
        async with httpx.AsyncClient(timeout=60) as client:
            for number, request in enumerate(requests):
                url = f"{open.base_url.removesuffix('/v1')}/{request['path']}"
                answer = await client.post(url, json=request["body"])
                assert answer.status_code == 200, answer.text
                prompts = [prompt for prompts in engine.prompts.values() for prompt in prompts]
                assert len(prompts) == number + 1
                assert rendered(chat, request) in prompts
        metrics = open.trajectory.metrics
        assert {key.removeprefix("openai_dropped_") for key in metrics if "dropped" in key} == DROPPED[name]
        assert "openai_bad_requests" not in metrics and metrics["openai_calls"] == len(requests)
        assert len(open.trajectory.transcripts) == TRANSCRIPTS[name]
        assert recorded(open.trajectory) == said(engine)
    assert main_of(open.session.transcripts()).keys() == MAIN.get(name, {0})
