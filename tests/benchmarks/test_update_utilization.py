"""The benchmark that is for GPUs, at a size for a CPU: it runs, and its two ways agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from agentrl.model.packed import token_logprobs, use_packed_attention
from benchmarks.training.update_utilization import (
    SHAPES,
    made_batch,
    main,
    make_policy,
    padded_batches,
    padded_log_probs,
)


def test_it_tells_utilisation_memory_and_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--shape=tiny", "--tokens=512", "--updates=1", "--device=cpu", f"--profile={tmp_path}"])
    said = capsys.readouterr().out
    found = re.search(r"update: .* s, [\d,]+ tokens/s, ([\d.]+)% model FLOP utilisation", said)
    assert found and 0 < float(found[1]) < 100
    assert re.search(r"memory: [\d.]+ GB more than at rest", said)
    assert "aten::" in said and (tmp_path / "rank0_update_actor.json.gz").exists()
    assert re.search(r"log-probs: .* of the peak; padded .* times as long", said)


def test_padded_log_probs_are_those_of_packed_sequences(tmp_path: Path) -> None:
    batch = made_batch(SHAPES["tiny"], 2048, 700)
    assert all(max(map(len, rows)) * len(rows) <= 1024 for rows in padded_batches(batch, 1024))
    make_policy(SHAPES["tiny"], tmp_path, "cpu")
    model = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    padded = padded_log_probs(model, batch, 1024)
    packed, *_ = token_logprobs(use_packed_attention(model), batch.ids, batch.offsets)
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[batch.offsets[:-1]] = True
    assert torch.allclose(padded, packed[~first], atol=1e-4)
