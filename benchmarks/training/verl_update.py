"""Compares one training step with verl's own formulas: the same tiny models, the same tokens, commands in verl's keys.

Ours is what `python -m agentrl.verl.main_ppo` would make of the command: workers, advantages, updates. The reference
is a plain Hugging Face model over padded rows, with the advantages, losses and KL of `verl.trainer.ppo.core_algos`,
torch's AdamW, and the values of the config that verl composes from the same command. Rewards, tokens and the weights
that both start from are random; ours is in float32, the reference in float64. Prints the largest differences: of
log-probs, advantages and values, and of the weights behind the step. verl (Apache-2.0) stays in a folder of its own:

    pip install --no-deps --target /tmp/verl verl==0.9.1 tensordict==0.10.0 codetiming pyvers importlib_metadata zipp
    PYTHONPATH=/tmp/verl python -m benchmarks.training.verl_update
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agentrl.algorithms.estimate import Settings, estimate
from agentrl.config import Config, load_config
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers import PolicyWorker, ReferenceWorker
from agentrl.workers.critic import CriticWorker
from benchmarks.verl.composed import TRAINERS, composed

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SHAPE = TinyShape(vocab=320, hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)
COMMON = (
    *("data.train_batch_size=8", "data.max_response_length=32", f"{ACTOR}.ppo_mini_batch_size=4"),
    *(f"{ACTOR}.optim.lr=1e-4", f"{ACTOR}.fsdp_config.dtype=float32", "trainer.n_gpus_per_node=1"),
    *(f"{ROLLOUT}.name=embedded", f"{ROLLOUT}.tensor_model_parallel_size=1", "trainer.logger=[console]"),
    f"{ROLLOUT}.temperature=0.8",
)
COMMANDS = {
    "PPO": (
        *("algorithm.adv_estimator=gae", "algorithm.lam=0.95", "algorithm.gamma=0.99", f"{ACTOR}.ppo_epochs=2"),
        *(f"{ACTOR}.entropy_coeff=0.01", "critic.optim.lr=1e-4", "algorithm.use_kl_in_reward=True"),
    ),
    "GRPO": (
        *("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.01"),
        *(f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio_c=10.0"),
    ),
    "RLOO": (
        *("algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=4", "algorithm.use_kl_in_reward=True"),
        *("algorithm.kl_penalty=kl", "algorithm.kl_ctrl.kl_coef=0.05", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"),
    ),
    "REINFORCE++": (
        *("algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}.n=2", f"{ACTOR}.use_kl_loss=True"),
        *(f"{ACTOR}.kl_loss_type=mse", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"),
    ),
}


def draw(prompts: int, n: int, vocab: int) -> RaggedBatch:
    """Draw n responses to each prompt, with an answer of a tool in the midst of each, and a score at its end."""
    generator = torch.Generator().manual_seed(7)

    def tokens(low: int, high: int) -> Tensor:
        return torch.randint(3, vocab, (int(torch.randint(low, high, (), generator=generator)),), generator=generator)

    parts, is_policys, group, lengths = [], [], [], []
    for prompt in range(prompts):
        beginning = tokens(5, 12)
        for _ in range(n):
            row = [beginning, tokens(3, 12), tokens(2, 5), tokens(3, 12)]
            parts += row
            is_policys += [torch.full_like(part, place in (1, 3)) for place, part in enumerate(row)]
            group.append(prompt)
            lengths.append(sum(map(len, row)))
    mask, offsets = torch.cat(is_policys).bool(), torch.tensor([0, *lengths]).cumsum(0)
    rewards = torch.zeros(len(mask))
    rewards[offsets[1:] - 1] = torch.randn(len(group), generator=generator)
    return RaggedBatch.from_columns(
        offsets=offsets,
        ids=torch.cat(parts),
        mask=mask,
        rollout_logprobs=torch.zeros(len(mask)),
        version=mask.int() - 1,
        turn=mask.int() - 1,
        rewards=rewards,
        group=torch.tensor(group),
        trajectory=torch.arange(len(group)),
        policy=torch.zeros(len(group), dtype=torch.int32),
        policies=("policy",),
    )


@dataclass
class Step:
    """Results of a step, and the weights after it."""

    logprobs: Tensor  # [T], of the policy before the step
    advantages: Tensor  # [T]
    values: Tensor | None  # [T], of the critic before the step
    weights: dict[str, Tensor]


def our_step(config: Config, batch: RaggedBatch) -> tuple[Step, dict[str, Tensor] | None]:
    """Take a step as the trainer does; beside it the critic's weights before it."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    policy = PolicyWorker(config, device="cpu", total_steps=10)
    reference = ReferenceWorker(
        config.actor_rollout_ref.ref.path or model.path,
        dtype="float32",
        device="cpu",
        temperature=rollout.temperature,
        log_prob_max_tokens=4096,
    )
    old, _ = policy.compute_log_probs(batch)
    batch = batch.with_fields(old_logprobs=old, ref_logprobs=reference.compute_reference_log_probs(batch)[0])
    critic, critic_weights = None, None
    if config.algorithm.adv_estimator == "gae":
        critic = CriticWorker(config, device="cpu", total_steps=10)
        with torch.no_grad():  # it starts at zero, where values and advantages would say little
            head: nn.Linear = critic.backend.model.value_head  # type: ignore[attr-defined]
            head.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(3))
        critic_weights = _copied(critic)
        batch = batch.with_fields(values=critic.compute_values(batch)[0])
    kl_coef = config.algorithm.kl_ctrl.kl_coef if config.algorithm.use_kl_in_reward else None
    columns, _ = estimate(batch, config.algorithm, Settings(rollout.n, kl_coef))
    batch = batch.with_fields(**columns)
    if critic is not None:
        critic.update(batch, step=1)
    policy.update(batch, step=1)
    assert batch.advantages is not None
    weights = _copied(policy) | ({f"critic.{name}": one for name, one in _copied(critic).items()} if critic else {})
    return Step(old, batch.advantages, batch.values, weights), critic_weights


def _copied(worker: Any) -> dict[str, Tensor]:
    """Copy the weights under their names in Hugging Face's model, the critic's backbone without its prefix."""
    return {name.removeprefix("base."): one.detach().clone() for name, one in worker.backend.tensors.items()}


class Rows:
    """The batch as verl has it: responses [N, R] behind prompts, padded at their ends."""

    def __init__(self, batch: RaggedBatch) -> None:
        rows = [slice(int(a), int(b)) for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
        self.starts = [int(batch.mask[row].nonzero()[0]) for row in rows]
        self.lengths = [row.stop - row.start for row in rows]
        self.ids = nn.utils.rnn.pad_sequence([batch.ids[row] for row in rows], batch_first=True)
        self.mask = self.by_sequence(batch.mask.double(), batch.offsets)
        self.rewards = self.by_sequence(batch.rewards.double(), batch.offsets)
        self.group = batch.group.numpy().astype(np.int64)

    def by_sequence(self, values: Tensor, offsets: Tensor) -> Tensor:
        """Take responses [N, R] out of tokens [T]."""
        rows = [values[int(a) + start : int(b)] for a, b, start in zip(offsets, offsets[1:], self.starts, strict=False)]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def responses(self, full: Tensor) -> Tensor:
        """Take responses [N, R] out of padded rows [N, W], whose entry t belongs to the token t."""
        rows = [full[i, start:length] for i, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True))]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def flat(self, responses: Tensor, offsets: Tensor) -> Tensor:
        """Put responses [N, R] back to tokens [T], 0 elsewhere."""
        found = torch.zeros(int(offsets[-1]), dtype=responses.dtype)
        for i, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            found[int(offsets[i]) + start : int(offsets[i + 1])] = responses[i, : length - start]
        return found


def their_step(verls: Mapping[str, Any], config: Config, batch: RaggedBatch, critic_weights: Any) -> Step:
    """Take the same step by verl's formulas, in float64, with the values of verl's config."""
    from verl.trainer.ppo import core_algos  # type: ignore[import-not-found]

    rows = Rows(batch)
    path, temperature = str(config.actor_rollout_ref.model.path), verls[f"{ROLLOUT}.temperature"]
    policy = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float64)
    reference = AutoModelForCausalLM.from_pretrained(str(config.actor_rollout_ref.ref.path), torch_dtype=torch.float64)

    def scores(model: nn.Module) -> tuple[Tensor, Tensor]:
        logits = model(rows.ids).logits[:, :-1] / temperature
        every = logits.log_softmax(-1)
        chosen = every.gather(-1, rows.ids[:, 1:, None])[..., 0]
        entropy = -(every.exp() * every).sum(-1)
        first = torch.zeros(len(rows.ids), 1, dtype=torch.float64)
        return rows.responses(torch.cat([first, chosen], 1)), rows.responses(torch.cat([first, entropy], 1))

    with torch.no_grad():
        old, ref = scores(policy)[0], scores(reference)[0]
    critic = _Critic(path, critic_weights) if critic_weights is not None else None
    values = None
    if critic is not None:
        with torch.no_grad():
            values = rows.responses(critic(rows.ids)) * rows.mask
    rewards = rows.rewards
    if verls["algorithm.use_kl_in_reward"]:
        kl = core_algos.kl_penalty(old, ref, verls["algorithm.kl_penalty"]) * rows.mask
        rewards = rewards - verls["algorithm.kl_ctrl.kl_coef"] * kl
    advantages, returns = _advantages(core_algos, verls, rows, rewards, values)
    if critic is not None:
        assert values is not None
        _fit_critic(core_algos, verls, critic, rows, values, returns)
    _fit_policy(core_algos, verls, policy, rows, scores, (old, ref, advantages))
    weights = dict(policy.named_parameters())
    if critic is not None:
        weights |= {f"critic.{name.removeprefix('base.')}": one for name, one in critic.named_parameters()}
    flat = [None if one is None else rows.flat(one * rows.mask, batch.offsets) for one in (old, advantages, values)]
    assert flat[0] is not None and flat[1] is not None
    return Step(flat[0], flat[1], flat[2], {name: one.detach() for name, one in weights.items()})


class _Critic(nn.Module):
    def __init__(self, path: str, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.base = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float64).model
        self.value_head = nn.Linear(self.base.config.hidden_size, 1, bias=False, dtype=torch.float64)
        self.value_head.weight.data = weights["value_head.weight"].double()
        known = self.base.state_dict()
        self.base.load_state_dict({name: one.double() for name, one in weights.items() if name in known})

    def forward(self, ids: Tensor) -> Tensor:
        """Values [N, W]: entry t is that of the state before the token t."""
        after = self.value_head(self.base(ids).last_hidden_state)[..., 0]
        return torch.cat([torch.zeros(len(ids), 1, dtype=after.dtype), after[:, :-1]], 1)


def _advantages(
    algos: Any, verls: Mapping[str, Any], rows: Rows, rewards: Tensor, values: Any
) -> tuple[Tensor, Tensor]:
    name = verls["algorithm.adv_estimator"]
    arguments: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": rows.mask}
    if name == "gae":
        arguments |= {"values": values, "gamma": verls["algorithm.gamma"], "lam": verls["algorithm.lam"]}
    elif name == "reinforce_plus_plus":
        arguments["config"] = type("Config", (), {"gamma": verls["algorithm.gamma"]})
    else:
        arguments["index"] = rows.group
    found: tuple[Tensor, Tensor] = algos.get_adv_estimator_fn(name)(**arguments)
    return found


def _mini_batches(verls: Mapping[str, Any], rows: Rows) -> list[slice]:
    """Each mini-batch of each epoch, as verl splits a batch that is not shuffled."""
    size = verls[f"{ACTOR}.ppo_mini_batch_size"] * verls[f"{ROLLOUT}.n"]
    each = [slice(start, start + size) for start in range(0, len(rows.ids), size)]
    return each * verls[f"{ACTOR}.ppo_epochs"]


def _optimizer(verls: Mapping[str, Any], role: str, model: nn.Module) -> torch.optim.AdamW:
    optim = {name: verls[f"{role}.optim.{name}"] for name in ("lr", "betas", "weight_decay")}
    return torch.optim.AdamW(
        model.parameters(), float(optim["lr"]), tuple(optim["betas"]), weight_decay=optim["weight_decay"]
    )


def _stepped(
    verls: Mapping[str, Any], role: str, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any
) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), verls[f"{role}.optim.clip_grad"])
    optimizer.step()


def _fit_critic(
    algos: Any, verls: Mapping[str, Any], critic: _Critic, rows: Rows, values: Tensor, returns: Tensor
) -> None:
    optimizer = _optimizer(verls, "critic", critic)
    for mini in _mini_batches(verls, rows):
        loss, _ = algos.compute_value_loss(
            vpreds=rows.responses(critic(rows.ids))[mini],
            values=values[mini],
            returns=returns[mini],
            response_mask=rows.mask[mini],
            cliprange_value=verls["critic.cliprange_value"],
            loss_agg_mode=verls["critic.loss_agg_mode"],
        )
        _stepped(verls, "critic", critic, optimizer, loss)


def _fit_policy(
    algos: Any, verls: Mapping[str, Any], policy: nn.Module, rows: Rows, scores: Any, columns: tuple[Tensor, ...]
) -> None:
    from verl.workers.config import ActorConfig as TheirConfig  # type: ignore[import-not-found]

    old, ref, advantages = columns
    names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    clips = {name: verls[f"{ACTOR}.{name}"] for name in names}
    config = TheirConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **clips)
    optimizer, mode = _optimizer(verls, ACTOR, policy), verls[f"{ACTOR}.loss_agg_mode"]
    for mini in _mini_batches(verls, rows):
        logprobs, entropy = (one[mini] for one in scores(policy))
        mask = rows.mask[mini]
        vanilla = algos.get_policy_loss_fn(verls[f"{ACTOR}.policy_loss.loss_mode"])
        loss, _ = vanilla(old[mini], logprobs, advantages[mini], mask, mode, config)
        loss = loss - verls[f"{ACTOR}.entropy_coeff"] * algos.agg_loss(entropy, mask, mode)
        if verls[f"{ACTOR}.use_kl_loss"]:
            kl = algos.kl_penalty(logprobs, ref[mini], verls[f"{ACTOR}.kl_loss_type"])
            loss = loss + verls[f"{ACTOR}.kl_loss_coef"] * algos.agg_loss(kl, mask, mode)
        _stepped(verls, ACTOR, policy, optimizer, loss)


def compare(name: str, folder: Path, package: Path) -> dict[str, float]:
    """Take the step of a command both ways; return the largest difference of each thing."""
    paths = [make_tiny_policy(folder / f"policy-{seed}", seed, shape=SHAPE) for seed in (0, 1)]
    command = [*COMMON, *COMMANDS[name], f"actor_rollout_ref.model.path={paths[0]}"]
    command += [f"+actor_rollout_ref.ref.model.path={paths[1]}", f"critic.model.path={paths[0]}"]
    config = load_config(command, "ppo_trainer")
    verls = composed(package, package / TRAINERS, "ppo_trainer", [f"++{word.lstrip('+')}" for word in command])
    model = AutoModelForCausalLM.from_pretrained(paths[0])
    batch = draw(config.data.train_batch_size, config.actor_rollout_ref.rollout.n, model.config.vocab_size)
    ours, critic_weights = our_step(config, batch)
    theirs = their_step(verls, config, batch, critic_weights)
    mask = batch.mask
    before = {**dict(model.named_parameters()), **{f"critic.{k}": v for k, v in (critic_weights or {}).items()}}
    found = {"log-probs": float((ours.logprobs - theirs.logprobs).abs().max())}
    found["advantages"] = float((ours.advantages - theirs.advantages)[mask].abs().max())
    if ours.values is not None and theirs.values is not None:
        found["values"] = float((ours.values - theirs.values)[mask].abs().max())
    names = theirs.weights.keys() & ours.weights.keys()
    assert len(names) == len(theirs.weights), sorted(theirs.weights.keys() ^ ours.weights.keys())
    apart = torch.cat([(ours.weights[one] - theirs.weights[one]).flatten() for one in sorted(names)])
    moved = torch.cat([(before[one].detach() - theirs.weights[one]).flatten() for one in sorted(names)])
    found |= {"weights": float(apart.abs().max()), "their furthest move": float(moved.abs().max())}
    found["root mean square of difference / of moves"] = float(apart.norm() / moved.norm())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    logging.disable()
    transformers_logging.disable_progress_bar()
    import verl  # type: ignore[import-not-found]

    package = Path(verl.__file__).resolve().parents[1]
    for name in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            found = compare(name, Path(folder), package)
        print(f"{name:12}", "  ".join(f"{what} {value:.1e}" for what, value in found.items()))


if __name__ == "__main__":
    main()
