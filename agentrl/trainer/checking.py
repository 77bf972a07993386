"""The checks of each training step, and the reactions to their findings (docs/reliability.md)."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from agentrl.algorithms.advantages import reads_teacher
from agentrl.algorithms.estimate import Estimate
from agentrl.checks.batch import Drawn, Expected, check_batch
from agentrl.checks.columns import check_trained, seal
from agentrl.checks.finding import Finding
from agentrl.checks.report import Report
from agentrl.checks.runner import Alarms
from agentrl.checks.step import History, check_fates, check_position, check_update
from agentrl.checks.update import UpdateChecked
from agentrl.config import Config
from agentrl.config.sections.checks import Reaction
from agentrl.observe.display import Display
from agentrl.observe.gap_alarm import ESS, GapAlarm
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
) -> tuple[dict[str, torch.Tensor], tuple[Estimate, Report]]:
    """Call `compute` on a batch, then check the batch with its columns [T]: (columns, (result, findings)).

    One call, so that the tokens are fetched once.
    """
    columns, found = compute(batch)
    begun = time.thread_time()
    batch = batch.with_fields(**columns)
    report = check_batch(batch, expected)
    report.seals = seal(batch)
    report.seconds = time.thread_time() - begun
    return columns, (found, report)


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
        """The last step, and the data's position after it."""
        self.found = Report()
        """Everything that was found in the current step."""
        self.pool = 0
        """Prompts from which the step's batch was chosen by their results."""

    def add_report(self, report: Report, metrics: Mapping[str, float]) -> None:
        """Add findings made where trajectories run. metrics: of the step and of its update."""
        self.found.add(report)
        moved = metrics.get("actor/lr", 0.0) > 0 and metrics.get("train/sequences", 0.0) > 0
        if report.unchanged and moved and not metrics.get("actor/skipped_updates"):
            what = "the weights that the engine was sent are those of the step before"
            self.found.add_check("update", [Finding("update", what, WEIGHTS)])

    def check_reference(self, sums: Mapping[str, str]) -> None:
        """Compare the reference's checksums with the checksums of this process's first step."""
        if not self.reference:
            self.reference = sums
        changed = [name for name, value in sums.items() if self.reference.get(name) != value]
        what = "its weights are not those that the run began with"
        self.found.add_check("reference", [Finding("reference", what, name) for name in changed])

    def check_position(self, step: int, state: Mapping[str, JSON], batches: float) -> None:
        """Check how far the data advanced since the step before; batches: how often the step drew."""
        loader = as_object(state.get("loader")).get("state")
        if self.position is not None and self.position[0] == step - 1:
            rows = int(batches) * self.config.data.drawn_at_once
            self.found.add_check("fates", check_position(self.position[1], loader, rows))
        self.position = step, loader

    def add_record(self, differences: Mapping[str, str]) -> None:
        """Add how trained tokens differ from recorded ones, by the trajectory's uid."""
        self.found.add_check("coverage", [Finding("coverage", text, uid) for uid, text in differences.items()])

    def check_fates(self, step: int, outlines: Sequence[Outline], metrics: Mapping[str, float]) -> None:
        """Check the fates of the step's prompts; metrics of its source."""
        at_once, keys = self.config.prompts_at_once, self.config.async_training
        self.found.add_check("fates", check_fates(outlines, training(self.config, step).each, at_once))
        self.pool = len({one.group for one in outlines})
        if keys.max_staleness:  # those that had not ended, or were replaced, could have been in the batch, too
            replaced = metrics.get("refill/groups_equal", 0.0) + metrics.get("refill/groups_failed", 0.0)
            self.pool = (1 + min(keys.depth, keys.max_staleness)) * at_once + int(replaced)

    def expected(
        self,
        outlines: Sequence[Outline],
        source: TrajectorySource,
        version: int,
        kl_coef: float | None,
        greedy_rewards: Mapping[int, float] | None,
        numbers: Mapping[int, Mapping[str, float]] | None,
    ) -> Expected:
        """Return the expectations that the step's batch is checked against."""
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
            pool=self.pool,
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
        """Check the report of the policy's update; tokens of its batch, and of sequences without an advantage."""
        actor = self.config.actor_rollout_ref.actor
        learnt = metrics.get("train/sequences", 0.0) > 0
        found = check_update(metrics, tokens, without, actor.ppo_epochs, learnt=learnt, lr=actor.optim.lr)
        self.found.add_check("update", found)

    def check_trained(
        self, found: Estimate, trained: Collection[int], outlines: Sequence[Outline], checked: Sequence[UpdateChecked]
    ) -> None:
        """Take the findings of the ranks that watched the update, and compare its sequences with the estimate's.

        trained: the trajectories of the update's batch.
        """
        seals = self.found.seals
        for one in checked:
            self.found.add(one.report)
        if seals is None or not all(one.watched for one in checked):
            return
        kept = [row for row, owner in enumerate(found.trajectory) if owner in trained]
        zero = set(found.zero_advantage)
        optional = {place for place, row in enumerate(kept) if row in zero}
        epochs = self.config.actor_rollout_ref.actor.ppo_epochs
        gone_over = [one for rank in checked for one in rank.seals]
        names = check_trained(seals[kept], gone_over, epochs, optional, lambda one: outlines[one].uid)
        self.found.add_check("update", names)

    def end_step(
        self, step: int, metrics: Mapping[str, float], outlines: Sequence[Outline], *, learnt: bool
    ) -> tuple[Numbers, str | None, Reaction]:
        """Raise the step's alarms. Returns (metrics, their text or None, the strongest reaction asked for)."""
        begun = time.thread_time()
        step_found, self.found = self.found, Report()
        numbers = step_found.numbers | step_found.text.numbers()
        findings = step_found.findings
        findings += self.history.check({**metrics, **numbers}, outlines, learnt=learnt, evidence=step_found.evidence)
        if (text := self.gap_alarm.text(metrics)) is not None:
            findings.append(Finding("gap", text, "all trajectories of the step", "sign"))
        if (text := self.gap_alarm.ess_text(metrics)) is not None:
            findings.append(Finding("ess", text, "all trajectories of the step", "sign"))
        self.history.evaluated.update(step_found.evaluated)
        self.history.evaluated["ess"] += ESS in metrics
        alarms, reaction = self.alarms.raise_for(step, findings)
        numbers["checks/alarms"] = float(len(alarms))
        numbers["perf/check_seconds"] = step_found.seconds + time.thread_time() - begun
        return numbers, "; ".join(alarm.text() for alarm in alarms) or None, reaction
