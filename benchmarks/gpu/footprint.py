"""Memory of a policy that learns, seen against the arithmetic of docs/scale.md, with checkpointing and without."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from agentrl.plan import sizing
from agentrl.plan.sizing import BFLOAT16, ModelShape
from benchmarks.gpu.part import GB, Setting, memory, out_of_memory_is_a_row, row, setting
from benchmarks.gpu.states import CHUNK_LOGITS, policy_folder, states, update_bytes
from benchmarks.training.update_utilization import SHAPES, fsdp, made_batch, make_worker

TOKENS = {"tiny": (512,), "0.5B": (8192, 16384), "1.5B": (8192, 16384)}
"""Tokens of a micro-batch."""


def tell(label: str, device: str, seen: float, foretold: float) -> None:
    beside = {}
    if device == "cuda":
        beside["reserved_GB"] = torch.cuda.max_memory_reserved() / GB
        free, total = torch.cuda.mem_get_info()
        beside["of_the_GPU_GB"] = (total - free) / GB
    row(label, seen_GB=seen / GB, foretold_GB=foretold / GB, seen_by_foretold=seen / foretold, **beside)


def watch(asked: Setting, name: str, shape: ModelShape, folder: Path, recompute: bool) -> None:
    device, autocast = asked.device, asked.dtype == "bfloat16"
    words = f"{name}{'' if recompute else ', without checkpointing'}"
    with memory(device) as loading:
        worker = make_worker(folder, device, asked.dtype, TOKENS[name][0], checkpointing=recompute)
    held = states(shape)
    if device == "cuda":
        tell(f"{words}: loaded", device, torch.cuda.memory_allocated(), held["weights"])
    else:
        tell(f"{words}: while it loads", device, loading.peak, held["weights"])
    for tokens in TOKENS[name]:
        label = f"{words}, {tokens:,} tokens"
        fsdp(worker).max_tokens = fsdp(worker).log_prob_max_tokens = tokens
        batch = made_batch(shape, 2 * tokens, min(8192, tokens))
        with out_of_memory_is_a_row(label):
            worker.update(batch, step=1)
            at_rest = held["weights"] + held["optimizer"]
            if device == "cuda":
                tell(f"{label}: at rest after an update", device, torch.cuda.memory_allocated(), at_rest)
            with memory(device) as seen:
                worker.compute_log_probs(batch)
            one = sizing.layer_activation_bytes(shape, autocast=autocast) * tokens
            casts = BFLOAT16 * (shape.layers * shape.layer_params + shape.head_params) if autocast else 0
            passing = (at_rest if device == "cuda" else 0) + one + casts
            tell(f"{label}: log-probs", device, seen.peak, passing + sizing.logits_bytes(shape, tokens, CHUNK_LOGITS))
            with memory(device) as seen:
                worker.update(batch, step=2)
            foretold = update_bytes(shape, tokens, autocast=autocast, recompute=recompute)
            at_once = sum(foretold.values()) - (at_rest if device == "cpu" else 0)
            tell(f"{label}: update", device, seen.peak, at_once)


def main() -> None:
    asked = setting(__doc__)
    for name in ("tiny",) if asked.tiny else ("0.5B", "1.5B"):
        with policy_folder(SHAPES[name], asked.device) as folder:
            for recompute in (True, False):
                watched = partial(watch, asked, name, SHAPES[name], folder, recompute)
                with out_of_memory_is_a_row(f"{name}{'' if recompute else ', without checkpointing'}"):
                    watched()


if __name__ == "__main__":
    main()
