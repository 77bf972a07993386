"""verl's contract of an agent loop, which makes token ids itself, and the loop of ours that a class of it becomes.

Such a loop may arrange ids as it likes, so its output is compared with the ids that the engine sampled for it. An id
that its mask marks as the policy's must be the engine's at that place, after the very ids before it. Log-probs and
versions of weights are the engine's, never the loop's.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field

from agentrl.agent_loop.base import AgentLoop, Episode
from agentrl.agent_loop.limits import seed_of
from agentrl.agent_loop.registry import register as register_loop
from agentrl.chat import Chat
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import FinishReason, Generation, SamplingParams
from agentrl.system.json_value import JSON
from agentrl.system.numbers import finite, number_of
from agentrl.system.user_code import Code, contract_error
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message, Status, ToolCallRecord, VersionSpan
from agentrl.verl.calling import ConstructorOptions, fitting, stand_in
from agentrl.verl.fields import sample_fields
from agentrl.verl.tokenizer import verl_tokenizer

NOT_READ = ("logprobs", "skip_special_tokens", "include_stop_str_in_output")
"""Sampling parameters of verl's servers that change no token."""
ONLY_ONE = ("n", "repetition_penalty")
"""Sampling parameters that must be 1."""


class AgentLoopMetrics(BaseModel):
    """Seconds of a trajectory by kind; `num_preempted` is accepted and not read."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """One sequence of a trajectory: ids of the prompt, ids after it, and which of these the policy sampled (1)."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    """Accepted and not read: the engine's own are recorded."""
    routed_experts: object = None
    multi_modal_data: dict[str, object] | None = None
    reward_score: float | None = None
    """Score of the trajectory; it is not scored otherwise then."""
    num_turns: int = 0
    """Shown to scorers in `extra_info`."""
    metrics: AgentLoopMetrics = AgentLoopMetrics()
    extra_fields: dict[str, object] = Field(default_factory=dict)
    """Shown to scorers in `extra_info`."""
    mm_processor_kwargs: dict[str, object] | None = None


class TokenOutput(BaseModel):
    """Answer of `server_manager.generate`."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: object = None
    stop_reason: str | None = None
    """`completed`, or `aborted`."""
    num_preempted: int | None = None
    extra_fields: dict[str, object] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DictConfigWrap:
    """A config as constructors are given it."""

    config: DictConfig


@dataclass(frozen=True, slots=True)
class MergedTokens:
    """Token ids after messages or a turn were appended."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One request to the engine, and the tokens it sampled."""

    prompt: list[int]
    generation: Generation
    seconds: float
    seed: int | None


@dataclass(slots=True)
class ServerManager:
    """The engine, as a loop of verl's asks it. One object for each trajectory."""

    episode: Episode
    sampled: list[Sampled] = field(default_factory=list)
    requests: int = 0
    """Number of requests so far, running ones included: each has a seed of its own."""
    calls: dict[int, list[ToolCallRecord]] = field(default_factory=dict)
    """Records of tool calls by the index in `sampled` of the answer that they were read from."""
    sessions: dict[str, str] = field(default_factory=dict)
    """The engine's name of each request id: of the first one the episode's own."""

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        image_data: Sequence[object] | None = None,
        video_data: Sequence[object] | None = None,
        **kwargs: object,
    ) -> TokenOutput:
        """Continue `prompt_ids`. Requests of one id share a cache.

        `max_tokens`, `stop` and `stop_token_ids` of `sampling_params` hold for this request; temperature, top_p and
        top_k are the run's. Raises ValueError for other ones, as tokens of another distribution cannot be trained on.
        """
        if image_data or video_data or kwargs.get("audio_data"):
            raise ValueError("generate: images, videos and sounds do not reach the model in a loop of verl's contract")
        episode, ids = self.episode, [int(token) for token in prompt_ids]
        session = self.sessions.setdefault(
            request_id, episode.session if not self.sessions else f"{episode.session}.{len(self.sessions)}"
        )
        params = self._params(dict(sampling_params), len(ids))
        if params is None:
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="completed")
        self.requests += 1
        begun = time.monotonic()
        generation = await episode.sample_ids(ids, params, session)
        self.sampled.append(Sampled(ids, generation, time.monotonic() - begun, params.seed))
        reason = "aborted" if generation.finish_reason.kind == "abort" else "completed"
        return TokenOutput(token_ids=list(generation.ids), log_probs=list(generation.logprobs), stop_reason=reason)

    def _params(self, given: dict[str, object], length: int) -> SamplingParams | None:
        """Read the parameters of a request after `length` ids; None where there is no room for another token."""
        episode = self.episode
        limits, run, chat = episode.context.limits, episode.params, episode.context.chat
        for name in ("temperature", "top_p", "top_k"):
            value = given.pop(name, None)
            if value is not None and number_of(value) != float(getattr(run, name)):
                raise ValueError(
                    f"generate: {name} is {getattr(run, name):g} in this run, found {value}: tokens that are sampled "
                    "otherwise cannot be trained on. Leave it as run() was given it"
                )
        asked, stop, stop_ids = _ends(given)
        for name, value in given.items():
            if name not in NOT_READ and not (name in ONLY_ONE and value == 1):
                raise ValueError(f"generate: sampling parameter {name}={value!r} has no equal here: leave it out")
        most = [limits.max_model_len - length, limits.max_tokens_per_turn, *asked]
        room = min(limit for limit in most if limit is not None)
        if room <= 0:
            return None
        return SamplingParams(
            max_new_tokens=room,
            temperature=run.temperature,
            top_p=run.top_p,
            top_k=run.top_k,
            stop_token_ids=(*chat.stop_token_ids, *chat.media_token_ids, *stop_ids),
            stop=stop,
            seed=seed_of(episode.seed, self.requests, length),
            priority=run.priority,
        )


def _ends(given: dict[str, object]) -> tuple[list[int], tuple[str, ...], list[int]]:
    """Take the ends of a turn out of sampling parameters: numbers of tokens, texts and ids."""
    most = [(name, given.pop(name, None)) for name in ("max_tokens", "max_new_tokens")]
    stop = tuple(map(str, _several("stop", given.pop("stop", None))))
    ids = _several("stop_token_ids", given.pop("stop_token_ids", None))
    asked = [_count(name, value) for name, value in most if value is not None]
    return asked, stop, [_count("stop_token_ids", id) for id in ids]


def _count(name: str, value: object) -> int:
    """Read a whole number. Raises ValueError for anything else."""
    number = number_of(value)
    if number is None:
        raise ValueError(f"generate: {name} must be a number, found {value!r:.100}")
    return int(number)


def _several(name: str, value: object) -> Iterable[object]:
    """Return the values of a list, a single text, or nothing for None. Raises ValueError for anything else."""
    if value is None or isinstance(value, str):
        return () if not value else (value,)
    if not isinstance(value, Iterable):
        raise ValueError(f"generate: {name} must be a list, found {value!r:.100}")
    return value


class AgentLoopBase(ABC):
    """Base class of a loop, as verl's; each trajectory has an object of its own.

    Name the class in the YAML of `rollout.agent.agent_loop_config_path`; further keys of its entry go to the
    constructor.
    """

    _class_initialized: ClassVar[bool] = False

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: ServerManager,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: type | None = None,
        data_config: DictConfigWrap | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the run's config, the engine and the tokenizer. `processor` and `dataset_cls` are None."""
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = self.dataset_config = self.config.data if data_config is None else data_config.config
        self.apply_chat_template_kwargs: dict[str, JSON] = dict(
            self.data_config.get("apply_chat_template_kwargs") or {}
        )
        self.mm_processor_kwargs: dict[str, JSON] = {}
        self.loop = asyncio.get_running_loop()
        self.init_class(config=self.config, tokenizer=tokenizer, processor=processor, **kwargs)

    @classmethod
    def adapted_class(cls) -> type[AgentLoop]:
        """Return the loop that replaces this class."""
        return stand_in(AdaptedLoop, cls)

    @classmethod
    def init_class(cls, config: DictConfig, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Set up the state shared by all objects of the class; called with each object that is made."""
        cls._class_initialized = True

    @abstractmethod
    async def run(self, sampling_params: dict[str, JSON], **kwargs: Any) -> AgentLoopOutput:
        """Run one trajectory. `kwargs` are the row's fields; `raw_prompt` are its messages."""

    @functools.cached_property
    def system_prompt(self) -> list[int]:
        """Ids that the chat template writes before the first message."""
        once, twice = (self._render([{"role": "user", "content": ""}] * times, None, False) for times in (1, 2))
        return once[: len(once) - (len(twice) - len(once))]

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        images: Sequence[object] | None = None,
        videos: Sequence[object] | None = None,
        remove_system_prompt: bool = False,
        **kwargs: object,
    ) -> list[int]:
        """Render messages and a generation prompt, by the tokenizer's own template. Raises ValueError for images.

        A tool's or user's text that spells a control token stays text.
        """
        if images or videos:
            raise ValueError("apply_chat_template: a loop of verl's contract is given no images or videos here")
        ids = self._render(messages, tools, True)  # not in a thread: without waiting, the order repeats exactly
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    async def process_vision_info(self, messages: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """Return the images and videos of messages: always empty, as rows with images do not reach such a loop."""
        return {}

    async def process_multi_modal_info(self, messages: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """Return the same as `process_vision_info`."""
        return {}

    def _get_mm_processor_kwargs(self, audio_data: Sequence[object] | None = None) -> dict[str, JSON]:
        """Return the arguments of a processor: always empty, as there is no processor."""
        return dict(self.mm_processor_kwargs)

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        """Raise ValueError for images, videos and sounds."""
        if has_multi_modal:
            raise ValueError("a loop of verl's contract is given no images, videos or sounds here")

    async def ct_build_initial_tokens(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        images: Sequence[object] | None = None,
        videos: Sequence[object] | None = None,
        **kwargs: object,
    ) -> list[int]:
        """Render the first prompt."""
        return await self.apply_chat_template(messages, tools, images, videos)

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: Sequence[Mapping[str, object]],
        updated_messages: Sequence[Mapping[str, object]],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> tuple[MergedTokens, list[int], list[float] | None]:
        """Append the messages in `updated_messages` after `previous_messages`, and a generation prompt."""
        chat = self.server_manager.episode.context.chat
        added = cast(Sequence[Message], updated_messages[len(previous_messages) :])
        new = chat.bridge(runtime_token_ids, added, cast("Sequence[ToolSchema] | None", tools))
        return _merged(runtime_token_ids, new, 0, response_mask, response_logprobs, None)

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> tuple[MergedTokens, list[int], list[float] | None]:
        """Append the ids that the policy sampled."""
        return _merged(runtime_token_ids, assistant_token_ids, 1, response_mask, response_logprobs, assistant_logprobs)

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        generation: bool,
    ) -> list[int]:
        episode = self.server_manager.episode
        chat = episode.context.chat
        text: str = self.tokenizer.apply_chat_template(
            chat.prepared(cast(Sequence[Message], messages), episode.sampled_texts),
            tools=tools,
            add_generation_prompt=generation,
            tokenize=False,
            **self.apply_chat_template_kwargs,
        )
        return chat.encode_markup(text)


def _merged(
    before: list[int],
    new: list[int],
    mask: int,
    response_mask: list[int],
    logprobs: list[float] | None,
    new_logprobs: list[float] | None,
) -> tuple[MergedTokens, list[int], list[float] | None]:
    aligned = None if logprobs is None else [*logprobs, *(new_logprobs or [0.0] * len(new))]
    return MergedTokens([*before, *new]), [*response_mask, *[mask] * len(new)], aligned


def register(agent_name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Register a loop (class decorator): rows whose `agent_name` is this run it. Raises ValueError for a taken name."""

    def decorate(subclass: type[AgentLoopBase]) -> type[AgentLoopBase]:
        register_loop(agent_name)(subclass.adapted_class())
        return subclass

    return decorate


class AdaptedLoop(AgentLoop):
    """A loop of ours around one of verl's contract."""

    takes_images = False
    wrapped: ClassVar[type[AgentLoopBase]]

    def __init__(self, options: ConstructorOptions | None = None) -> None:
        self.options = dict((options or ConstructorOptions()).model_extra or {})
        self.config = OmegaConf.create()

    @property
    def code(self) -> Code:
        return self.wrapped.run

    def configure(self, config: RolloutsConfig) -> None:
        self.config = as_verl_config(config)

    async def run(self, episode: Episode) -> None:
        server = ServerManager(episode)
        try:
            loop = self._make(server, episode.context.chat)
            output: object = await loop.run(_sampling_params(episode.params), **row_fields(episode))
        finally:
            for session in server.sessions.values():
                if session != episode.session:
                    await episode.context.engine.release(session)
        returned = output if isinstance(output, list) else [output]
        outputs = [one for one in returned if isinstance(one, AgentLoopOutput)]
        if not outputs or len(outputs) < len(returned):
            raise self._error(f"it must return an AgentLoopOutput, found {output!r:.100}")
        statuses = [await self._record(episode, server, one) for one in outputs]
        self._tell(episode, outputs)
        episode.finish(next((one for one in statuses if one is not Status.COMPLETED), Status.COMPLETED))

    def _make(self, server: ServerManager, chat: Chat) -> AgentLoopBase:
        data = DictConfigWrap(self.config.data)
        offered = {
            "trainer_config": DictConfigWrap(self.config),
            "server_manager": server,
            "tokenizer": verl_tokenizer(chat.tokenizer),
            "processor": None,
            "dataset_cls": None,
            "data_config": data,
            "dataset_config": data,
            **self.options,
        }
        return self.wrapped(**fitting(self.wrapped.__init__, offered))

    async def _record(self, episode: Episode, server: ServerManager, output: AgentLoopOutput) -> Status:
        """Write one output as a transcript; return how it ended."""
        prompt, response, mask = output.prompt_ids, output.response_ids, output.response_mask
        if len(mask) != len(response) or not set(mask) <= {0, 1}:
            raise self._error(
                f"response_mask must hold a 0 or 1 for each of {len(response)} response_ids, found {len(mask)} values"
            )
        if not prompt:
            raise self._error("its AgentLoopOutput has no prompt_ids")
        most = min(episode.context.limits.max_response_tokens, episode.context.limits.max_model_len - len(prompt))
        is_cut = len(response) > most
        response, mask = response[: max(most, 0)], mask[: max(most, 0)]
        origins = find_origins([*prompt, *response], server.sampled)
        for place, (id, is_sampled) in enumerate(zip(response, mask, strict=True)):
            if is_sampled and origins[len(prompt) + place] is None:
                raise self._error(self._unsampled(episode, place, id, len(prompt), server))
        messages = episode.sample.prompt
        episode.start_ids(prompt, messages, teacher_prompt=await episode.teacher_prompt(messages))
        episode.inside_turn = True  # the loop's own ids may differ from the template's
        last = await self._append(episode, server, response, mask, origins[len(prompt) :])
        if is_cut or (last is not None and last.kind == "length"):
            return Status.LENGTH
        return Status.ABORTED if last is not None and last.kind == "abort" else Status.COMPLETED

    async def _append(
        self,
        episode: Episode,
        server: ServerManager,
        response: list[int],
        mask: list[int],
        origins: list[int | None],
    ) -> FinishReason | None:
        """Append ids by turns; return why the last turn ended, None where an observation is last."""
        start, last = episode.transcript.prompt_length, None
        marked = [origin if is_sampled else None for origin, is_sampled in zip(origins, mask, strict=True)]
        for origin, run in itertools.groupby(range(len(response)), key=lambda place: marked[place]):
            places = list(run)
            ids = response[places[0] : places[-1] + 1]
            if origin is None:
                text = episode.context.chat.tokenizer.decode(ids, skip_special_tokens=True)
                said: list[Message] = [{"role": "tool", "content": text}]
                episode.observe_ids(ids, said)
                last = None
            else:
                one = server.sampled[origin]
                first = start + places[0] - len(one.prompt)
                part = _part(one.generation, first, first + len(ids))
                episode.early_calls = server.calls.pop(origin, [])
                await episode.record(part, one.seconds, one.seed)
                last = part.finish_reason
        return last

    def _unsampled(self, episode: Episode, place: int, id: int, prompt_length: int, server: ServerManager) -> str:
        text = episode.context.chat.tokenizer.decode([id])
        return (
            f"response_mask is 1 at place {place} of the response (id {id}, {text!r}; the prompt has {prompt_length} "
            f"ids), and none of the {len(server.sampled)} answers of server_manager.generate has this id there, after "
            "the same ids. Mark what the engine did not sample with 0, and keep prompt_ids and token_ids as they were "
            "given and returned: text that is decoded and encoded again has other ids"
        )

    def _tell(self, episode: Episode, outputs: Sequence[AgentLoopOutput]) -> None:
        """Keep the fields for scorers, and the loop's own score."""
        trajectory = episode.trajectory
        for output in outputs:
            trajectory.for_scorers.update(output.extra_fields)
            episode.tool_seconds += output.metrics.tool_calls
        final = outputs[-1]
        if final.num_turns:
            trajectory.for_scorers["num_turns"] = final.num_turns
        if final.reward_score is not None and (score := finite(final.reward_score)) is None:
            raise self._error(f"reward_score must be a finite number or None, found {final.reward_score!r:.100}")
        elif final.reward_score is not None:
            trajectory.score = score

    def _error(self, problem: str) -> Exception:
        return contract_error(f"agent loop {self.wrapped.__name__}", self.wrapped.run, problem)


def find_origins(ids: Sequence[int], sampled: Sequence[Sampled]) -> list[int | None]:
    """Find which request sampled each id: [T] indices into `sampled`, None for ids that no request sampled there.

    A request's ids count as far as `ids` begins with its prompt and continues with its sampled ids.
    """
    origins: list[int | None] = [None] * len(ids)
    for index, one in enumerate(sampled):
        begin = len(one.prompt)
        if list(ids[:begin]) != one.prompt:
            continue
        for place, id in enumerate(one.generation.ids, begin):
            if place >= len(ids) or ids[place] != id:
                break
            if origins[place] is None:
                origins[place] = index
    return origins


def _part(generation: Generation, begin: int, end: int) -> Generation:
    """Take the ids [begin, end) of a generation; a generation that is not taken to its end was cut."""
    spans = [
        VersionSpan(span.version, max(span.start, begin) - begin, min(span.end, end) - begin)
        for span in generation.versions
        if span.start < end and span.end > begin
    ]
    cut = len(generation.ids) - end
    reason = generation.finish_reason if end == len(generation.ids) else FinishReason("length")
    experts = None if generation.experts is None else generation.experts[: len(generation.experts) - cut]
    return Generation(generation.ids[begin:end], generation.logprobs[begin:end], reason, spans, experts=experts)


def _sampling_params(params: SamplingParams) -> dict[str, JSON]:
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


def row_fields(episode: Episode) -> dict[str, object]:
    """Return the row's fields under verl's names."""
    sample = episode.sample
    return {
        **sample_fields(sample),
        "tools_kwargs": dict(sample.tools_kwargs),
        "interaction_kwargs": dict(sample.interaction_kwargs),
        "uid": episode.trajectory.uid,
    }


def as_verl_config(config: RolloutsConfig) -> DictConfig:
    """Write the run's config with the names that verl's loops read."""
    values: dict[str, Any] = config.model_dump(mode="json")
    rollout, data = values["actor_rollout_ref"]["rollout"], values["data"]
    lengths = {"prompt_length": data["max_prompt_length"], "response_length": data["max_response_length"]}
    rollout |= {**lengths, "calculate_log_probs": True}
    rollout["max_model_len"] = rollout["max_model_len"] or sum(lengths.values())
    data["apply_chat_template_kwargs"] = values["actor_rollout_ref"]["model"]["chat_template_kwargs"]
    data["tool_config_path"] = rollout["multi_turn"]["tool_config_path"]
    return OmegaConf.create(values)
