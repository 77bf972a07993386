"""The reports of a run: numbers of its steps on the terminal, in loggers and the plot, texts, problems at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.config import Config
from agentrl.observe.error_summary import ErrorSummary
from agentrl.observe.generations import some, write_texts
from agentrl.observe.metrics import step_metrics
from agentrl.observe.plot import plot
from agentrl.observe.verl_names import verl_names
from agentrl.trainer.observer import Step, StepObserver
from agentrl.trainer.run_folder import view_command
from agentrl.trainer.setting import RunSetting
from agentrl.trajectory import Trajectory
from agentrl.trajectory.collate import left_out


class Reports(StepObserver):
    """Reports of steps and validations."""

    def __init__(self, setting: RunSetting[Config]) -> None:
        self.config, self.folder, self.chat = setting.config, setting.folder.path, setting.chat
        self.tracker, self.display, self.total_steps = setting.tracker, setting.display, setting.total_steps
        self.errors = ErrorSummary()

    def on_rollout(self, step: Step) -> None:
        if step.rollout.shown is not None:
            self.display.trajectory(step.rollout.shown, f"train, step {step.number}")
        if (folder := self.config.trainer.rollout_data_dir) is not None:
            self._write_texts([path for path, _ in step.rollout.files], folder, step.number)
        step.metrics |= step_metrics(
            step.sampled,
            turn_reward_coef=self.config.algorithm.turn_reward_coef,
            success_threshold=self.config.reward_model.success_threshold,
        )
        step.metrics |= {f"left_out/{cause}": float(count) for cause, count in left_out(step.sampled).items()}

    def on_batch(self, step: Step) -> None:
        self.errors.add(step.sampled, step.metrics, learnt=step.learnt)

    def on_end(self, step: Step) -> None:
        if "console" in self.config.trainer.logger:
            self.display.step(step.number, self.total_steps, step.metrics)
        self.log(step.number, step.metrics)

    def on_validation(
        self, step: int, metrics: Mapping[str, float], shown: Trajectory | None, files: Sequence[Path]
    ) -> None:
        """Report a validation, whose trajectories are in the files."""
        if shown is not None:
            self.display.trajectory(shown, f"val, step {step}")
        if count := self.config.trainer.log_val_generations:
            self.tracker.log_generations(some(self._here(files), self.chat.decode, count), step)
        if (folder := self.config.trainer.validation_data_dir) is not None:
            self._write_texts(files, folder, step)
        self.display.validation(step, metrics)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step's metrics, and draw the plot whenever validation is in them."""
        if self.config.trainer.verl_metric_names:
            metrics = {**metrics, **verl_names(metrics)}
        self.tracker.log(metrics, step)
        if any(name.startswith("val/") for name in metrics):
            plot(self.folder / "metrics.jsonl", self.folder / "reward.png", self.config.trainer.experiment_name)

    def tell_end(self, source: str | None, alarms: str | None) -> None:
        """List the contents of the run's folder, and the problems that occurred."""
        trainer, ray_init = self.config.trainer, self.config.ray_init
        held = ["metrics.jsonl", "reward.png", "checkpoints/", "policy/"]
        held += ["trajectories/"] if trainer.save_trajectories != "none" else []
        held += ["profile/"] if trainer.profile_steps else []
        there = ", ".join(name for name in held if (self.folder / name).exists())
        self.display.note(f"done: {self.folder} holds {there}")
        if source is not None:
            self.display.note(source)
        if self.config.uses_ray and ray_init.timeline_json_file is not None:
            self.display.note(f"Ray's timeline is written to {ray_init.timeline_json_file}")
        for text in filter(None, [self.errors.text(), alarms]):
            self.display.warn(text)
        if (command := view_command(self.folder)) is not None:
            self.display.note(f"to look at it: {command}")

    def _write_texts(self, files: Sequence[Path], folder: str, step: int) -> None:
        """Write trajectories as text into the folder."""
        write_texts(self._here(files), self.chat.decode, Path(folder) / f"{step}.jsonl")

    def _here(self, files: Sequence[Path]) -> list[Path]:
        """Leave out the files that rollout workers wrote on machines which share no file system with this one."""
        found = [path for path in files if path.exists()]
        if len(found) < len(files):
            self.display.warn(
                f"{len(files) - len(found)} of {len(files)} files of trajectories are not on this machine"
            )
        return found
