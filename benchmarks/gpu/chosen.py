"""Choices of the plan for `auto`, and its forecast of memory against an update that has these values.

The engine of the run is on other devices. On a GPU the last row leaves an update too little memory for its activations:
the update has to be tried again with all layers computed again.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from agentrl.config.sections.actor import ActorConfig, ActorRolloutRefConfig
from agentrl.config.sections.model import PolicyModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.parallel import most_tokens
from agentrl.config.sections.training import Config
from agentrl.plan.choices import choose, with_keys
from agentrl.plan.memory import MemoryPlan
from agentrl.plan.sizing import ModelShape, Work, update_flops
from agentrl.runtime.room import room
from agentrl.workers import PolicyWorker
from benchmarks.gpu.foretold import Device
from benchmarks.gpu.part import (
    GB,
    Setting,
    copy_bandwidth,
    free,
    matmul_flops,
    median_seconds,
    memory,
    out_of_memory_is_a_row,
    row,
    seconds,
    setting,
)
from benchmarks.gpu.states import policy_folder
from benchmarks.gpu.update import data_sheet_flops
from benchmarks.training.update_utilization import MICRO_BATCHES, SHAPES, fsdp, made_batch

LONGEST, TINY = 8192, 512
"""Tokens of a sequence, and of a tiny one and its micro-batch."""
MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
ENOUGH = 0.8
"""Part of the foretold memory that an update is left which must not fit."""


def asked_for(folder: Path, asked: Setting) -> Config:
    """A run that leaves to the plan what it can."""
    model = PolicyModelConfig(path=str(folder), dtype="bfloat16" if asked.dtype == "bfloat16" else "float32")
    tokens = TINY if asked.tiny else "auto"
    actor = ActorConfig(ppo_mini_batch_size=1_000_000, ppo_max_token_len_per_gpu=tokens, optim=OptimConfig(lr=1e-6))
    keys: dict[str, object] = {
        "actor_rollout_ref.rollout.nnodes": 1,
        "data.train_batch_size": 1_000_000,
        "data.max_prompt_length": 0,
        "data.max_response_length": TINY if asked.tiny else LONGEST,
    }
    return with_keys(Config(actor_rollout_ref=ActorRolloutRefConfig(model=model, actor=actor)), keys)


def measure(label: str, config: Config, shape: ModelShape, rates: Device, *, limited: bool = False) -> None:
    """Run updates by a config in which nothing is `auto`. limited: with too little memory for its activations."""
    free()
    device, roles = rates.asked.device, config.actor_rollout_ref
    tokens, recomputed = most_tokens(roles.actor.ppo_max_token_len_per_gpu), roles.model.recomputed(shape.layers)
    plan = MemoryPlan(config, device, room(device))
    foretold = sum(size for name, size in plan.moments[-1].parts.items() if name not in ("CUDA, NCCL, gaps", "process"))
    batch = made_batch(shape, MICRO_BATCHES * tokens, min(LONGEST, tokens))
    work = Work.from_lengths(batch.lengths.tolist(), float(batch.policy_tokens.sum()))
    peak = data_sheet_flops(device)
    if limited:
        torch.cuda.set_per_process_memory_fraction(ENOUGH * foretold / plan.capacity)
    with out_of_memory_is_a_row(label):
        worker = PolicyWorker(config, device=device, total_steps=100)
        first = seconds(partial(worker.update, batch, step=1), device)
        with memory(device) as seen:
            update = median_seconds(partial(worker.update, batch, step=2), device, 2, warm_up=0)
        compiled, part = roles.actor.compiles, recomputed / shape.layers
        row(
            label,
            layers=shape.layers,
            computed_again=recomputed,
            then_all_computed_again=limited and fsdp(worker)._keep_all == 0,
            tokens_of_a_micro_batch=tokens,
            update_seconds=update,
            first_update_seconds=first,
            MFU=None if peak is None else update_flops(shape, work, recompute=0, recompute_head=False) / update / peak,
            seen_GB=seen.peak / GB,
            foretold_GB=foretold / GB,
            seen_by_foretold=seen.peak / foretold,
            **(
                {"compiled": compiled}
                if limited
                else rates.update(shape, batch, tokens, update, recomputed=part, compiled=compiled)
            ),
        )


def main() -> None:
    asked = setting(__doc__)
    rates = Device(asked, matmul_flops(asked.device), copy_bandwidth(asked.device))
    for name in ("tiny",) if asked.tiny else ("0.5B", "1.5B"):
        shape = SHAPES[name]
        with policy_folder(shape, asked.device) as folder:
            config = choose(
                asked_for(folder, asked), asked.device, room(asked.device), lambda said: print(said, flush=True)
            )
            measure(f"{name}, auto", config, shape, rates)
            for value in (True, False):
                other = with_keys(
                    config, {f"{MODEL}.enable_gradient_checkpointing": value, f"{ACTOR}.use_torch_compile": False}
                )
                measure(f"{name}, {'all' if value else 'no'} layers computed again", other, shape, rates)
            if asked.device == "cuda":
                measure(f"{name}, too little memory for no layers computed again", other, shape, rates, limited=True)
                torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    main()
