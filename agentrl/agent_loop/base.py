"""Contract of an agent loop, and the `Episode` through which it acts.

A loop never handles token ids. It talks to an `Episode`, which asks the engine, records the sampled tokens exactly and
appends observations; so a user's loop cannot break the invariants of the transcript.
"""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal, TypeAlias

from agentrl.agent_loop.compaction import Compaction
from agentrl.agent_loop.limits import LoopLimits, seed_of
from agentrl.agent_loop.observer import Observers
from agentrl.agent_loop.teacher_context import TeacherContext, with_teacher_context
from agentrl.agent_loop.tool_calls import answer_to, record_calls, run_calls
from agentrl.chat import AssistantMessage, Chat, Drift, ParsedCall
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import (
    EngineError,
    FinishReason,
    Generation,
    Listener,
    RequestError,
    RolloutEngine,
    SamplingParams,
    check_generation,
    contract_fault,
    takes_listener,
)
from agentrl.engines.recorded import GENERATIONS, TimedGeneration, request_key
from agentrl.errors import DataError, UserError
from agentrl.interaction import Interaction
from agentrl.system.call_journal import CallJournal
from agentrl.system.json_value import JSON
from agentrl.system.threads import beside_loop
from agentrl.system.user_code import Code, contract_error
from agentrl.tool import ToolSchema
from agentrl.tool.session import ToolSession
from agentrl.tool.toolset import ToolSet
from agentrl.tool.truncation import fit_budget
from agentrl.trajectory import (
    FROZEN,
    Message,
    PlacedImage,
    Status,
    ToolAnswer,
    ToolCallRecord,
    Trajectory,
    Transcript,
    Turn,
)
from agentrl.trajectory.picture import size_of, text_of
from agentrl.trajectory.sample import Sample


@dataclass(frozen=True, slots=True)
class LoopContext:
    """Objects that all trajectories of a run share."""

    engine: RolloutEngine
    chat: Chat
    tools: ToolSet
    interactions: dict[str, Interaction]
    limits: LoopLimits
    observers: Observers = field(default_factory=Observers)
    teacher_context: TeacherContext | None = None
    """Makes the text that a row's privileged teacher is shown; None where no teacher is privileged."""
    roles: Mapping[str, TakeTurn] = field(default_factory=dict)
    """By role, who takes its turns (see `agentrl.agent_loop.roles`); empty in a run without roles."""
    stop_conditions: tuple[StopCondition, ...] = ()
    """Further conditions that end a trajectory (see `agentrl.agent_loop.stopping`)."""
    compaction: Compaction | None = None
    """How conversations that become too long go on (see `agentrl.agent_loop.compactor`); None: they end."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One assistant turn: the parsed message, and why generation ended."""

    message: AssistantMessage
    finish_reason: FinishReason
    forged: bool = False
    """True: the policy sampled a token that stands for media only, and was stopped there."""

    @property
    def stopped(self) -> bool:
        """True when the policy ended its turn itself."""
        return self.finish_reason.kind == "stop"


class _Left(Exception):
    """Takes an answer past the journal."""

    def __init__(self, answer: TimedGeneration) -> None:
        super().__init__()
        self.answer = answer


TakeTurn: TypeAlias = "Callable[[Episode, Sequence[str], int | None], Awaitable[Reply]]"
"""Takes a turn in an episode, given stop texts and a limit of tokens, and records it."""
StopCondition: TypeAlias = "Callable[[Episode, Reply], Status | None]"
"""See `agentrl.agent_loop.stopping`."""


class AgentLoop(ABC):
    """Base class of a loop: subclass it and `register("name")` it.

    One object serves all trajectories: keep state in local variables.
    """

    takes_interactions: ClassVar[bool] = False
    """True: the loop asks the row's interaction for user turns. Under any other loop a row that names one is
    refused."""
    offers_tools: ClassVar[bool] = False
    """True: the loop is for the run's tools. Its rows without an interaction are remarked on where no tools are."""
    compacts: ClassVar[bool] = False
    """True: the loop goes on from summaries (see `agentrl.agent_loop.compactor`). Rows of another loop are remarked on
    in a run that asks for them."""
    on_resume: ClassVar[Literal["answers", "none"]] = "answers"
    """After a kill, `answers` calls `run` again from its start with the recorded answers of engine, tools and
    interactions; every other effect happens again. With `none`, the trajectory restarts."""
    waits_for_people: ClassVar[bool] = False
    """True: it serves people, by requests to the engine of its own, and its trajectories end when these choose, e.g.
    with their feedback. They have no deadline, and no warning tells that none has ended."""
    takes_images: ClassVar[bool] = True
    """True: images in a row's prompt reach the model. Under any other loop a row with images is refused."""

    calls: re.Pattern[str] | None = None
    """How its tool calls look in decoded text, for people; None: as the chat format writes them."""

    def first_prompt(self, sample: Sample, tools: list[ToolSchema]) -> tuple[list[Message], list[ToolSchema]]:
        """Return the messages of the first prompt, and the run's tools that the chat template renders in it.

        data.max_prompt_length measures this prompt and the start-up check shows it.
        """
        return sample.prompt, tools

    @property
    def code(self) -> Code:
        """The user's own part of `run`, by which messages name the place of an error."""
        return self.run

    @abstractmethod
    async def run(self, episode: Episode) -> None:
        """Drive one trajectory to its end and set `episode.trajectory.status`, which `episode.finish` does.

        A fault of the infrastructure (see `agentrl.system.user_code`) ends this try, and the scheduler tries again. A
        UserError or RequestError fails the trajectory, and any other exception is an error of this code.
        """

    def configure(self, config: RolloutsConfig) -> None:  # noqa: B027 - most loops read it from the context
        """Take the run's config, once, before the first trajectory."""

    def check(self) -> None:  # noqa: B027 - most loops need nothing
        """Check the loop before the first step, where rows run it. Raises ConfigError for what it lacks."""

    async def close(self) -> None:  # noqa: B027 - most loops hold nothing
        """Free the loop's resources at the end of the run."""


@dataclass(slots=True)
class Episode:
    """One try at one trajectory: the loop's only way to the engine and to the record.

    An episode writes one transcript at a time: the last that it started. Its `branch`es write others of the same
    trajectory, also at the same time.
    """

    context: LoopContext
    sample: Sample
    trajectory: Trajectory
    params: SamplingParams
    """Temperature, top-p and top-k; lengths and stop ids are filled in for each turn."""
    seed: int
    session: str
    """Name of this try at the engine."""
    journal: CallJournal | None = None
    """Journal of the trajectory's calls, where a killed run shall resume."""
    waiting_for: str = "start"
    """Current activity of the episode; a time-out quotes it."""
    tools: Sequence[ToolSchema] | None = None
    assistant_turns: int = 0
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    index: int = -1
    """Index of the current transcript in trajectory.transcripts; -1 before `start`."""
    messages: list[Message] = field(default_factory=list)
    """Messages that the current transcript stands for."""
    inside_turn: bool = False
    """True: text was observed inside an assistant turn, so no template could render the transcript."""
    earlier: list[Episode] = field(default_factory=list)
    """Copies of this episode as it left each transcript for the next one."""
    branches: list[Episode] = field(default_factory=list)
    """Episodes that `branch` made."""
    role: str = ""
    """Role that this episode's transcripts belong to."""
    trunk: Episode | None = None
    """Episode that holds the open tools of this branch; None: itself."""
    tool_session: ToolSession | None = None
    """Tools of the trajectory, once they are open."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the tools are opened, as branches call them at the same time."""
    state: str | None = None
    """Name of the state that the next assistant turn is taken in (see `Turn.state`)."""
    last_turn: Turn | None = None
    """Assistant turn that `generate` recorded last."""
    listener: Listener | None = None
    """Hears the ids of its turns as they are sampled, where the engine tells them."""
    sampled_texts: set[str] = field(default_factory=set)
    """Texts and reasoning of the policy in this trajectory, branches included, that have tokens of a turn in them which
    it sampled: rendered again, their spellings stand for the tokens."""
    last_message: Message | None = None
    """Message of `last_turn` in the trajectory."""
    early_calls: list[ToolCallRecord] = field(default_factory=list)
    """Calls from before the first assistant turn, which are recorded with it."""
    reserved: int = 0
    """Tokens of the window that stay free, for a summary."""
    takes_version: Callable[[int], bool] = lambda version: True
    """Says whether a batch can train in time on tokens of this version that were sampled before the trajectory began.
    The trajectory is then taken to have no older ones."""

    @property
    def transcript(self) -> Transcript:
        """The current transcript. Raises IndexError before `start`."""
        if self.index < 0:
            raise IndexError("the episode has no transcript yet: await episode.start(...) first")
        return self.trajectory.transcripts[self.index]

    def branch(self, role: str = "", seed: int | None = None) -> Episode:
        """Make an episode of the same trajectory, with samples of its own, to write another transcript.

        The caller has to release its session; drift and costs are counted here. seed: of its samples; None: by the
        number of branches before.
        """
        number = len(self.branches)
        branch = Episode(
            context=self.context,
            sample=self.sample,
            trajectory=self.trajectory,
            params=self.params,
            seed=seed_of(self.seed, "branch", number) if seed is None else seed,
            session=f"{self.session}.{number}",
            journal=self.journal,
            role=role,
            trunk=self.trunk or self,
            sampled_texts=self.sampled_texts,
        )
        self.branches.append(branch)
        return branch

    @property
    def budget_left(self) -> int:
        """Number of tokens that may still be appended, sampled or observed."""
        limits, transcript = self.context.limits, self.transcript
        length = len(transcript.ids) + self.reserved
        return min(limits.max_response_tokens + transcript.prompt_length, limits.max_model_len) - length

    async def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> None:
        """Open a transcript with the first prompt. `tools` are rendered by the chat template, now and on every turn.

        The trajectory's first one is cut, where it is too long, as data.truncation says.
        An episode may leave its transcript for another, which has budgets and samples of its own.
        """
        chat = self.context.chat

        def write() -> tuple[list[int], list[PlacedImage]]:
            ids = chat.render(messages, tools or None, sampled=self.sampled_texts)
            return ids, self._first_images(ids, messages)

        ids, images = await beside_loop(size_of(messages), write)
        told = await self.teacher_prompt(messages, tools)
        kept = ids if images or self.trajectory.transcripts else self.context.limits.cut_prompt(ids)
        self._open(kept, images, messages, tools, told)
        self.inside_turn = len(kept) < len(ids)  # no template could render the cut text

    def start_ids(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        *,
        teacher_prompt: Sequence[int],
        images: Sequence[PlacedImage] | None = None,
    ) -> None:
        """Open a transcript as `start` does, where the prompt's tokens are known, e.g. another transcript's.

        `teacher_prompt`: the result of the method of this name for the messages. `images`: placed in `ids`; None: those
        of the messages, which are looked for in `ids`.
        """
        placed = self._first_images(ids, messages) if images is None else images
        self._open(ids, placed, messages, tools, teacher_prompt)

    async def teacher_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> list[int]:
        """Render the messages as a privileged teacher is shown them; empty where it is shown no more than these."""
        text = None if self.context.teacher_context is None else self.context.teacher_context(self.sample)
        if text is None:
            return []
        shown = with_teacher_context(messages, text)
        render = partial(self.context.chat.render, shown, tools or None, sampled=self.sampled_texts)
        return await beside_loop(size_of(shown), render)

    def _first_images(self, ids: Sequence[int], messages: Sequence[Message]) -> list[PlacedImage]:
        try:
            return self.context.chat.images(ids, messages)
        except DataError as error:
            raise DataError(f"{self.sample.file}, row {self.sample.row} (the first is 0): {error}") from error

    def _open(
        self,
        ids: Sequence[int],
        images: Sequence[PlacedImage],
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        teacher_prompt: Sequence[int],
    ) -> None:
        if self.index >= 0:
            self.earlier.append(replace(self))
            # With the old seeds, the same prompt would be answered with the same words.
            self.seed = seed_of(self.seed, "transcript", len(self.earlier))
            self.inside_turn = False
        self.tools = tools or None
        transcript = Transcript(role=self.role, teacher_prompt=list(teacher_prompt))
        transcript.append_prompt(ids, images)
        self.index = len(self.trajectory.transcripts)
        self.trajectory.transcripts.append(transcript)
        self.messages = list(messages)
        self.trajectory.messages.extend(messages)

    async def generate(self, *, stop: Sequence[str] = (), max_tokens: int | None = None) -> Reply:
        """Sample one assistant turn, record it as it is and parse it. Needs `budget_left` > 0.

        Raises ValueError where the policy has ended its turn and nothing was observed since.
        """
        transcript = self.transcript
        if transcript.mask[-1:] == [1] and transcript.ids[-1] in self.context.chat.stop_token_ids:
            raise ValueError(
                "the policy has ended its turn, and nothing was observed since: `await episode.observe(messages)` "
                "appends what it is to answer"
            )
        params = self.turn_params(stop, max_tokens)
        before = self.generate_seconds
        generation = await self.sample_ids(transcript.ids, params, self.session, transcript.images)
        return await self.record(generation, self.generate_seconds - before, params.seed)

    def turn_params(self, stop: Sequence[str], max_tokens: int | None, adapter: str | None = None) -> SamplingParams:
        """Make the parameters of the transcript's next turn. Needs `budget_left` > 0."""
        return replace(
            self.params,
            max_new_tokens=self.room(max_tokens),
            stop_token_ids=self.context.chat.stop_token_ids + self.context.chat.media_token_ids,
            stop=tuple(stop),
            seed=seed_of(self.seed, len(self.transcript)),
            adapter=adapter,
        )

    async def record(self, generation: Generation, seconds: float, seed: int | None = None) -> Reply:
        """Append a generation, sampled in `seconds`, to the transcript as one assistant turn.

        seed: of the request.
        """
        chat, transcript = self.context.chat, self.transcript
        message = await chat.read(generation.ids, self.tools)
        start = len(transcript)
        # Recorded after the last await: a cancelled call leaves no sampled tokens without their turn.
        transcript.append_sampled(generation.ids, generation.logprobs, generation.versions, generation.experts)
        turn = Turn(
            role="assistant",
            text=message.text,
            transcript=self.index,
            start=start,
            end=len(transcript),
            finish_reason=generation.finish_reason.kind,
            seconds=seconds,
            seed=seed if generation.seed is None else generation.seed,
            state=self.state,
        )
        self.state = None
        self._add_turn(turn)
        self.last_turn = turn
        if self.early_calls:
            record_calls(turn, self.early_calls)
            self.early_calls = []
        self.assistant_turns += 1
        self.last_message = message.to_message()
        self.sampled_texts |= chat.spelled_by_tokens([message.text, message.reasoning or ""], generation.ids)
        self._add_messages([self.last_message])
        return Reply(message, generation.finish_reason, generation.finish_reason.matched in chat.media_token_ids)

    def take_back(self, keep: int = 0) -> int:
        """Remove all but the first `keep` tokens of the policy's last turn from the record, where it ends the
        transcript: no client got them.

        Returns the number of removed tokens; 0 where the last turn is not the policy's.
        """
        turn, transcript = self.last_turn, self.transcript
        if turn is None or turn.role != "assistant" or turn.transcript != self.index or turn.end != len(transcript):
            return 0
        end, kept = turn.end, turn.start + keep
        if kept >= end:
            return 0
        transcript.take_back(kept)
        if keep:
            message = self.context.chat.parse(transcript.ids[turn.start :], self.tools)
            turn.end, turn.text, turn.finish_reason = kept, message.text, "abort"
            turn.calls.clear()
            known, self.last_message = self.last_message, message.to_message()
            everything = self.trajectory.messages
            everything[:] = [self.last_message if one is known else one for one in everything]
            self.messages[-1] = self.last_message
            return end - kept
        self.trajectory.turns = [one for one in self.trajectory.turns if one is not turn]
        self.trajectory.messages = [one for one in self.trajectory.messages if one is not self.last_message]
        self.messages.pop()
        self.assistant_turns -= 1
        self.last_turn = self.last_message = None
        return end - kept

    async def record_frozen(
        self, ids: Sequence[int], policy: str, finish_reason: FinishReason, seconds: float
    ) -> Reply:
        """Append a turn of a role that is not trained: its tokens, [T], have the mask 0.

        policy: the name of the model whose turn it is.
        """
        chat, transcript = self.context.chat, self.transcript
        message = await chat.read(list(ids), self.tools)
        start = len(transcript)
        transcript.append_observed(ids)
        transcript.policy = policy
        turn = Turn(FROZEN, message.text, self.index, start, len(transcript), finish_reason=finish_reason.kind)
        turn.seconds = seconds
        self._add_turn(turn)
        self.last_turn = turn
        self.assistant_turns += 1
        self._add_messages([message.to_message()])
        return Reply(message, finish_reason, finish_reason.matched in chat.media_token_ids)

    def room(self, max_tokens: int | None = None) -> int:
        """Number of tokens that the next turn may have when `max_tokens` are asked for."""
        room = self.budget_left
        for limit in (max_tokens, self.context.limits.max_tokens_per_turn):
            if limit is not None:
                room = min(room, limit)
        return room

    async def sample_ids(
        self, ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Have the engine continue `ids` [T], and record nothing but its cost.

        `session` names the request's cache at the engine. Raises EngineError, RequestError.
        """
        self.waiting_for = f"the engine (turn {self.assistant_turns + 1}, {len(ids)} tokens)"
        ask = partial(self._ask_engine, ids, params, session, images)
        if self.journal is None:
            answer = await ask()
        else:
            key = request_key(ids, params, images)
            try:
                answer = await self.journal.call(
                    f"engine, as {session}", key, partial(self._unless_left, ask), GENERATIONS, strict=True
                )
            except _Left as left:
                answer = left.answer
        self.generate_seconds += answer.seconds
        self.cached_tokens += answer.generation.cached_tokens
        self.prompt_tokens += len(ids)
        return answer.generation

    async def _unless_left(self, ask: Callable[[], Awaitable[TimedGeneration]]) -> TimedGeneration:
        """Ask the engine. An answer that was ended because nobody hears it any more is not to be given again."""
        answer = await ask()
        if self.listener is not None and answer.generation.finish_reason.kind == "abort":
            raise _Left(answer)
        return answer

    async def _ask_engine(
        self, ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage]
    ) -> TimedGeneration:
        begun = time.monotonic()
        engine = self.context.engine
        generate = partial(engine.generate, ids, params, session)
        if images:
            generate = partial(generate, images=images)
        if self.listener is not None and takes_listener(engine):
            generate = partial(generate, listener=self.listener)
        try:
            generation = await generate()
        except (EngineError, RequestError, UserError):
            raise
        except Exception as error:  # of the engine, and not of the loop that asked it
            raise EngineError(f"{type(error).__name__}: {error}") from error
        if (problem := contract_fault(generation)) is not None:
            raise contract_error(f"rollout engine {type(engine).__name__}", engine.generate, problem)
        check_generation(generation)
        return TimedGeneration(generation, time.monotonic() - begun)

    async def observe(self, messages: Sequence[Message]) -> bool:
        """Append tool answers or user turns and a new generation prompt. Returns whether there is room to continue.

        An answer that does not fit the budget is cut, with a visible marker, and kept.
        """
        chat, ids, tools = self.context.chat, self.transcript.ids, self.tools
        first = len(self.messages)

        def write() -> tuple[list[int], list[PlacedImage]]:
            bridge = chat.bridge(ids, messages, tools, first=first)
            return bridge, chat.images(bridge, messages)

        return self._append_messages(*await beside_loop(size_of(messages), write), messages)

    def observe_ids(
        self, ids: list[int], messages: Sequence[Message], images: Sequence[PlacedImage] | None = None
    ) -> bool:
        """Append messages as `observe` does, where the tokens that stand for them, and `images` in them, are known."""
        placed = self.context.chat.images(ids, messages) if images is None else images
        return self._append_messages(ids, placed, messages)

    async def observe_text(self, text: str) -> bool:
        """Append plain text inside the running assistant turn (ReAct's observations). Returns whether there is room to
        continue."""
        ids = await beside_loop(len(text), partial(self.context.chat.encode, text))
        self.inside_turn = True
        self._add_messages([{"role": "tool", "content": text}])
        return self._append_observed(ids, "tool", text)

    def _append_messages(self, ids: list[int], images: Sequence[PlacedImage], messages: Sequence[Message]) -> bool:
        self._add_messages(messages)
        text = "\n".join(text_of(message["content"]) for message in messages)
        # An assistant's message of a client is no turn of the policy.
        role = next((str(one["role"]) for one in messages if one["role"] != "assistant"), "user")
        return self._append_observed(ids, role, text, images)

    def _append_observed(self, ids: list[int], role: str, text: str, images: Sequence[PlacedImage] = ()) -> bool:
        transcript, room = self.transcript, max(self.budget_left, 0)
        ids, images, text, cut = fit_budget(ids, images, text, room, self.context.chat.encode)
        start = len(transcript)
        transcript.append_observed(ids, images)
        self._add_turn(Turn(role=role, text=text, transcript=self.index, start=start, end=len(transcript)))
        return not cut and len(ids) < room

    def _add_turn(self, turn: Turn) -> None:
        self.trajectory.turns.append(turn)
        self.context.observers.on_turn(self.trajectory, turn)

    def _add_messages(self, messages: Sequence[Message]) -> None:
        self.messages.extend(messages)
        self.trajectory.messages.extend(messages)

    async def open_tools(self, *, images: bool = True) -> ToolSession:
        """Open the trajectory's tools unless they are open, and create each tool that the row's tools_kwargs name.

        The first call of a tool opens them, too. They are closed when the loop has ended. Without `images`, images of
        answers are left out, with a note.
        """
        trunk = self.trunk or self
        if trunk.tool_session is None:
            async with trunk.opening:
                if trunk.tool_session is None:  # another branch may have opened them meanwhile
                    kwargs = self.sample.tools_kwargs
                    trunk.tool_session = await self.context.tools.open(
                        trunk.session, kwargs, images=images, journal=trunk.journal
                    )
        return trunk.tool_session

    async def close_tools(self) -> None:
        """Close the tools, if they are open, when the loop has ended; add their rewards to the last assistant turn."""
        if self.tool_session is not None:
            for reward in await self.tool_session.close():
                self.add_turn_reward(reward)

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> ToolAnswer:
        """Call a tool, and record the call with the assistant turn before it (without one, with the first).

        The result's `text` is the answer as a model would see it, cut to the tool's limit; `error` is the kind of error
        in it, or None. Raises ToolInfrastructureError for a tool with `on_error: fail`; the trajectory is tried again.
        """
        call = ParsedCall(id="call_0", name=name, arguments=dict(arguments), raw="", error=None)
        (record,) = await self._run_calls([call])
        return record.answer

    async def answer_calls(self, calls: Sequence[ParsedCall]) -> tuple[list[ToolCallRecord], list[Message]]:
        """Run the calls of a message concurrently; return their records and the messages that answer them, in order.

        The records are added to the turn that made the calls, and the messages are for `observe`.
        """
        records = await self._run_calls(calls)
        return records, [answer_to(call, record) for call, record in zip(calls, records, strict=True)]

    async def _run_calls(self, calls: Sequence[ParsedCall]) -> list[ToolCallRecord]:
        session, limit, turn = await self.open_tools(), self.context.limits.max_parallel_calls, self.last_turn
        self.waiting_for = "tools: " + ", ".join(call.name or "?" for call in calls[:limit])
        begun = time.monotonic()
        records = await run_calls(session, calls, limit)
        self.tool_seconds += time.monotonic() - begun
        for record in records:
            for measured, value in record.answer.metrics.items():
                self.trajectory.metrics[measured] = self.trajectory.metrics.get(measured, 0.0) + value
        if turn is None:
            self.early_calls.extend(records)
        else:
            record_calls(turn, records)
        return records

    def add_turn_reward(self, reward: float) -> None:
        """Add to the reward of the trajectory's last assistant turn that is trained on."""
        for turn in reversed(self.trajectory.trained_turns):
            if turn.role == "assistant":
                turn.reward = reward + (turn.reward or 0.0)
                return

    async def count_drift(self) -> None:
        """Compare every transcript, branches included, with a full re-render of its messages.

        The fraction of each kind of drift becomes a metric.
        """
        compared = [one for one in (self, *self.earlier, *self.branches) if one.index >= 0 and not one.inside_turn]
        drifts = [
            await beside_loop(
                size_of(one.messages),
                partial(one.context.chat.drift, one.transcript.ids, one.messages, one.tools),
            )
            for one in compared
        ]
        for kind in Drift if drifts else ():
            self.trajectory.metrics[f"drift/{kind.value}"] = drifts.count(kind) / len(drifts)

    def finish(self, status: Status) -> None:
        """Set the trajectory's ending and its costs, branches included."""
        everyone = (self, *self.branches)
        self.trajectory.status = status
        self.trajectory.metrics.update(
            generate_seconds=sum(one.generate_seconds for one in everyone),
            tool_seconds=sum(one.tool_seconds for one in everyone),
            cached_tokens=float(sum(one.cached_tokens for one in everyone)),
            context_tokens=float(sum(one.prompt_tokens for one in everyone)),
        )


CURRENT_EPISODE: ContextVar[Episode] = ContextVar("current episode")
"""Episode of the trajectory that the current task belongs to, for code that is called without it."""
