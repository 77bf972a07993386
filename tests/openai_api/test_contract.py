"""The three model APIs, each by the contract of all."""

from __future__ import annotations

from typing import Any

from tests.openai_api.contract import ApiContract, ReasoningContract
from tests.openai_api.programs import ChatProgram, MessagesProgram, ResponsesProgram


class TestChatCompletions(ApiContract):
    program = ChatProgram


class TestResponses(ReasoningContract):
    program = ResponsesProgram

    def forgetting(self, history: list[Any]) -> list[Any]:
        return [item for item in history if item.get("type") != "reasoning"]


class TestMessages(ReasoningContract):
    program = MessagesProgram

    def forgetting(self, history: list[Any]) -> list[Any]:
        return [{**turn, "content": [one for one in turn["content"] if one["type"] != "thinking"]} for turn in history]
