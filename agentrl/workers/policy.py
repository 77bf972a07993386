"""The policy: log-probs of sampled tokens, the update, and its weights for the engine and for disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from agentrl.algorithms.aggregate import LossScale, Scored, Term, add_up, aggregate, with_loss_units
from agentrl.algorithms.policy_loss import BY_TOKEN, CORRECTION, PolicyLoss, loss_columns
from agentrl.algorithms.rollout_correction import correction_metrics
from agentrl.algorithms.terms import EntropyBonus, ExpertNLL, loss_terms
from agentrl.config.declaration import Computed
from agentrl.config.registries import POLICY_BACKENDS
from agentrl.config.sections.distillation import POLICY
from agentrl.config.sections.parallel import most_tokens
from agentrl.config.sections.training import Config
from agentrl.errors import TrainingError
from agentrl.model.scores import Needs, TokenScores
from agentrl.observe.report import Report
from agentrl.observe.watch import Comparison, Counts, Learning, owners_of
from agentrl.runtime.ranks import CachedColumns, RankWeights
from agentrl.system.metrics import Numbers
from agentrl.system.registry import configured
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.backend import AUX_LOSS, Z_LOSS, MiniBatch, PolicyBackendFactory, PolicySettings, StepReport
from agentrl.workers.fsdp import FSDPPolicy
from agentrl.workers.plan import update_plan, with_policy_tokens
from agentrl.workers.teacher import read_heads, write_scores
from agentrl.workers.trainable import TrainableWorker, UpdateReport

POLICY_TOKENS = "policy_tokens"
"""The sum, over an update's forward passes, of the policy tokens that they went over."""
EXPERT_TOKENS = "expert_tokens"
"""The sum of the tokens of an expert's transcripts that an optimizer step learns."""
LOSS_WEIGHT = "loss_weight"
"""The sum of the weights that tokens have in the loss of a mini-batch."""
ENTROPY: Needs = frozenset({"entropy"})
MOST_VARENTROPY = 49.0
"""Bound of the variance of -log p of n < 2^20 tokens: log(n - 1)^2 / 4 + 1 (arXiv:1404.0123). Checks see less by it."""
EXPERTS: Needs = frozenset({"experts"})


class PolicyWorker(TrainableWorker[TokenScores]):
    """The trained policy on one device, or one rank's part of it: the algorithm, over a `PolicyBackend`.

    The learning rate's schedule begins after the training steps in which only the critic learns.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: str | torch.device,
        total_steps: int,
        further_scores: Sequence[Computed] = (),
    ) -> None:
        """Make the backend of the actor's strategy. Raises ConfigError.

        total_steps: training steps of the whole run. further_scores: scores that `compute_log_probs` gives in addition
        to log-probs.
        """
        roles, distillation = config.actor_rollout_ref, config.distillation
        model, actor, temperature = roles.model, roles.actor, roles.rollout.temperature
        self.config = actor
        self._correction = config.algorithm.rollout_correction
        self._expert = ExpertNLL(config.expert.coef)
        self._teaches = [index for index, (_, one) in enumerate(distillation.teachers) if one.is_policy]
        """Indices among the teachers that mean the policy itself."""
        heads = read_heads(distillation, model, device=device, temperature=temperature)
        self._terms = loss_terms(actor, config.algorithm, distillation, heads)
        self._needs: Needs = frozenset(score for term in self._terms for score in term.scores())
        self._compare = next(filter(None, (term.comparison() for term in self._terms)), None)
        self._reads = next(filter(None, (term.reads() for term in self._terms)), None)
        self._further_scores = tuple(further_scores)
        self.seed = config.trainer.seed
        self._critic_warmup = config.trainer.critic_warmup
        self._max_response_length = config.data.max_response_length
        self._kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Rows [n], offsets [n + 1] and columns [T, F] of the last update's micro-batches; whether a policy token is
        among them, read once the update has ended, as a device is waited for."""
        self._experts: CachedColumns | None = None
        """Experts [T, L, k] that the last `compute_log_probs` sent tokens to, with router_replay.mode=R2."""
        settings = PolicySettings(
            section=actor,
            model=model,
            device=device,
            total_steps=total_steps - self._critic_warmup,
            seed=self.seed,
            temperature=temperature,
            log_prob_max_tokens=most_tokens(roles.rollout.log_prob_max_token_len_per_gpu),
        )
        make = cast(PolicyBackendFactory, POLICY_BACKENDS.get(actor.strategy))
        self.backend = configured(make, actor.strategy_options, f"{POLICY_BACKENDS.key}_options")(settings)
        learning = Learning(
            kind="policy",
            config=config,
            section=actor,
            dtype=model.dtype,
            total_steps=settings.total_steps,
            scores=watched_scores,
        )
        super().__init__(self.backend, learning, config.trainer.checks.watches)

    def keep(self) -> None:
        """Keep the weights as they are, for `compute_log_probs` where the proximal policy is the published one."""
        self.backend.keep()

    def compute_log_probs(self, batch: RaggedBatch) -> tuple[torch.Tensor, Numbers]:
        """Return ([T] float32 on the CPU: log-probs of the policy tokens, 0 elsewhere; the metric actor/entropy).

        With k further scores the first is [T, 1 + k]. The entropy is the mean over the policy tokens of all ranks'
        shares, in nats. All of it is of the weights of the last `keep` where the proximal policy is the published one.
        With router_replay.mode=R2 the experts are kept for `of_log_probs`.
        """
        records = self.config.router_replay.mode == "R2"
        needs = ENTROPY.union(self._further_scores, EXPERTS if records else ())
        with self.backend.kept() if self._reads_published else nullcontext():
            scores = self.backend.log_probs(batch, needs)
        if records:
            self._experts = kept_experts(scores.experts, batch)
        assert scores.entropy is not None
        entropy, tokens = self.backend.sum(torch.stack([scores.entropy.double().sum(), batch.mask.sum().double()]))
        if scores.varentropy is None:  # a user's backend need not compute it
            scores = scores._replace(varentropy=torch.where(batch.mask, MOST_VARENTROPY, 0.0))
        known = scores._asdict()
        columns = [scores.logprobs, *(known[name] for name in self._further_scores)]
        found = torch.stack(columns, dim=1) if self._further_scores else scores.logprobs
        return found, {"actor/entropy": entropy / max(tokens, 1.0)}

    def of_log_probs(self) -> CachedColumns:
        """Return the experts of this rank's sequences in the last `compute_log_probs`, and forget them."""
        kept, self._experts = self._experts, None
        assert kept is not None, "it recorded them"
        return kept

    def compute_reference_log_probs(self, batch: RaggedBatch) -> tuple[torch.Tensor, Numbers]:
        """Do as `ReferenceWorker.compute_reference_log_probs`, under the model that the adapters were put into.

        The first part of the answer is [T] float32.
        """
        return self.backend.reference_log_probs(batch), {}

    def recompute(self, sequence: Sequences, temperature: float, compare: Comparison) -> Report:
        """Compare one sequence's log-probs with those of transformers' own model."""
        if self._correction.proximal != "recomputed":
            sequence = sequence.with_fields(old_logprobs=None)
        return self._recompute(sequence, temperature, compare, adapted=True)

    def recompute_reference(self, sequence: Sequences, temperature: float, compare: Comparison) -> Report:
        """Do the same without the adapters, for the column ref_logprobs."""
        return self._recompute(sequence, temperature, compare, adapted=False)

    def _recompute(self, sequence: Sequences, temperature: float, compare: Comparison, *, adapted: bool) -> Report:
        if not isinstance(self.backend, FSDPPolicy):
            return compare(None, sequence, torch.device("cpu"))
        with self.backend.on_device():
            return compare(self.backend.second(temperature, adapted=adapted), sequence, self.backend.device)

    def compute_teacher_scores(self, batch: RaggedBatch) -> tuple[torch.Tensor, Numbers]:
        """Do as `TeacherWorker.compute_teacher_scores` for the teacher that is the policy as it is now.

        The first part of the answer is [T, 1] float32.
        """
        scores = torch.zeros(batch.num_tokens, 1)
        for index in self._teaches:
            write_scores(scores, batch, index, POLICY, self._taught_logprobs)
        return scores, {}

    def _taught_logprobs(self, batch: RaggedBatch) -> torch.Tensor:
        """Compute the log-probs of the policy tokens, [T, 1] float32."""
        return self.backend.log_probs(batch.with_fields(experts=None), frozenset()).logprobs[:, None]

    def update(
        self,
        batch: Sequences,
        *,
        step: int,
        expert: Sequences | None = None,
        entropy_coeff: float | None = None,
        by_token: bool = False,
    ) -> dict[str, float]:
        """Update the weights in mini-batches of whole prompts; `step` is the training step, counted from 1.

        Every rank is given all sequences, and loads its share of each mini-batch. Sequences without a policy token are
        left out. With one mini-batch and one epoch `batch.old_logprobs` may be None: the policy's own, detached, are
        the same. They are not read, but `staleness` is, where the proximal policy is another one.

        Args:
            batch: sequences of its column zero_advantage have advantages that are all 0. With a loss that declares
                advantage_only, and without KL loss, entropy bonus and teacher in the loss, their gradient is 0, and
                they are not computed. This changes no weight: mini-batches and denominators count all sequences, and
                a mini-batch without any other takes its optimizer step, too. With success_nll_coef its column success
                is needed, with observation_nll_coef its column observed.
            expert: transcripts whose mean negative log-likelihood by policy token, times `expert_coef`, is added to
                the loss; they are spread over the optimizer steps.
            entropy_coeff: weight of the entropy bonus; None: the config's.
            by_token: keep the loss's results for each token for `of_update`.

        Returns actor/loss, actor/pg_loss, actor/ppo_kl, the loss's own metrics (clip_frac, clip_frac_lower),
        actor/grad_norm (before clipping), actor/lr, actor/skipped_updates, with these losses actor/kl_loss,
        actor/success_nll, actor/observation_nll, actor/teacher_loss, actor/expert_loss, actor/moe_aux_loss and
        actor/moe_z_loss (see
        `agentrl.trainer.step`); train/filtered_fraction, the part of the sequences that was not computed;
        perf/update_tokens, all tokens that the updates went over; train/policy_tokens, the tokens among them that the
        policy sampled, in the steps taken; train/loss_weight; `correction_metrics` where the proximal policy is
        another one.

        Raises ValueError when a field of the batch is missing or the batch has no policy token. Raises TrainingError
        when loss or gradient were not finite for too long (see `agentrl.workers.trainable`).
        """
        config, terms = self.config, self._terms
        if entropy_coeff is not None:
            terms = [EntropyBonus(-entropy_coeff) if isinstance(one, EntropyBonus) else one for one in terms]
        self._kept = []
        if isinstance(batch, RaggedBatch):
            batch = batch.with_fields(row=torch.arange(len(batch)))
        batch = with_loss_units(batch.select(with_policy_tokens(batch)), config.loss_unit)
        key = f"{self.seed}/{step}" if config.shuffle else None
        plan = update_plan(batch.group, config.ppo_mini_batch_size, config.ppo_epochs, key)
        self._check(batch, len(plan))
        computed = torch.stack([term.computes(batch) for term in terms]).any(0)
        counts = {term.name: term.counts(batch) for term in terms if not term.by_token}
        counts[POLICY_TOKENS] = batch.policy_tokens
        last = len(plan) - len(plan) // config.ppo_epochs if by_token else len(plan)
        """The place of the first mini-batch whose columns are kept."""
        minis = (
            self._mini(
                f"step {step}, {name} of the policy", batch, members, terms, computed, counts, keeps=place >= last
            )
            for place, (name, members) in enumerate(plan)
        )
        if expert is not None:
            minis = (replace(mini, beside=self._imitated(expert, place, len(plan))) for place, mini in enumerate(minis))
        report = self._learn(
            minis, step=step - self._critic_warmup, rates=len(plan) if config.optim.lr_by_mini_batch else 1
        )
        went_over = self._went_over(report, int(batch.lengths[computed].sum()))
        left = {"train/filtered_fraction": 1 - int(computed.sum()) / len(computed)}
        return self._metrics(report, with_expert=expert is not None) | went_over | left

    def of_update(self) -> CachedColumns:
        """Return the loss's columns of this rank's sequences in the last epoch of the last update, and forget them."""
        kept, self._kept = self._kept, []
        fields = loss_columns(self._correction)
        rows, ends, values = [], [torch.zeros(1, dtype=torch.int64)], [torch.zeros(0, len(fields))]
        end = 0
        for of_rows, offsets, columns, counts in kept:
            if not counts:  # without policy tokens it only kept step with other ranks
                continue
            rows.append(of_rows.cpu())
            ends.append(offsets[1:].cpu() + end)
            values.append(columns.cpu())
            end += len(columns)
        found = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
        return CachedColumns(found, torch.cat(ends), torch.cat(values))

    def _keep(self, micro: RaggedBatch, columns: Mapping[str, torch.Tensor]) -> None:
        """Keep the columns of a micro-batch."""
        assert micro.row is not None, "update has numbered them"
        absent = torch.full((micro.num_tokens,), math.nan, device=micro.ids.device)
        names = loss_columns(self._correction)
        values = torch.stack([columns.get(name, absent).float() for name in names], dim=1)
        values = values.masked_fill(~micro.mask[:, None], math.nan)
        self._kept.append((micro.row, micro.offsets, values, micro.mask.any()))

    def weights(self) -> RankWeights:
        """Return the weights for an engine."""
        return self.backend.weights()

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the policy and its tokenizer in Hugging Face format, in the configured dtype."""
        self.backend.export(Path(dir), tokenizer)

    def _mini(
        self,
        where: str,
        batch: Sequences,
        members: Sequence[int],
        terms: Sequence[Term],
        computed: torch.Tensor,
        of_batch: Mapping[str | None, torch.Tensor],
        *,
        keeps: bool,
    ) -> MiniBatch[TokenScores]:
        """Make a mini-batch that counts all of its `members`, and holds the computed ones.

        of_batch: policy tokens, and the terms' `counts`, of each sequence of the batch. keeps: it keeps its columns for
        `of_update`.
        """
        tokens, units = of_batch[POLICY_TOKENS][members], batch.sequences["loss_unit"][members]
        scale = LossScale.from_policy_tokens(tokens, self.config.loss_agg_mode, self._max_response_length, units)
        counts = {name: int(found[members].sum()) for name, found in of_batch.items()}

        def loss(found: TokenScores, micro: RaggedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            """Compute (loss, a scalar; sums for metrics, scalars) from the scores [T] of a micro-batch."""
            logprobs = torch.where(micro.mask, found.logprobs, 0.0)  # those of observed tokens are for one term alone
            total, sums, columns = add_up(terms, Scored(micro, found, logprobs), scale, counts)
            if keeps:
                self._keep(micro, columns)
            ones = torch.ones_like(found.logprobs)
            weight = aggregate(ones, micro.mask, micro.offsets, scale, micro.unit_tokens)
            return total, sums | {POLICY_TOKENS: micro.mask.sum(), LOSS_WEIGHT: weight}

        return MiniBatch(
            where,
            batch.select([row for row in members if computed[row]]),
            loss,
            self._needs,
            self._compare,
            self._reads,
            watches=self._watched(
                Counts(
                    policy_tokens=tokens,
                    owners=owners_of(batch, members),
                    successful=counts.get("success_nll", 0),
                    read=counts.get("observation_nll", 0),
                    entropy_coeff=-sum(term.coef for term in terms if isinstance(term, EntropyBonus)),
                )
            ),
        )

    def _imitated(self, expert: Sequences, place: int, steps: int) -> MiniBatch[TokenScores]:
        """Make the part of an expert's transcripts that goes with optimizer step `place` of so many."""
        sequences = expert.select(range(place, len(expert), steps))
        scale = LossScale.from_policy_tokens(sequences.policy_tokens, "token-mean")

        def loss(found: TokenScores, micro: RaggedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            """Compute (loss, a scalar; sums for metrics, scalars) from the scores [T] of a micro-batch."""
            scored = Scored(micro, found, found.logprobs)
            total, sums, _ = add_up([self._expert], scored, scale, {self._expert.name: scale.tokens})
            return total, sums | {EXPERT_TOKENS: micro.mask.sum()}

        return MiniBatch(f"transcripts of optimizer step {place + 1}", sequences, loss)

    @property
    def _reads_published(self) -> bool:
        """Say whether the proximal policy is the last published policy."""
        return self._correction.proximal == "published"

    def _metrics(self, report: UpdateReport, *, with_expert: bool) -> dict[str, float]:
        """Name the sums that the optimizer steps reported."""
        names = list(dict.fromkeys(name for one in report.taken for name in one.sums))
        terms = [*self._terms, self._expert] if with_expert else self._terms
        means = {one.name: one.name for one in terms if one.name is not None}
        means |= {name: name for name in ("loss", AUX_LOSS, Z_LOSS) if name in names}
        by_token = {name.removeprefix(BY_TOKEN): name for name in names if name.startswith(BY_TOKEN)}
        found = report.metrics("actor", means, by_token)
        if learnt := [one.sums[self._expert.name] for one in report.taken if one.sums.get(EXPERT_TOKENS)]:
            found[f"actor/{self._expert.name}"] = sum(learnt) / len(learnt)
        corrections = [name for name in names if name.startswith(CORRECTION)]
        if not corrections:
            return found
        sums = {
            name.removeprefix(CORRECTION): sum(one.sums.get(name, 0.0) for one in report.taken) for name in corrections
        }
        return found | correction_metrics(sums, self._correction)

    def _blame(self, report: StepReport) -> str:
        """Blame a user's loss whose numbers, or whose gradient, are not finite where its log-probs are."""
        loss = next((one for one in self._terms if isinstance(one, PolicyLoss)), None)
        own, change = report.sums.get("pg_loss", 0.0), report.sums.get(f"{BY_TOKEN}ppo_kl", math.nan)
        if loss is None or not loss.is_of_a_user or not math.isfinite(change):
            return super()._blame(report)
        if not math.isfinite(own):
            return (
                f"and so are the policy's log-probs: the result of {loss.what} is not. Look for 0 / 0 and log(0) in it."
            )
        return (
            f"and so is the result of {loss.what}: its gradient is not (a root or a power of 0, or where() around "
            f"one), or {super()._blame(report)}"
        )

    def _went_over(self, report: UpdateReport, length: int) -> dict[str, float]:
        """Return train/policy_tokens, perf/update_tokens and, where weights add up to 1, train/loss_weight, a mean.

        length: tokens of the sequences that were computed.
        """
        taken = report.taken
        tokens = {
            "train/policy_tokens": sum(one.sums.get(POLICY_TOKENS, 0.0) for one in taken),
            "perf/update_tokens": float(length * self.config.ppo_epochs),
        }
        if not taken or self.config.loss_agg_mode not in ("token-mean", "seq-mean-token-mean"):
            return tokens
        return tokens | {"train/loss_weight": sum(one.sums[LOSS_WEIGHT] for one in taken) / len(taken)}

    def _check(self, batch: Sequences, optimizer_steps: int) -> None:
        if len(batch) == 0:
            raise ValueError("PolicyWorker.update: the batch has no policy token")
        for term in self._terms:
            if missing := [name for name in term.columns if not batch.has(name)]:
                raise ValueError(f"PolicyWorker.update: batch.{missing[0]} is missing, and {term.key} needs it")
        may_lack = not self._correction.needs_pass or (optimizer_steps == 1 and not self._reads_published)
        if not batch.has("old_logprobs") and not may_lack:
            raise ValueError(
                f"PolicyWorker.update: {optimizer_steps} optimizer steps need batch.old_logprobs; without them the "
                "batch must be one mini-batch and one epoch, and the proximal policy not the published one"
            )


def watched_scores(found: TokenScores) -> Mapping[str, torch.Tensor]:
    """Take the scores that watches of an update see out of a forward pass's result."""
    return {"score": found.logprobs} | ({} if found.entropy is None else {"entropy": found.entropy})


def kept_experts(experts: torch.Tensor | None, batch: RaggedBatch) -> CachedColumns:
    """Name the sequences that experts [T, L, k] are of. Raises TrainingError where the backend returned no experts."""
    if experts is None:
        raise TrainingError(
            "actor_rollout_ref.actor.router_replay.mode=R2: this strategy does not tell which experts tokens are sent "
            "to (TokenScores.experts); set it to disabled, or take actor_rollout_ref.actor.strategy=fsdp2"
        )
    rows = torch.arange(len(batch)) if batch.row is None else batch.row
    return CachedColumns(rows, batch.offsets, experts)
