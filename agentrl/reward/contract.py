"""Contract of reward managers, which score trajectories, and their use by a run.

Choose one of your own by `reward_model.reward_manager`. A manager that fails, or takes too long, fails its trajectories
(status FAILED, never a zero reward). An error of a user's code, which would come again, is raised, too.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

from agentrl.config.registries import REWARD_MANAGERS
from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig
from agentrl.errors import CodeError
from agentrl.remote.router import ServerAccess
from agentrl.reward.scorer import Verdict
from agentrl.system.call_journal import CallJournal, Codec, as_json, digest
from agentrl.system.metrics import Metrics
from agentrl.system.registry import configured
from agentrl.system.user_code import contract_error, user_code
from agentrl.trajectory import Cause, Status, Trajectory
from agentrl.trajectory.sample import Sample

Scored = tuple[str, str | None, float | None, dict[str, float], float | None]
"""Status, failure, score, further numbers, and the seconds that scoring took."""
SCORES: Codec[list[Scored]] = Codec(as_json, lambda content: [tuple(one) for one in json.loads(content)])


class RewardManager(ABC):
    """Scores the trajectories of a run. Subclass it, or `GroupRewardManager`.

    One object serves all trajectories of a process, many at a time, in its event loop.
    """

    on_verdict: Callable[[Mapping[str, object], float], object] | None = None
    """Called with what a scorer was given, and the score that it returned, by managers that ask scorers."""
    by_group: ClassVar[bool] = False
    """True if it is given all trajectories of a prompt at once, when the last of them has ended."""

    def __init__(self, config: RewardConfig, custom: CustomRewardConfig, *, beside_model: bool) -> None:
        """Raises ConfigError for a missing key of the config.

        A parameter `options`, annotated with a pydantic model, is given `reward_model.reward_manager_options`.

        Args:
            config: `reward_model.*`.
            custom: `custom_reward_function.*`; a manager may leave it alone.
            beside_model: a reward model scores, too.
        """
        self.config, self.custom, self.beside_model = config, custom, beside_model

    def check(self, data_sources: Iterable[str]) -> None:  # noqa: B027 - a manager may score anything
        """Before the first step: raises UserError for a data source that it cannot score."""

    def check_row(self, sample: Sample) -> None:  # noqa: B027 - a manager may need nothing of its rows
        """Before the first step: raises DataError for a row that it cannot score; the caller adds the row's name."""

    def is_tried(self, data_source: str) -> bool:
        """Say whether a made-up answer to one of its rows may be scored before the run's first step."""
        return True

    def bind(self, tokenizer: Any) -> None:  # noqa: B027 - most managers read texts
        """Take the policy's tokenizer (Hugging Face's), before the first trajectory; not where texts are scored."""

    def serve(self, servers: ServerAccess, date: str | None = None) -> None:  # noqa: B027 - most ask no server
        """Take the servers of a generative reward model (reward_model.model.generative), before `start`.

        date: model.chat_template_date, for the model's own chat template.
        """

    async def start(self, run: str) -> None:  # noqa: B027 - most managers reach nothing
        """Reach what it needs; `run` names the run. Raises ConfigError where a server does not answer."""

    def take_metrics(self) -> Metrics:
        """Return and reset its own numbers."""
        return Metrics()

    async def close(self) -> None:  # noqa: B027 - most managers hold nothing
        """Free what it holds."""

    @abstractmethod
    async def score(self, trajectory: Trajectory, sample: Sample) -> Verdict:
        """Score a trajectory that has ended; it is not changed here.

        A fault of the infrastructure (see `agentrl.system.user_code`) fails the trajectory. Any other exception is an
        error of this code.
        """


class GroupRewardManager(RewardManager):
    """A reward manager that compares the trajectories of a prompt."""

    by_group = True

    async def score(self, trajectory: Trajectory, sample: Sample) -> Verdict:
        return (await self.score_group([trajectory], sample))[0]

    @abstractmethod
    async def score_group(self, trajectories: Sequence[Trajectory], sample: Sample) -> Sequence[Verdict]:
        """Score all trajectories of a prompt that have ended without a failure: at least one, one verdict each."""


def make_reward_manager(
    config: RewardConfig, custom: CustomRewardConfig, *, beside_model: bool = False
) -> RewardManager:
    """The manager that `reward_model.reward_manager` names. Raises ConfigError."""
    found = cast(type[RewardManager], REWARD_MANAGERS.get(config.reward_manager))
    with user_code(f"reward manager {config.reward_manager}", found):
        make = configured(found, config.reward_manager_options, "reward_model.reward_manager_options")
        return make(config, custom, beside_model=beside_model)


async def score_all(manager: RewardManager, trajectories: Sequence[Trajectory], sample: Sample) -> list[Verdict | None]:
    """Set `score` and `score_extra` of trajectories of `sample`, or status FAILED and `failure`; returns the verdicts.

    FAILED ones are left as they are. Several are given only to a manager that scores by group. Raises CodeError, when
    that is done, for an error of a user's code.
    """
    scored = [one for one in trajectories if one.status is not Status.FAILED]
    if not scored:
        return [None] * len(trajectories)
    begun = time.perf_counter()
    try:
        verdicts = await _verdicts(manager, scored, sample)
    except TimeoutError as error:
        _fail(scored, str(error) or "TimeoutError")
        return [None] * len(trajectories)
    except CodeError as error:
        _fail(scored, f"{type(error).__name__}: {error.summary}")
        raise
    except (Exception, SystemExit) as error:
        _fail(scored, f"{type(error).__name__}: {error}")
        return [None] * len(trajectories)
    for trajectory, verdict in zip(scored, verdicts, strict=True):
        trajectory.score = verdict.score
        trajectory.score_extra.update(verdict.extra)
        trajectory.metrics["score_seconds"] = time.perf_counter() - begun
    found = iter(verdicts)
    return [None if one.status is Status.FAILED else next(found) for one in trajectories]


async def score_once(
    journal: CallJournal, manager: RewardManager, trajectories: Sequence[Trajectory], sample: Sample
) -> None:
    """Do as `score_all` does, or as it did where that is recorded of trajectories with the same tokens."""

    async def scored() -> list[Scored]:
        await score_all(manager, trajectories, sample)
        return [
            (one.status.value, one.failure, one.score, one.score_extra, one.metrics.get("score_seconds"))
            for one in trajectories
        ]

    tokens = [array("q", transcript.ids).tobytes() for one in trajectories for transcript in one.transcripts]
    rewards = json.dumps([[one.uid, [turn.reward for turn in one.turns]] for one in trajectories]).encode()
    found = await journal.call("scorers", digest(rewards, *tokens), scored, SCORES)
    for trajectory, (status, failure, score, extra, seconds) in zip(trajectories, found, strict=True):
        trajectory.status, trajectory.failure = Status(status), failure
        trajectory.failure_cause = None if failure is None else Cause.SCORER.value
        trajectory.score, trajectory.score_extra = score, extra
        if seconds is not None:
            trajectory.metrics["score_seconds"] = seconds


async def _verdicts(manager: RewardManager, scored: Sequence[Trajectory], sample: Sample) -> Sequence[Verdict]:
    name = f"reward manager {type(manager).__name__}"
    code: Callable[..., object] = manager.score
    if isinstance(manager, GroupRewardManager):
        code = manager.score_group
        with user_code(name, code):
            verdicts = await manager.score_group(scored, sample)
    else:
        with user_code(name, code):
            verdicts = [await manager.score(one, sample) for one in scored]
    if len(verdicts) != len(scored) or not all(isinstance(one, Verdict) for one in verdicts):
        raise contract_error(name, code, f"it must give a Verdict for each of {len(scored)} trajectories")
    return verdicts


def _fail(trajectories: Iterable[Trajectory], message: str) -> None:
    for trajectory in trajectories:
        trajectory.fail(Cause.SCORER, message)
