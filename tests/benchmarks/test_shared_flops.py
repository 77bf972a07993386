"""The counted operations of an update with shared prompts, against torch's count."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.model.attend import Rule
from agentrl.model.attention import BLOCK, IMPLEMENTATION, PackedAttention
from agentrl.model.head_product import HeadScale, keep_scale
from agentrl.model.layout import flat_layout
from agentrl.model.packed import forward_packed, token_logits
from agentrl.model.tree_layout import tree_layout
from benchmarks.gpu.shared import groups
from benchmarks.training.shared_flops import attention_flops, matrix_flops, ratios
from benchmarks.training.update_utilization import SHAPES


class NoAttention(PackedAttention):
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        return (query + (key + value).repeat_interleave(len(query) // len(key), dim=0)).transpose(0, 1)


def test_operations_of_matrices_are_those_that_torch_counts() -> None:
    shape, length = SHAPES["tiny"], 256
    batch = groups(shape, 1, 0.5, length, 4)
    answers = int(batch.mask.sum())
    assert (batch.num_tokens, answers) == (4 * length, 2 * length)
    tree = tree_layout(batch.ids, batch.offsets)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        config = Qwen2Config(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
        )
        model = Qwen2ForCausalLM._from_config(config, attn_implementation=IMPLEMENTATION)
        keep_scale(model, HeadScale())
        places = torch.zeros(len(tree.stored), dtype=torch.int64)
        hidden = forward_packed(model, places, places, NoAttention(tree))
        token_logits(model, hidden[:1].expand(answers, -1)).sum().backward()
    assert counter.get_total_flops() == matrix_flops(shape, len(tree.stored), answers)


def test_what_sharing_saves() -> None:
    shape = SHAPES["tiny"]
    found = ratios(shape, 4, 0.5, 256)
    assert found["tokens"] == pytest.approx(5 / 8) and found["tokens"] < found["update"] < 1
    # Two sequences of two blocks each, whose first block is common: 6 pairs of blocks, or 5.
    ids = torch.cat([torch.arange(BLOCK), torch.arange(500, 500 + BLOCK), torch.arange(BLOCK), torch.arange(BLOCK)])
    offsets = torch.tensor([0, 2 * BLOCK, 4 * BLOCK])
    layouts = tree_layout(ids, offsets), flat_layout(offsets, ids.device)
    one = 14 * shape.layers * shape.q_dim * BLOCK**2
    assert [attention_flops(shape, layout) for layout in layouts] == [5 * one, 6 * one]
