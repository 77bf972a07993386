"""What sampling by top_p does to a policy gradient whose log-probs are those of the whole distribution: the figures
that a run is warned with, on softmaxes of one token whose gradient is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor


def filtered(probs: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens up to `top_p`, the one that passes it included, as engines do; not normalised."""
    order = probs.argsort(descending=True)
    kept = torch.zeros_like(probs, dtype=torch.bool)
    kept[order] = probs[order].cumsum(0) - probs[order] < top_p
    return probs * kept


def gradient(probs: Tensor, sampled: Tensor, advantage: Tensor) -> Tensor:
    """Expect advantage times the gradient of log probs in the logits, of tokens drawn from `sampled`."""
    weighed = sampled * advantage
    return weighed - weighed.sum() * probs


@pytest.mark.parametrize(("top_p", "without", "with_one"), [(0.95, 0.20, 0.09), (0.9, 0.39, 0.17)])
def test_the_figures_of_the_warning(top_p: float, without: float, with_one: float) -> None:
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(200):
        probs = torch.randn(200, generator=generator, dtype=torch.float64).softmax(0)
        reward = (torch.rand(200, generator=generator) < 0.8).double()
        kept = filtered(probs, top_p)
        apart = -math.log(kept.sum())  # KL of the normalised filtered distribution from the whole one
        assert 0.9 * -math.log(top_p) < apart <= -math.log(top_p)
        sampled = kept / kept.sum()
        true = gradient(probs, probs, reward)
        found = [gradient(probs, sampled, reward - baseline) - true for baseline in (0.0, (sampled * reward).sum())]
        errors.append([float(one.norm() / true.norm()) for one in found])
    assert torch.tensor(errors).mean(0).tolist() == pytest.approx([without, with_one], abs=0.01)
