"""The training loop. `Trainer.train_step` reads top to bottom like the algorithm.

Everything random is derived from (trainer.seed, step, prompt, trajectory, position), so a resumed run needs no
generator state: it continues with the same batches and, on one device, the same numbers.

Metrics of a step in addition to `agentrl.observe.metrics`, the same for every config. *Taken* optimizer steps are the
steps that were not skipped; a number without values to be taken over is left out. Where the policy before the update
does not run over the batch (`algorithm.rollout_correction.proximal`) there is no entropy and no largest gap. Gap and
correction are then taken over the tokens of the update:

| name | what it is |
|---|---|
| `left_out/<cause>` | trajectories that are not trained on; `masked` are those of algorithm.masked_statuses |
| `group/groups` | prompts of which at least one trajectory is trained on |
| `group/groups_of_one` | those of which one is; of several asked for it teaches nothing (group estimators) |
| `group/groups_equal` | those of two or more whose rewards are all equal |
| `group/groups_without_greedy` | those whose greedy trajectory failed, so that none of them teaches (remax) |
| `estimator/<name>` | metrics that an advantage estimator of a user's returns |
| `rollout/logprob_gap_mean_abs` `/max_abs` `/kl` | trainer's log-probs against the engine's, over all policy tokens |
| `correction/weight_mean`, `correction/ess` | weights of the policy tokens; their effective sample size, a fraction |
| `correction/clipped_frac`, `correction/masked_frac` | fraction of these tokens whose weight is truncated, is 0 |
| `<these>/staleness_<s>` | gap and correction of the tokens that are s versions old; 7: and older |
| `actor/entropy` | mean over all policy tokens of the entropy before the update (that of `proximal`), in nats |
| `actor/reward_kl_penalty`, `actor/reward_kl_penalty_coeff` | KL in the reward: by trajectory; its coefficient |
| `actor/entropy_coeff` | weight of the entropy bonus, with `actor.target_entropy` |
| `actor/loss` | the whole loss, each term times its coefficient: mean over the taken optimizer steps |
| `actor/pg_loss`, `actor/kl_loss` | that term of the loss, without coefficient: mean over the taken optimizer steps |
| `actor/success_nll` | likewise: negative log-likelihood of the policy tokens of trajectories that succeed |
| `actor/observation_nll` | likewise: of what the policy read after its first token |
| `actor/teacher_loss` | the teacher's term of the loss, without coefficient, likewise |
| `actor/expert_loss` | likewise, of the steps with transcripts of an expert: their mean negative log-likelihood |
| `actor/moe_aux_loss`, `actor/moe_z_loss` | losses of a mixture's routers, without coefficients, likewise |
| `distill/kl` | mean over the sampled tokens with a teacher of log p - log p of the teacher, before the update |
| `distill/taught_fraction` | fraction of the policy tokens that have a teacher |
| `actor/ppo_kl` | mean of old - new log-prob over the policy tokens with advantage of the taken optimizer steps |
| `actor/clip_frac`, `actor/clip_frac_lower` | fraction of the same tokens that the clip, the dual clip cut off |
| `critic/vf_loss` | value loss: mean over the taken optimizer steps |
| `critic/explained_variance` | 1 - var(returns - values) / var(returns), over the policy tokens, before the update |
| `critic/clip_frac`, `critic/value_mean` | fraction clipped, and mean value, over the policy tokens of these steps |
| `actor/grad_norm`, `critic/grad_norm` | before clipping, mean over the taken optimizer steps |
| `actor/lr`, `critic/lr` | the learning rate, mean over the taken optimizer steps |
| `actor/skipped_updates`, `critic/skipped_updates` | optimizer steps skipped: loss or gradient was not finite |
| `train/sequences` | transcripts that are trained on and have an advantage; 0: rewards teach nothing in this step |
| `train/filtered_fraction` | fraction of the transcripts that the policy's update did not go over: zero advantage |
| `train/loss_weight` | sum of its tokens' weights in the loss of a mini-batch, where all would be 1: mean over steps |
| `train/policy_tokens` | policy tokens that it went over, counted in each epoch |
| `perf/update_tokens` | all tokens that it went over, counted in each epoch |
| `budget/minutes` `/tokens` `/cost` | spent so far, with `trainer.budget` (docs/checkpoints.md) |
| `budget/steps_left` | steps that fit into the rest of the budget, each like the largest of the last ten |
| `checks/alarms` | checks that raised an alarm in this step; what they say is in alarms.jsonl |
| `checks/gap_mean` `/gap_worst` | gap of tokens that the present weights sampled: mean; of the worst trajectory |
| `checks/surprise` | nats by which sampled tokens are more surprising than the entropies of their distributions |
| `checks/repeated` `/garbled` | share of repetitions, and of characters that are no text, of those looked at |
| `perf/check_seconds` | CPU seconds of the threads that check, added up over all processes |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from agentrl.algorithms.declared import declared_by_estimator, declared_by_loss
from agentrl.algorithms.entropy import EntropyControl
from agentrl.algorithms.estimate import REWARD_KL, Settings, estimate
from agentrl.algorithms.kl import AdaptiveKLController, FixedKLController
from agentrl.algorithms.policy_loss import select_tokens
from agentrl.algorithms.running_returns import RunningReturns
from agentrl.config import Config
from agentrl.data.contract import Dataset
from agentrl.errors import TrainingError
from agentrl.observe.report import Report
from agentrl.rollouts.async_source import AsyncSource
from agentrl.rollouts.contract import check_failures
from agentrl.system.json_value import JSON, as_mapping
from agentrl.system.metrics import Numbers
from agentrl.system.termination import defer
from agentrl.trainer.checking import StepChecks
from agentrl.trainer.expert import ExpertStream
from agentrl.trainer.model_scores import outline_columns, trained_on, with_model_scores
from agentrl.trainer.observer import Observers, Step, StepDone, StepObserver
from agentrl.trainer.recording import Records
from agentrl.trainer.reporting import Reports
from agentrl.trainer.run import Training, validation_due
from agentrl.trainer.sessions import Sessions
from agentrl.trainer.setting import RunSetting
from agentrl.trainer.teachers import with_teacher_scores
from agentrl.trainer.validation import validate
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.roles import Workers, needs_log_probs


class Trainer(Training[Config]):
    """Reinforcement learning, a step at a time."""

    def __init__(
        self,
        setting: RunSetting[Config],
        source: AsyncSource,
        workers: Workers,
        *,
        validation: Dataset | None,
        expert: ExpertStream | None = None,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        """Args:
        validation: the rows to validate on; None: the run does not validate.
        expert: transcripts that are learnt together with the policy's own trajectories.
        observers: the user's, called after agentrl's own.
        """
        learning = {"policy": workers.policy, "critic": workers.critic}
        groups = {name: group for name, group in learning.items() if group is not None}
        super().__init__(setting, workers.executor, groups, workers.policy.export)
        config = self.config
        self.source, self.workers = source, workers
        self.kl_controller = build_kl_controller(config)
        self.reports = Reports(setting)
        self.checks = StepChecks(config, self.dir, self.display, source, workers)
        self.evaluated = self.checks.history.evaluated
        proxy = config.actor_rollout_ref.rollout.agent.openai_proxy
        sessions = [Sessions(proxy, self.display)] if proxy.is_set else []
        ours = [self.reports, *sessions, Records(config, workers, self.timed), self.checks]
        self.observers = Observers(ours, observers)
        self.validation, self.expert = validation, expert
        self.version = 0
        """Version of the policy; see `agentrl.trajectory.staleness`."""
        actor = config.actor_rollout_ref.actor
        self.running_returns: RunningReturns | None = None
        if "running_returns" in declared_by_estimator(config).columns:
            keys = config.algorithm
            self.running_returns = RunningReturns.from_options(keys.adv_options, keys.turn_reward_coef)
        self.entropy_control = (
            None if actor.target_entropy is None else EntropyControl(actor.entropy_coeff, actor.target_entropy)
        )

    def take_step(self, *, validates: bool) -> Step:
        step = self.train_step()
        if (budget := self.setting.budget) is not None:
            budget.spend(step, self.display, self.config.trainer.save_freq)
        if validates or (step.stop is not None and validation_due(self.config.trainer, self.step, self.step)):
            self.validate(step)
        self.observers.tell("on_end", step)
        return step

    def train_step(self) -> Step:
        """Take one step: rollouts, log-probs, advantages, update, weights to the engine."""
        observers, began = self.observers, time.perf_counter()
        step = self.collect()
        observers.tell("on_rollout", step)
        try:
            check_failures(self.config, step.number, step.sampled)
        except TrainingError:
            self.source.refuse(step.number, step.outlines)
            raise

        batch = self.with_scores(trained_on(step.rollout, step.outlines), step)
        step.tokens = batch.num_tokens
        with self.timed("advantages"):
            batch = self.estimate(batch, step)
        defer(self.config.trainer.preemption_seconds)
        self.whole = None
        self.mask(batch, step)
        observers.tell("on_batch", step)
        if len(step.batch):
            step.updated = self.update(step)
            observers.tell("on_update", step)
        self.version += step.updated
        if step.updated or self.source.needs_weights:
            step.metrics |= self.publish()
        self.source.updated(step.outlines)
        observers.tell("on_published", step)

        seconds = time.perf_counter() - began
        step.metrics |= {**self.seconds, "time/step": seconds, "perf/tokens_per_second": step.tokens / seconds}
        return step

    def with_scores(self, batch: Sequences, step: Step) -> Sequences:
        """Add the columns of the models that go over the batch before the update; the policy's metrics, too."""
        workers = self.workers
        if needs_log_probs(self.config):
            with self.timed("old_log_prob"):
                published = self.config.algorithm.rollout_correction.proximal == "published"
                if published and self.source.served == self.version:
                    workers.policy.keep()
                batch, metrics = workers.policy.log_probs(batch)
                step.metrics |= metrics
        if workers.reference is not None:
            with self.timed("ref_log_prob"):
                batch = workers.reference.log_probs(batch)
        if workers.critic is not None:
            with self.timed("values"):
                batch = workers.critic.values(batch)
        if workers.teacher is not None:
            with self.timed("teacher"):
                batch = with_teacher_scores(self.config.distillation, workers, batch, step.outlines)
        return batch

    def collect(self) -> Step:
        """Begin a step with its trajectories and their rewards, and let the engine rest."""
        config, workers = self.config, self.workers
        metrics = {name: spent for name, spent in self.seconds.items() if name == "time/save"}  # after the step before
        self.seconds = {}
        frequency = config.trainer.show_trajectory_freq
        with self.timed("rollout", shown=False):
            show = frequency > 0 and (self.step - 1) % frequency == 0
            rollout = self.source.next_batch(self.step, show=show)
        metrics |= self.source.metrics()
        self.source.sleep()
        outlines = rollout.outlines
        if workers.reward_model is not None:
            with self.timed("reward_model"):
                outlines = with_model_scores(config.reward_model, workers, self.source, rollout)
        return Step(
            number=self.step,
            run_dir=self.dir,
            version=self.version,
            metrics=metrics,
            found=Report(),
            rollout=rollout,
            outlines=outlines,
            kl_coef=None if self.kl_controller is None else self.kl_controller.coef,
        )

    def estimate(self, batch: Sequences, step: Step) -> Sequences:
        """Add advantages, returns and rewards to the batch (see `estimate`), and steer the KL's coefficient."""
        config = self.config
        batch = batch.with_fields(**outline_columns(config, batch, step.outlines))
        if self.running_returns is not None:
            batch = batch.with_fields(running_returns=self.running_returns.column(batch, step.outlines))
        distillation = config.distillation if config.distillation.teachers else None
        settings = Settings(config.actor_rollout_ref.rollout.n, step.kl_coef, self.version, distillation)
        compute = partial(estimate, config=config.algorithm, settings=settings)
        batch, (metrics, step.read) = self.workers.executor.compute(estimate_and_read, batch, compute, step.readers)
        step.metrics |= metrics
        if self.kl_controller is not None:
            self.kl_controller.update(metrics[REWARD_KL], len(batch.trajectory.unique()))
        return batch

    def mask(self, batch: Sequences, step: Step) -> None:
        """Leave the trajectories of masked_statuses out of the update's batch, and count its parts."""
        masked, metrics, trajectory = self.config.algorithm.masked_statuses, step.metrics, batch.trajectory
        kept = [row for row, owner in enumerate(trajectory.tolist()) if step.outlines[owner].status not in masked]
        step.batch = batch.select(kept) if masked else batch
        metrics["left_out/masked"] = float(len(trajectory.unique()) - len(trajectory[kept].unique()))
        metrics["train/sequences"] = float((~step.batch.sequences["zero_advantage"]).sum())
        step.learnt = metrics["train/sequences"] > 0 or self.config.distillation.in_loss

    def update(self, step: Step) -> bool:
        """Update critic, and policy after the critic's warm-up. Returns whether the policy has new weights."""
        workers, batch, metrics = self.workers, step.batch, step.metrics
        entropy = metrics.get("actor/entropy")  # before the update; not every config computes it
        updated = self.step > self.config.trainer.critic_warmup
        if workers.critic is not None:
            with self.timed("update_critic"):
                metrics |= workers.critic.update(batch, step=self.step)
        if updated and declared_by_loss(self.config).select is not None:
            seed = self.config.trainer.seed + self.step
            batch, _ = workers.executor.compute(select_tokens, batch, self.config.actor_rollout_ref.actor, seed)
        if updated:
            bonus = None
            if self.entropy_control is not None and entropy is not None:
                bonus = metrics["actor/entropy_coeff"] = self.entropy_control.weight(entropy)
            with self.timed("update_actor"):
                expert = None if self.expert is None else workers.executor.keep(self.expert.batch(self.step))
                metrics |= workers.policy.update(
                    batch,
                    step=self.step,
                    expert=expert,
                    entropy_coeff=bonus,
                    by_token=bool(step.rollout.files),
                )
        return updated

    def publish(self) -> Numbers:
        """Give the policy's weights to the engine."""
        with self.timed("sync_weights"):
            report = self.source.publish(self.workers.policy.weights(), self.version)
        return {"sync/bytes": float(report.bytes), "sync/seconds": report.seconds}

    def validate(self, step: StepDone) -> None:
        """Validate, show, and add metrics and alarms to the step's. Without validation data nothing happens."""
        if self.validation is None:
            return
        samples = [self.validation[index] for index in range(len(self.validation))]
        with self.timed("validation", shown=False):
            show = self.config.trainer.show_trajectory_freq > 0
            metrics, shown, files = validate(self.config, samples, self.source, self.workers, self.step, show=show)
        self.reports.on_validation(self.step, metrics, shown, files)
        self.validated = metrics | {"time/validation": self.seconds["time/validation"]}
        step.metrics |= self.validated
        self.checks.on_validation(step)

    def validate_first(self) -> StepDone:
        step = StepDone(number=self.step, metrics={})
        self.validate(step)
        if step.metrics:
            self.reports.log(self.step, step.metrics)
            self.observers.tell_first_validation(step)
        return step

    def state(self) -> dict[str, JSON]:
        state: dict[str, JSON] = {"step": self.step, "version": self.version, **self.source.state()}
        if self.kl_controller is not None:
            state["kl_controller"] = self.kl_controller.state_dict()
        if self.entropy_control is not None:
            state["entropy_coef"] = self.entropy_control.coef
        if self.running_returns is not None:
            state["running_returns"] = self.running_returns.state()
        return state

    def restore(self, state: Mapping[str, JSON]) -> None:
        # A run that resumes may begin to control what the checkpoint's run did not.
        if self.kl_controller is not None and (kl := state.get("kl_controller")) is not None:
            self.kl_controller.load_state_dict(as_mapping(kl))
        if self.entropy_control is not None and (coef := state.get("entropy_coef")) is not None:
            self.entropy_control.restore(coef)
        if self.running_returns is not None:
            self.running_returns.restore(state.get("running_returns"))
        self.source.load_state(state)
        super().restore(state)
        version = state.get("version")  # checkpoints of earlier releases have none: theirs was the step
        self.version = version if isinstance(version, int) else self.step

    def loaded(self) -> None:
        self.source.publish(self.workers.policy.weights(), self.version)

    def restart(self) -> None:
        super().restart()
        self.source.restart_workers()

    def saved(self) -> None:
        self.source.saved()

    def tell_end(self) -> None:
        self.reports.tell_end(self.source.report(), self.checks.alarms.text())


def estimate_and_read(
    batch: RaggedBatch,
    compute: partial[tuple[dict[str, torch.Tensor], Numbers]],
    readers: Mapping[str, Callable[[RaggedBatch], object]],
) -> tuple[dict[str, torch.Tensor], tuple[Numbers, dict[str, object]]]:
    """Call `compute` on a batch, then the readers on the batch with its columns: (columns, (metrics, readings)).

    One call, so that the tokens are fetched once.
    """
    columns, metrics = compute(batch)
    batch = batch.with_fields(**columns)
    return columns, (metrics, {name: read(batch) for name, read in readers.items()})


def build_kl_controller(config: Config) -> FixedKLController | None:
    """Make the controller of the KL coefficient of the reward; None without KL in the reward."""
    ctrl = config.algorithm.kl_ctrl
    if not config.algorithm.use_kl_in_reward:
        return None
    if ctrl.type == "fixed":
        return FixedKLController(ctrl.kl_coef)
    return AdaptiveKLController(ctrl.kl_coef, target=ctrl.target_kl, horizon=ctrl.horizon)
