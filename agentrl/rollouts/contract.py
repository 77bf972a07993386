"""Tasks and results of rollouts, and the contract of a runner of trajectories.

A group is the trajectories of one prompt. It is requested once, and may outlive a call; when it has ended, a few
numbers describe it. Its tokens stay in the process that runs it until they are packed into a batch. Under Ray those of
a group that has a log go to the journal (`agentrl.rollouts.journal`), so that they outlive that process.

A `RolloutRunner` says where trajectories run: in this process (`agentrl.rollouts.local`) or in workers under Ray
(`agentrl.rollouts.ray`). When they begin, and in which batch they end, is the source's
(`agentrl.rollouts.async_source`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Protocol

from agentrl.algorithms.declared import declared_by_estimator
from agentrl.config import Config
from agentrl.config.sections.rollout import RolloutConfig, ValKwargs
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import SamplingParams
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import TrainingError
from agentrl.observe.report import Report
from agentrl.rollouts.journal import Journal
from agentrl.rollouts.staleness_scheduler import GroupStatus
from agentrl.system.call_journal import Entry
from agentrl.system.loop_thread import LoopThread
from agentrl.system.metrics import Metrics
from agentrl.system.reporter import Reporter
from agentrl.trajectory import Outline, Status, Trajectory, exclusion
from agentrl.trajectory.batch import Sequences
from agentrl.trajectory.origin import Origin, Split
from agentrl.trajectory.sample import Sample

GREEDY = SamplingParams(1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Task:
    """Which trajectories to run of each prompt, and how they are named and recorded."""

    name: str
    """Name on the display."""
    n: int
    """Sampled trajectories of each prompt."""
    params: SamplingParams
    """Only temperature, top_p and top_k are read."""
    seeds: str
    """Text that seeds depend on in addition to trainer.seed, prompt and number."""
    split: Split
    """train: the rollout has a batch to train on."""
    step: int = 0
    part: str = ""
    """Suffix of the names of files that this step's trajectories are written to."""
    share: tuple[int, int] = (1, 1)
    """(number, count): which of the files of `part` these prompts' trajectories are written to."""
    greedy: bool = False
    """One more trajectory of each prompt, drawn greedily: in training a `Trajectory.baseline`."""

    @property
    def each(self) -> int:
        """Trajectories of each prompt, the greedy one included."""
        return self.n + self.greedy

    def origin(self, number: int, rollout: int, sample: Sample) -> Origin:
        """Name the place in the run of a trajectory: the prompt's number in this task, and its own for the prompt."""
        return Origin(self.split, self.step, number, rollout, rollout == self.n, sample.file, sample.row)


def training(config: Config, step: int) -> Task:
    """Ask for rollout.n sampled trajectories of each prompt, and a greedy one where the estimator reads its reward."""
    rollout = config.actor_rollout_ref.rollout
    greedy = "greedy_rewards" in declared_by_estimator(config).columns
    return Task("rollout", rollout.n, _sampled(rollout), f"train/{step}", "train", step, greedy=greedy)


def validation(config: Config, step: int, *, greedy: bool, first: int = 0) -> Task:
    """Run one greedy trajectory of each prompt, or val_kwargs.n sampled ones, by the same seeds in each validation.

    `first`: number of the first prompt that is asked for together; part of the files' names.
    """
    val, kind = config.actor_rollout_ref.rollout.val_kwargs, "greedy" if greedy else "sampled"
    part = f"_{kind}" + (f"_{first:06d}" if first else "")
    if greedy:
        return Task("validate (greedy)", 0, GREEDY, "greedy", "val", step, part, greedy=True)
    return Task("validate (sampled)", val.n, _sampled(val), "val", "val", step, part)


def responses(config: RolloutsConfig, *, greedy: bool) -> Task:
    """Ask for rollout.n sampled trajectories of each prompt, or one greedy one."""
    rollout = config.actor_rollout_ref.rollout
    n, params = (0, GREEDY) if greedy else (rollout.n, _sampled(rollout))
    return Task("responses", n, params, "generate", "generate", greedy=greedy)


def _sampled(keys: RolloutConfig | ValKwargs) -> SamplingParams:
    return SamplingParams(1, temperature=keys.temperature, top_p=keys.top_p, top_k=keys.top_k)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Result of a task: its trajectories in outline, and batches of their tokens."""

    outlines: list[Outline]
    """All trajectories, in the order of the prompts; trajectories of one prompt are adjacent."""
    batch: Sequences | None = None
    """Tokens that can be trained on; None where nothing is to be."""
    shown: Trajectory | None = None
    """One of them, whole, where one was asked for."""
    conversations: Sequences | None = None
    """Conversations that the reward model reads; None without a reward model."""
    files: list[tuple[Path, int]] = field(default_factory=list)
    """Files that they were written to, and of how many of the outlines, in order, each holds some or all."""
    whole: list[Trajectory] = field(default_factory=list)
    """All of them, whole and not in outline, where they are generated for their texts (`Task.split`)."""
    versions: Counter[int] = field(default_factory=Counter)
    """Sampled tokens that are trained on, by version, where the batch was packed of groups that had ended."""

    @staticmethod
    def joined(parts: Sequence[Rollout]) -> Rollout:
        """Join parts of a step, each after the other."""
        batches = [part.batch for part in parts if part.batch is not None]
        read = [part.conversations for part in parts if part.conversations is not None]
        return Rollout(
            list(chain.from_iterable(part.outlines for part in parts)),
            batches[0].joined(batches[1:]) if batches else None,
            next((part.shown for part in parts if part.shown is not None), None),
            read[0].joined(read[1:]) if read else None,
            list(chain.from_iterable(part.files for part in parts)),
            list(chain.from_iterable(part.whole for part in parts)),
            sum((part.versions for part in parts), Counter()),
        )


def check_failures(config: Config, step: int, outlines: Sequence[Outline]) -> None:
    """Raise TrainingError when too many of a step's trajectories failed."""
    unscored = [outline for outline in outlines if outline.score is None]
    allowed = config.actor_rollout_ref.rollout.agent.max_failed_fraction * len(outlines)
    if len(unscored) > allowed or len(unscored) == len(outlines):
        causes = sorted({outline.failure or outline.status for outline in unscored})
        raise TrainingError(
            f"step {step}: {len(unscored)} of {len(outlines)} trajectories failed, more than "
            f"actor_rollout_ref.rollout.agent.max_failed_fraction allows. Causes: {'; '.join(causes[:5])}"
        )


@dataclass(frozen=True, slots=True)
class PromptTask:
    """One prompt whose trajectories are to be run."""

    ordinal: int
    sample: Sample
    task: Task
    number: int
    """Number of the prompt in its task, by which trajectories are named and seeded."""


@dataclass(frozen=True, slots=True)
class Log:
    """Answers to a group's trajectories, which are given again where they run again."""

    read: Callable[[], Sequence[Entry]]
    """Returns the entries."""
    add: Callable[[Entry], None]
    """Takes down an entry."""


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """How a group ended."""

    ordinal: int
    outcome: GroupStatus
    oldest: int | None
    """Version of the oldest token that is trained on; None without such tokens."""
    record: bytes | None
    """Its record in the journal; None: it has parts that the journal leaves out."""


def judge_group(
    trajectories: Sequence[Trajectory | Outline], teaches: Callable[[Sequence[Outline]], bool] | None
) -> GroupStatus:
    """Judge a group by how its trajectories ended. `teaches`: see `load_filter`."""
    if not any(exclusion(one) is None for one in trajectories):
        return GroupStatus.TIMEOUT if any(one.status is Status.TIMEOUT for one in trajectories) else GroupStatus.FAILED
    if teaches is None:
        return GroupStatus.SCORED
    outlines = (one if isinstance(one, Outline) else one.outline() for one in trajectories)
    compared = [one for one in outlines if not one.baseline and exclusion(one) is None]
    if len(compared) < 2:
        return GroupStatus.FAILED
    return GroupStatus.SCORED if teaches(compared) else GroupStatus.FILTERED


class RolloutRunner(Protocol):
    """Runs the trajectories of prompts, each prompt's as a group, and makes batches of groups that have ended.

    `run_group` runs the groups of a step, of later steps and of a validation.

    Coroutines are called on `loop`, everything else from one other thread, while no update is under way; other calls
    return when they are done. A call raises the error that ended it (UserError for errors that the user can fix), and
    WorkerDied when a process died once more than trainer.max_worker_restarts allows. An interrupt (Ctrl-C) first ends
    the running work.
    """

    loop: LoopThread
    reporter: Reporter
    run_dir: Path
    on_loss: Callable[[], object]
    """Called on `loop` when groups cannot continue until `replace_dead_workers` is called."""
    takes_version: Callable[[int, int], bool]
    """Called on `loop` with a group that runs in this process, and a version: may its tokens be as old, although it
    began later?"""

    @property
    def serves_people(self) -> bool:
        """Requests that belong to no group may reach the engine at any time."""

    @property
    def needs_weights(self) -> bool:
        """The engine's memory is lent (`sleep`): it generates nothing before the next `update_weights`."""

    def fill_rewards(self, files: Sequence[tuple[Path, int]], outlines: Sequence[Outline]) -> None:
        """Write the reward model's part of rewards into the files of a rollout, whose outlines these are now."""

    def update_weights(self, weights: Weights, version: int, *, in_flight: bool = False) -> SyncReport:
        """Have the engine generate by `weights` from now on. Raises TrainingError when it cannot take them.

        `in_flight`: requests continue, in an engine that can do so.
        """

    def sleep(self) -> None:
        """Lend the engine's memory to the policy until `update_weights`, where the two share a device."""

    def metrics(self) -> Metrics:
        """Take the numbers of engine, tools, interactions and scorers since they were last taken."""

    def checked(self) -> Report:
        """Take the findings of checks about trajectories and the engine's weights since the last call."""

    def restart_workers(self) -> None:
        """Replace workers that died while they were idle. Their weights must be sent again."""

    @property
    def in_flight_updates(self) -> bool:
        """The engine is not held while the policy is updated: its processors and its memory are its own."""

    @property
    def is_broken(self) -> bool:
        """A process died that `replace_dead_workers` is to replace."""

    async def run_group(
        self, work: PromptTask, on_begin: Callable[[int], None], on_end: Callable[[], None], log: Log | None
    ) -> EndedGroup:
        """Run and score a prompt's trajectories. Raises the error of tools that answer no call any more.

        Groups that are begun in one turn of the loop begin together, so that a step's numbers repeat.
        `on_begin(version)`: the first trajectory began, by weights no older than `version`; called again where a
        process died and they begin in another. `on_end()`: one has ended. `log` records the answers they are given, and
        the group's record outlives its process; recorded answers are given again. Without a log nothing is written,
        and the group runs again where its process dies before the group is packed.
        """

    async def stop_groups(self) -> None:
        """Wait until groups whose `run_group` was cancelled have ended everywhere, and forget groups that had ended."""

    async def pause(self) -> None:
        """Keep the engine from sampling; what it has sampled of running requests stays. Deadlines stand still."""

    async def resume(self) -> None:
        """Let the engine sample again after `pause`."""

    async def lock_weights(self) -> None:
        """Read the weights that were last given no more, for they are about to change."""

    async def unlock_weights(self, weights: Weights, version: int) -> None:
        """Allow, after `lock_weights`, to read weights for processes that come back; others keep their weights."""

    async def idle_seconds(self) -> float:
        """Return the seconds in which the engines had nothing to do since this was first called, on average."""

    def observed(self, task: Task, total: int | None) -> AbstractContextManager[Callable[[], None]]:
        """Show, watch and profile a coroutine on `loop`; it calls the yielded function for each end."""

    def pack(
        self, task: Task, ordinals: Sequence[int], journal: Journal | None, first: int = 0, *, show: bool = False
    ) -> Rollout:
        """Make a rollout of groups that have ended, numbered from `first`, and write their trajectories down.

        Groups that ended in an earlier process are in the journal.
        """

    def replace_dead_workers(self) -> None:
        """Replace processes that died. Raises WorkerDied when that is not allowed any more."""
