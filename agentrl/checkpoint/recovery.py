"""Choose the checkpoint to resume from, at the start of a run and after a worker died."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl.checkpoint.export import exported_step
from agentrl.checkpoint.manager import CheckpointManager
from agentrl.config.sections.trainer import RunConfig
from agentrl.errors import ConfigError, WorkerDied
from agentrl.observe.display import Display


class Continuation:
    """Chooses checkpoints, and makes new workers as often as trainer.max_worker_restarts allows."""

    def __init__(
        self, config: RunConfig, restart: Callable[[], None], checkpoints: CheckpointManager, display: Display
    ) -> None:
        """restart: ends all workers and makes new ones."""
        self.restarts = 0
        self._config, self._restart, self._checkpoints, self._display = config, restart, checkpoints, display
        self._begun_from: Path | None = None

    def begin(self, last_step: int | None, policy: Path) -> Path | None:
        """Choose the checkpoint that `resume_mode` asks for, if there is one.

        Args:
            last_step: where the run ends; None: it trains nothing.
            policy: where the policy is exported to.

        Raises ConfigError when nothing is left to do: the checkpoint is of the last step, as the exported policy is,
        or of a later one.
        """
        if self._config.resume_mode == "disable":  # an older run is still there, and is moved aside later
            return None
        given = self._config.resume_from_path
        if given is None:
            self._checkpoints.fetch(self._display)
        path = Path(given) if given else self._checkpoints.latest()
        if path is not None and last_step is not None:
            step = self._checkpoints.load(path)["step"]
            if step > last_step or step == last_step == exported_step(policy):
                raise ConfigError(
                    f"{path} is of step {step}, and this run ends at step {last_step}: there is nothing left to train. "
                    "Raise trainer.total_training_steps or trainer.total_epochs, name another "
                    "trainer.experiment_name or default_local_dir, or start over with trainer.resume_mode=disable"
                )
        self._begun_from = path
        return path

    def after(self, death: WorkerDied, go_back_to: Callable[[Path | None], None]) -> WorkerDied:
        """Make new workers, and have `go_back_to` load what this process saved last or began from (None: the start).

        Returns the last death, of those of new workers, too. Raises it when the run has gone on often enough.
        """
        while True:
            if self.restarts >= self._config.max_worker_restarts:
                raise WorkerDied(
                    f"{death}\nStart the same command again: it goes on from its newest checkpoint, if it has one "
                    "(trainer.save_freq)"
                ) from death
            self.restarts += 1
            try:
                self._restart()  # first: ranks that live may still write what is given up
                self._checkpoints.give_up()
                go_back_to(self._checkpoints.latest() if self._checkpoints.published else self._begun_from)
                return death
            except WorkerDied as another:
                death = another
