"""Loops, tools, interactions, scorers and data of a run, loaded and checked before any model."""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from agentrl.agent_loop import AgentLoop, agent_names, load_agent_loops
from agentrl.agent_loop.compaction import Compaction
from agentrl.agent_loop.registry import as_loop, instantiate
from agentrl.agent_loop.roles import Roles
from agentrl.agent_loop.teacher_context import load_teacher_context
from agentrl.chat import Chat
from agentrl.chat.check import marks_left, start_up_check
from agentrl.config import Config
from agentrl.config.sections.data import DataConfig
from agentrl.config.sections.reward import CustomRewardConfig, ScorerConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.data.contract import Dataset
from agentrl.data.dataset import FileDataset
from agentrl.data.messages import FurtherFields, digest_of, further_with_reasoning, told_fields
from agentrl.data.own import load_own
from agentrl.errors import ConfigError, DataError, UserError
from agentrl.interaction import Interaction, load_interactions
from agentrl.interaction.recorded import RecordedInteraction
from agentrl.observe.display import Display, note_of_files, warn_of_counts
from agentrl.observe.excerpt import Reading
from agentrl.remote.router import ServerAccess
from agentrl.reward import RewardManager, make_reward_manager
from agentrl.reward.manager import NaiveRewardManager
from agentrl.rollouts.objects import UserObjects
from agentrl.system.call_journal import RENAMED
from agentrl.system.cassette import Cassette
from agentrl.system.plugin import with_present_names
from agentrl.system.proxies import spare_own_addresses
from agentrl.system.user_code import await_user_code, user_code
from agentrl.tool import ToolSchema
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Message
from agentrl.trajectory.picture import pictures_in
from agentrl.trajectory.sample import Sample

logger = logging.getLogger(__name__)
ASKING = "interaction/"
"""Beginning of data sources that are scored by an interaction."""
NO_SUMMARY = "agent_name={}, whose conversations go on from no summary (multi_turn.compaction)"
ASSISTANT_LAST = "an assistant message at their end: the policy begins another turn behind it, and does not continue it"


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The first rows of each data source, interaction and loop, on which these are tried before the first step."""

    by_source: dict[str, Sample] = field(default_factory=dict)
    by_interaction: dict[str, Sample] = field(default_factory=dict)
    by_loop: dict[str, Sample] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Keep the row for each name that no earlier row uses."""
        self.by_source.setdefault(sample.data_source, sample)
        self.by_loop.setdefault(sample.agent_name, sample)
        if sample.interaction is not None:
            self.by_interaction.setdefault(sample.interaction, sample)


@dataclass(frozen=True, slots=True)
class RunContext:
    """Everything that rows name: loops, tools, interactions, scorers. Checks rows, and starts and closes its parts."""

    loops: dict[str, AgentLoop]
    tools: ToolSet
    interactions: dict[str, Interaction]
    reward: RewardManager | None
    """None: nothing is scored."""
    roles: Roles | None = None
    """None: no episode has roles."""
    objects: UserObjects = field(default_factory=UserObjects)
    """Parts of the above that were given as objects, as they were given."""
    first: FirstRows = field(default_factory=FirstRows)
    """Filled by `fit_prompts`."""

    def bind(self, chat: Chat) -> None:
        """Give tools the tokenizer by which their answers are cut, and the reward manager the same."""
        self.tools.bind(chat.encode, chat.decode, chat.vision.tokens_of if chat.vision is not None else None)
        if self.reward is not None:
            self.reward.bind(chat.tokenizer)

    def serve(self, servers: ServerAccess | None, date: str | None) -> None:
        """Give the scorers the servers of a generative reward model, where there is one, and the run's date."""
        if self.reward is not None and servers is not None:
            self.reward.serve(servers, date)

    async def start(self, run: str) -> None:
        """Reach the services of tools and interactions, unless their answers are replayed. Raises ConfigError."""
        await self.tools.start(run)
        for interaction in self.interactions.values():
            await await_user_code(f"interaction {interaction.name}", interaction.start, partial(interaction.start, run))
        if self.reward is not None:
            await self.reward.start(run)
        if self.roles is not None:
            await self.roles.start(run)

    async def close(self) -> None:
        """Free the resources of tools, interactions and scorers, also where one of them fails to."""
        closing = [self.tools.close(), *(interaction.close() for interaction in self.interactions.values())]
        if self.reward is not None:
            closing.append(self.reward.close())
        if self.roles is not None:
            closing.append(self.roles.close())
        for ended in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(ended, BaseException):
                logger.warning("close: %s: %s", type(ended).__name__, ended)

    def reading(self, chat: Chat) -> Reading:
        """Say how the display reads tool calls in text: as each loop writes them, else as the chat format does."""
        patterns = {name: loop.calls or chat.format.shown for name, loop in self.loops.items()}
        return Reading(chat.shown, {name: pattern for name, pattern in patterns.items() if pattern is not None})

    def check_row(self, sample: Sample) -> None:
        """Raise DataError for parts of a row that its loop would not use, or that its scorer would miss.

        A loop may not use images, an interaction or arguments of an interaction.
        """
        if self.reward is not None:
            with user_code(
                f"reward manager {type(self.reward).__name__}", self.reward.check_row, passing=(ValueError,)
            ):
                self.reward.check_row(sample)
        loop = self.loops[sample.agent_name]
        if not loop.takes_images and any(pictures_in(sample.prompt)):
            raise DataError(f"it has images, and agent_name={sample.agent_name} shows none")
        if sample.interaction is None:
            return
        kwargs = dict(sample.interaction_kwargs)
        if not loop.takes_interactions:
            taking = ", ".join(name for name, loop in self.loops.items() if loop.takes_interactions)
            raise DataError(
                f"it has interaction_kwargs, and agent_name={sample.agent_name} asks no interaction; {taking} does "
                "(a loop of your own says so by takes_interactions = True)"
            )
        interaction = self.interactions[kwargs.pop("name")]
        with user_code(f"interaction {interaction.name}", interaction.check_row, passing=(ValueError,)):
            interaction.check_row(kwargs)

    def first_prompt(self, sample: Sample) -> tuple[list[Message], list[ToolSchema]]:
        """Return the messages and the tools of the first prompt that the row's loop makes."""
        loop = self.loops[sample.agent_name]
        with user_code(f"agent loop {sample.agent_name}", loop.first_prompt, passing=(ValueError,)):
            return loop.first_prompt(sample, self.tools.schemas)


def run_name(config: RolloutsConfig) -> str:
    """Return the name by which servers know the run."""
    return config.tools.client_id or f"{config.trainer.project_name}/{config.trainer.experiment_name}"


def load_chat(config: RolloutsConfig) -> Chat:
    """Load tokenizer, template and parser of the model; after `load_context`, whose files may register the parser.

    Raises ConfigError.
    """
    return Chat.of_model(config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.multi_turn.format)


def load_context(config: RolloutsConfig, objects: UserObjects | None = None, *, scored: bool = True) -> RunContext:
    """Load the objects that the YAML files name, in addition to `objects`, and the scorers where trajectories are
    scored.

    Imports no torch. Raises UserError. `RunContext.bind` follows when the tokenizer is there.
    """
    spare_own_addresses(os.environ)  # before a user's file makes a client, which may read them once
    objects = objects or UserObjects()
    turns, agent = config.actor_rollout_ref.rollout.multi_turn, config.actor_rollout_ref.rollout.agent
    path = agent.agent_loop_config_path
    options = {} if path is None else load_agent_loops(path)
    cassette = None
    if config.tools.cassette is not None and config.tools.cassette_path is not None:
        cassette = Cassette(config.tools.cassette_path, config.tools.cassette)
    tools = ToolSet.from_yaml(
        turns.tool_config_path,
        options=turns.tool_options,
        timeout=turns.tool_timeout,
        max_response_tokens=turns.max_tool_response_length,
        truncate_side=turns.tool_response_truncate_side,
        unit=turns.tool_response_unit,
        cassette=cassette,
        further=objects.tools,
    )
    tools.limit_run(config.tools.max_concurrent, config.tools.max_rate)
    interactions = load_interactions(turns.interaction_config_path)
    for interaction in objects.interactions:
        if interaction.name in interactions:
            raise ConfigError(f"two interactions are called {interaction.name!r}: give one of them another name")
        interactions[interaction.name] = interaction
    interactions = {name: with_present_names(interaction, RENAMED) for name, interaction in interactions.items()}
    if cassette is not None:
        interactions = {name: RecordedInteraction(interaction, cassette) for name, interaction in interactions.items()}
    reward = None
    if scored:
        reward = load_reward(config, objects)
    options["openai_proxy"] = agent.openai_proxy.model_dump()
    loops = instantiate(agent_names(), options)
    for name, given in objects.loops.items():
        if name in loops:
            raise ConfigError(f"agent loop {name!r} is registered already: give yours another name")
        loops[name] = as_loop(name, given)
    for loop in loops.values():
        with_present_names(loop, RENAMED).configure(config)
    roles = Roles(config.actor_rollout_ref.rollout.roles) if config.actor_rollout_ref.rollout.roles else None
    return RunContext(loops, tools, interactions, reward, roles, objects)


def load_reward(config: RolloutsConfig, objects: UserObjects) -> RewardManager:
    """Make the reward manager that the config names, or take that of `objects`, or the naive one around their function.

    Raises ConfigError.
    """
    keys, custom, beside_model = config.reward_model, config.custom_reward_function, uses_reward_model(config)
    if keys.overlong_buffer.max_resp_len is None:
        limit = {"max_resp_len": config.data.max_response_length}
        keys = keys.model_copy(update={"overlong_buffer": keys.overlong_buffer.model_copy(update=limit)})
    if isinstance(config, Config) and config.reward_model.classifies and config.reward_model.model.replaces_scorers:
        scorers = {"*": ScorerConfig(name="agentrl.reward.scorer:no_score")}
        keys, custom = keys.model_copy(update={"scorers": scorers}), CustomRewardConfig()
    if objects.reward is None:
        return make_reward_manager(keys, custom, beside_model=beside_model)
    if keys.reward_manager != "naive":
        raise ConfigError(
            f"reward_model.reward_manager={keys.reward_manager} takes no reward that is given as an object: "
            "leave one of them out"
        )
    if isinstance(objects.reward, RewardManager):
        return objects.reward
    return NaiveRewardManager(keys, custom, function=objects.reward, beside_model=beside_model)


def uses_reward_model(config: RolloutsConfig) -> bool:
    """Return True if a reward model scores in addition to the scorers, which happens only in training."""
    return isinstance(config, Config) and config.reward_model.classifies


def open_rows(config: RolloutsConfig, files: str | list[str], max_samples: int | None, context: RunContext) -> Dataset:
    """Read the rows, and check them, the names in them and the loops that run them. Imports no torch.

    Raises UserError.
    """
    loop, on_bad_row = config.actor_rollout_ref.rollout.agent.default_agent_loop, config.data.on_bad_row
    data: Dataset
    if isinstance(config.data, DataConfig) and config.data.custom_cls.path is not None:
        custom = config.data.custom_cls
        data = load_own(custom, files, config, max_samples)
    else:
        data = FileDataset(
            files,
            prompt_key=config.data.prompt_key,
            image_key=config.data.image_key,
            default_agent_loop=loop,
            max_samples=max_samples,
            on_bad_row=on_bad_row,
        )
    sources = data.check(
        agent_names=list(context.loops),
        tool_names=context.tools.names,
        interaction_names=list(context.interactions),
    )
    if context.reward is not None:
        context.reward.check(sources)
    for name in data.loops:
        with user_code(f"agent loop {name}", context.loops[name].check):
            context.loops[name].check()
    return data


def fit_prompts(
    rows: Sequence[Dataset], config: RolloutsConfig, chat: Chat, context: RunContext, display: Display
) -> None:
    """Render every prompt of the data sets; leave out (or refuse) prompts that are too long.

    Raises DataError, and ConfigError for a template that cannot be used, before the other rows are rendered.
    """
    check_template(rows[0], chat, context)
    compaction = Compaction.from_config(config.actor_rollout_ref.rollout.multi_turn.compaction)
    if compaction is not None:
        compaction.check_room(chat, config.data.max_response_length)
    warned: set[str] = set()
    most, teacher_context = config.data.max_prompt_length, load_teacher_context(config)
    for data in rows:
        unanswered: list[Sample] = []
        toolless: list[Sample] = []
        cut: list[int] = []
        told: list[bool] = []
        found: Counter[str] = Counter()
        fields = FurtherFields(further_with_reasoning)
        digests = array("q")
        remarks = chat.remarks.copy()

        def length(
            sample: Sample,
            unanswered: list[Sample] = unanswered,
            toolless: list[Sample] = toolless,
            cut: list[int] = cut,
            told: list[bool] = told,
            found: Counter[str] = found,
            fields: FurtherFields = fields,
            digests: array[int] = digests,
        ) -> int:
            # Here, since this pass decodes each row, and no earlier pass does.
            context.check_row(sample)
            context.first.add(sample)
            fields.note(sample.prompt)
            if sample.prompt[-1]["role"] == "assistant":
                found[ASSISTANT_LAST] += 1
            if sample.interaction is None and sample.data_source.startswith(ASKING):
                unanswered.append(sample)
            loop = context.loops[sample.agent_name]
            if compaction is not None and not loop.compacts:
                found[NO_SUMMARY.format(sample.agent_name)] += 1
            if loop.offers_tools and not context.tools.names and sample.interaction is None:
                toolless.append(sample)
            if teacher_context is not None:
                told.append(teacher_context(sample) is not None)
            prompt, tools = context.first_prompt(sample)
            ids = chat.render(prompt, tools)
            cuts = config.data.truncation != "error" and not config.data.filter_overlong_prompts
            if not cuts and len(ids) > most:
                return len(ids)
            if len(ids) > most and chat.images(ids, prompt):
                raise DataError(
                    f"the prompt is {len(ids)} tokens long, data.max_prompt_length is {most}, and one with images "
                    "cannot be cut (data.truncation)"
                )
            digests.append(digest_of(sample.prompt))
            if len(ids) > most:
                cut.append(len(ids))
            return min(len(ids), most)

        with display.stage("check prompts", total=len(data)) as stage:
            dropped = data.filter_overlong(
                length,
                most,
                refuse=not config.data.filter_overlong_prompts,
                progress=stage.advance,
            )
        note_of_files(display, data.notes)
        if data.bad.count:
            display.warn(data.bad.told(", ".join(data.files)))
        _note_lengths(config, dropped, cut, display)
        found_twice, counts = np.unique(digests, return_counts=True)
        data.repeated = frozenset(found_twice[counts > 1].tolist())
        if data is rows[0]:
            trained = found_twice
        elif len(both := np.flatnonzero(np.isin(digests, trained))):
            first = data[int(both[0])]
            display.note(
                f"{len(both)} of {len(data)} prompts of {', '.join(data.files)} are in {', '.join(rows[0].files)}, "
                f"too, the first is {first.file} row {first.row}: scores on them say nothing of other rows"
            )
        files = ", ".join(data.files)
        warn_of_counts(display, chat.remarks - remarks, f"prompts of {files}")
        if data is rows[0] and not all(told):
            display.warn(
                f"{told.count(False)} of {len(told)} rows of {', '.join(data.files)} show a teacher nothing that the "
                "policy is not shown, by distillation.teacher.privileged, and learn from rewards alone"
            )
        warn_of_counts(display, found | told_fields(fields.unread(chat.render)), f"of {len(data)} prompts of {files}")
        for kind, remark in remarks_on_rows(data, config, context, unanswered, toolless):
            if kind not in warned:
                warned.add(kind)
                display.warn(remark)


def check_template(data: Dataset, chat: Chat, context: RunContext) -> None:
    """Raise ConfigError where the template cannot be used with the first row's tools.

    A first row that cannot be used itself is left to the pass over all rows, which names its place.
    """
    try:
        prompt, tools = context.first_prompt(data[0])
        chat.render(prompt, tools)
    except (ValueError, TypeError, LookupError, RuntimeError, UserError):
        return
    start_up_check(chat, prompt, tools)


def _note_lengths(config: RolloutsConfig, dropped: int, cut: Sequence[int], display: Display) -> None:
    most, truncation = config.data.max_prompt_length, config.data.truncation
    if dropped:
        display.note(f"{dropped} prompts longer than data.max_prompt_length={most} are left out")
    if cut:
        display.note(
            f"{len(cut)} prompts longer than data.max_prompt_length={most} (up to {max(cut)}) are cut: "
            f"data.truncation={truncation}"
        )


def remarks_on_rows(
    data: Dataset, config: RolloutsConfig, context: RunContext, unanswered: list[Sample], toolless: list[Sample]
) -> Iterator[tuple[str, str]]:
    """Yield (kind, warning) for rows that leave tools or interactions unused, which is seldom meant.

    unanswered: the rows whose data source wants an interaction, but which name no interaction. toolless: the rows
    without an interaction, whose loop is for tools, where none are configured.
    """
    files, agent = ", ".join(data.files), config.actor_rollout_ref.rollout.agent
    if data.without_loop and context.tools.names and agent.default_agent_loop == "single_turn":
        yield (
            "loop",
            f"{data.without_loop} rows of {files} have no agent_name and run single_turn, which calls no tool; "
            f"configured are {', '.join(context.tools.names)}. Give rows an agent_name, e.g. tool_agent, or set "
            "actor_rollout_ref.rollout.agent.default_agent_loop",
        )
    if toolless:
        first = toolless[0]
        yield (
            "tools",
            f"{len(toolless)} rows, the first is {first.file} row {first.row}, run {first.agent_name}, which is for "
            "tools, and none are configured: the policy is offered no tool, and answers alone. Name them in "
            "actor_rollout_ref.rollout.multi_turn.tool_config_path, or give such rows agent_name=single_turn",
        )
    columns = (
        "Where rows have them, the file may not: pyarrow.Table.from_pylist takes its columns from the first row alone"
    )
    if unanswered:
        first = unanswered[0]
        yield (
            "interaction",
            f"{len(unanswered)} rows, the first is {first.file} row {first.row}, have data_source={first.data_source} "
            f"and no interaction_kwargs: nobody answers the policy in them. {columns}",
        )
    elif context.interactions and not context.first.by_interaction:
        yield (
            "interaction",
            f"interactions are configured ({', '.join(context.interactions)}), and no row of {files} has "
            f"interaction_kwargs. {columns}",
        )


def show_first_prompts(chat: Chat, context: RunContext, display: Display) -> None:
    """Print a prompt of each loop; raise where its tools, the parser and the template do not fit."""
    for name, sample in context.first.by_loop.items():
        text = start_up_check(chat, *context.first_prompt(sample))
        display.note(f"first prompt of {sample.file} (agent_name={name}):\n{text}")
    if (left := marks_left(chat)) is not None:
        display.warn(left)
