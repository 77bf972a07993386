"""Choose the checkpoint to resume from, at the start of a run and after a worker died."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from agentrl.checkpoint.export import exported_step
from agentrl.checkpoint.manager import CheckpointManager, step_in
from agentrl.config.section import Section
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.trainer import RunConfig
from agentrl.errors import CheckpointError, ConfigError, NothingLeft, WorkerDied
from agentrl.observe.display import Display
from agentrl.optim.schedule import lr_factor
from agentrl.system.json_value import JSON

FIXED = (
    "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora_alpha",
    "actor_rollout_ref.actor.optim.name",
    "model.lora_rank",
    "model.lora_alpha",
    "optim.name",
)
"""Keys that a continued run must share with its checkpoint, since their values determine the form of its contents."""


def choose_checkpoint(
    config: RunConfig,
    checkpoints: CheckpointManager,
    last_step: int | None,
    policy: Path,
    display: Display,
    check: Callable[[Path, Mapping[str, JSON]], None],
) -> tuple[Path, Mapping[str, JSON]] | None:
    """Choose the checkpoint that `resume_mode` asks for, if there is one, and return its path and state.

    Args:
        last_step: where the run ends; None: it trains nothing.
        policy: where the policy is exported to.
        check: raises UserError for a checkpoint of another run's data or form, before anything is said of its step.

    Raises NothingLeft when the checkpoint is of the last step and its policy, or the best one, is exported, and
    ConfigError when it is of a later one.
    """
    if config.resume_mode == "disable":  # an older run is still there, and is moved aside later
        return None
    given = config.resume_from_path
    if given is None:
        checkpoints.fetch(display)
    path = Path(given) if given else checkpoints.latest()
    if path is None:
        return None
    state = checkpoints.load(path)
    check(path, state)
    if last_step is None:
        return path, state
    step = step_in(state)
    ends = f"{path} is of step {step}, and this run ends at step {last_step}: there is nothing left to train. "
    more = (
        "Raise trainer.total_training_steps or trainer.total_epochs to train on, name another trainer.experiment_name "
        "or default_local_dir for another run, or start over with trainer.resume_mode=disable"
    )
    if step > last_step:
        raise ConfigError(ends + more)
    if step == last_step and exported_step(policy) == step_to_export(config, checkpoints, step):
        begun = (_value(state.get("config"), key) for key in ("actor_rollout_ref.model.path", "model.path"))
        model = next((f", trained from {name}," for name in begun if isinstance(name, str)), "")
        raise NothingLeft(f"{ends}The policy{model} is in {policy}. {more}")
    return path, state


def step_to_export(config: RunConfig, checkpoints: CheckpointManager, step: int) -> int:
    """Return the step whose policy a run that ends after `step` exports."""
    best = checkpoints.best.found
    return best.step if config.load_best_model_at_end and best is not None else step


def check_same_form(path: Path, state: Mapping[str, JSON], config: Section) -> None:
    """Compare the keys of FIXED with the keys of the checkpoint's run. Raises CheckpointError where one differs."""
    differing = [
        f"{key}: {theirs} in the checkpoint, {ours} in this run"
        for key in FIXED
        if (theirs := _value(state.get("config"), key)) is not None
        and (ours := _value(config.model_dump(mode="json"), key)) is not None
        and theirs != ours
    ]
    if differing:
        raise CheckpointError(
            f"{path} is of another model or config: {'; '.join(differing)}. Set the keys as they were, or go on from "
            "its weights in another run: trainer.experiment_name, and the path of the model is the policy/ that the "
            "run exported at its end"
        )


def remark_on_schedule(
    state: Mapping[str, JSON],
    steps_per_epoch: int,
    total: int,
    rates: Mapping[str, OptimConfig],
    waits: Mapping[str, int] = {},
) -> str | None:
    """Say that the checkpoint's run would have had other learning rates, as it was to take another number of steps.

    None where it would not. `rates`: the optimizers by their keys. `waits`: likewise, the first steps that an optimizer
    does not take, before its schedule begins.
    """
    config = state.get("config")
    steps, epochs = _value(config, "trainer.total_training_steps"), _value(config, "trainer.total_epochs")
    before = steps if isinstance(steps, int) else epochs * steps_per_epoch if isinstance(epochs, int) else total
    for key, optim in rates.items():
        wait = waits.get(key, 0)
        for step in range(max(step_in(state), wait) + 1, total + 1):
            old, new = (optim.lr * lr_factor(optim, step - wait, last - wait) for last in (before, total))
            if old != new:
                return (
                    f"the checkpoint's run was to take {before} steps, and this one takes {total}: by {key} the rate "
                    f"of step {step} is {new:.3g}, and was to be {old:.3g}"
                )
    return None


def _value(tree: JSON, key: str) -> JSON:
    """Find a value by its dotted key; None without such a key."""
    for name in key.split("."):
        if not isinstance(tree, dict) or name not in tree:
            return None
        tree = tree[name]
    return tree


class Continuation:
    """Chooses checkpoints, and makes new workers as often as trainer.max_worker_restarts allows."""

    def __init__(
        self, config: RunConfig, restart: Callable[[], None], checkpoints: CheckpointManager, begun_from: Path | None
    ) -> None:
        """Args:
        restart: ends all workers and makes new ones.
        begun_from: the checkpoint of `choose_checkpoint`.
        """
        self.restarts = 0
        self.begun_from = begun_from
        self._config, self._restart, self._checkpoints = config, restart, checkpoints

    def resume_hint(self) -> str:
        """Name the place from which the same command, started again, resumes."""
        newest = self._checkpoints.newest()
        if newest is None:
            start = "begins anew" if self.begun_from is None else f"begins at {self.begun_from} again"
            return f"no checkpoint was saved (trainer.save_freq): the same command {start}"
        if self._config.resume_mode == "auto":
            return f"the same command goes on from {newest}"
        return f"the same command with trainer.resume_mode=auto goes on from {newest}"

    def after(self, death: WorkerDied, go_back_to: Callable[[Path | None], None]) -> WorkerDied:
        """Make new workers, and have `go_back_to` load the last state that this process saved or began from (None: the
        start).

        Returns the last death, deaths of new workers included. Raises it when the run has resumed often enough.
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
                path = self._checkpoints.latest() if self._checkpoints.published else self.begun_from
                if path is None:
                    self._checkpoints.best.set(None)
                go_back_to(path)
                return death
            except WorkerDied as another:
                death = another
