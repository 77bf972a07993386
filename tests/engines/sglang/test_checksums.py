"""Which checksums an SGLang server is expected to answer."""

from __future__ import annotations

import hashlib

import pytest
import torch

from agentrl.engines.servers.sync.buckets import buckets
from agentrl.engines.sglang.checksums import Expectation

PREFIX = "model.layers.0.self_attn."


def expected(*tensors: tuple[str, torch.Tensor], bucket_bytes: int = 4096) -> Expectation:
    expectation = Expectation()
    buffer = torch.empty(4096, dtype=torch.uint8)
    for bucket in buckets(tensors, buffer, bucket_bytes, torch.float32):
        expectation.add(bucket)
    return expectation


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


@pytest.mark.parametrize("order", ["qkv", "vkq", "kqv"])
@pytest.mark.parametrize("bucket_bytes", [16, 4096])
def test_fused_parameters_are_hashed_in_their_own_order(order: str, bucket_bytes: int) -> None:
    part = {letter: torch.randn(2, 2) for letter in "qkv"}
    tensors = [(f"{PREFIX}{letter}_proj.weight", part[letter]) for letter in order]
    found = expected(*tensors, bucket_bytes=bucket_bytes).checksums()
    assert found == {f"{PREFIX}qkv_proj.weight": sha(part["q"], part["k"], part["v"])}


def test_rows_of_the_vocabulary_are_padded_and_other_names_are_kept() -> None:
    embedding, norm, bias = torch.randn(65, 2), torch.randn(2), torch.randn(3)
    gate, up = torch.randn(3, 2), torch.randn(3, 2)
    assert expected(
        ("model.embed_tokens.weight", embedding),
        ("model.norm.weight", norm),
        ("model.layers.1.mlp.gate_proj.weight", gate),
        ("model.layers.1.mlp.up_proj.weight", up),
        ("model.layers.1.mlp.down_proj.bias", bias),
        ("scale", bias),
    ).checksums() == {
        "model.embed_tokens.weight": sha(embedding, torch.zeros(63, 2)),
        "model.norm.weight": sha(norm),
        "model.layers.1.mlp.gate_up_proj.weight": sha(gate, up),
        "model.layers.1.mlp.down_proj.bias": sha(bias),
        "scale": sha(bias),
    }


def test_checksums_are_known_of_the_very_parameters_that_were_sent() -> None:
    norm = ("norm.weight", torch.ones(2))
    assert expected(norm).for_parameters(["norm.weight"]) == {"norm.weight": sha(norm[1])}
    assert expected(norm).for_parameters(["experts.w13"]) is None
    assert expected(norm).for_parameters(["norm.weight", "experts.w13"]) is None


def test_a_tied_head_need_not_be_a_parameter_of_the_server() -> None:
    norm, head = ("norm.weight", torch.ones(2)), ("lm_head.weight", torch.ones(64, 1))
    assert (expected(norm, head).for_parameters(["norm.weight"]) or {})["norm.weight"] == sha(norm[1])
    assert expected(norm).for_parameters(["norm.weight", "lm_head.weight"]) is None
