"""A tiny policy with a real vocabulary that makes a program's calls: it has learnt recorded sessions of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from agentrl.quickstart.tiny_policy import CHAT_TEMPLATE, TinyShape, build_model
from agentrl.trajectory import Transcript
from tests.chat.vocabularies import qwen_2

SHAPE = TinyShape(hidden=96, layers=2, heads=3, kv_heads=3, intermediate=288, max_length=1 << 16)
SURE, IN_A_ROW = 0.003, 12
"""Mean loss of a session's calls, and sessions in a row with no more, at which teaching ends."""


def untaught(folder: Path) -> Path:
    """Write a random policy with Qwen's vocabulary and 65,536 positions."""
    tokenizer = Tokenizer.from_str(qwen_2())
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_tokens([AddedToken(one, normalized=False, special=True) for one in control])
    markers = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tokenizer.add_tokens([AddedToken(one, normalized=False, special=False) for one in markers])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    build_model(fast, SHAPE, seed=7).save_pretrained(folder)
    return folder


def teach(folder: Path, sessions: Sequence[Transcript], rate: float = 5e-3, most_steps: int = 400) -> tuple[int, float]:
    """Teach the policy in `folder` the sampled tokens of sessions; return the steps and the worst last loss."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    recent = [float("inf")] * IN_A_ROW
    for step in range(most_steps):
        transcript = sessions[step % len(sessions)]
        ids = torch.tensor([transcript.ids])
        own = torch.tensor(transcript.mask, dtype=torch.bool)[1:]
        states = model.model(input_ids=ids).last_hidden_state[0, :-1][own]
        loss = cross_entropy(model.lm_head(states), ids[0, 1:][own])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent[step % IN_A_ROW] = loss.item()
        if max(recent) < SURE:
            break
    model.save_pretrained(folder)
    return step + 1, max(recent)
