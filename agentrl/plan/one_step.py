"""One step: seconds of its stages, and what bounds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.plan import rollout_times
from agentrl.plan.rollout_times import RolloutTimes
from agentrl.plan.simulated_servers import Session
from agentrl.plan.step_times import Memory, Stage, Training, gpu_memory


@dataclass(frozen=True, slots=True)
class Forecast:
    """One step."""

    training: Training
    tokens: int
    longest: int
    sampled: int
    rollout: RolloutTimes
    stages: list[Stage]
    memory: Memory

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def dominates(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.seconds)


def forecast(training: Training, sessions: Sequence[Session], *, system: int = 0) -> Forecast:
    """Compute the stages of `agentrl.trainer.step.Trainer.train_step`, one after another. The sessions are used up."""
    concurrent = training.plan.concurrent
    rollout = rollout_times.simulate(sessions, training.servers, training.speed(), concurrent=concurrent, system=system)
    tail = f"95 % done after {rollout.most:.3g} s; tools {rollout.tools:.3g} s a trajectory; busy {rollout.busy:.0%}"
    stages = [Stage("rollout", serial=rollout.all, note=tail), *training.passes(sessions)]
    stages += [training.sync(), training.save()]
    lengths = rollout_times.final_lengths(sessions)
    sampled = sum(sum(session.answers) for session in sessions)
    return Forecast(training, sum(lengths), max(lengths), sampled, rollout, stages, gpu_memory(training))


def bound_by(stage: Stage) -> str:
    if stage.name == "rollout":
        return "decoding, tools and the longest trajectories"
    if stage.serial >= max(stage.compute, stage.traffic):
        return "what travels between machines, memories and disks"
    return "arithmetic" if stage.compute >= stage.traffic else "the network that gathers weights"
