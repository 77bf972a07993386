"""Log-probs and their gradient with other chunks of logits: seconds and memory, of 2^24 to 2^29 logits at once.

Then whole updates, with the head at once, whose logits are made again in the backward pass, and in parts, whose logits
are made once where a sequence fits into a chunk.

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
    free,
    median_seconds,
    memory,
    out_of_memory_is_a_row,
    row,
    setting,
)
from benchmarks.gpu.states import logits_at_once, made_once, policy_folder
from benchmarks.training.update_utilization import SHAPES, fsdp, made_batch, make_worker

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


def update_both_ways(asked: Setting, shape: ModelShape, folder: Path) -> None:
    device, tokens = asked.device, TINY_TOKENS if asked.tiny else TOKENS
    batch = made_batch(shape, tokens, 4096)
    worker = make_worker(folder, device, asked.dtype, tokens, checkpointing=False)
    for power in TINY_POWERS if asked.tiny else POWERS:
        label = f"2^{power} logits, an update"
        spent: list[float] = []
        above: list[float] = []
        with out_of_memory_is_a_row(label), logits_at_once(1 << power):
            for fsdp(worker).by_parts in (False, True):
                update = partial(worker.update, batch, step=1)
                update()
                with memory(device) as seen:
                    update()
                spent.append(median_seconds(update, device, 5, warm_up=0))
                above.append((seen.peak - seen.before) / GB)
            row(
                label,
                seconds_at_once=spent[0],
                seconds_in_parts=spent[1],
                at_once_by_parts=spent[0] / spent[1],
                logits_made_once=made_once(batch, max(1, (1 << power) // shape.vocab)),
                GB_at_once=above[0],
                GB_in_parts=above[1],
            )


def main() -> None:
    asked = setting(__doc__)
    shape = replace(SHAPES["tiny" if asked.tiny else asked.shape], layers=1)
    with policy_folder(shape, asked.device) as folder:
        measure(asked, shape, folder)
        free()
        update_both_ways(asked, shape, folder)


if __name__ == "__main__":
    main()
