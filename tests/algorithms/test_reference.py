"""Against figures of verl 0.9.1 for the same inputs; see make_reference.py for how they were made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.advantages import compute_advantages
from agentrl.algorithms.aggregate import LossScale, aggregate
from agentrl.algorithms.kl import AdaptiveKLController, kl_penalty
from agentrl.algorithms.ragged import masked_whiten, segment_sum
from agentrl.algorithms.value_loss import value_loss
from agentrl.trajectory.batch import RaggedBatch
from tests.algorithms.batches import algorithm, micro_loss

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text(encoding="utf-8"))


def cases(name: str) -> list[Any]:
    return [pytest.param(case, id=str(number)) for number, case in enumerate(REFERENCE[name])]


def unpad(rows: list[list[float]], lengths: list[int]) -> Tensor:
    """[T] float64: what is left of padded rows."""
    return torch.tensor([value for row, n in zip(rows, lengths, strict=True) for value in row[:n]], dtype=torch.float64)


def layout(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """([T] mask, [N + 1] offsets)"""
    return unpad(case["mask"], case["lengths"]).bool(), torch.tensor([0, *case["lengths"]]).cumsum(0)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-6)


def named_cases(name: str) -> list[Any]:
    """Each case with each name that it has expected figures for."""
    found = REFERENCE[name]
    return [
        pytest.param(case, one, id=f"{number}-{one}") for number, case in enumerate(found) for one in case["expected"]
    ]


@pytest.mark.parametrize(("case", "name"), named_cases("advantages"))
def test_advantages(case: dict[str, Any], name: str) -> None:
    mask, offsets = layout(case)
    by_token = ("gae", "reinforce_plus_plus", "tir_optimal_token_baseline")
    rewards = "token_rewards" if name in by_token else "outcome_rewards"
    batch = RaggedBatch.from_columns(
        offsets=offsets,
        ids=torch.zeros(len(mask), dtype=torch.int64),
        mask=mask,
        rollout_logprobs=torch.zeros(len(mask)),
        version=mask.int() - 1,
        turn=mask.int() - 1,
        rewards=unpad(case[rewards], case["lengths"]).float(),
        group=torch.tensor(case["group"]),
        trajectory=torch.arange(len(offsets) - 1),
        policy=torch.zeros(len(offsets) - 1, dtype=torch.int32),
        policies=("policy",),
        old_logprobs=unpad(case["old"], case["lengths"]).float(),
        squared_probs=unpad(case["squared_probs"], case["lengths"]).float(),
        values=unpad(case["values"], case["lengths"]).float(),
        greedy_rewards=torch.tensor(case["baselines"])[torch.tensor(case["group"])],
    )
    by_std = name != "dr_grpo"
    config = algorithm(name if by_std else "grpo", gamma=case["gamma"], lam=case["lam"], norm_adv_by_std_in_grpo=by_std)
    result = compute_advantages(batch, config, n=1)  # verl cannot tell a lone survivor, and takes its raw reward
    assert result.advantages is not None and result.returns is not None
    close(result.advantages, unpad(case["expected"][name]["advantages"], case["lengths"]))
    close(result.returns, unpad(case["expected"][name]["returns"], case["lengths"]))


@pytest.mark.parametrize(("case", "mode"), named_cases("policy_loss"))
def test_policy_loss_gradient_and_metrics(case: dict[str, Any], mode: Any) -> None:
    mask, offsets = layout(case)
    new = unpad(case["new"], case["lengths"]).requires_grad_()
    old, advantages = unpad(case["old"], case["lengths"]), unpad(case["advantages"], case["lengths"])
    found = micro_loss(case["loss"], new, old, advantages, mask, offsets, *case["clip"])
    loss = aggregate(
        found.by_token,
        mask,
        offsets,
        LossScale.from_policy_tokens(segment_sum(mask.double(), offsets), mode, case["norm_length"]),
    )
    loss.backward()
    expected = case["expected"][mode]
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    assert new.grad is not None
    close(new.grad, unpad(expected["gradient"], case["lengths"]))
    for metric, name in (("pg_clipfrac", "clip_frac"), ("pg_clipfrac_lower", "clip_frac_lower"), ("ppo_kl", "ppo_kl")):
        if name not in found.sums or f"actor/{metric}" not in expected:
            continue
        mean = found.sums[name].item() / found.tokens.item()
        assert mean == pytest.approx(expected[f"actor/{metric}"], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("case", cases("aggregation"))
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_aggregation(case: dict[str, Any], mode: Any) -> None:
    mask, offsets = layout(case)
    scale = LossScale.from_policy_tokens(segment_sum(mask.double(), offsets), mode, case["norm_length"])
    found = aggregate(unpad(case["loss"], case["lengths"]), mask, offsets, scale)
    assert found.item() == pytest.approx(case["expected"][mode], rel=1e-6)


@pytest.mark.parametrize("case", cases("kl_penalty"))
@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_kl_penalty(case: dict[str, Any], kind: Any) -> None:
    found = kl_penalty(torch.tensor(case["logprobs"]), torch.tensor(case["ref"]), kind)
    close(found, torch.tensor(case["expected"][kind]))


@pytest.mark.parametrize("case", cases("kl_controller"))
def test_adaptive_kl_controller(case: dict[str, Any]) -> None:
    controller = AdaptiveKLController(case["coef"], target=case["target"], horizon=case["horizon"])
    found = []
    for kl, steps in case["updates"]:
        controller.update(kl, steps)
        found.append(controller.coef)
    assert found == pytest.approx(case["expected"], rel=1e-6)


@pytest.mark.parametrize("case", cases("value_loss"))
def test_value_loss(case: dict[str, Any]) -> None:
    mask, offsets = layout(case)
    values, old, returns = (unpad(case[name], case["lengths"]) for name in ("values", "old", "returns"))
    by_token, clipped = value_loss(values, old, returns, mask, case["clip_range"])
    loss = aggregate(
        by_token, mask, offsets, LossScale.from_policy_tokens(segment_sum(mask.double(), offsets), case["mode"])
    )
    assert loss.item() == pytest.approx(case["expected"]["loss"], rel=1e-6)
    assert clipped.item() / mask.sum().item() == pytest.approx(case["expected"]["clipped"], rel=1e-6)


@pytest.mark.parametrize("case", cases("masked_whiten"))
def test_masked_whiten(case: dict[str, Any]) -> None:
    mask, _ = layout(case)
    found = masked_whiten(unpad(case["values"], case["lengths"]), mask)
    close(found, unpad(case["expected"], case["lengths"]))
