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
| `rollout/logprob_gap_mean_abs` `/max_abs` `/kl` | trainer's log-probs against the engine's, over all policy tokens |
| `correction/weight_mean`, `correction/ess` | weights of the policy tokens; their effective sample size, a fraction |
| `correction/clipped_frac`, `correction/masked_frac` | fraction of these tokens whose weight is truncated, is 0 |
| `<these>/staleness_<s>` | gap and correction of the tokens that are s versions old; 7: and older |
| `actor/entropy` | mean over all policy tokens of the entropy before the update (that of `proximal`), in nats |
| `actor/reward_kl_penalty`, `actor/reward_kl_penalty_coeff` | KL in the reward: mean over sequences; its coefficient |
| `actor/entropy_coeff` | weight of the entropy bonus, with `actor.target_entropy` |
| `actor/pg_loss`, `actor/kl_loss` | that term of the loss, without coefficient: mean over the taken optimizer steps |
| `actor/success_nll` | likewise: negative log-likelihood of the policy tokens of trajectories that succeed |
| `actor/observation_nll` | likewise: of what the policy read after its first token |
| `actor/teacher_loss` | the teacher's term of the loss, without coefficient, likewise |
| `actor/expert_loss` | mean negative log-likelihood of an expert's transcripts, without coefficient, likewise |
| `actor/moe_aux_loss`, `actor/moe_z_loss` | losses of a mixture's routers, without coefficients, likewise |
| `distill/kl` | mean over the sampled tokens with a teacher of log p - log p of the teacher, before the update |
| `distill/taught_fraction` | fraction of the policy tokens that have a teacher |
| `actor/ppo_kl` | mean of old - new log-prob over the policy tokens with advantage of the taken optimizer steps |
| `actor/clip_frac`, `actor/clip_frac_lower` | fraction of the same tokens that the clip, the dual clip cut off |
| `critic/vf_loss` | value loss: mean over the taken optimizer steps |
| `critic/explained_variance` | 1 - var(returns - values) / var(returns), over the policy tokens, before the update |
| `critic/clip_frac`, `critic/value_mean` | fraction clipped, and mean value, over the policy tokens of these steps |
| `actor/grad_norm`, `critic/grad_norm` | before clipping, mean over the taken optimizer steps |
| `actor/lr`, `critic/lr` | the learning rate that was used |
| `actor/skipped_updates`, `critic/skipped_updates` | optimizer steps skipped: loss or gradient was not finite |
| `train/sequences` | sequences that are trained on and have an advantage; 0: rewards teach nothing in this step |
| `train/filtered_fraction` | fraction of the sequences that the policy's update did not go over: zero advantage |
| `train/loss_weight` | sum of its tokens' weights in the loss of a mini-batch, where all would be 1: mean over steps |
| `train/policy_tokens` | policy tokens that it went over, counted in each epoch |
| `perf/update_tokens` | all tokens that it went over, counted in each epoch |
| `checks/alarms` | checks that raised an alarm in this step; what they say is in alarms.jsonl |
| `checks/gap_mean` `/gap_worst` | gap of tokens that the present weights sampled: mean; of the worst trajectory |
| `checks/surprise` | nats by which sampled tokens are more surprising than the entropies of their distributions |
| `checks/repeated` `/garbled` | share of repetitions, and of characters that are no text, of those looked at |
| `perf/check_seconds` | CPU seconds of the threads that check, added up over all processes |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch

from agentrl.algorithms.declared import declared_by_estimator, declared_by_loss
from agentrl.algorithms.entropy import EntropyControl
from agentrl.algorithms.estimate import Estimate, estimate
from agentrl.algorithms.kl import KLController
from agentrl.algorithms.policy_loss import select_tokens
from agentrl.chat import Chat
from agentrl.checkpoint.export import export_policy
from agentrl.checkpoint.manager import CheckpointManager, reading_state, step_in
from agentrl.checkpoint.recovery import Continuation
from agentrl.checks.report import Report
from agentrl.config import Config, config_to_dict
from agentrl.config.sections.trainer import RunConfig
from agentrl.data.contract import Dataset
from agentrl.errors import TrainingError, WorkerDied
from agentrl.observe.display import Display
from agentrl.observe.tracking import Tracker
from agentrl.rollouts.contract import check_failures
from agentrl.rollouts.saving import remove_oldest
from agentrl.rollouts.source import TrajectorySource
from agentrl.runtime.profiler import nvtx_range, profile_of
from agentrl.system.json_value import JSON, as_mapping
from agentrl.system.metrics import Numbers
from agentrl.system.termination import Terminated, allow, defer, within_time
from agentrl.trainer.checking import StepChecks
from agentrl.trainer.expert import ExpertStream
from agentrl.trainer.model_scores import trained_on, with_model_scores
from agentrl.trainer.observer import Observers, Parts, Step, StepObserver
from agentrl.trainer.recording import Records
from agentrl.trainer.reporting import Reports
from agentrl.trainer.run_folder import RunFolder, view_command
from agentrl.trainer.teachers import with_teacher_scores
from agentrl.trainer.validation import validate
from agentrl.trajectory import Outline
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.groups import TrainableGroup
from agentrl.workers.roles import Workers, needs_log_probs


class Trainer:
    """The training loop of a run, from the newest checkpoint, or from the start, to the last step."""

    def __init__(
        self,
        config: Config,
        *,
        source: TrajectorySource,
        workers: Workers,
        kl_controller: KLController | None,
        checkpoints: CheckpointManager,
        tracker: Tracker,
        folder: RunFolder,
        chat: Chat,
        validation: Dataset | None,
        total_steps: int,
        begun_from: Path | None,
        display: Display,
        expert: ExpertStream | None = None,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        """Args:
        validation: the rows to validate on; None: the run does not validate.
        begun_from: the checkpoint that the run resumes from; None: it begins at step 0.
        expert: transcripts that are learnt together with the policy's own trajectories.
        observers: the user's, called after agentrl's own.
        """
        self.config, self.display = config, display
        self.source, self.workers, self.kl_controller = source, workers, kl_controller
        self.checkpoints, self.tracker, self.folder, self.dir = checkpoints, tracker, folder, folder.path
        self.reports = Reports(config, folder.path, chat, tracker, display, total_steps)
        self.checks = StepChecks(config, folder.path, display, source, workers)
        self.observers = Observers([self.reports, Records(config, workers, self.timed), self.checks], observers)
        self.chat, self.validation, self.total_steps = chat, validation, total_steps
        self.expert = expert
        self.step = 0
        self.version = 0
        """Version of the policy; see `agentrl.trajectory.staleness`."""
        self.continuation = Continuation(config.trainer, workers.executor.restart, checkpoints, begun_from)
        self.seconds: Numbers = {}
        self.validated: Numbers = {}
        """Metrics of the last validation; empty before the first."""
        actor = config.actor_rollout_ref.actor
        self.entropy_control = (
            None if actor.target_entropy is None else EntropyControl(actor.entropy_coeff, actor.target_entropy)
        )
        self.first = self.state()
        self.ended: dict[str, JSON] | None = None
        """State after the last step that is whole; None before the first, and while an update changes the policy."""
        self.saved = 0
        """Step of the newest checkpoint."""

    def steps(self) -> Generator[Numbers, None, None]:
        """Resume, validate if asked, train to the last step, and export the policy. Yields each step's metrics.

        Closing the generator between two steps waits for the checkpoints that are being written. An interruption is
        raised with a note of the checkpoint that the run would resume from; SIGTERM after a checkpoint, if there is
        time.
        """
        try:
            yield from self._steps()
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Terminated):
                self.save_in_time()
            interrupt.add_note(self.continuation.resume_hint())
            raise

    def _steps(self) -> Generator[Numbers, None, None]:
        config, total = self.config.trainer, self.total_steps
        self.resume()
        if config.val_only or (self.step == 0 and config.val_before_train):
            self.validated = self.validate_first()
            if self.validated:  # Empty where the run has no rows to validate.
                self.reports.log(self.step, self.validated)
                self.checkpoints.is_named_in(self.validated)
        if config.val_only:
            self.display.note(f"done: {self.dir} holds metrics.jsonl and trajectories/")
            self.display.note(f"to look at it: {view_command(self.dir)}")
            return
        with self.display.stage("train", total=total, done=self.step) as stage:
            while True:
                done, metrics = self.step, None
                try:
                    if done == total:
                        self.checkpoints.settle()
                        self.export()
                        self.tell_end()
                        return
                    metrics = self.next_step()
                except WorkerDied as death:
                    self.go_back(death)
                except Exception:
                    with suppress(Exception):  # the error that ended the run is the one to tell
                        self.checkpoints.settle()
                    raise
                stage.advance(self.step - done)
                if metrics is None:
                    continue
                try:
                    yield metrics
                except GeneratorExit:
                    self.checkpoints.settle()
                    raise

    def tell_end(self) -> None:
        """List the contents of the run's folder, and the problems that occurred."""
        trainer, ray_init = self.config.trainer, self.config.ray_init
        held = ["metrics.jsonl", "reward.png", "checkpoints/", "policy/"]
        held += ["trajectories/"] if trainer.save_trajectories != "none" else []
        held += ["profile/"] if trainer.profile_steps else []
        self.display.note(f"done: {self.dir} holds {', '.join(name for name in held if (self.dir / name).exists())}")
        if (report := self.source.report()) is not None:
            self.display.note(report)
        if self.config.uses_ray and ray_init.timeline_json_file is not None:
            self.display.note(f"Ray's timeline is written to {ray_init.timeline_json_file}")
        for text in (self.reports.errors.text(), self.checks.alarms.text()):
            if text is not None:
                self.display.warn(text)
        self.display.note(f"to look at it: {view_command(self.dir)}")

    def next_step(self) -> Numbers:
        """Train one step; validate, show, log and save as far as it is due.

        From the update on SIGTERM waits for the end of the step, and not longer than `trainer.preemption_seconds`.
        """
        config, total = self.config.trainer, self.total_steps
        self.step += 1
        try:
            step = self.train_step()
            if validation_due(config, self.step, total):
                self.validated = self.validate()
                step.metrics |= self.validated
            self.observers.tell("on_end", step)
            self.ended = self.state()
        finally:
            allow()
        # The save of an earlier step may have reached the disk meanwhile: then it counts from now on.
        self.checkpoints.settle(wait=False)
        if self.checkpoints.is_best(self.step, step.metrics) or due(config.save_freq, self.step, total):
            self.save(self.state())
        self.react(step)
        remove_oldest(self.dir, config.trajectories_to_keep_gb, {self.step, *self.checkpoints.steps_kept()})
        return step.metrics

    def react(self, step: Step) -> None:
        """Stop the run, after a checkpoint, where alarms of the step ask for it. Raises TrainingError."""
        if step.alarm is None or step.reaction == "warn":
            return
        if step.reaction == "checkpoint_then_stop":
            self.save(self.state())
            self.checkpoints.settle()
        raise TrainingError(f"step {step.number}: {step.alarm}. All alarms are in {self.checks.alarms.path}")

    def validate_first(self) -> Numbers:
        """Validate before any step; by new workers when some die."""
        while True:
            try:
                return self.validate()
            except WorkerDied as death:
                self.go_back(death)

    def go_back(self, death: WorkerDied) -> None:
        """After a worker died, make new workers and load the newest checkpoint.

        Raises WorkerDied when the run has resumed often enough.
        """

        def go_back_to(path: Path | None) -> None:
            self.source.restart_workers()
            self.begin_again() if path is None else self.load(path)
            if not self.config.trainer.val_only:
                self.tracker.truncate_after(self.step)
                self.checks.alarms.forget_after(self.step)

        death = self.continuation.after(death, go_back_to)
        self.display.warn(f"{death}; new workers go on after step {self.step}")

    def begin_again(self) -> None:
        """Restore the state in which this process began from no checkpoint, with workers that are new."""
        self.step = self.version = self.saved = 0
        self.ended = None
        self.source.load_state(self.first)
        if self.kl_controller is not None:
            self.kl_controller.load_state_dict(as_mapping(self.first["kl_controller"]))
        if self.entropy_control is not None:
            self.entropy_control.restore(self.first["entropy_coef"])
        self.source.publish(self.workers.policy.weights(), 0)

    def train_step(self) -> Step:
        """Take one step: rollouts, log-probs, advantages, update, weights to the engine."""
        workers, observers, began = self.workers, self.observers, time.perf_counter()
        step = self.collect()
        observers.tell("on_rollout", step)
        check_failures(self.config, step.number, step.sampled)

        batch = self.with_scores(trained_on(workers.executor, step.rollout, step.outlines), step)
        tokens = batch.num_tokens
        with self.timed("advantages"):
            batch = self.estimate(batch, step)
        defer(self.config.trainer.preemption_seconds)
        self.ended = None
        self.parts(batch, step)
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
        step.metrics |= {**self.seconds, "time/step": seconds, "perf/tokens_per_second": tokens / seconds}
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
        reads_numbers = "numbers" in declared_by_estimator(config).columns
        return Step(
            number=self.step,
            run_dir=self.dir,
            version=self.version,
            metrics=metrics,
            found=Report(),
            rollout=rollout,
            outlines=outlines,
            greedy_rewards=greedy_rewards(outlines, config.algorithm.turn_reward_coef),
            numbers={number: one.numbers for number, one in enumerate(outlines)} if reads_numbers else None,
            kl_coef=None if self.kl_controller is None else self.kl_controller.coef,
        )

    def estimate(self, batch: Sequences, step: Step) -> Sequences:
        """Add advantages, returns and rewards to the batch (see `estimate`), and steer the KL's coefficient."""
        further: dict[int, float] | None = None
        if self.workers.reward_model is not None:
            further = {number: outline.model_reward for number, outline in enumerate(step.outlines)}
        n = self.config.actor_rollout_ref.rollout.n
        successes = self.successes(step.outlines) if self.config.actor_rollout_ref.actor.success_nll_coef else None
        distillation = self.config.distillation if self.config.distillation.teachers else None
        compute = partial(
            estimate,
            config=self.config.algorithm,
            n=n,
            kl_coef=step.kl_coef,
            further_rewards=further,
            greedy_rewards=step.greedy_rewards,
            numbers=step.numbers,
            successes=successes,
            version=self.version,
            distillation=distillation,
        )
        batch, results = self.workers.executor.compute(estimate_and_read, batch, compute, step.readers)
        step.estimate, step.read = results
        step.metrics |= step.estimate.metrics
        if self.kl_controller is not None:
            self.kl_controller.update(step.estimate.kl, len(batch))
        return batch

    def parts(self, batch: Sequences, step: Step) -> None:
        """Leave the trajectories of masked_statuses out of the batch; sort the other sequences by their role in
        losses."""
        found, outlines, metrics = step.estimate, step.outlines, step.metrics
        masked, actor = self.config.algorithm.masked_statuses, self.config.actor_rollout_ref.actor
        kept = [row for row, owner in enumerate(found.trajectory) if outlines[owner].status not in masked]
        owners = [found.trajectory[row] for row in kept]
        zero = set(found.zero_advantage)
        successes = self.successes(outlines) if actor.success_nll_coef else set()
        step.batch = batch.select(kept) if masked else batch
        step.parts = Parts(
            trajectory=owners,
            zero_advantage=[place for place, row in enumerate(kept) if row in zero],
            successes=[place for place, owner in enumerate(owners) if owner in successes],
            observed=[found.observed[row] for row in kept],
        )
        metrics["left_out/masked"] = float(len(set(found.trajectory)) - len(set(owners)))
        metrics["train/sequences"] = float(len(step.batch) - len(step.parts.zero_advantage))
        step.learnt = metrics["train/sequences"] > 0 or self.config.distillation.in_loss

    def successes(self, outlines: Sequence[Outline]) -> set[int]:
        """Number the trajectories that succeed."""
        threshold = self.config.reward_model.success_threshold
        return {number for number, one in enumerate(outlines) if one.score is not None and one.score >= threshold}

    def update(self, step: Step) -> bool:
        """Update critic, and policy after the critic's warm-up. Returns whether the policy has new weights."""
        filtered = self.config.algorithm.filter_groups.enable and declared_by_estimator(self.config).compares_group
        workers, batch, parts, metrics = self.workers, step.batch, step.parts, step.metrics
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
                    zero_advantage=parts.zero_advantage if filtered else [],
                    successes=parts.successes,
                    observed_tokens=parts.observed,
                    expert=expert,
                    expert_coef=self.config.expert.coef,
                    entropy_coeff=bonus,
                    by_token=bool(step.rollout.files),
                )
        return updated

    def publish(self) -> Numbers:
        """Give the policy's weights to the engine."""
        with self.timed("sync_weights"):
            report = self.source.publish(self.workers.policy.weights(), self.version)
        return {"sync/bytes": float(report.bytes), "sync/seconds": report.seconds}

    def validate(self) -> Numbers:
        """Validate and show. Empty when there is no validation data."""
        if self.validation is None:
            return {}
        samples = [self.validation[index] for index in range(len(self.validation))]
        with self.timed("validation", shown=False):
            show = self.config.trainer.show_trajectory_freq > 0
            metrics, shown, files = validate(self.config, samples, self.source, self.workers, self.step, show=show)
        self.reports.on_validation(self.step, metrics, shown, files)
        return metrics | {"time/validation": self.seconds["time/validation"]}

    def save_in_time(self) -> None:
        """Save the last step that is whole, unless it is saved, or an update was left half done, or time runs out."""
        seconds = self.config.trainer.preemption_seconds
        try:
            with within_time(seconds):
                if self.ended is not None and step_in(self.ended) > self.saved and seconds:
                    self.save(self.ended, goes_on=False)
                self.checkpoints.settle()
        except (Exception, Terminated) as error:  # the run ends anyway, and goes on from the checkpoint before
            self.display.warn(f"no checkpoint was saved at the end: {str(error) or f'{seconds:g} s have passed'}")

    def save(self, state: Mapping[str, JSON], *, goes_on: bool = True) -> None:
        """Save the state that a continued run needs; published now or, in the background, when it is written.

        `state`: of the step that the models are after. Not `goes_on`: later records are needed, too.
        """
        groups: dict[str, TrainableGroup] = {"policy": self.workers.policy}
        if self.workers.critic is not None:
            groups["critic"] = self.workers.critic
        background = self.checkpoints.background
        writers = {name: partial(group.save, background=background) for name, group in groups.items()}
        with self.timed("save"):
            self.checkpoints.save(step_in(state), writers, {**state, "config": config_to_dict(self.config)})
            self.saved = step_in(state)
            if goes_on:
                self.source.saved()

    def state(self) -> dict[str, JSON]:
        """Collect the contents of a checkpoint apart from the workers."""
        state: dict[str, JSON] = {"step": self.step, "version": self.version, **self.source.state()}
        if self.kl_controller is not None:
            state["kl_controller"] = self.kl_controller.state_dict()
        if self.entropy_control is not None:
            state["entropy_coef"] = self.entropy_control.coef
        return state

    def load(self, path: Path) -> None:
        """Restore workers, data order, step and engine from a checkpoint. Raises CheckpointError."""
        state = self.checkpoints.load(path)
        self.workers.policy.load(path / "policy")
        if self.workers.critic is not None:
            self.workers.critic.load(path / "critic")
        with reading_state(path):
            if self.kl_controller is not None:
                self.kl_controller.load_state_dict(as_mapping(state["kl_controller"]))
            if self.entropy_control is not None:
                self.entropy_control.restore(state["entropy_coef"])
            self.source.load_state(state)
        self.step = self.saved = step_in(state)
        self.ended = None
        version = state.get("version")  # checkpoints of earlier releases have none: theirs was the step
        self.version = version if isinstance(version, int) else self.step
        self.source.publish(self.workers.policy.weights(), self.version)

    def resume(self) -> None:
        """Load the checkpoint that the run resumes from, if there is one, then begin to write into its folder."""
        config, path = self.config.trainer, self.continuation.begun_from
        if path is not None:
            self.load(path)
            self.display.note(f"resumed from {path} (step {self.step})")
        after = None if config.val_only else -1 if path is None else self.step
        self.folder.begin(self.tracker, self.checkpoints, after)
        if after is not None:
            self.checks.alarms.forget_after(after)

    def export(self) -> None:
        """Export the policy in Hugging Face format, whole or not at all."""
        export = self.workers.policy.export
        export_policy(export, self.chat, self.step, self.dir / "policy", self.checkpoints.store, self.display)

    @contextmanager
    def timed(self, name: str, *, shown: bool = True) -> Iterator[None]:
        """Time a stage into `time/<name>`, in seconds; show it, unless it shows its own progress. Profiled if asked."""
        began = time.perf_counter()
        self.workers.executor.profile_with(profile_of(self.config.trainer, self.dir, self.step, name))
        try:
            with self.display.stage(name.replace("_", " ")) if shown else nullcontext(), nvtx_range(name):
                yield
        finally:
            self.workers.executor.profile_with(None)  # what follows a worker's death is no part of the stage
        self.seconds[f"time/{name}"] = time.perf_counter() - began


def estimate_and_read(
    batch: RaggedBatch,
    compute: partial[tuple[dict[str, torch.Tensor], Estimate]],
    readers: Mapping[str, Callable[[RaggedBatch], object]],
) -> tuple[dict[str, torch.Tensor], tuple[Estimate, dict[str, object]]]:
    """Call `compute` on a batch, then the readers on the batch with its columns [T]: (columns, (result, readings)).

    One call, so that the tokens are fetched once.
    """
    columns, found = compute(batch)
    batch = batch.with_fields(**columns)
    return columns, (found, {name: read(batch) for name, read in readers.items()})


def greedy_rewards(outlines: Sequence[Outline], turn_reward_coef: float) -> dict[int, float] | None:
    """Find by prompt the rewards of the trajectories that are a baseline; None where no baseline was drawn."""
    drawn = {outline.group: outline.reward(turn_reward_coef) for outline in outlines if outline.baseline}
    return {group: reward for group, reward in drawn.items() if reward is not None} if drawn else None


def validation_due(config: RunConfig, step: int, total: int) -> bool:
    """Return true every `test_freq` steps and at the last one; with -1 there alone, unless `val_after_train` is off."""
    return due(config.test_freq, step, total) and (config.test_freq > 0 or config.val_after_train)


def due(frequency: int, step: int, total: int) -> bool:
    """Return true every `frequency` steps, and at the last one; -1: only there."""
    return step == total or (frequency > 0 and step % frequency == 0)
