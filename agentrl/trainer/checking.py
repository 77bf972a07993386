"""The checks of each training step, and what follows from what they find (docs/reliability.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from agentrl.algorithms.advantages import reads_teacher
from agentrl.algorithms.estimate import Estimate
from agentrl.checks.batch import Drawn, Expected, check_batch
from agentrl.checks.finding import Finding
from agentrl.checks.report import Report
from agentrl.checks.runner import Alarms
from agentrl.checks.step import History, check_fates, check_position, check_update
from agentrl.config import Config
from agentrl.config.sections.checks import Reaction
from agentrl.observe.display import Display
from agentrl.observe.gap_alarm import GapAlarm
from agentrl.rollouts.contract import training
from agentrl.rollouts.source import TrajectorySource
from agentrl.system.json_value import JSON, as_object
from agentrl.system.metrics import Numbers
from agentrl.trajectory import Outline, exclusion
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.roles import policy_is_reference

WEIGHTS = "the policy's weights"
GAPS = {"float32": 1e-3, "bfloat16": 0.25}
"""Bounds of the gap by the dtype of the model, see `trainer.checks.gap`."""


def estimate_and_check(
    batch: RaggedBatch,
    compute: partial[tuple[dict[str, torch.Tensor], Estimate]],
    expected: Expected,
) -> tuple[dict[str, torch.Tensor], tuple[Estimate, list[Finding], Numbers]]:
    """Call `compute` on a batch, then check the batch with its columns [T]: (columns, (result, findings, numbers)).

    One call, so that the tokens are fetched once.
    """
    columns, found = compute(batch)
    begun = time.thread_time()
    findings, numbers = check_batch(batch.with_fields(**columns), expected)
    numbers["perf/check_seconds"] = time.thread_time() - begun
    return columns, (found, findings, numbers)


class StepChecks:
    """Checks on the driver, and the alarms of a run."""

    def __init__(self, config: Config, folder: Path, display: Display) -> None:
        self.config = config
        self.keys = config.trainer.checks
        self.alarms = Alarms(self.keys, folder, display.warn)
        model = config.actor_rollout_ref.model
        self.gap = GAPS[model.dtype] if self.keys.gap is None else self.keys.gap
        self.history = History(self.keys, self.gap)
        self.gap_alarm = GapAlarm(config.algorithm.rollout_correction)
        self.reference: Mapping[str, str] = {}
        """Checksums of the reference's tensors at the first step of this process."""
        self.position: tuple[int, JSON] | None = None
        """The last step, and the data's position behind it."""
        self.found: list[Finding] = []
        self.numbers: Numbers = {}

    def add(self, findings: Sequence[Finding], numbers: Mapping[str, float] = {}) -> None:
        """Add what was found in the current step. Seconds add up."""
        self.found += findings
        for name, value in numbers.items():
            self.numbers[name] = value + (self.numbers.get(name, 0.0) if name == "perf/check_seconds" else 0.0)

    def add_report(self, report: Report, metrics: Mapping[str, float]) -> None:
        """Add what was found where trajectories run; metrics of the step, with those of its update."""
        self.add(report.findings, {**report.text.numbers(), "perf/check_seconds": report.seconds})
        moved = metrics.get("actor/lr", 0.0) > 0 and metrics.get("train/sequences", 0.0) > 0
        if report.unchanged and moved and not metrics.get("actor/skipped_updates"):
            self.add([Finding("update", "the weights that the engine was sent are those of the step before", WEIGHTS)])

    def check_reference(self, sums: Mapping[str, str]) -> None:
        """Hold the reference's checksums against those of the first step of this process."""
        if not self.reference:
            self.reference = sums
        changed = [name for name, value in sums.items() if self.reference.get(name) != value]
        self.add([Finding("reference", "its weights are not those that the run began with", name) for name in changed])

    def check_position(self, step: int, state: Mapping[str, JSON], batches: float) -> None:
        """Check how far the data went on since the step before; batches: how often the step drew."""
        loader = as_object(state.get("loader")).get("state")
        if self.position is not None and self.position[0] == step - 1:
            self.add([*check_position(self.position[1], loader, int(batches) * self.config.data.drawn_at_once)])
        self.position = step, loader

    def add_record(self, differences: Mapping[str, str]) -> None:
        """Add how trained tokens differ from recorded ones, by the trajectory's uid."""
        self.add([Finding("coverage", text, uid) for uid, text in differences.items()])

    def check_fates(self, step: int, outlines: Sequence[Outline]) -> None:
        """Check the fates of the step's prompts."""
        self.add([*check_fates(outlines, training(self.config, step).each, self.config.prompts_at_once)])

    def expected(
        self,
        outlines: Sequence[Outline],
        source: TrajectorySource,
        version: int,
        kl_coef: float | None,
        greedy_rewards: Mapping[int, float] | None,
        numbers: Mapping[int, Mapping[str, float]] | None,
    ) -> Expected:
        """Say what the step's batch is held against."""
        config, roles = self.config, self.config.actor_rollout_ref
        coef, rollout = config.algorithm.turn_reward_coef, roles.rollout
        drawn = {
            number: Drawn(one.uid, one.group, reward, one.num_sampled)
            for number, one in enumerate(outlines)
            if not one.baseline and exclusion(one) is None and (reward := one.reward(coef)) is not None
        }
        same = policy_is_reference(config) or roles.ref.path in (None, roles.model.path)
        learns = roles.actor.optim.lr > 0 and roles.model.lora_adapter_path is None
        return Expected(
            drawn=drawn,
            version=version,
            max_staleness=source.max_staleness,
            algorithm=config.algorithm,
            n=rollout.n,
            kl_coef=kl_coef,
            greedy_rewards=greedy_rewards,
            numbers=numbers,
            taught=bool(config.distillation.teachers) and not reads_teacher(config.algorithm),
            gap=self.gap,
            plain=rollout.top_p == 1 and rollout.top_k == -1 and rollout.temperature > 0,
            reference="same" if same and learns else "other",
            keeps=config.async_training.keep_kv_cache,
        )

    def check_update(self, metrics: Mapping[str, float], tokens: int, without: int) -> None:
        """Check what the policy's update reports; tokens of its batch, and those of sequences without an advantage."""
        actor = self.config.actor_rollout_ref.actor
        learnt = metrics.get("train/sequences", 0.0) > 0
        self.add([*check_update(metrics, tokens, without, actor.ppo_epochs, learnt=learnt, lr=actor.optim.lr)])

    def end_step(
        self, step: int, metrics: Mapping[str, float], outlines: Sequence[Outline], *, learnt: bool
    ) -> tuple[Numbers, str | None, Reaction]:
        """Raise the step's alarms. Returns (metrics, what they say or None, the strongest reaction asked for)."""
        begun = time.thread_time()
        self.add(self.history.check({**metrics, **self.numbers}, outlines, learnt=learnt))
        if (text := self.gap_alarm.text(metrics)) is not None:
            self.add([Finding("gap", text, "all trajectories of the step", "sign")])
        if (text := self.gap_alarm.ess_text(metrics)) is not None:
            self.add([Finding("ess", text, "all trajectories of the step", "sign")])
        alarms, reaction = self.alarms.raise_for(step, self.found)
        numbers = {**self.numbers, "checks/alarms": float(len(alarms))}
        numbers["perf/check_seconds"] = numbers.get("perf/check_seconds", 0.0) + time.thread_time() - begun
        self.found, self.numbers = [], {}
        return numbers, "; ".join(alarm.text() for alarm in alarms) or None, reaction
