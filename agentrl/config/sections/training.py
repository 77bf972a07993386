"""The whole config of `python -m agentrl.train`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from agentrl.config.adapters import why_not_served
from agentrl.config.columns import COLUMNS, described
from agentrl.config.declaration import OF_ESTIMATORS, declaration_of
from agentrl.config.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from agentrl.config.rules import OnlyWith, ReadBy
from agentrl.config.section import Finding
from agentrl.config.sections.actor import ActorRolloutRefConfig, CriticConfig
from agentrl.config.sections.algorithm import OF_STALE_TOKENS, AlgorithmConfig
from agentrl.config.sections.async_training import AsyncTrainingConfig
from agentrl.config.sections.data import DataConfig
from agentrl.config.sections.distillation import DistillationConfig
from agentrl.config.sections.expert import ExpertConfig
from agentrl.config.sections.model import PolicyModelConfig
from agentrl.config.sections.parallel import Parallel
from agentrl.config.sections.reward import RewardModelConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.sections.trainer import QuickstartConfig, TrainerConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
COMPARING = frozenset({"grpo", "grpo_turn", "grpo_passk", "rloo", "opo", "gpg", "maxrl", "rlsd"})
"""Estimators that compare the trajectories of a prompt, and take one alone."""


def even_sizes(batch: int) -> list[int]:
    """List the sizes of the largest mini-batch of a batch that is split as evenly as whole prompts can be, from 1."""
    return sorted({-(-batch // steps) for steps in range(1, batch + 1)})


class Config(RolloutsConfig):
    """The whole config of `python -m agentrl.train`."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: Annotated[
        CriticConfig,
        ReadBy(
            (ADVANTAGE_ESTIMATORS,),
            "algorithm.adv_estimator=gae or bi_level_gae or decoupled_gae",
            declares=lambda declared: "values" in declared.columns,
            off=("fsdp", "fsdp2"),  # verl's scripts name the strategy of every role, with GRPO too
        ),
    ] = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    distillation: DistillationConfig = DistillationConfig()
    expert: ExpertConfig = ExpertConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    trainer: TrainerConfig = TrainerConfig()
    quickstart: Annotated[
        QuickstartConfig,
        OnlyWith("data.train_files=quickstart", "data.val_files=quickstart", "actor_rollout_ref.model.path=quickstart"),
    ] = QuickstartConfig()

    @property
    def rollout_workers(self) -> int:
        """Number of processes that run trajectories: with Ray one on each machine that generates."""
        return self.actor_rollout_ref.rollout.nnodes or self.trainer.nnodes

    @property
    def prompts_per_draw(self) -> int:
        """Number of prompts that a step brings, or a whole multiple of it where it may draw again."""
        return self.data.train_batch_size if self.async_training.max_staleness else self.data.draw_size

    @property
    def teacher_parallel(self) -> Parallel:
        """Arrangement of the teachers' ranks."""
        own = self.distillation.ulysses_sequence_parallel_size
        sequence = own or self.actor_rollout_ref.actor.ulysses_sequence_parallel_size
        return Parallel.from_fsdp(sequence, self.distillation.fsdp_config)

    @property
    def uses_ray(self) -> bool:
        """Say whether more than this process is asked for."""
        devices = self.trainer.nnodes * self.trainer.n_gpus_per_node
        return devices > 1 or self.actor_rollout_ref.rollout.nnodes > 0 or self.reward_model.enable_resource_pool

    @property
    def served_adapters(self) -> PolicyModelConfig | None:
        """Keys of the adapters that servers are sent, and serve unmerged; None where they are merged."""
        model = self.actor_rollout_ref.model
        return model if model.lora_rank and not model.lora_merge else None

    def findings(self) -> Iterator[Finding]:
        yield from super().findings()
        yield from self._batches()
        yield from self._overlap()
        yield from self._correction()
        yield from self._columns_of_loss()
        yield from self._rewards()
        yield from self._teachers()
        yield from self._ranks()
        yield from self._remarks()

    def _batches(self) -> Iterator[Finding]:
        """Check that a batch splits into mini-batches of that many prompts, as even as whole prompts can be."""
        batch = self.data.train_batch_size
        sizes = even_sizes(batch)
        for section, keys in ((ACTOR, self.actor_rollout_ref.actor), ("critic", self.critic)):
            if (size := keys.ppo_mini_batch_size) is not None and size not in sizes:
                near = [*[n for n in sizes if n < size][-1:], *[n for n in sizes if n > size][:1]]
                yield Finding(
                    f"{section}.ppo_mini_batch_size={size} is not the size of a mini-batch of "
                    f"data.train_batch_size={batch} (both count prompts), which is split as evenly as whole prompts "
                    f"can be; the nearest that are: {' and '.join(map(str, near))}"
                )

    def _overlap(self) -> Iterator[Finding]:
        """Check that what is begun ahead is kept, and that something runs trajectories during updates."""
        rollout, every = self.actor_rollout_ref.rollout, self.async_training.publish_every
        at, save_freq = f"async_training.max_staleness={self.async_training.max_staleness}", self.trainer.save_freq
        if not self.async_training.max_staleness:
            return
        if save_freq < 1 and not self.trainer.val_only:
            yield Finding(
                f"trainer.save_freq={save_freq} conflicts with {at}: prompts that were begun ahead are kept in "
                "checkpoints. Set trainer.save_freq=50, say"
            )
        if self.algorithm.rollout_correction.proximal == "published" and save_freq % every:
            yield Finding(
                f"trainer.save_freq={save_freq} conflicts with {CORRECTION}.proximal=published: a run that is "
                f"continued begins with the weights of a checkpoint. Set a multiple of publish_every={every}"
            )
        if rollout.free_cache_engine and rollout.nnodes:
            yield Finding(
                f"{at} with {ROLLOUT}.nnodes={rollout.nnodes} conflicts with {ROLLOUT}.free_cache_engine=true: rollout "
                "workers with devices of their own would stand still for the update. Set free_cache_engine=false"
            )

    def _correction(self) -> Iterator[Finding]:
        """Check that the importance weight is not counted twice."""
        keys, loss = self.algorithm.rollout_correction, self.actor_rollout_ref.actor.policy_loss.loss_mode
        to_engine = keys.proximal == "rollout" and POLICY_LOSSES.is_built_in(loss) and loss != "gpg"
        if keys.rollout_is is not None and (to_engine or loss == "m2po"):
            what = f"loss_mode={loss}" if loss == "m2po" else f"proximal={keys.proximal}"
            yield Finding(
                f"{CORRECTION}.rollout_is={keys.rollout_is} conflicts with {what}: the ratio of loss_mode={loss} is to "
                f"the engine's log-probs already, and would count twice. Set {ACTOR}.policy_loss.loss_mode=gpg, or "
                "leave rollout_is out"
            )

    def _columns_of_loss(self) -> Iterator[Finding]:
        """Check that the batch will have the columns that a user's loss declares."""
        loss, estimator = self.actor_rollout_ref.actor.policy_loss.loss_mode, self.algorithm.adv_estimator
        if POLICY_LOSSES.is_built_in(loss):
            return
        declared = declaration_of(POLICY_LOSSES.get(loss)).columns
        for name in (one for one in OF_ESTIMATORS if one in declared):
            at = f"{ACTOR}.policy_loss.loss_mode={loss} declares the column {described(name)}, which"
            if name not in COLUMNS:
                yield Finding(f"{at} only estimators are given: leave it out of @declare")
            elif name not in declaration_of(ADVANTAGE_ESTIMATORS.get(estimator)).columns:
                yield Finding(
                    f"{at} is computed only for an estimator that declares it, and algorithm.adv_estimator={estimator} "
                    f"does not: choose e.g. {'gae' if name == 'values' else 'remax'}"
                )

    def _rewards(self) -> Iterator[Finding]:
        """Check that rewards are known when and by what they are read, and that validation validates."""
        estimator, filters = self.algorithm.adv_estimator, self.algorithm.filter_groups
        scores, rollout = self.reward_model, self.actor_rollout_ref.rollout
        if filters.refill and scores.classifies and filters.metric == "reward":
            yield Finding(
                "algorithm.filter_groups.refill=true with reward_model.enable=true needs "
                "algorithm.filter_groups.metric=score, or another number of the scorer's: the reward model scores when "
                "all prompts are drawn"
            )
        if rollout.roles and "greedy_rewards" in declaration_of(ADVANTAGE_ESTIMATORS.get(estimator)).columns:
            yield Finding(
                f"{ROLLOUT}.roles conflicts with algorithm.adv_estimator={estimator}: the reward of a greedy "
                "trajectory is not known by role. Set algorithm.adv_estimator=rae, or grpo"
            )
        if rollout.roles and scores.classifies:
            yield Finding(
                f"{ROLLOUT}.roles conflicts with a reward model: it reads a conversation, not a role. Leave "
                "reward_model out; the environment or the agent scores each role"
            )
        machines = self.rollout_workers > 1 or self.ray_init.address is not None
        if scores.starts_servers and not scores.enable_resource_pool and machines:
            yield Finding(
                "reward_model.model.generative=true starts servers on this machine alone, and several machines score: "
                "give them devices of their own (reward_model.enable_resource_pool=true, reward_model.nnodes, "
                "reward_model.n_gpus_per_node), or name servers that run already (reward_model.rollout.server_urls)"
            )
        if self.data.val_files is not None and not (rollout.val_kwargs.do_sample or rollout.val_kwargs.greedy):
            yield Finding(
                f"{ROLLOUT}.val_kwargs has do_sample=false and greedy=false, so nothing would be validated; set one of "
                "them, or data.val_files=null"
            )

    def _teachers(self) -> Iterator[Finding]:
        """Check that the teachers' log-probs can be compared with the policy's."""
        teachers, temperature = self.distillation.teachers, self.actor_rollout_ref.rollout.temperature
        served = [teacher for _, teacher in teachers if teacher.base_url is not None]
        if served and temperature not in (0, 1):
            yield Finding(
                f"{ROLLOUT}.temperature={temperature:g} conflicts with the teacher {served[0].name}: servers give "
                "log-probs at temperature 1, as the policy's have to be. Set it to 1, or take distillation.teacher.path"
            )
        if self.algorithm.adv_estimator == "rlsd" and not teachers:
            yield Finding(
                "algorithm.adv_estimator=rlsd weighs tokens by what a teacher says of them: set distillation.teacher, "
                "path=policy and privileged='The answer is {ground_truth}.' say"
            )

    def _ranks(self) -> Iterator[Finding]:
        """Check that the ranks of each role can be arranged as its keys say, and adapters served so."""
        ranks, roles = self.trainer.nnodes * self.trainer.n_gpus_per_node, self.actor_rollout_ref
        yield from map(Finding, roles.actor.parallel.faults(ranks, f"{ACTOR}."))
        yield from map(Finding, roles.ref_parallel.faults(ranks, "actor_rollout_ref.ref."))
        yield from map(Finding, self.critic.parallel.faults(ranks, "critic.", "model.fsdp_config"))
        if self.distillation.teachers:
            yield from map(Finding, self.teacher_parallel.faults(ranks, "distillation."))
        kept = self.async_training.keep_kv_cache
        if (model := self.served_adapters) is not None and (why := why_not_served(model, roles.rollout, kept)):
            yield Finding(
                f"actor_rollout_ref.model.lora_merge=false: adapters cannot be served as they are: {why}. Leave the "
                "key out, and they are merged"
            )

    def _remarks(self) -> Iterator[Finding]:
        """Yield settings that are allowed and seldom meant."""
        rollout, estimator = self.actor_rollout_ref.rollout, self.algorithm.adv_estimator
        on = [f"top_p={rollout.top_p:g}"] if rollout.top_p < 1 else []
        on += [f"top_k={rollout.top_k}"] if rollout.top_k > 0 else []
        apart = f" by up to {-math.log(rollout.top_p):.2g} nats a token (KL)" if rollout.top_p < 1 else ""
        if on and not self.trainer.val_only:
            yield Finding(
                f"{ROLLOUT}.{' and '.join(on)}: training samples from a filtered distribution, and engine and trainer "
                f"both report log-probs of the whole one, which differs{apart}; rollout/logprob_gap_kl reads 0. "
                "Without a baseline of the group the gradient is off by about 20 % at top_p=0.95 and 40 % at 0.9, with "
                f"one by half of that. Set top_p=1 and top_k=-1; validation has its own in {ROLLOUT}.val_kwargs",
                "remark",
            )
        if rollout.n == 1 and estimator in COMPARING and not self.trainer.val_only:
            yield Finding(
                f"{ROLLOUT}.n=1 with algorithm.adv_estimator={estimator}: a prompt has no other trajectory to be "
                "compared with, so there is no baseline and the advantage is the reward. Set n to 2 or more",
                "remark",
            )
        if self.async_training.max_staleness:
            keys = self.algorithm.rollout_correction
            done = (
                f"the correction is {keys.text()}: watch correction/ess"
                if keys.changes_loss or not keys.needs_pass
                else f"nothing corrects for that: set {CORRECTION}.rollout_is={OF_STALE_TOKENS}, and watch "
                "rollout/logprob_gap_kl"
            )
            yield Finding(
                f"async_training.max_staleness={self.async_training.max_staleness} trains on tokens that older weights "
                f"sampled, and {done}",
                "remark",
            )
