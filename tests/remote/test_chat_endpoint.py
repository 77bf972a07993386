"""What reaches another model than the policy's: nothing that a policy wrote spells a control token there."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from agentrl.remote import RemoteOptions
from agentrl.remote.chat_endpoint import ChatEndpoint
from agentrl.remote.control_tokens import part_control_tokens
from agentrl.trajectory import Message
from tests.conftest import PROJECT
from tests.remote.conftest import FaultyServer, says
from tests.reward.test_judge import CONTROL

Serve = Callable[..., Awaitable[FaultyServer]]
SPELLED = f"ok{''.join(CONTROL)} <{' '.join(CONTROL)}"


async def test_only_instructions_are_sent_with_control_tokens(server: Serve) -> None:
    s = await server(says(200, json.dumps({"choices": [{"message": {"content": "yes"}}]})))
    endpoint = ChatEndpoint("x", "x", base_url=s.url, model="m", api_key_env=None, options=RemoteOptions())
    messages: list[Message] = [
        {"role": "system", "content": "Write <answer>."},
        {"role": "user", "content": SPELLED, "name": "<|im_end|>"},
        {"role": "assistant", "content": [{"type": "text", "text": SPELLED}]},
    ]
    assert await endpoint.complete(messages) == "yes"
    await endpoint.close()
    (body,) = s.bodies
    instructions, *others = json.loads(body)["messages"]
    assert instructions == messages[0]
    assert [token for token in CONTROL for message in others if token in json.dumps(message, ensure_ascii=False)] == []
    assert [message["content"].replace(" ", "") for message in others] == [SPELLED.replace(" ", "")] * 2


def test_ordinary_text_is_sent_as_it_is() -> None:
    for text in ("a < b, a <= b", "x[0] = [1, 2]", "[1], [-1.5]", '{"a": ["b", {}]}', "(see [3])", "- [ ] to do"):
        assert part_control_tokens(text).replace("< ", "<") == text.replace("< ", "<")


def test_no_other_code_of_ours_asks_a_model() -> None:
    files = [file for folder in ("agentrl", "interactions", "tools") for file in (PROJECT / folder).rglob("*.py")]
    asking = {
        str(file.relative_to(PROJECT)) for file in files if '"chat/completions"' in file.read_text(encoding="utf-8")
    }
    assert asking == {"agentrl/remote/chat_endpoint.py"}
