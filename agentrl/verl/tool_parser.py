"""verl's parsers of tool calls: as a chat format that `multi_turn.format` names, and as a loop's own."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from agentrl.agent_loop.base import CURRENT_EPISODE
from agentrl.chat import Chat
from agentrl.chat.codec import Codec
from agentrl.chat.formats.template import TemplateFormat
from agentrl.chat.message import AssistantMessage, make_call
from agentrl.config.registries import CALL_FORMATS
from agentrl.system.json_value import JSON
from agentrl.system.user_code import contract_error
from agentrl.tool import ToolSchema
from agentrl.verl.calling import call, stand_in, waited
from agentrl.verl.tokenizer import verl_tokenizer
from agentrl.verl.tools import FunctionCall


class ToolParser(ABC):
    """Base class of a parser of tool calls, as verl's. A loop's own is its `tool_parser`."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a turn, in addition to the template's own."""
        return []

    @abstractmethod
    async def extract_tool_calls(self, responses_ids: list[int]) -> tuple[str, list[FunctionCall]]:
        """Return the text of an answer's tokens without its calls, and the calls.

        A parameter `tools` is given the schemas of the tools.
        """

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """Make the parser that is registered as `name`, else the run's own, of the format `multi_turn.format`."""
        if name in cls._registry:
            return cls._registry[name](tokenizer)
        episode = CURRENT_EPISODE.get(None)
        if episode is None:
            raise ValueError(f"no tool parser is registered as {name!r}, and no run is there whose own it could be")
        return RunsParser(tokenizer, episode.context.chat, episode.context.tools.schemas)

    @classmethod
    def register(cls, name: str) -> Callable[[type[ToolParser]], type[ToolParser]]:
        """Register a parser (class decorator), for `multi_turn.format` and `get_tool_parser`.

        Raises ValueError for the name of a format of ours, or of another parser.
        """

        def decorate(subclass: type[ToolParser]) -> type[ToolParser]:
            CALL_FORMATS.register(name)(subclass.adapted_class())
            cls._registry[name] = subclass
            return subclass

        return decorate

    @classmethod
    def adapted_class(cls) -> type[ParserFormat]:
        """Return the chat format that replaces this class."""
        return stand_in(ParserFormat, cls)


class ParserFormat(TemplateFormat):
    """The tokenizer's own template, with calls read by a user's `ToolParser`."""

    wrapped: type[ToolParser]
    writes_calls = False

    def __init__(self, codec: Codec, template_kwargs: Mapping[str, JSON]) -> None:
        super().__init__(codec, template_kwargs, name=self.wrapped.__name__)
        self._calls_of = self.wrapped(verl_tokenizer(codec.tokenizer))
        self.parses_tools = True
        self.stop_token_ids = tuple(dict.fromkeys([*self.stop_token_ids, *self._calls_of.stop_token_ids]))

    def growing(self, prompt: Sequence[int], tools: Sequence[ToolSchema] | None, stop: Sequence[str]) -> None:
        """Read a turn when it has ended: nobody knows what the parser makes of a part."""

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema] | None, *, spoken: bool = False
    ) -> AssistantMessage:
        parser = self._calls_of
        found = waited(call(parser.extract_tool_calls, list(ids), tools=None if tools is None else list(tools)))
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str)):
            problem = f"it must return a text and a list of FunctionCall, found {found!r:.100}"
            raise contract_error(f"tool parser {type(parser).__name__}", parser.extract_tool_calls, problem)
        text, calls = found
        if ids and ids[-1] in self.stop_token_ids:
            text = text.removesuffix(self._codec.decode([ids[-1]]))
        made = [make_call(place, one.arguments, one.name, one.arguments, None) for place, one in enumerate(calls)]
        return AssistantMessage(text, calls=tuple(made))


class RunsParser(ToolParser):
    """The parser of the run's chat format. Malformed calls are left out, as verl's parsers do."""

    def __init__(self, tokenizer: Any, chat: Chat, tools: list[ToolSchema]) -> None:
        super().__init__(tokenizer)
        self._chat, self._tools = chat, tools

    async def extract_tool_calls(self, responses_ids: list[int]) -> tuple[str, list[FunctionCall]]:
        message = await self._chat.read(responses_ids, self._tools or None)
        calls = [
            FunctionCall(name=one.name, arguments=json.dumps(one.arguments, ensure_ascii=False))
            for one in message.calls
            if one.error is None
        ]
        return message.text, calls
