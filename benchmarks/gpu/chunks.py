"""Log-probs and their gradient with other chunks of logits: seconds and memory, of 2^24 to 2^28 logits at once.

The head of Qwen2.5-1.5B behind one layer, so that nearly everything is the vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from agentrl.model.packed import load_model, token_logprobs
from agentrl.plan.sizing import ModelShape
from benchmarks.gpu.part import (
    GB,
    Setting,
    median_seconds,
    memory,
    out_of_memory_is_a_row,
    row,
    setting,
)
from benchmarks.gpu.states import policy_folder
from benchmarks.training.update_utilization import SHAPES, made_batch

POWERS, TINY_POWERS = (24, 25, 26, 27, 28, 29), (17, 19)
TOKENS, TINY_TOKENS = 16384, 2048


def measure(asked: Setting, shape: ModelShape, folder: Path) -> None:
    device = asked.device
    batch = made_batch(shape, TINY_TOKENS if asked.tiny else TOKENS, 4096)
    ids, offsets = batch.ids.to(device), batch.offsets.to(device)
    model = load_model(str(folder), dtype="float32", device=device)

    def both_ways(chunk: int) -> None:
        model.zero_grad(set_to_none=False)
        with torch.autocast(device, torch.bfloat16, enabled=asked.dtype == "bfloat16"):
            logprobs, *_ = token_logprobs(model, ids, offsets, chunk_tokens=chunk)
        logprobs.sum().backward()

    for power in TINY_POWERS if asked.tiny else POWERS:
        label = f"2^{power} logits"
        chunk = max(1, (1 << power) // shape.vocab)
        with out_of_memory_is_a_row(label):
            both_ways(chunk)
            with memory(device) as seen:
                both_ways(chunk)
            spent = median_seconds(partial(both_ways, chunk), device, 5)
            above = seen.peak - seen.before
            row(label, tokens=len(ids), tokens_a_chunk=chunk, seconds=spent, GB_above_the_model=above / GB)


def main() -> None:
    asked = setting(__doc__)
    shape = replace(SHAPES["tiny" if asked.tiny else asked.shape], layers=1)
    with policy_folder(shape, asked.device) as folder:
        measure(asked, shape, folder)


if __name__ == "__main__":
    main()
