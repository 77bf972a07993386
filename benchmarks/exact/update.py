"""The updates of a run computed again in float64, from its recorded trajectories and its config alone.

The formulas are written here from the papers, for one sequence after another, over transformers' own eager model:
GRPO's advantages or GAE, PPO's clipped loss with the KL and the entropy beside it, the critic's clipped loss, the mean
by tokens or by trajectory, the clip of the gradient's norm, and AdamW. Nothing of the trainer is used
but its files, its config, and the start of the adapters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.config import Config
from agentrl.config.sections.optim import OptimConfig
from agentrl.model.lora import Lora
from benchmarks.exact.recompute import TrainedSequence, advantages_of, rows_of, sequences_of, survives

EPSILON = 1e-8
"""AdamW's, and the whitening's."""


@dataclass(slots=True)
class AdamW:
    """Decoupled weight decay (arXiv:1711.05101, algorithm 2) at a constant rate, after a clip of the norm."""

    params: Mapping[str, nn.Parameter]
    config: OptimConfig
    largest_norm: float
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    @torch.no_grad()
    def step(self) -> float:
        """Take a step by the gradients, and forget them; returns their norm before the clip."""
        grads = {name: one.grad if one.grad is not None else torch.zeros_like(one) for name, one in self.params.items()}
        norm = float(torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt())
        scale = min(1.0, self.largest_norm / (norm + 1e-6))
        self.steps += 1
        (early, late), rate = self.config.betas, self.config.lr
        for name, param in self.params.items():
            grad = grads[name] * scale
            first = self.first[name] = early * self.first.get(name, 0.0) + (1 - early) * grad
            second = self.second[name] = late * self.second.get(name, 0.0) + (1 - late) * grad.square()
            param.mul_(1 - rate * self.config.weight_decay)
            mean, spread = first / (1 - early**self.steps), second / (1 - late**self.steps)
            param.sub_(rate * mean / (spread.sqrt() + EPSILON))
            param.grad = None
        return norm


@dataclass(slots=True)
class Row:
    """A transcript with its columns, each of the sampled tokens [S] float64."""

    sequence: TrainedSequence
    group: int
    old: Tensor
    reference: Tensor | None
    values: Tensor | None
    advantages: Tensor
    returns: Tensor


class Critic(nn.Module):
    """The backbone of the policy's start, and one value a token by a head that begins at zero."""

    def __init__(self, policy: Path) -> None:
        super().__init__()
        whole = eager(policy)
        self.base = whole.base_model
        self.value_head = nn.Linear(whole.config.hidden_size, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.value_head.weight)

    def values(self, one: TrainedSequence) -> Tensor:
        """Compute the values of the states before the sampled tokens, [S]."""
        after = self.value_head(self.base(input_ids=one.ids[None]).last_hidden_state)[0, :-1, 0]
        found: Tensor = after[one.mask[1:]]
        return found


class Training:
    """A run's training, step by step."""

    def __init__(self, run: Path, config: Config, policy: Path) -> None:
        roles = config.actor_rollout_ref
        self.run, self.config, self.temperature = run, config, roles.rollout.temperature
        self.model, self.reference = eager(policy), eager(policy) if roles.actor.use_kl_loss else None
        self.lora = None
        if roles.model.lora_rank:
            self.lora = Lora(self.model, roles.model, config.trainer.seed, quiet=True)
            self.model.double()
        learns = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self.optimizer = AdamW(learns, roles.actor.optim, roles.actor.grad_clip)
        self.transcripts: set[int] = set()
        """Numbers of transcripts that trajectories had."""
        self.critic: Critic | None = None
        if config.algorithm.adv_estimator == "gae":
            self.critic = Critic(policy)
            learns = dict(self.critic.named_parameters())
            self.values_optimizer = AdamW(learns, config.critic.optim, config.critic.grad_clip)

    def step(self, number: int) -> dict[str, float]:
        """Take a training step; returns the means of its losses and norms over the optimizer steps."""
        rows = self._rows([row for row in rows_of(self.run, number) if survives(row)])
        actor, keys = self.config.actor_rollout_ref.actor, self.config.critic
        found: defaultdict[str, list[float]] = defaultdict(list)
        if self.critic is not None:
            for mini in self._minis(rows, keys.ppo_mini_batch_size or actor.ppo_mini_batch_size, keys.ppo_epochs):
                weights = self._weights(mini, keys.loss_agg_mode)
                total = sum(self._value_loss(row, weight) for row, weight in zip(mini, weights, strict=True))
                assert isinstance(total, Tensor)
                total.backward()
                found["critic/vf_loss"].append(total.item())
                found["critic/grad_norm"].append(self.values_optimizer.step())
        for mini in self._minis(rows, actor.ppo_mini_batch_size, actor.ppo_epochs):
            whole, parts = 0.0, torch.zeros(2, dtype=torch.float64)
            for row, weight in zip(mini, self._weights(mini, actor.loss_agg_mode), strict=True):
                loss, own = self._loss(row, weight)
                loss.backward()
                whole, parts = whole + loss.item(), parts + own
            found["actor/loss"].append(whole)
            found["actor/pg_loss"].append(float(parts[0]))
            if actor.use_kl_loss:
                found["actor/kl_loss"].append(float(parts[1]))
            found["actor/grad_norm"].append(self.optimizer.step())
        return {name: sum(values) / len(values) for name, values in found.items()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights by their names in an export."""
        params = dict(self.model.named_parameters())
        if self.lora is None:
            yield from ((name, one.detach()) for name, one in params.items())
            return
        keys = self.config.actor_rollout_ref.model
        for name, param in params.items():
            if "lora_" in name:
                continue
            layer, adapted, _ = name.rpartition(".base_layer.weight")
            plain = name.replace(".base_layer", "")
            if not adapted:
                yield plain, param.detach()
                continue
            a, b = (params[f"{layer}.lora_{side}.default.weight"].detach() for side in "AB")
            yield plain, param.detach() + keys.lora_alpha / keys.lora_rank * (b @ a)

    @torch.no_grad()
    def _rows(self, records: Sequence[Mapping[str, Any]]) -> list[Row]:
        """Score the transcripts of a step by the models before its update, and compute their advantages."""
        rows = []
        values: list[Tensor] | None
        relative = {} if self.critic is not None else advantages_of(records)
        for record in records:
            own = sequences_of(record)
            self.transcripts.add(len(own))
            if self.critic is None:
                advantages = [torch.full((int(one.mask.sum()),), relative[one.uid, one.role]).double() for one in own]
                values, returns = None, advantages
            else:
                values = [self.critic.values(one) for one in own]
                advantages, returns = self._gae(values, record["score"])
            for place, one in enumerate(own):
                old = score(self.model, one, self.temperature)[0]
                far = None if self.reference is None else score(self.reference, one, self.temperature)[0]
                value = None if values is None else values[place]
                rows.append(Row(one, record["group"], old, far, value, advantages[place], returns[place]))
        if self.critic is not None:
            every = torch.cat([row.advantages for row in rows])
            for row in rows:
                row.advantages = (row.advantages - every.mean()) * torch.rsqrt(every.var() + EPSILON)
        return rows

    def _gae(self, values: Sequence[Tensor], reward: float) -> tuple[list[Tensor], list[Tensor]]:
        """Estimate advantages and returns (arXiv:1506.02438) over a trajectory's sampled tokens; the reward is last."""
        keys, joined = self.config.algorithm, torch.cat(list(values))
        advantages, ahead, following = torch.zeros_like(joined), 0.0, 0.0
        for place in reversed(range(len(joined))):
            reward, here = (0.0, reward) if place == len(joined) - 1 else (reward, 0.0)
            delta = here + keys.gamma * following - float(joined[place])
            ahead = delta + keys.gamma * keys.lam * ahead
            advantages[place], following = ahead, float(joined[place])
        lengths = [len(one) for one in values]
        return list(advantages.split(lengths)), list((advantages + joined).split(lengths))

    def _minis(self, rows: Sequence[Row], prompts: int, epochs: int | None) -> Iterator[list[Row]]:
        """Split a step into its optimizer steps, as evenly as whole prompts can be."""
        groups = sorted({row.group for row in rows})
        count = -(-len(groups) // prompts)
        for _ in range(epochs or self.config.actor_rollout_ref.actor.ppo_epochs):
            for place in range(count):
                chosen = groups[len(groups) * place // count : len(groups) * (place + 1) // count]
                yield [row for row in rows if row.group in chosen]

    def _weights(self, mini: Sequence[Row], mode: str) -> list[float]:
        """Weigh a token of each transcript in the loss of a mini-batch."""
        own: defaultdict[object, int] = defaultdict(int)
        by_trajectory = self.config.actor_rollout_ref.actor.loss_unit == "trajectory"
        units = [row.sequence.uid if by_trajectory else place for place, row in enumerate(mini)]
        for unit, row in zip(units, mini, strict=True):
            own[unit] += len(row.old)
        by_mode = {
            "token-mean": lambda tokens: 1 / sum(own.values()),
            "seq-mean-token-mean": lambda tokens: 1 / (tokens * len(own)),
            "seq-mean-token-sum": lambda tokens: 1 / len(own),
            "seq-mean-token-sum-norm": lambda tokens: 1 / (len(own) * self.config.data.max_response_length),
        }
        return [by_mode[mode](own[unit]) for unit in units]

    def _loss(self, row: Row, weight: float) -> tuple[Tensor, Tensor]:
        """Compute a transcript's part of the loss, and its parts of the policy's term and the KL's, [2]."""
        actor = self.config.actor_rollout_ref.actor
        new, entropy = score(self.model, row.sequence, self.temperature)
        ratio, advantage = (new - row.old).exp(), row.advantages
        worse = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - actor.clip_low, 1 + actor.clip_high))
        bounded = torch.where(advantage < 0, torch.minimum(worse, -advantage * actor.clip_ratio_c), worse)
        loss = bounded.sum() - actor.entropy_coeff * entropy.sum()
        kl = torch.zeros((), dtype=torch.float64)
        if row.reference is not None:
            assert actor.kl_loss_type in ("low_var_kl", "k3")
            kl = ((row.reference - new).exp() - 1 - (row.reference - new)).sum()
            loss = loss + actor.kl_loss_coef * kl
        return weight * loss, weight * torch.stack([bounded.sum(), kl]).detach()

    def _value_loss(self, row: Row, weight: float) -> Tensor:
        """Compute a transcript's part of the critic's loss (arXiv:2005.12729)."""
        assert self.critic is not None and row.values is not None
        reach, new = self.config.critic.cliprange_value, self.critic.values(row.sequence)
        bounded = torch.minimum(torch.maximum(new, row.values - reach), row.values + reach)
        worse = torch.maximum((new - row.returns).square(), (bounded - row.returns).square())
        found: Tensor = weight * 0.5 * worse.sum()
        return found


def eager(policy: Path) -> PreTrainedModel:
    """Load transformers' own model in float64."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        policy, dtype=torch.float64, attn_implementation="eager"
    )
    return model.eval()


def score(model: PreTrainedModel, one: TrainedSequence, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies of the sampled tokens, [S] each."""
    every = (model(input_ids=one.ids[None]).logits[0, :-1].double() / temperature).log_softmax(-1)
    every, chosen = every[one.mask[1:]], one.ids[1:][one.mask[1:]]
    return every.gather(1, chosen[:, None])[:, 0], -(every.exp() * every).sum(-1)
