"""The contract of a runner of trajectories, in this process or in workers under Ray."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from agentrl.checks.report import Report
from agentrl.engines.weights import SyncReport, Weights
from agentrl.rollouts.contract import EndedGroup, Log, PromptTask, Rollout, Task
from agentrl.rollouts.journal import Journal
from agentrl.system.loop_thread import LoopThread
from agentrl.system.metrics import Metrics
from agentrl.system.reporter import Reporter
from agentrl.trajectory import Outline
from agentrl.trajectory.sample import Sample

Hook = Callable[[], Coroutine[object, None, None]] | None


class RolloutRunner(Protocol):
    """Runs the trajectories of prompts: a round of prompts to its end, or single groups concurrently with updates.

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

    @property
    def needs_weights(self) -> bool:
        """The engine's memory is lent (`sleep`): it generates nothing before the next `update_weights`."""

    def run(
        self,
        task: Task,
        samples: Sequence[Sample],
        first: int = 0,
        *,
        show: bool = False,
        before: Hook = None,
        after: Hook = None,
    ) -> Rollout:
        """Run, score and record the trajectories of `samples`, whose prompts are numbered from `first`.

        Groups that are under way continue meanwhile. `before` and `after` are awaited on `loop` around them.
        """

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

        `on_begin(version)`: the first trajectory began, by weights no older than `version`; called again where a
        process died and they begin in another. `on_end()`: one has ended. `log` records the answers they are given;
        recorded answers are given again.
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

    def pack(self, task: Task, ordinals: Sequence[int], journal: Journal, *, show: bool = False) -> Rollout:
        """Make the batch of groups that have ended, numbered from 0; groups that ended elsewhere are in the journal."""

    def replace_dead_workers(self) -> None:
        """Replace processes that died. Raises WorkerDied when that is not allowed any more."""
