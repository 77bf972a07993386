"""A tiny policy that says the same words whatever it is asked, so that tools are really called in short runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.quickstart.tiny_policy import make_tiny_policy

STEPS = 120
RATE = 5e-3


def teach(
    folder: Path,
    turns: list[str],
    between: list[str],
    messages: list[dict[str, Any]],
    tools: Any = None,
    steps: int = STEPS,
) -> None:
    """Write a policy that says `turns`, one after another, behind the messages; `between` stands between its turns.

    Only the turns' own tokens are learnt.
    """
    make_tiny_policy(folder, seed=3)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    parts = [(prompt, False)]
    for turn, behind in zip(turns, [*between, ""], strict=True):
        parts += [(turn, True), (behind, False)]
    written = [(tokenizer.encode(text, add_special_tokens=False), is_own) for text, is_own in parts]
    ids = torch.tensor([[id for new, _ in written for id in new]])
    own = torch.tensor([is_own for new, is_own in written for _ in new])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(steps):
        logits = model(input_ids=ids).logits[0, :-1]
        loss = cross_entropy(logits[own[1:]], ids[0, 1:][own[1:]])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
