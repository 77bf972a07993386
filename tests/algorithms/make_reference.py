"""Writes reference.json: what the published functions of verl 0.9.1 (Apache-2.0) give for small random inputs.

Figures only; no code of verl is in this project. It runs in an environment of its own, apart from this project's:

    python -m venv /tmp/verlenv && . /tmp/verlenv/bin/activate
    pip install torch==2.13.0 numpy && pip install --no-deps verl==0.9.1
    pip install 'tensordict>=0.8,<=0.10,!=0.9.0' omegaconf codetiming hydra-core ray 'transformers<5.11'
    python tests/algorithms/make_reference.py

Inputs are rows padded to one width, as verl takes them; `lengths` says how much of each row is a sequence. Within it
the mask has gaps, as tool answers leave them. Everything is computed in float64.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos  # type: ignore[import-not-found]
from verl.utils import torch_functional  # type: ignore[import-not-found]
from verl.workers.config import ActorConfig, PolicyLossConfig  # type: ignore[import-not-found]

WIDTH = 9
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CLIP = (0.2, 0.28, 3.0)  # low, high, dual


def draw(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers of four decimals."""
    return (torch.randn(*shape, generator=generator) * scale * 1e4).round() / 1e4


def masked_rows(generator: torch.Generator, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows] lengths, [rows, WIDTH] mask): a prompt token, then policy and observed tokens, then padding."""
    lengths = torch.randint(3, WIDTH + 1, (rows,), generator=generator)
    mask = (torch.rand(rows, WIDTH, generator=generator) < 0.6).double()
    mask[:, 0], mask[:, 1] = 0.0, 1.0
    return lengths, mask * (torch.arange(WIDTH) < lengths[:, None])


def outcome_rewards(mask: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """[rows, WIDTH]: each score on its row's last policy token."""
    last = (mask * torch.arange(WIDTH)).argmax(-1)
    return torch.zeros_like(mask).scatter_(1, last[:, None], scores[:, None])


def advantage_cases() -> list[dict[str, Any]]:
    """Groups of 4, 3 and 1, then batches with a group of equal rewards that float64 represents exactly: 0.5, and 0."""
    cases = []
    for seed, group in enumerate(([0, 0, 0, 0, 1, 1, 1, 2], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1])):
        generator = torch.Generator().manual_seed(seed)
        lengths, mask = masked_rows(generator, len(group))
        scores = draw(generator, len(group))
        if seed:
            scores[:2] = 0.5 if seed == 1 else 0.0
        rewards, values = outcome_rewards(mask, scores), draw(generator, len(group), WIDTH)
        turns = rewards + draw(generator, len(group), WIDTH, scale=0.1) * mask
        old = -draw(generator, len(group), WIDTH).abs()
        # The token's own square, and some of what the others may have.
        squared = old.exp() ** 2 + (1 - old.exp()) ** 2 * draw(generator, len(group), WIDTH).sigmoid()
        baselines = draw(generator, max(group) + 1)
        index = np.array(group)
        expected = {}
        for name in ("grpo", "rloo", "opo"):
            estimator = core_algos.get_adv_estimator_fn(name)
            expected[name] = estimator(rewards.clone(), mask, index=index)
        estimator = core_algos.get_adv_estimator_fn("grpo")
        expected["dr_grpo"] = estimator(rewards.clone(), mask, index=index, norm_adv_by_std_in_grpo=False)
        config = type("Config", (), {"gamma": 0.9})
        estimator = core_algos.get_adv_estimator_fn("reinforce_plus_plus")
        expected["reinforce_plus_plus"] = estimator(turns.clone(), mask, config=config)
        estimator = core_algos.get_adv_estimator_fn("reinforce_plus_plus_baseline")
        expected["reinforce_plus_plus_baseline"] = estimator(rewards.clone(), mask, index=index)
        if seed != 1:  # where it counts rewards of 0 in place of groups that teach nothing (see agentrl's gpg)
            expected["gpg"] = core_algos.get_adv_estimator_fn("gpg")(rewards.clone(), mask, index=index)
        if seed:  # it refuses groups of one
            by_std = {"norm_adv_by_std_in_grpo": True}
            estimator = core_algos.get_adv_estimator_fn("grpo_passk")
            expected["grpo_passk"] = estimator(rewards.clone(), mask, index=index, config=by_std)
        estimator = core_algos.get_adv_estimator_fn("tir_optimal_token_baseline")
        expected["tir_optimal_token_baseline"] = estimator(
            turns.clone(), mask, index=index, old_log_probs=old, sum_pi_squared=squared
        )
        estimator = core_algos.get_adv_estimator_fn("remax")
        expected["remax"] = estimator(rewards.clone(), baselines[index], mask)
        expected["gae"] = core_algos.compute_gae_advantage_return(turns.clone(), values, mask, 0.9, 0.8)
        cases.append(
            {
                "lengths": lengths,
                "mask": mask,
                "group": group,
                "outcome_rewards": rewards,
                "token_rewards": turns,
                "values": values,
                "old": old,
                "squared_probs": squared,
                "baselines": baselines,
                "gamma": 0.9,
                "lam": 0.8,
                "expected": {
                    name: {"advantages": advantages * mask, "returns": returns * mask}
                    for name, (advantages, returns) in expected.items()
                },
            }
        )
    return cases


def policy_cases() -> list[dict[str, Any]]:
    """Ratios inside and far beyond the clip bounds; log-ratios beyond the clamp in the last case."""
    cases = []
    for seed, scale in enumerate((0.1, 1.0, 1.0)):
        generator = torch.Generator().manual_seed(10 + seed)
        lengths, mask = masked_rows(generator, 5)
        old = -draw(generator, 5, WIDTH).abs()
        new = old + draw(generator, 5, WIDTH, scale=scale)
        advantages = draw(generator, 5, WIDTH) * mask
        if seed == 2:
            new[0, 1], advantages[0, 1] = old[0, 1] + 30.0, 1.0
            new[1, 1], advantages[1, 1] = old[1, 1] + 30.0, -1.0
        for name in ("vanilla", "gspo"):
            if name == "gspo" and seed == 2:
                continue  # verl clamps the sequence's log-ratio to 10 there, this project to 20
            expected = {mode: policy_figures(name, mode, old, new, advantages, mask) for mode in MODES}
            cases.append(policy_case(name, lengths, mask, old, new, advantages, expected))
    return cases


def policy_case(
    name: str,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
    advantages: torch.Tensor,
    expected: dict[str, Any],
) -> dict[str, Any]:
    """A case of a policy loss as the reference file has it."""
    return {
        "loss": name,
        "lengths": lengths,
        "mask": mask,
        "old": old,
        "new": new,
        "advantages": advantages,
        "clip": CLIP,
        "norm_length": WIDTH,
        "expected": expected,
    }


def further_policy_cases() -> list[dict[str, Any]]:
    """Losses beside vanilla and gspo; probabilities stay below 1, as those that read them need."""
    cases = []
    for seed, name in enumerate(("cispo", "dppo_tv", "dppo_kl", "gpg", "sapo", "geo_mean", "dro")):
        generator = torch.Generator().manual_seed(60 + seed)
        lengths, mask = masked_rows(generator, 5)
        old = -draw(generator, 5, WIDTH).abs() - 0.01
        new = (old + draw(generator, 5, WIDTH)).clamp(max=-0.01)
        advantages = draw(generator, 5, WIDTH)
        if name == "geo_mean":  # which knows one advantage a sequence
            advantages = advantages[:, :1].expand(5, WIDTH)
        advantages = advantages * mask
        # These two always take this mean.
        modes = ("seq-mean-token-mean",) if name in ("sapo", "geo_mean") else MODES
        expected = {mode: policy_figures(name, mode, old, new, advantages, mask) for mode in modes}
        for figures in expected.values() if name == "geo_mean" else ():
            # These count tokens beyond either bound, also where the minimum takes the other side.
            del figures["actor/pg_clipfrac"], figures["actor/pg_clipfrac_lower"]
        cases.append(policy_case(name, lengths, mask, old, new, advantages, expected))
    return cases


def policy_figures(
    name: str, mode: str, old: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> dict[str, Any]:
    """Loss, gradient by log-prob and metrics of one policy loss."""
    low, high, dual = CLIP
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        policy_loss=PolicyLossConfig(loss_mode=name, dro_beta=0.5),
    )
    leaf = new.clone().requires_grad_()
    loss, metrics = core_algos.get_policy_loss_fn(name)(old, leaf, advantages, mask, mode, config)
    loss.backward()
    return {"loss": loss.detach(), "gradient": leaf.grad} | metrics


def aggregation_cases() -> list[dict[str, Any]]:
    """One row has no policy token at all."""
    generator = torch.Generator().manual_seed(20)
    lengths, mask = masked_rows(generator, 5)
    mask[3] = 0.0
    loss = draw(generator, 5, WIDTH)
    expected = {mode: core_algos.agg_loss(loss, mask, mode) for mode in MODES}
    return [{"lengths": lengths, "mask": mask, "loss": loss, "norm_length": WIDTH, "expected": expected}]


def kl_cases() -> list[dict[str, Any]]:
    """With differences beyond both clamps of k3."""
    generator = torch.Generator().manual_seed(30)
    logprobs = torch.cat([-draw(generator, 8).abs(), torch.tensor([-30.0, -0.5, -4.0])])
    ref = torch.cat([-draw(generator, 8).abs(), torch.tensor([-0.5, -30.0, -1.0])])
    kinds = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
    expected = {kind: core_algos.kl_penalty(logprobs, ref, kind) for kind in kinds}
    return [{"logprobs": logprobs, "ref": ref, "expected": expected}]


def controller_cases() -> list[dict[str, Any]]:
    """The coefficient after each of a run of updates."""
    controller = core_algos.AdaptiveKLController(0.2, 0.1, 100)
    updates, coefficients = [[0.5, 16], [0.11, 16], [0.0, 8], [0.09, 32]], []
    for kl, steps in updates:
        controller.update(kl, steps)
        coefficients.append(float(controller.value))
    return [{"coef": 0.2, "target": 0.1, "horizon": 100, "updates": updates, "expected": coefficients}]


def value_cases() -> list[dict[str, Any]]:
    cases = []
    for seed, mode in enumerate(("token-mean", "seq-mean-token-mean")):
        generator = torch.Generator().manual_seed(40 + seed)
        lengths, mask = masked_rows(generator, 4)
        values, old, returns = (draw(generator, 4, WIDTH) for _ in range(3))
        loss, clipped = core_algos.compute_value_loss(values, returns, old, mask, 0.5, mode)
        cases.append(
            {
                "mode": mode,
                "lengths": lengths,
                "mask": mask,
                "values": values,
                "old": old,
                "returns": returns,
                "clip_range": 0.5,
                "expected": {"loss": loss, "clipped": clipped},
            }
        )
    return cases


def whiten_cases() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(50)
    lengths, mask = masked_rows(generator, 3)
    values = draw(generator, 3, WIDTH)
    expected = torch_functional.masked_whiten(values, mask) * mask
    return [{"lengths": lengths, "mask": mask, "values": values, "expected": expected}]


def plain(value: object) -> object:
    """JSON: tensors as lists, figures of eight digits."""
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    reference = {
        "source": "verl 0.9.1 (Apache-2.0), functions of verl.trainer.ppo.core_algos and verl.utils.torch_functional",
        "advantages": advantage_cases(),
        "policy_loss": [*policy_cases(), *further_policy_cases()],
        "aggregation": aggregation_cases(),
        "kl_penalty": kl_cases(),
        "kl_controller": controller_cases(),
        "value_loss": value_cases(),
        "masked_whiten": whiten_cases(),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(plain(value))}" for key, value in reference.items()]
    Path(__file__).with_name("reference.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
