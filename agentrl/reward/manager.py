"""Scores each trajectory by the scorer of its data source, when it ends."""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, cast

from agentrl.config.registries import SCORERS
from agentrl.config.sections.reward import (
    CustomRewardConfig,
    RewardConfig,
    RewardModelConfig,
    ScoreModelConfig,
    ScorerConfig,
)
from agentrl.errors import ConfigError, DataError
from agentrl.remote.router import ServerAccess
from agentrl.reward.asked_model import AskedModel
from agentrl.reward.code import CodeJudge
from agentrl.reward.contract import RewardManager
from agentrl.reward.judge import ModelJudge
from agentrl.reward.scorer import Scorer, Verdict, load_function
from agentrl.reward.sources import INSTANT, NEED_TRUTH, SOURCES, kind_of, ready_scorer
from agentrl.system.deadline import within
from agentrl.system.metrics import Metrics
from agentrl.system.plugin import nearest
from agentrl.trajectory import Message, Trajectory
from agentrl.trajectory.sample import Sample
from agentrl.trajectory.trajectory import NO_SOURCE

NEEDED = {
    "code": "judged by running programs: start `python -m sandbox.server`, and name it with "
    "reward_model.sandbox_fusion.url=http://127.0.0.1:8080",
    "judge": "scored by a language model: name an OpenAI-compatible endpoint with "
    "reward_model.judge.base_url=http://HOST:PORT/v1 and its model with reward_model.judge.model",
}
"""Keys that scorers which ask servers need, by kind."""


class NaiveRewardManager(RewardManager):
    """The ready scorers by data source, a user's for some of them, or a user's one function in place of all."""

    def __init__(
        self,
        config: RewardConfig | None = None,
        custom: CustomRewardConfig | None = None,
        *,
        function: Callable[..., object] | None = None,
        beside_model: bool = False,
    ) -> None:
        """Load the scorers.

        Args:
            custom: names a function that scores everything.
            function: such a function itself.
            beside_model: a reward model scores, too; a data source without a scorer has a score of 0 then.

        Raises ConfigError for a function that cannot be loaded or called, and for missing settings of servers.
        """
        super().__init__(config or RewardConfig(), custom or CustomRewardConfig(), beside_model=beside_model)
        self._model: AskedModel | None = None
        asks_model = generative(self.config) is not None
        self._custom: Scorer | None = None
        if self.custom.path is not None:
            where = f"custom_reward_function: {self.custom.path}: {self.custom.name}"
            if function is not None:
                raise ConfigError(f"{where}: a reward function is given as an object, too; keep one of them")
            loaded, key = load_function(self.custom.path, self.custom.name), "custom_reward_function.reward_kwargs"
            self._custom = Scorer.from_function(
                loaded, where, self.custom.reward_kwargs, key=key, asks_model=asks_model
            )
        if function is not None:
            where = f"reward {getattr(function, '__name__', function)}"
            self._custom = Scorer.from_function(function, where, self.custom.reward_kwargs, asks_model=asks_model)
        self._judges: dict[str, CodeJudge | ModelJudge] = {}
        if (sandbox := self.config.sandbox_fusion).url is not None:
            self._judges["code"] = CodeJudge(sandbox)
        if (judge := self.config.judge).base_url is not None:
            self._judges["judge"] = ModelJudge(judge)
        bounds = {"code": sandbox.max_concurrent, "judge": judge.max_concurrent}
        self._asking = {
            kind: Scorer.from_function(judge.compute_score, kind, {}, max_concurrent=bounds[kind])
            for kind, judge in self._judges.items()
        }
        self._own = {pattern: self._named(pattern, entry) for pattern, entry in self.config.scorers.items()}
        self._tokenizer: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places: dict[int | None, asyncio.Semaphore] = {}

    def sources(self) -> list[str]:
        """The data sources that scorers know; `*` stands for anything."""
        return sorted({*self._own, *SOURCES})

    def check(self, data_sources: Iterable[str]) -> None:
        """Raises DataError for a data source that nothing scores, ConfigError where a server's URL is missing.

        ConfigError, too, for a generative reward model that no scorer asks.
        """
        functions = [self._custom] if self._custom is not None else list(self._own.values())
        if generative(self.config) and not any(isinstance(one, Scorer) and one.asks_model for one in functions):
            raise ConfigError(
                "reward_model.model.generative=true serves a model that no scorer asks: give the function of "
                "custom_reward_function.path, or one in reward_model.scorers, the parameter reward_router_address"
            )
        if self._custom is not None:
            return
        for source in data_sources:
            scorer = self._scorer(source)
            if isinstance(scorer, str):
                raise ConfigError(f"data_source {source!r} is {NEEDED[scorer]}")
            if scorer is None and not self.beside_model:
                whose = f"data_source {source!r} has no scorer{nearest(source, self.sources())}"
                if source == NO_SOURCE:
                    whose = "rows without a text in the column data_source have no scorer"
                raise DataError(
                    f"{whose}; known are {', '.join(self.sources())}: name yours in reward_model.scorers, or set "
                    "custom_reward_function.path to a file with a function for all rows"
                )

    def check_row(self, sample: Sample) -> None:
        """Raise DataError for a row without the ground truth that its ready scorer compares with."""
        if sample.ground_truth is not None or self._custom is not None or self.beside_model:
            return
        if (kind := self._kind(sample.data_source)) in NEED_TRUTH:
            raise DataError(
                f"it has no reward_model.ground_truth, with which the scorer of data_source {sample.data_source!r} "
                f"({kind}) compares; every score would be 0. Add the column reward_model: {{ground_truth: ...}}, or "
                "name a scorer that needs none in reward_model.scorers or custom_reward_function.path"
            )

    def is_tried(self, data_source: str) -> bool:
        """Say so of scorers that ask no server of ours."""
        scorer = self._custom or self._scorer(data_source)
        return scorer not in self._asking.values() and not (isinstance(scorer, Scorer) and scorer.asks_model)

    def bind(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def serve(self, servers: ServerAccess, date: str | None = None) -> None:
        if (model := generative(self.config)) is not None:
            self._model = AskedModel(model, servers, date)

    @property
    def model_arguments(self) -> Mapping[str, object]:
        """Values that functions are given of the generative reward model, by name; empty before `start`."""
        return {} if self._model is None else self._model.arguments

    async def start(self, run: str) -> None:
        """The run named `run` begins, in its event loop. Raises ConfigError when a server does not answer."""
        if self._model is not None:
            await self._model.start()
        for judge in self._judges.values():
            await judge.start(run)

    def take_metrics(self) -> Metrics:
        """Return and reset the numbers of the judge, and of the generative reward model."""
        metrics, judge = Metrics(), self._judges.get("judge")
        if self._model is not None:
            metrics.add(self._model.take_metrics(), "reward_model/")
        if isinstance(judge, ModelJudge):
            metrics.add(judge.take_metrics(), "judge/")
        return metrics

    async def close(self) -> None:
        """Close the connections to servers, if there are any."""
        async with AsyncExitStack() as stack:
            if self._model is not None:
                stack.push_async_callback(self._model.close)
            for judge in self._judges.values():
                stack.push_async_callback(judge.close)

    async def score(self, trajectory: Trajectory, sample: Sample) -> Verdict:
        return await self.judge(
            {
                "data_source": sample.data_source,
                "solution_str": solution_of(self.config, trajectory, sample, self._tokenizer),
                "ground_truth": sample.ground_truth,
                "extra_info": self.extra_info(trajectory, sample),
                "trajectory": trajectory,
            }
        )

    def extra_info(self, trajectory: Trajectory, sample: Sample) -> dict[str, object]:
        """Return what scorers are given as `extra_info`."""
        return shown_info(trajectory, sample)

    async def judge(self, arguments: Mapping[str, object]) -> Verdict:
        """Score by the scorer of the data source; arguments: what `agentrl.reward.scorer.ARGUMENTS` names."""
        data_source, arguments = str(arguments["data_source"]), {**arguments, **self.model_arguments}
        scorer = self._custom or self._scorer(data_source)
        if scorer is None and self.beside_model:
            return Verdict(0.0, {})
        if scorer is None or isinstance(scorer, str):
            raise LookupError(f"no scorer for data_source {data_source!r}")
        if scorer.is_instant:
            verdict = await scorer(arguments)
        else:
            async with self._place(scorer):
                try:
                    async with within(self.config.timeout) as deadline:
                        verdict = await scorer(arguments)
                except TimeoutError as error:
                    if deadline.expired():
                        late = f"no score within reward_model.timeout={self.config.timeout:g} s"
                        raise TimeoutError(late) from error
                    raise
        if self.on_verdict is not None:
            self.on_verdict(arguments, verdict.score)
        return verdict

    def _scorer(self, data_source: str) -> Scorer | str | None:
        """Find the scorer: a user's first, then the judge's own patterns. Its kind where a server's URL is missing."""
        for pattern, scorer in self._own.items():
            if fnmatch.fnmatchcase(data_source, pattern):
                return scorer
        kind = self._kind(data_source)
        if kind is None:
            return None
        return self._asking.get(kind, kind) if kind in NEEDED else ready_scorer(kind)

    def _kind(self, data_source: str) -> str | None:
        """Find the name of a data source's scorer; None without a scorer."""
        for pattern, entry in self.config.scorers.items():
            if fnmatch.fnmatchcase(data_source, pattern):
                return entry.name
        if any(fnmatch.fnmatchcase(data_source, pattern) for pattern in self.config.judge.data_sources):
            return "judge"
        return kind_of(data_source)

    def _named(self, pattern: str, entry: ScorerConfig) -> Scorer | str:
        """The scorer of an entry of `reward_model.scorers`."""
        key = f"reward_model.scorers.{pattern}"
        if entry.name not in NEEDED:
            function = cast(Callable[..., object], SCORERS.get(entry.name, key))
            in_loop = entry.name in INSTANT
            where, asks_model = f"{key}: {entry.name}", generative(self.config) is not None
            of_kwargs = f"{key}.kwargs"
            return Scorer.from_function(
                function, where, entry.kwargs, key=of_kwargs, in_loop=in_loop, asks_model=asks_model
            )
        if entry.kwargs:
            section = {"code": "sandbox_fusion", "judge": "judge"}[entry.name]
            raise ConfigError(f"{key}.kwargs: {entry.name} takes none; its keys are reward_model.{section}.*")
        return self._asking.get(entry.name, entry.name)

    def _place(self, scorer: Scorer) -> asyncio.Semaphore:
        """Places of a scorer with a bound of its own, or the places that all others share."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._places = loop, {}
        most = scorer.max_concurrent
        owner = None if most is None else id(scorer)
        return self._places.setdefault(owner, asyncio.Semaphore(most or self.config.max_concurrent))


def generative(config: RewardConfig) -> ScoreModelConfig | None:
    """Return the section of the reward model that scorers ask; None without such a model."""
    return config.model if isinstance(config, RewardModelConfig) and config.generates else None


def shown_info(trajectory: Trajectory, sample: Sample) -> dict[str, object]:
    """Return the row's `extra_info` with the trajectory's values for scorers, under verl's names.

    num_turns: the prompt, assistant turns and answers to them. rollout_reward_scores: by tool, the rewards of its
    calls, and under `user_turn_rewards` the rewards of turns without calls.
    """
    if trajectory.turns:
        num_turns = 1 + len(trajectory.trained_turns)
    else:
        num_turns = 1 + max(len(trajectory.messages) - len(sample.prompt), 0)
    by_tool: dict[str, list[float]] = {}
    for call in trajectory.tool_calls:
        if call.reward is not None:
            by_tool.setdefault(call.name, []).append(call.reward)
    scores = [turn.reward for turn in trajectory.turns if turn.reward is not None and not turn.calls]
    return {
        **sample.extra_info,
        "turn_rewards": trajectory.turn_rewards,
        "num_turns": num_turns,
        "rollout_reward_scores": {**by_tool, **({"user_turn_rewards": scores} if scores else {})},
        "turn_scores": scores,
        "tool_rewards": [reward for rewards in by_tool.values() for reward in rewards],
        **trajectory.for_scorers,
    }


def solution_of(config: RewardConfig, trajectory: Trajectory, sample: Sample, tokenizer: Any) -> str:
    """Return what `reward_model.solution_str` asks for; of a record without tokens, the turns."""
    if config.solution_str == "response" and trajectory.transcripts and tokenizer is not None:
        return response_text(trajectory, tokenizer)
    return policy_text(trajectory, sample)


def response_text(trajectory: Trajectory, tokenizer: Any) -> str:
    """Decode all tokens after the prompt of each transcript that is trained on, special tokens left out."""
    responses = (one.ids[one.prompt_length : one.trained_end] for one in trajectory.transcripts if one.trained_to != 0)
    return "\n".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in responses)


def policy_text(trajectory: Trajectory, sample: Sample) -> str:
    """The assistant messages that the policy wrote, one after another on lines of their own.

    Assistant messages of a prompt (examples, or a history that an agent rewrote) are not the policy's. Tool answers and
    user turns are not either. Tokens that training leaves out (`Transcript.trained_to`) do not count. A record without
    turns is read by its messages.
    """
    if trajectory.turns:
        return turns_text(trajectory)
    given = sum(message["role"] == "assistant" for message in sample.prompt)
    written = [message for message in trajectory.messages if message["role"] == "assistant"][given:]
    return "\n".join(text for text in map(_text, written) if text)


def turns_text(trajectory: Trajectory) -> str:
    """The same, read by the turns alone."""
    return "\n".join(turn.text for turn in trajectory.trained_turns if turn.role == "assistant" and turn.text)


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""
