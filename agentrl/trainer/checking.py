"""The checks of each training step, and the reactions to their findings (docs/reliability.md)."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from agentrl.algorithms.advantages import reads_teacher
from agentrl.checks.batch import Drawn, Expected, check_batch
from agentrl.checks.recomputed import pick, recompute
from agentrl.checks.runner import ORDER, Alarms
from agentrl.checks.step import History, check_position, check_prompts, check_update
from agentrl.checks.update import check_trained, seal
from agentrl.config import Config
from agentrl.data.sampler import EpochSampler
from agentrl.observe.display import Display
from agentrl.observe.gap_alarm import ESS, GapAlarm
from agentrl.observe.report import Finding, Report
from agentrl.observe.watch import UpdateChecked
from agentrl.rollouts.async_source import AsyncSource
from agentrl.rollouts.contract import training
from agentrl.system.json_value import JSON, as_object
from agentrl.trainer.observer import Step, StepDone, StepObserver
from agentrl.trajectory import exclusion
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.roles import Workers, policy_is_reference

WEIGHTS = "the policy's weights"
GAPS = {"float32": 1e-3, "bfloat16": 0.25}
"""Bounds of the gap by the dtype of the model, see `trainer.checks.gap`."""


def read_checks(batch: RaggedBatch, expected: Expected) -> Report:
    """Check a batch that has its advantages, where its tokens are."""
    begun = time.thread_time()
    report = check_batch(batch, expected)
    report.seals = seal(batch)
    report.seconds = time.thread_time() - begun
    return report


class StepChecks(StepObserver):
    """Checks on the driver, and the alarms of a run."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        display: Display,
        source: AsyncSource,
        workers: Workers,
    ) -> None:
        self.config, self.source, self.policy, self.reference = config, source, workers.policy, workers.reference
        self.critic, self.teacher = workers.critic, workers.teacher
        keys = config.trainer.checks
        self.alarms = Alarms(keys, folder, display.warn)
        model = config.actor_rollout_ref.model
        self.gap = GAPS[model.dtype] if keys.gap is None else keys.gap
        self.history = History(keys, self.gap)
        self.gap_alarm = GapAlarm(config.algorithm.rollout_correction)
        self.reference_sums: Mapping[str, str] = {}
        """Checksums of the reference's tensors at the first step of this process."""
        self.position: tuple[int, JSON] | None = None
        """The last step, and the data's position after it."""
        self.first_row: tuple[int, int, int] | None = None
        """A prompt's number in the run (with a bound of 0 in the step), and its row's epoch and position there; None:
        not known, or the order has no epochs."""
        self.later = Report()
        """Rows and texts of trajectories that ended during a validation: the next step's."""
        self.rows: dict[int, dict[int, int]] = {}
        """By epoch and hash of a prompt, the position of the row that had it first."""

    def on_rollout(self, step: Step) -> None:
        """Check the prompts and the data's position, and have the batch checked where its tokens are."""
        config = self.config
        per_draw, each = config.prompts_per_draw, training(config, step.number).each
        step.found.add_check("fates", check_prompts(step.rollout.outlines, each, per_draw))
        if config.async_training.max_staleness == 0 or (self.first_row is None and self._has_epochs()):
            self._check_position(step)
        step.readers["checks"] = partial(read_checks, expected=self.expected(step))

    def on_batch(self, step: Step) -> None:
        """Take the findings about the batch, and check the reference."""
        report = step.read["checks"]
        assert isinstance(report, Report)
        step.found.add(report)
        if self.reference is not None:
            sums = self.reference.sampled_checksums()
            self.reference_sums = self.reference_sums or sums
            changed = [name for name, value in sums.items() if self.reference_sums.get(name) != value]
            what = "its weights are not those that the run began with"
            step.found.add_check("reference", [Finding("reference", what, name) for name in changed])
        self._recompute(step)

    def _recompute(self, step: Step) -> None:
        """Have each model compute one short sequence of the batch again, before any of them learns.

        Gradients take most of it: the policy's are compared in each even step, and the critic's in each odd one.
        """
        row = pick(step.batch, step.number)
        if row is None:
            return
        one, temperature = step.batch.select([row]), self.config.actor_rollout_ref.rollout.temperature
        even = step.number % 2 == 0
        step.found.add(self.policy.recompute(one, temperature, partial(recompute, gradients=even)))
        if self.reference is not None:
            step.found.add(self.reference.recompute(one, temperature, recompute))
        if self.critic is not None:
            step.found.add(self.critic.recompute(one, partial(recompute, gradients=not even)))
        if self.teacher is not None:
            step.found.add(self.teacher.recompute(one, recompute))

    def on_update(self, step: Step) -> None:
        """Check the reports of the updates against their batch."""
        actor = self.config.actor_rollout_ref.actor
        if self.critic is not None:
            epochs = self.config.critic.ppo_epochs or actor.ppo_epochs
            self._check_trained(step, self.critic.checked(), epochs, (), "critic: ")
        by_sequence = step.batch.policy_tokens
        without, tokens = int(by_sequence[step.batch.sequences["zero_advantage"]].sum()), int(by_sequence.sum())
        learnt = step.metrics.get("train/sequences", 0.0) > 0
        found = check_update(step.metrics, tokens, without, actor.ppo_epochs, learnt=learnt, lr=actor.optim.lr)
        step.found.add_check("update", found)
        if step.updated:
            optional = set(step.batch.sequences["zero_advantage"].nonzero()[:, 0].tolist())
            self._check_trained(step, self.policy.checked(), actor.ppo_epochs, optional)

    def _check_trained(
        self, step: Step, checked: Sequence[UpdateChecked], epochs: int, optional: Collection[int], role: str = ""
    ) -> None:
        """Take the findings of the ranks that watched an update, and compare its sequences with the estimate's.

        optional: sequences that need not be gone over. role: names a model other than the policy.
        """
        found = step.found
        for one in checked:
            found.add(one.report)
        if found.seals is None or not all(one.watched for one in checked):
            return
        kept = torch.isin(found.seals[:, 0], step.batch.trajectory)
        gone_over = [one for rank in checked for one in rank.seals]
        differences = check_trained(
            found.seals[kept], gone_over, epochs, optional, lambda one: f"{role}{step.outlines[one].uid}"
        )
        found.add_check("update", differences)

    def on_published(self, step: Step) -> None:
        """Take the findings made where trajectories run, and raise the step's alarms."""
        found, metrics = step.found, step.metrics
        found.add(self.later)
        self.later = Report()
        found.add(self.source.checked())
        self._check_rows(step)
        moved = metrics.get("actor/lr", 0.0) > 0 and metrics.get("train/sequences", 0.0) > 0
        if found.unchanged and moved and not metrics.get("actor/skipped_updates"):
            what = "the weights that the engine was sent are those of the step before"
            found.add_check("update", [Finding("update", what, WEIGHTS)])
        begun = time.thread_time()
        metrics |= found.numbers
        for name, whole in (("repeated", "tokens"), ("garbled", "characters")):
            if found.text[whole]:
                metrics[f"checks/{name}"] = found.text[name] / found.text[whole]
        found.findings += self.history.check(metrics, step.sampled, learnt=step.learnt, evidence=found.evidence)
        if (text := self.gap_alarm.text(metrics)) is not None:
            found.findings.append(Finding("gap", text, "all trajectories of the step", "sign"))
        if (text := self.gap_alarm.ess_text(metrics)) is not None:
            found.findings.append(Finding("ess", text, "all trajectories of the step", "sign"))
        self.history.evaluated.update(found.evaluated)
        self.history.evaluated["ess"] += ESS in metrics
        self._raise_alarms(step, found.findings, found.seconds + time.thread_time() - begun)

    def on_validation(self, step: StepDone) -> None:
        """Raise alarms for the findings about a validation, which is checked after the step's trajectories."""
        found = self.source.checked()
        self.history.evaluated.update(found.evaluated)
        self._raise_alarms(step, found.findings, found.seconds)
        self.later.add(Report(text=found.text, rows=found.rows))

    def _raise_alarms(self, step: StepDone, findings: Sequence[Finding], seconds: float) -> None:
        alarms, reaction = self.alarms.raise_for(step.number, findings)
        step.alarm = "; ".join(filter(None, [step.alarm, *(alarm.text() for alarm in alarms)])) or None
        step.reaction = max(step.reaction, reaction, key=ORDER.index)
        for name, value in (("checks/alarms", len(alarms)), ("perf/check_seconds", seconds)):
            step.metrics[name] = step.metrics.get(name, 0.0) + value

    def forget_after(self, step: int) -> None:
        self.alarms.forget_after(step)
        self.later = Report()

    def _check_position(self, step: Step) -> None:
        """Check how far the data advanced since the step before, and find the step's place in them."""
        state = self.source.state()
        loader, begins, first = as_object(state.get("loader")).get("state"), None, 0
        if self.config.async_training.max_staleness:
            number = state.get("first_prompt")
            begins, first = loader, number if isinstance(number, int) else 0
        elif self.position is not None and self.position[0] == step.number - 1:
            begins = self.position[1]
            rows = int(step.metrics.get("refill/gen_batches", 1.0)) * self.config.data.draw_size
            step.found.add_check("fates", check_position(begins, loader, rows))
        self.position, self.first_row = (step.number, loader), None
        match begins:
            case {"epoch": int(epoch), "position": int(position)} if self._has_epochs():
                self.first_row = first, epoch, position

    def _has_epochs(self) -> bool:
        return isinstance(self.source.loader.sampler, EpochSampler)

    def _check_rows(self, step: Step) -> None:
        """Check that no row comes twice in an epoch; prompts that several rows have are left out."""
        if self.first_row is None or not step.found.rows:
            return
        first, begun, position = self.first_row
        size, drawn = self.config.data.train_batch_size, self.config.data.draw_size
        data, is_late = self.source.loader.dataset, self.config.async_training.max_staleness > 0
        left = (len(data) - position) // drawn * drawn  # rows that the epoch begun still gives
        found: list[Finding] = []
        for name, digest in step.found.rows.items():
            _, of_step, number = name.split("/")
            place = int(number) - first
            if is_late:  # see `AsyncSource._begin`
                place += (int(of_step) - 1) * size
            elif int(of_step) != step.number:
                continue
            if place < left:
                epoch, row = begun, position + place
            else:
                more, row = divmod(place - left, len(data) // drawn * drawn)
                epoch = begun + 1 + more
            before = self.rows.setdefault(epoch, {}).setdefault(digest, row)
            if before != row and digest not in data.repeated:
                what = f"row {row} of epoch {epoch} is the row that came as number {before}"
                found.append(Finding("rows", what, f"prompt {name}"))
        step.found.add_check("rows", found)
        self.rows = {epoch: seen for epoch, seen in self.rows.items() if epoch > max(self.rows) - 2}

    def _pool(self, step: Step) -> int:
        """Count the prompts from which the step's batch was chosen by their results."""
        keys = self.config.async_training
        if not keys.max_staleness:
            return len({one.group for one in step.rollout.outlines})
        # those that had not ended, or were replaced, could have been in the batch, too
        replaced = step.metrics.get("refill/groups_equal", 0.0) + step.metrics.get("refill/groups_failed", 0.0)
        return (1 + min(keys.depth, keys.max_staleness)) * self.config.prompts_per_draw + int(replaced)

    def expected(self, step: Step) -> Expected:
        """Return the expectations that the step's batch is checked against."""
        config, roles = self.config, self.config.actor_rollout_ref
        coef, rollout = config.algorithm.turn_reward_coef, roles.rollout
        drawn = {
            number: Drawn(one.uid, one.group, reward, one.num_sampled)
            for number, one in enumerate(step.outlines)
            if not one.baseline and exclusion(one) is None and (reward := one.reward(coef)) is not None
        }
        same = policy_is_reference(config) or roles.ref.path in (None, roles.model.path)
        learns = roles.actor.optim.lr > 0 and roles.model.lora_adapter_path is None
        return Expected(
            drawn=drawn,
            version=step.version,
            max_staleness=self.source.max_staleness,
            algorithm=config.algorithm,
            n=rollout.n,
            pool=self._pool(step),
            kl_coef=step.kl_coef,
            taught=bool(config.distillation.teachers) and not reads_teacher(config.algorithm),
            gap=self.gap,
            plain=rollout.top_p == 1 and rollout.top_k == -1 and rollout.temperature > 0,
            reference="same" if same and learns else "other",
            keeps=config.async_training.keep_kv_cache,
        )
