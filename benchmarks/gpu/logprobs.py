"""A log-prob pass over packed sequences against transformers' own over padded batches: seconds and differences.

Both score every token with the same weights, in micro-batches of as many tokens. In bfloat16 either rounds in its own
places; how far each is from float32 says which difference is one of rounding.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2ForCausalLM

from agentrl.model.packed import load_model, token_logprobs
from agentrl.plan.sizing import ModelShape
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.plan import micro_batches
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
from benchmarks.gpu.states import policy_folder
from benchmarks.training.update_utilization import SHAPES, made_batch, padded_log_probs

TOKENS, TINY_TOKENS = 16384, 2048
"""Tokens of a micro-batch; four of them are scored."""
FEW = 6
"""Sequences that are scored in float32, too."""


@torch.no_grad()
def packed_log_probs(model: PreTrainedModel, batch: RaggedBatch, tokens: int) -> torch.Tensor:
    """[T - N] of all tokens but each sequence's first, as `padded_log_probs`."""
    found = torch.zeros(batch.num_tokens)
    for rows in micro_batches(batch, tokens):
        part = batch.select(rows)
        scores = token_logprobs(model, part.ids.to(model.device), part.offsets.to(model.device))[0].cpu()
        for row_of, start, end in zip(rows, part.offsets[:-1].tolist(), part.offsets[1:].tolist(), strict=True):
            found[int(batch.offsets[row_of]) : int(batch.offsets[row_of + 1])] = scores[start:end]
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[batch.offsets[:-1]] = True
    return found[~first]


def plain(folder: Path, dtype: str, device: str) -> PreTrainedModel:
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    torch.nn.Module.to(model, device)
    return model


def differ(label: str, one: torch.Tensor, other: torch.Tensor) -> None:
    gap = (one - other).abs()
    row(label, tokens=len(gap), mean_difference=gap.mean().item(), largest_difference=gap.max().item())


def compare(asked: Setting, shape: ModelShape, folder: Path) -> None:
    device, tokens = asked.device, TINY_TOKENS if asked.tiny else TOKENS
    batch = made_batch(shape, 4 * tokens, min(8192, tokens) if not asked.tiny else 512)
    few = batch.select(range(min(FEW, len(batch))))
    found, exact, spent = {}, {}, {}
    ways = (
        ("packed", packed_log_probs, partial(load_model, str(folder))),
        ("padded", padded_log_probs, partial(plain, folder)),
    )
    for name, way, load in ways:
        with out_of_memory_is_a_row(f"{name}, float32"):
            exact[name] = way(load(dtype="float32", device=device), few, tokens)
        with out_of_memory_is_a_row(name):
            model = load(dtype=asked.dtype, device=device)
            with memory(device) as seen:
                found[name] = way(model, batch, tokens)
            spent[name] = median_seconds(partial(way, model, batch, tokens), device, 3, warm_up=0)
            row(name, tokens=batch.num_tokens, seconds=spent[name], peak_GB=seen.peak / GB)
            differ(f"{name} against itself in float32", way(model, few, tokens), exact[name])
        free()
    if len(spent) == 2:
        row("padded / packed", seconds=spent["padded"] / spent["packed"])
        differ("packed against padded", found["packed"], found["padded"])
    if len(exact) == 2:
        differ("packed against padded, float32", exact["packed"], exact["padded"])


def main() -> None:
    asked = setting(__doc__)
    shape = SHAPES["tiny" if asked.tiny else asked.shape]
    with policy_folder(shape, asked.device) as folder:
        compare(asked, shape, folder)


if __name__ == "__main__":
    main()
