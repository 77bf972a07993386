"""An update on packed sequences: model FLOP utilisation, tokens a second and memory, with compiled layers and without.

Random weights in Qwen2.5's shapes, bfloat16 on a GPU, four micro-batches an update, AdamW, activation checkpointing.
Where the device has no room for all layers of the shape, fewer are taken: the same work a layer.
"""

from __future__ import annotations

from functools import partial

import torch

from agentrl.model.compiled import compile_layers, text_layers
from agentrl.plan.sizing import ModelShape, Work, forward_flops, update_flops
from agentrl.workers import PolicyWorker
from benchmarks.gpu.foretold import Device
from benchmarks.gpu.part import (
    GB,
    copy_bandwidth,
    matmul_flops,
    median_seconds,
    memory,
    out_of_memory_is_a_row,
    row,
    seconds,
    setting,
)
from benchmarks.gpu.states import fitting, policy_folder, update_bytes
from benchmarks.training.update_utilization import MICRO_BATCHES, PEAKS, SHAPES, fsdp, made_batch, make_worker

TOKENS = {"tiny": (512,), "0.5B": (8192, 32768), "1.5B": (8192, 16384, 32768), "7B": (8192, 16384)}
"""Tokens of a micro-batch."""
LONGEST = 8192
ROOM = 0.85
"""Part of the free memory that a shape may be foretold to take: the rest are gaps between blocks."""
UPDATES = 3


def data_sheet_flops(device: str) -> float | None:
    if device == "cpu":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def measure(worker: PolicyWorker, shape: ModelShape, rates: Device, tokens: int, compiled: bool) -> None:
    label = f"{tokens:,} tokens{', compiled' if compiled else ''}"
    asked, rate = rates.asked, rates.product
    device = asked.device
    batch = made_batch(shape, MICRO_BATCHES * tokens, min(LONGEST, tokens))
    fsdp(worker).max_tokens = fsdp(worker).log_prob_max_tokens = tokens
    work = Work.from_lengths(batch.lengths.tolist(), float(batch.policy_tokens.sum()))
    flops = update_flops(shape, work, recompute=False, recompute_head=False)
    peak = data_sheet_flops(device)
    with out_of_memory_is_a_row(label):
        first = seconds(partial(worker.update, batch, step=1), device)
        with memory(device) as seen:
            update = median_seconds(partial(worker.update, batch, step=2), device, UPDATES, warm_up=0)
        scoring = median_seconds(partial(worker.compute_log_probs, batch), device, UPDATES)
        foretold = sum(update_bytes(shape, tokens, autocast=asked.dtype == "bfloat16").values())
        row(
            label,
            layers=shape.layers,
            sequences=len(batch),
            all_tokens=batch.num_tokens,
            update_seconds=update,
            tokens_a_second=batch.num_tokens / update,
            MFU=None if peak is None else flops / update / peak,
            of_the_matrix_product=flops / update / rate,
            first_update_seconds=first,
            peak_GB=seen.peak / GB,
            foretold_GB=foretold / GB,
            log_prob_seconds=scoring,
            log_probs_of_the_matrix_product=forward_flops(shape, work) / scoring / rate,
            **rates.update(shape, batch, tokens, update, recomputed=1.0, compiled=compiled, log_prob_seconds=scoring),
        )


def main() -> None:
    asked = setting(__doc__)
    name = "tiny" if asked.tiny else asked.shape
    device, autocast, tokens = asked.device, asked.dtype == "bfloat16", TOKENS[name]
    shape = SHAPES[name]
    if device == "cuda":
        shape = fitting(shape, tokens[0], ROOM * torch.cuda.mem_get_info()[0], autocast=autocast)
    rates = Device(asked, matmul_flops(device), copy_bandwidth(device))
    with policy_folder(shape, device) as folder:
        worker = make_worker(folder, device, asked.dtype, tokens[0])
    for compiled in (False, True):
        if compiled:
            compile_layers(text_layers(fsdp(worker).model.base), device)
        for count in tokens:
            measure(worker, shape, rates, count, compiled)


if __name__ == "__main__":
    main()
