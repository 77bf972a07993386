"""Every family of models: what is computed packed, generated, trained and saved is what transformers has."""

from __future__ import annotations

import pytest
import torch

from agentrl.model.packed import token_logprobs, use_packed_attention
from tests.model.families import FAMILIES, batch, make_model, one_by_one


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_one_by_one_with_gradients(name: str) -> None:
    own, model = make_model(name), use_packed_attention(make_model(name))
    ids, offsets = batch()
    expected, entropy = one_by_one(own, ids, offsets, 0.8)
    logprobs, spread = token_logprobs(model, ids, offsets, temperature=0.8, with_entropy=True)
    assert spread is not None
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert torch.allclose(spread, entropy, atol=1e-5)
    weights = torch.linspace(-1, 1, len(ids))
    (expected @ weights + entropy.sum()).backward()
    (logprobs @ weights + spread.sum()).backward()
    for (key, want), got in zip(own.named_parameters(), model.parameters(), strict=True):
        assert got.grad is not None and want.grad is not None, key
        assert torch.allclose(got.grad, want.grad, atol=1e-4 * float(want.grad.abs().max()) + 1e-7), key
