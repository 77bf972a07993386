"""Scores each trajectory when it ends.

A scorer that raises, answers with something that is no finite number, or takes too long, fails that trajectory
(status FAILED, never a zero reward); the run goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from agentrl.config.schema import CustomRewardConfig, RewardConfig
from agentrl.data.sample import Sample
from agentrl.errors import DataError
from agentrl.plugin import nearest
from agentrl.reward.scorer import Scorer, Verdict, load_function
from agentrl.reward.sources import SOURCES, scorer_of
from agentrl.trajectory import Message, Status, Trajectory


class RewardManager:
    """The ready scorers by data source, or the user's one function in place of all of them."""

    def __init__(self, config: RewardConfig | None = None, custom: CustomRewardConfig | None = None) -> None:
        """Raises ConfigError when the custom function cannot be loaded or called."""
        self._config = config or RewardConfig()
        self._custom: Scorer | None = None
        if custom is not None and custom.path is not None:
            where = f"custom_reward_function: {custom.path}: {custom.name}"
            self._custom = Scorer.of(load_function(custom.path, custom.name), where, custom.reward_kwargs)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(self._config.max_concurrent)

    def sources(self) -> list[str]:
        """The data sources that ready scorers know; `*` stands for anything."""
        return sorted(SOURCES)

    def check(self, data_sources: Iterable[str]) -> None:
        """Raises DataError for a data source that nothing scores."""
        if self._custom is not None:
            return
        for source in data_sources:
            if scorer_of(source) is None:
                raise DataError(
                    f"data_source {source!r} has no scorer{nearest(source, SOURCES)}; known are "
                    f"{', '.join(self.sources())}: set custom_reward_function.path to a file with your own"
                )

    async def score(self, trajectory: Trajectory, sample: Sample) -> None:
        """Set `score` and `score_extra`, or status FAILED and `failure`. Failed trajectories are left as they are."""
        if trajectory.status is Status.FAILED:
            return
        begun = time.perf_counter()
        try:
            verdict = await self._verdict(trajectory, sample)
        except TimeoutError as error:
            return _fail(trajectory, str(error) or "TimeoutError")
        except (Exception, SystemExit) as error:
            return _fail(trajectory, f"{type(error).__name__}: {error}")
        trajectory.score = verdict.score
        trajectory.score_extra.update(verdict.extra)
        trajectory.metrics["score_seconds"] = time.perf_counter() - begun

    async def _verdict(self, trajectory: Trajectory, sample: Sample) -> Verdict:
        scorer = self._custom or scorer_of(sample.data_source)
        if scorer is None:
            raise LookupError(f"no scorer for data_source {sample.data_source!r}")
        arguments = {
            "data_source": sample.data_source,
            "solution_str": policy_text(trajectory, sample),
            "ground_truth": sample.ground_truth,
            "extra_info": {**sample.extra_info, "turn_rewards": trajectory.turn_rewards},
            "trajectory": trajectory,
        }
        if scorer.is_instant:
            return await scorer(arguments)
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._places = loop, asyncio.Semaphore(self._config.max_concurrent)
        async with self._places:
            deadline = asyncio.timeout(self._config.timeout)
            try:
                async with deadline:
                    return await scorer(arguments)
            except TimeoutError as error:
                if deadline.expired():
                    raise TimeoutError(f"no score within reward_model.timeout={self._config.timeout:g} s") from error
                raise


def policy_text(trajectory: Trajectory, sample: Sample) -> str:
    """The assistant messages that the policy wrote, one after another on lines of their own.

    Assistant messages of a prompt (examples, or a history that an agent wrote anew) are not the policy's; tool answers
    and user turns are not either. A record without turns is read by its messages.
    """
    if trajectory.turns:
        return "\n".join(turn.text for turn in trajectory.turns if turn.role == "assistant" and turn.text)
    given = sum(message["role"] == "assistant" for message in sample.prompt)
    written = [message for message in trajectory.messages if message["role"] == "assistant"][given:]
    return "\n".join(text for text in map(_text, written) if text)


def _text(message: Message) -> str:
    content: Any = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def _fail(trajectory: Trajectory, cause: str) -> None:
    trajectory.status = Status.FAILED
    trajectory.score = None
    trajectory.failure = f"scorer: {cause}"
