"""verl's contract of a tool, and the tool of ours that a class of it becomes."""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from agentrl.agent_loop.base import CURRENT_EPISODE, Episode
from agentrl.system.json_value import JSON
from agentrl.system.numbers import finite_numbers
from agentrl.tool import Tool, ToolSchema
from agentrl.tool import ToolResponse as Response
from agentrl.tool.answers import WrongResponse
from agentrl.verl.calling import call, fitting, stand_in


class _Schema(BaseModel):
    """Part of an OpenAI schema; fields of JSON schema outside the declared ones (`items`, `minimum`) are kept."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Schema):
    """A parameter of a function."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[JsonValue] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    """The parameters of a function."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Schema):
    """A function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_Schema):
    """A tool."""

    type: str = "function"
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as the policy wrote it."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with its arguments read."""

    name: str
    arguments: dict[str, JsonValue]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Read the arguments; the second value is True where they are no JSON object, and are left out."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None
        broken = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if broken else arguments), broken


class OpenAIFunctionToolCall(BaseModel):
    """A call with its id."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """Answer of a tool; it may be empty."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[object] | None = None
    """Accepted, and refused when it is shown."""

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_list(cls, value: object) -> object:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"expected a list, [one] for a single one, found {type(value).__name__}")
        return value

    def is_empty(self) -> bool:
        """Check whether it has no text, no image and no video."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Check whether it has text and nothing else."""
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """Base class of a tool, as verl's: `create`, `execute`, `release` for each call of the policy.

    Name the class in the tools' YAML (`class_name`). Its rewards count as rewards of the turn that called it. Its
    `calc_reward` is for its own use: as in verl, nothing else calls it.
    """

    def __init__(self, config: dict[str, JSON], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        """Take the YAML's config and schema. Raises TypeError where both the YAML and the class lack a schema."""
        self.config = config
        self.tool_schema: OpenAIFunctionToolSchema | None = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise TypeError(f"{type(self).__name__}: neither the YAML nor get_openai_tool_schema gives a tool_schema")
        self.name = self.tool_schema.function.name

    @classmethod
    def adapted_class(cls) -> type[Tool]:
        """Return the tool that replaces this class."""
        return stand_in(AdaptedTool, cls)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Return the schema that the policy is shown."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a call, with the row's create_kwargs; return the name of its state."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, JSON], **kwargs: Any
    ) -> tuple[ToolResponse, float, Mapping[str, object]]:
        """Answer a call: the text for the policy, a reward or None, and metrics."""
        raise NotImplementedError(f"{type(self).__name__}.execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return a reward by the state."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a call."""


class FunctionCall(BaseModel):
    """A call as a parser found it; `arguments` is JSON text."""

    arguments: str
    name: str


@dataclass
class AgentData:
    """A trajectory so far: the state of a `ToolAgentLoop`, and the tools' view of any loop (`agent_data` of `execute`).

    All but `extra_fields` are copies where another loop runs.
    """

    messages: list[dict[str, object]]
    image_data: list[object] = field(default_factory=list)
    """Always empty: images are in the messages."""
    video_data: list[object] = field(default_factory=list)
    """Always empty."""
    audio_data: list[object] | None = None
    """Always empty."""
    mm_processor_kwargs: dict[str, JSON] = field(default_factory=dict)
    """Always empty."""
    metrics: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""
    tools_kwargs: dict[str, JSON] = field(default_factory=dict)
    interaction: Any = None
    """The row's interaction in a `ToolAgentLoop`: `generate_response` answers as verl's do."""
    interaction_kwargs: dict[str, JSON] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    """All tokens so far."""
    response_ids: list[int] = field(default_factory=list)
    """Tokens of the last assistant turn."""
    response_mask: list[int] = field(default_factory=list)
    """Mask of the tokens after the first prompt: 1 where the policy sampled it."""
    response_logprobs: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    user_turns: int = 0
    assistant_turns: int = 0
    tool_calls: list[FunctionCall] = field(default_factory=list)
    """Calls of the last assistant turn."""
    extra_fields: dict[str, object] = field(default_factory=dict)
    """Values that tools keep here are seen by later calls of the trajectory, and by scorers in `extra_info`."""

    @staticmethod
    def from_episode(episode: Episode) -> AgentData:
        """Describe an episode."""
        trajectory, sample = episode.trajectory, episode.sample
        started = episode.index >= 0
        observed = [turn for turn in trajectory.turns if turn.role != "assistant"]
        return AgentData(
            messages=[dict(message) for message in episode.messages],
            request_id=episode.session,
            tools_kwargs=dict(sample.tools_kwargs),
            interaction_kwargs=dict(sample.interaction_kwargs),
            prompt_ids=list(episode.transcript.ids) if started else [],
            response_mask=episode.transcript.mask[episode.transcript.prompt_length :] if started else [],
            assistant_turns=episode.assistant_turns,
            user_turns=len(observed),
            turn_scores=[turn.reward for turn in trajectory.turns if turn.reward is not None and not turn.calls],
            tool_rewards=[call.reward for call in trajectory.tool_calls if call.reward is not None],
            extra_fields=trajectory.for_scorers,
        )


LOOPS_DATA: ContextVar[AgentData] = ContextVar("state of the loop that calls")
"""State that a `ToolAgentLoop` calls a tool with."""


class AdaptedTool(Tool):
    """A tool of ours around one of verl's contract."""

    wrapped: ClassVar[type[BaseTool]]

    def __init__(self, config: dict[str, JSON] | None = None, schema: ToolSchema | None = None) -> None:
        """Make the user's tool. Raises the errors of its constructor."""
        given = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
        self.inner = self.wrapped(dict(config or {}), given)
        own = self.inner.tool_schema
        if own is None:
            raise TypeError(f"{self.wrapped.__name__}: its constructor leaves tool_schema at None")
        super().__init__(config, cast(ToolSchema, own.model_dump(exclude_unset=True, exclude_none=True)))
        self._create_kwargs: dict[str, dict[str, JSON]] = {}
        names = list(inspect.signature(self.inner.execute).parameters)
        declared = own.function.parameters.properties
        self._by_name = "parameters" not in names and any(name in declared for name in names)
        """True: `execute` takes each argument by its name, as verl's first tools do."""

    @property
    def code(self) -> Callable[..., object]:
        return self.inner.execute

    async def create(self, instance_id: str, **create_kwargs: JSON) -> None:
        """Keep the arguments of each call's own `create`."""
        self._create_kwargs[instance_id] = create_kwargs

    async def release(self, instance_id: str) -> None:
        self._create_kwargs.pop(instance_id, None)

    async def execute(self, instance_id: str, arguments: dict[str, JSON]) -> Response:
        kwargs = self._create_kwargs.get(instance_id, {})
        # Earlier versions pass create_kwargs one by one and name the instance, later ones pass them as one mapping.
        offered: dict[str, object] = {"instance_id": str(uuid.uuid4()), "create_kwargs": kwargs, **kwargs}
        created = await call(self.inner.create, **offered)
        instance = created[0] if isinstance(created, tuple) else created
        episode = CURRENT_EPISODE.get(None)
        data = LOOPS_DATA.get(None) or (None if episode is None else AgentData.from_episode(episode))
        try:
            if self._by_name:
                given = fitting(self.inner.execute, {"instance_id": instance, "agent_data": data})
                execute: Callable[..., object] = self.inner.execute
                answer = await call(partial(execute, **given, **arguments))
            else:
                answer = await call(self.inner.execute, instance, arguments, agent_data=data)
        finally:
            await call(self.inner.release, instance)
        return as_response(answer, f"{self.wrapped.__name__}.execute")


def as_response(answer: object, what: str) -> Response:
    """Read (ToolResponse, text or mapping, reward or None, metrics or None), or the first of these alone.

    A mapping is shown as JSON. Raises WrongResponse for anything else.
    """
    if isinstance(answer, ToolResponse | str | Mapping):
        answer = (answer, None, None)
    if not (isinstance(answer, tuple) and len(answer) == 3):
        raise WrongResponse(f"{what} must return (ToolResponse, reward, metrics), found {answer!r:.100}")
    response, reward, metrics = answer
    if isinstance(response, Mapping):
        response = json.dumps(dict(response), ensure_ascii=False, default=str)
    if not isinstance(response, ToolResponse | str | None):
        raise WrongResponse(f"{what} must return a ToolResponse or a text first, found {response!r:.100}")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise WrongResponse(f"{what} must return a mapping of metrics or None last, found {metrics!r:.100}")
    if not isinstance(response, ToolResponse):
        response = ToolResponse(text=response)
    if response.video:
        raise WrongResponse(f"{what} returned a video; text and images are shown to the policy")
    images = tuple(image for image in response.image or () if image is not None)
    return Response(response.text or "", reward, finite_numbers(what, metrics or {}), images=images)
