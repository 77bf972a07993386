"""The toy with a known gradient: it is known, and the default correction keeps more of it than the token's does."""

from __future__ import annotations

import torch

from agentrl.config.sections.algorithm import OF_STALE_TOKENS
from labs.learning.stale_gradient import CORRECTIONS, DECIDING, PROMPTS, Table, learn, measured


def test_the_true_gradient_is_the_derivative_of_the_success_that_samples_have() -> None:
    table = Table(16, seed=1)
    logits = learn(table, seed=1)[-1].double()
    true = table.gradient(logits)
    for row, token in ((0, 0), (DECIDING - 1, 5), (DECIDING, 0)):
        step = torch.zeros_like(logits)
        step[row, token] = 1e-5
        slope = (table.success(logits + step) - table.success(logits - step)) / 2e-5
        assert abs(float(slope - true[row, token])) < 1e-8
    assert float(true[:DECIDING].abs().max()) > 0 and not true[DECIDING:].any()
    torch.manual_seed(1)
    shares = [(table.sample(logits)[0][:, :, table.rows < DECIDING] == 0).all(-1).double().mean() for _ in range(40)]
    assert abs(float(sum(shares)) / len(shares) - float(table.success(logits))) < 0.015  # 4 standard errors


def test_an_estimate_is_the_gradient_of_the_weighed_log_probs() -> None:
    table = Table(8, seed=2)
    logits = table.begins.clone().requires_grad_()
    torch.manual_seed(2)
    drawn, advantages = table.sample(logits.detach())
    weights = torch.rand(drawn.shape) * advantages[..., None]
    (expected,) = torch.autograd.grad((weights * table.chosen(logits, drawn)).sum() / advantages.numel(), logits)
    torch.testing.assert_close(table.estimate(logits.detach(), drawn, weights), expected, rtol=1e-4, atol=1e-6)
    assert len(drawn) == PROMPTS


def test_the_default_correction_keeps_more_of_the_gradient_than_the_tokens_and_nine_tenths_of_the_batch() -> None:
    found = {name: values for bound, name, values in measured(64, seed=0) if bound == 4}
    assert set(found) == set(CORRECTIONS)
    default, token = found[OF_STALE_TOKENS], found["token"]
    assert default[0] > token[0] and default[3] >= 0.9
    assert abs(default[2] - 1) < 1e-3
