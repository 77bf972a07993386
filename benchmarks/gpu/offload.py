"""Cost and gain of offloading parameters and optimizer state, inputs of layers, or both: seconds and memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from agentrl.plan.sizing import ModelShape
from benchmarks.gpu.part import (
    GB,
    Setting,
    median_seconds,
    memory,
    out_of_memory_is_a_row,
    row,
    seconds,
    setting,
)
from benchmarks.gpu.states import policy_folder, states
from benchmarks.training.update_utilization import MICRO_BATCHES, SHAPES, fsdp, made_batch, make_worker

TOKENS, TINY_TOKENS = 16384, 512


def measure(asked: Setting, shape: ModelShape, folder: Path, params: bool, activations: bool, plain: float) -> float:
    """Seconds of an update, of which the plain way takes `plain` (0: this is it)."""
    device, tokens = asked.device, TINY_TOKENS if asked.tiny else TOKENS
    worker = make_worker(folder, device, asked.dtype, tokens, offload_params=params, offload_activations=activations)
    batch = made_batch(shape, MICRO_BATCHES * tokens, min(8192, tokens))
    worker.update(batch, step=1)
    at_rest = torch.cuda.memory_allocated() if device == "cuda" else 0
    with memory(device) as seen:
        update = median_seconds(partial(worker.update, batch, step=2), device, 2, warm_up=0)
    moved = {}
    if params:

        def there_and_back() -> None:
            with fsdp(worker).offload:
                pass

        spent = seconds(there_and_back, device)
        held = torch.cuda.host_memory_stats() if device == "cuda" else {}
        moved = {
            "moving_seconds": spent,
            "moving_GB_a_second": 2 * states(shape)["weights"] / spent / GB,
            "page-locked_GB": held.get("allocated_bytes.current", 0) / GB,
        }
    row(
        label(params, activations),
        update_seconds=update,
        times_the_plain_way=update / plain if plain else None,
        at_rest_GB=at_rest / GB,
        peak_GB=seen.peak / GB,
        **moved,
    )
    return update


def label(params: bool, activations: bool) -> str:
    named = [name for name, on in (("param_offload", params), ("enable_activation_offload", activations)) if on]
    return " and ".join(named) or "nothing offloaded"


def main() -> None:
    asked = setting(__doc__)
    shape, plain = SHAPES["tiny" if asked.tiny else asked.shape], 0.0
    with policy_folder(shape, asked.device) as folder:
        for params, activations in ((False, False), (True, False), (False, True), (True, True)):
            with out_of_memory_is_a_row(label(params, activations)):
                found = measure(asked, shape, folder, params, activations, plain)
                plain = plain or found


if __name__ == "__main__":
    main()
