"""A tiny random reward model on disk: a Qwen2 classifier with one label, and a tokenizer with a template of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from agentrl.quickstart.tiny_policy import make_tiny_policy

TURN = "{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}"
TEMPLATE = f"{{% for message in messages %}}{TURN}{{% endfor %}}"
"""Knows no tool calls."""


def make_reward_model(path: Path, *, labels: int = 1, template: str | None = TEMPLATE, seed: int = 0) -> Path:
    """`template` None: that of the tiny policy, which knows tool calls. Its padding is the policy's end of turn."""
    make_tiny_policy(path, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(path)
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    if template is not None:
        tokenizer.chat_template = template
        tokenizer.save_pretrained(path)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.num_labels = labels
    torch.manual_seed(seed)
    model = Qwen2ForSequenceClassification(config)
    model.save_pretrained(path)
    return path
