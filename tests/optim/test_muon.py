"""Muon against its published update, and which parameters it takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agentrl.config.sections.optim import OptimConfig
from agentrl.optim.muon import Muon, orthogonalise
from agentrl.optim.optimizer import Optim


def test_orthogonalise_keeps_singular_vectors_and_levels_singular_values() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 40, 24, generator=generator)
    found = orthogonalise(matrices)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    rotated = left.mT @ found @ right.mT  # diagonal when the singular vectors are kept
    diagonal = torch.diagonal(rotated, dim1=1, dim2=2)
    assert (rotated - torch.diag_embed(diagonal)).abs().max() < 1e-4
    assert diagonal.min() > 0.6
    assert diagonal.max() < 1.25


def test_muon_is_torchs_muon() -> None:
    """torch.optim.Muon orthogonalises in bfloat16; the rest of the update is the same."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((12, 8), (8, 12), (12, 8))]
    ours = [nn.Parameter(tensor.clone()) for tensor in start]
    theirs = [nn.Parameter(tensor.clone()) for tensor in start]
    mine = Muon(ours, lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b, begin in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() < 0.03 * (b - begin).norm()


def test_muon_refuses_what_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1, weight_decay=0.0)


def test_muon_takes_the_named_matrices_and_adamw_the_rest() -> None:
    params = {"hidden": nn.Parameter(torch.ones(4, 4)), "norm": nn.Parameter(torch.ones(4))}
    config = OptimConfig(name="muon", lr=0.1, adamw_lr=0.01, weight_decay=0.0)
    optim = Optim(params, {"hidden"}, config, total_steps=10)
    for param in params.values():
        param.grad = torch.ones_like(param)
    assert optim.step(1) == pytest.approx(0.1)
    assert params["norm"].tolist() == pytest.approx([0.99] * 4, abs=1e-6)  # AdamW's first step is lr
    # A rank-one gradient: orthogonalised it is the rank-one matrix with singular value s, entries s / 4.
    assert 0.6 / 4 * 0.1 < 1 - params["hidden"][0, 0].item() < 1.25 / 4 * 0.1
    assert set(optim.state()) == {"hidden/momentum_buffer", "norm/step", "norm/exp_avg", "norm/exp_avg_sq"}
