"""verl's loop of tool calls and user turns as states, for files that change a part of it.

The states are verl's: a prompt is rendered, an answer sampled and parsed, its calls run, the interaction asked. Calls
go through the run's tools, with their limits, deadlines and records, in any method that a subclass changes.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from agentrl.agent_loop.base import AgentLoop, Episode
from agentrl.agent_loop.dialogue import Dialogue
from agentrl.interaction import ask
from agentrl.system.json_value import JSON
from agentrl.system.user_code import contract_error
from agentrl.trajectory import Message
from agentrl.verl.agent_loop import AdaptedLoop, AgentLoopBase, AgentLoopOutput, DictConfigWrap, ServerManager
from agentrl.verl.calling import call, stand_in
from agentrl.verl.tool_parser import ToolParser
from agentrl.verl.tools import LOOPS_DATA, AgentData, FunctionCall, ToolResponse, as_response

NO_HISTORY = "an interaction that writes the history anew has no place in a loop of verl's contract"


class AgentState(Enum):
    """Next act of a trajectory."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class RunsTool:
    """A tool of the run with the methods of verl's tools, for a `_call_tool` that calls them."""

    def __init__(self, name: str, server: ServerManager) -> None:
        self.name, self._server = name, server

    async def create(self, instance_id: str | None = None, **kwargs: object) -> tuple[str, ToolResponse]:
        """Return a name; the run makes the tool's state by the row's tools_kwargs."""
        return instance_id or uuid.uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: Mapping[str, JSON], agent_data: AgentData | None = None, **kwargs: object
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Call the tool: within its limits, and recorded with the answer that was sampled last."""
        episode, server = self._server.episode, self._server
        if agent_data is not None:
            LOOPS_DATA.set(agent_data)  # in the task of this call, or of the one trajectory that has this state
        result = await episode.call(self.name, parameters)
        server.calls.setdefault(len(server.sampled) - 1, []).extend(episode.early_calls)
        episode.early_calls = []
        images: list[object] = list(result.images)
        return ToolResponse(text=result.text, image=images or None), result.reward, dict(result.metrics)

    async def release(self, instance_id: str, **kwargs: object) -> None:
        """Do nothing: the run ends the tool's state with the trajectory."""


class RunsInteraction:
    """The row's interaction with the method of verl's that loops call."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: object
    ) -> tuple[bool, str, float, Mapping[str, object]]:
        """Ask the interaction. Raises ValueError for an interaction that rewrites the history."""
        interaction, session = self._dialogue.interaction, self._dialogue.episode.session
        assert interaction is not None
        answer = await ask(interaction, interaction.generate_response, session, list(messages))
        if answer.history is not None:
            raise ValueError(NO_HISTORY)
        return bool(answer.should_end), answer.text, float(answer.score), answer.extra


class ToolAgentLoop(AgentLoopBase):
    """Loop of tool calls and user turns; a subclass changes its handlers, `_call_tool`, or `tool_parser`."""

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: ServerManager,
        tokenizer: Any,
        processor: Any = None,
        **kwargs: Any,
    ) -> None:
        """Take the run's config, tools and parser."""
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)
        context, turns = server_manager.episode.context, self.rollout_config.multi_turn
        self.interaction_config_file: str | None = turns.interaction_config_path
        self.max_assistant_turns: int | None = turns.max_assistant_turns
        self.max_user_turns: int | None = turns.max_user_turns if context.interactions else None
        self.max_parallel_calls: int = turns.max_parallel_calls
        self.max_tool_response_length: int = turns.max_tool_response_length
        self.tool_response_truncate_side: str = turns.tool_response_truncate_side
        self.tools = {name: RunsTool(name, server_manager) for name in context.tools.names}
        self.tool_schemas: list[Any] = context.tools.schemas
        self.tool_parser_name: str = turns.format
        self.tool_parser = ToolParser.get_tool_parser(self.tool_parser_name, tokenizer)
        self.prompt_length: int = self.rollout_config.prompt_length
        self.response_length: int = self.rollout_config.response_length

    @classmethod
    def adapted_class(cls) -> type[AgentLoop]:
        """Return the loop that replaces this class."""
        return stand_in(AdaptedToolLoop, cls)

    async def run(self, sampling_params: dict[str, JSON], **kwargs: Any) -> AgentLoopOutput:
        """Run one trajectory, from state to state."""
        async with Dialogue.open(self.server_manager.episode) as dialogue:
            data = AgentData(
                messages=list(kwargs["raw_prompt"]),
                request_id=uuid.uuid4().hex,
                tools_kwargs=dict(kwargs.get("tools_kwargs") or {}),
                interaction=None if dialogue.interaction is None else RunsInteraction(dialogue),
                interaction_kwargs=dict(kwargs.get("interaction_kwargs") or {}),
                extra_fields=self.server_manager.episode.trajectory.for_scorers,
            )
            state = AgentState.PENDING
            while state is not AgentState.TERMINATED:
                state = await self._next(state, data, sampling_params)
        behind = len(data.prompt_ids) - len(data.response_mask)
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:behind],
            response_ids=data.prompt_ids[behind:][: self.response_length],
            response_mask=data.response_mask[: self.response_length],
            num_turns=data.user_turns + data.assistant_turns + 1,
            metrics=data.metrics,
            extra_fields={**data.extra_fields, "turn_scores": data.turn_scores, "tool_rewards": data.tool_rewards},
        )

    async def _next(self, state: AgentState, data: AgentData, sampling_params: dict[str, JSON]) -> AgentState:
        handlers: dict[AgentState, tuple[Callable[..., object], tuple[object, ...]]] = {
            AgentState.PENDING: (self._handle_pending_state, (data, sampling_params)),
            AgentState.GENERATING: (self._handle_generating_state, (data, sampling_params)),
            AgentState.PROCESSING_TOOLS: (self._handle_processing_tools_state, (data,)),
            AgentState.INTERACTING: (self._handle_interacting_state, (data,)),
        }
        handler, arguments = handlers[state]
        found = await call(handler, *arguments)
        if not isinstance(found, AgentState):
            problem = f"it must return an AgentState, found {found!r:.100}"
            raise contract_error(f"agent loop {type(self).__name__}", handler, problem)
        return found

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, JSON]) -> AgentState:
        """Render the first prompt."""
        agent_data.prompt_ids = await self.apply_chat_template(agent_data.messages, tools=self.tool_schemas or None)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, JSON], ignore_termination: bool = False
    ) -> AgentState:
        """Sample an answer and read its calls."""
        begun = time.perf_counter()
        output = await self.server_manager.generate(
            request_id=agent_data.request_id, prompt_ids=agent_data.prompt_ids, sampling_params=sampling_params
        )
        seconds = agent_data.metrics.get("generate_sequences", 0.0) + time.perf_counter() - begun
        agent_data.metrics["generate_sequences"] = seconds
        agent_data.assistant_turns += 1
        agent_data.response_ids = output.token_ids
        agent_data.prompt_ids = [*agent_data.prompt_ids, *output.token_ids]
        agent_data.response_mask += [1] * len(output.token_ids)
        agent_data.response_logprobs += output.log_probs or []
        if self._is_over(agent_data, ignore_termination):
            return AgentState.TERMINATED
        text, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(agent_data.response_ids)
        if agent_data.interaction is not None:
            agent_data.messages.append({"role": "assistant", "content": text})
        if agent_data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.TERMINATED if agent_data.interaction is None else AgentState.INTERACTING

    def _is_over(self, data: AgentData, ignore_length: bool) -> bool:
        """Check whether a limit ends the trajectory after an answer."""
        if not ignore_length and len(data.response_mask) >= self.response_length:
            return True
        if self.max_assistant_turns and data.assistant_turns >= self.max_assistant_turns:
            return True
        return bool(self.max_user_turns) and data.user_turns >= (self.max_user_turns or 0)

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Run the calls of the last answer at the same time, and append their answers."""
        begun = time.perf_counter()
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        answers = await asyncio.gather(*(self._answered(one, agent_data) for one in calls))
        agent_data.metrics["tool_calls"] = agent_data.metrics.get("tool_calls", 0.0) + time.perf_counter() - begun
        agent_data.tool_rewards += [reward for _, reward in answers if reward is not None]
        added: list[Message] = [{"role": "tool", "content": text} for text, _ in answers]
        agent_data.messages.extend(dict(message) for message in added)
        if not self._append(agent_data, added):
            return AgentState.TERMINATED
        agent_data.user_turns += 1
        return AgentState.GENERATING

    async def _answered(self, tool_call: FunctionCall, data: AgentData) -> tuple[str, float | None]:
        answer = await call(self._call_tool, tool_call, data.tools_kwargs, agent_data=data)
        whole = answer if isinstance(answer, tuple) else (answer, None, None)  # earlier versions answer by itself
        response = as_response(whole, f"{type(self).__name__}._call_tool")
        if response.images:
            raise ValueError("_call_tool: a loop of verl's contract shows no images here")
        return response.text, response.reward

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, JSON], agent_data: AgentData
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Call a tool; errors that the policy made are the answer's text."""
        tool = self.tools.get(tool_call.name) or RunsTool(tool_call.name, self.server_manager)
        arguments = json.loads(tool_call.arguments)
        instance_id, _ = await tool.create()
        return await tool.execute(instance_id, arguments, agent_data=agent_data)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        """Ask the interaction, and append its answer."""
        given = {name: value for name, value in agent_data.interaction_kwargs.items() if name != "name"}
        should_end, text, score, _ = await agent_data.interaction.generate_response(
            agent_data.request_id, agent_data.messages, **given
        )
        agent_data.user_turns += 1
        said: Message = {"role": "user", "content": text}
        agent_data.messages.append(dict(said))
        if score is not None:
            agent_data.turn_scores.append(score)
        is_over = should_end or not self._append(agent_data, [said])
        return AgentState.TERMINATED if is_over else AgentState.GENERATING

    def _append(self, data: AgentData, messages: list[Message]) -> bool:
        """Append the tokens of messages, and a generation prompt. Returns False where the response is full."""
        chat = self.server_manager.episode.context.chat
        new = chat.bridge(data.prompt_ids, messages, self.tool_schemas or None)
        if len(data.response_mask) + len(new) >= self.response_length:
            return False
        data.prompt_ids = [*data.prompt_ids, *new]
        data.response_mask += [0] * len(new)
        data.response_logprobs += [0.0] * len(new)
        return True


class AdaptedToolLoop(AdaptedLoop):
    """A loop of ours around a `ToolAgentLoop`."""

    takes_interactions = True
    offers_tools = True

    async def run(self, episode: Episode) -> None:
        await episode.open_tools(images=False)
        await super().run(episode)
